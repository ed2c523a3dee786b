"""`attnx.viz.heatmap`: the arguments of a picture, checked and computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from attnx._dispatch import lane_of
from attnx.errors import ArgumentError, ArgumentTypeError
from attnx.viz._choose import choose
from attnx.viz._labels import check_tokens, readable
from attnx.viz._record import Heatmap, check_path
from attnx.viz._weights import weights_of

__all__ = ["heatmap"]

DEFAULT_TITLE = "attention weights"


def heatmap(
    q: Any = None,
    k: Any = None,
    *,
    weights: Any = None,
    visible: Any = None,
    heads: Any = None,
    entry: int = 0,
    rows: tuple[int, int] | None = None,
    columns: tuple[int, int] | None = None,
    tokens: Any = None,
    key_tokens: Any = None,
    path: Path | str | None = None,
    title: str = DEFAULT_TITLE,
    **options: Any,
) -> Heatmap:
    """Show the weights P of `attention` as a heat map: a picture, or a page to explore (S2.5).

    Hidden pairs (S3) are hatched, apart from weights that are only small; rows that see nothing and
    weights that are no number are marked and told. Gradients are not recorded. Of a long sequence,
    choose `rows` and `columns`: at most 2048 of each fit into a picture, and only the chosen rows
    are computed.

    Args:
        q: `(*B, Hq, Lq, D)`, as in `attention_weights`, in any framework.
        k: `(*B, Hk, Lk, D)`.
        weights: instead of q and k, P itself: `(*B, Hq, Lq, Lk)` or `(Lq, Lk)`.
        visible: beside `weights`, True where a query sees a key: the same shape, each axis 1 or
            full, or `(Lq, Lk)`. Every pair counts as visible without it.
        heads: one query head, or several; all of them when absent.
        entry: the batch entry, as a row-major flattened index.
        rows: (start, stop) of the queries to show.
        columns: (start, stop) of the keys to show; weights are still those among all keys.
        tokens: Lq strings that name the queries, and the keys too where Lq == Lk.
        key_tokens: Lk strings that name the keys.
        path: where to save it: `.png`, `.svg` or `.html`.
        title: what the picture is called.
        **options: the options of `attention_weights`: mask, causal, bias, backend and so on.

    Returns:
        A `Heatmap`: the numbers, and `save(path)`, `figure()` and `html()`.

    Raises:
        ArgumentError: as in `attention_weights`; a part that is not there or too large to be seen.
        ArgumentTypeError: as in `attention_weights`; tokens that are no strings.
        UnsupportedError: as in `attention_weights`.
        MissingExtra: a path is given, and matplotlib or jinja2 is not installed.

    Example:
        >>> import numpy as np
        >>> from attnx import viz
        >>> q = np.ones((2, 3, 4), np.float32)
        >>> seen = viz.heatmap(q, q, heads=1, causal=True, tokens=["a", "clear", "error"])
        >>> seen.weights[0, 1].tolist(), seen.visible[0, 1].tolist()
        ([0.5, 0.5, 0.0], [True, True, False])
    """
    target = None if path is None else check_path(path)
    if weights is None:
        if q is None or k is None:
            raise ArgumentTypeError("q: expected q and k, or weights=, got none of them")
        if visible is not None:
            raise ArgumentError("visible: it goes with weights=; beside q and k, write mask=")
        found = weights_of(q, k, options, heads, entry, rows, columns)
    else:
        if q is not None or k is not None or options:
            given = [name for name, x in (("q", q), ("k", k)) if x is not None] + sorted(options)
            raise ArgumentError(
                f"weights: they are the answer already, so leave out {', '.join(given)}"
            )
        found = _given(weights, visible, heads, entry, rows, columns)
    part, P, seen, (Lq, Lk) = found
    queries = check_tokens("tokens", tokens, "Lq", Lq)
    keys = check_tokens("key_tokens", key_tokens, "Lk", Lk)
    if keys is None and Lq == Lk:
        keys = queries
    P = np.asarray(P)
    P = P if P.dtype == np.float64 else P.astype(np.float32)
    seen = np.broadcast_to(np.asarray(seen, np.bool_), P.shape)
    columns_shown = slice(*part.columns)
    made = Heatmap(
        weights=np.where(seen, P, 0)[:, :, columns_shown].astype(P.dtype),
        visible=seen[:, :, columns_shown].copy(),
        empty=np.asarray(~seen.any(axis=-1)),
        heads=part.heads,
        entry=part.entry,
        rows=part.rows,
        columns=part.columns,
        queries=None if queries is None else queries[slice(*part.rows)],
        keys=None if keys is None else keys[columns_shown],
        title=readable(str(title).strip() or DEFAULT_TITLE),
    )
    if target is not None:
        made.save(target)
    return made


def _given(weights: Any, visible: Any, heads: Any, entry: Any, rows: Any, columns: Any) -> Any:
    """The same as `weights_of`, from weights that somebody else computed."""
    lane = lane_of(weights, "weights")
    P = np.asarray(lane.to_numpy(lane.detached(weights)))
    if P.ndim < 2 or not lane.dtype_name(weights).startswith(("float", "bfloat")):
        raise ArgumentError(
            "weights: expected floating weights of shape (*B, Hq, Lq, Lk) or (Lq, Lk), "
            f"got {lane.dtype_name(weights)} {P.shape}"
        )
    full = P.shape
    P = P.reshape((-1 if P.size else 0, *full[-3:]) if P.ndim > 2 else (1, 1, *full))
    part = choose(P.shape, heads, entry, rows, columns)
    chosen = np.ix_([part.entry], part.heads, range(*part.rows), range(full[-1]))
    P = P[chosen][0]
    if visible is None:
        return part, P, np.ones((1, 1, 1), np.bool_), full[-2:]
    seen = _given_sight(visible, full).reshape(-1, *full[-3:] if len(full) > 2 else (1, *full))
    seen = seen[chosen][0]
    wrong = ~seen & (P != 0)
    if wrong.any():
        raise ArgumentError(
            f"weights: expected 0 where visible is False, got {P[wrong].ravel()[0]} and "
            f"{int(wrong.sum()) - 1} others"
        )
    return part, P, seen, full[-2:]


def _given_sight(visible: Any, full: tuple[int, ...]) -> Any:
    lane = lane_of(visible, "visible")
    seen = np.asarray(lane.to_numpy(visible))
    if seen.dtype != np.bool_:
        raise ArgumentTypeError(
            f"visible: expected a boolean array (True = visible), got {lane.dtype_name(visible)}"
        )
    fits = all(n in (1, m) for n, m in zip(seen.shape[::-1], full[::-1], strict=False))
    if seen.ndim not in (2, len(full)) or not fits:
        raise ArgumentError(
            f"visible: expected (Lq, Lk) = {full[-2:]} or the axes of weights, {full}, each 1 or "
            f"full, got {seen.shape}"
        )
    return np.broadcast_to(seen, full)
