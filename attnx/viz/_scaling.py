"""Why scores are divided by sqrt(D), measured.

The dot product of two vectors of D independent entries of unit variance has variance D. Without
the scale, scores spread with sqrt(D), a few of them take all the weight, and the softmax has next
to no gradient left. Both are computed here, not drawn from the formula: the scores of many rows,
and the weights that `attnx.attention_weights` makes of them.
"""

from __future__ import annotations

import io
import math
import operator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from attnx._api import attention_weights
from attnx.errors import ArgumentError, ArgumentTypeError
from attnx.viz._extra import DPI, settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.figure import Figure

__all__ = ["Scaling", "Spread", "scaling"]

ROWS, KEYS = 512, 64
DIMS = (4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Spread(NamedTuple):
    """What one scale makes of one head size.

    Attributes:
        D: the head size.
        scale: the factor on q · k.
        variance: of the scores.
        entropy: of a row of weights, in nats; the mean over rows.
        largest: the largest weight of a row; the mean over rows.
    """

    D: int
    scale: float
    variance: float
    entropy: float
    largest: float


class Scaling(NamedTuple):
    """Scores and weights against D; it prints as a table.

    Attributes:
        keys: the keys of a row; an even softmax has the entropy log(keys).
        scaled: one `Spread` for each D, with the scale 1/sqrt(D).
        unscaled: alike, with the scale 1.
    """

    keys: int
    scaled: tuple[Spread, ...]
    unscaled: tuple[Spread, ...]

    def __str__(self) -> str:
        head = "     D   scale       variance   entropy   largest weight"
        lines = [
            f"{x.D:6}   {name:9} {x.variance:10.3f} {x.entropy:9.3f} {x.largest:16.3f}"
            for pair in zip(self.scaled, self.unscaled, strict=True)
            for name, x in zip(("1/sqrt(D)", "1"), pair, strict=True)
        ]
        return "\n".join([head, *lines])


def scaling(
    path: Path | str | None = None, *, dims: Sequence[int] = DIMS, seed: int = 0
) -> Scaling:
    """Variance of the scores and entropy of the weights against D, with and without 1/sqrt(D) (S7).

    q and k are standard normal, 512 queries over 64 keys, in float64 on the NumPy backend.

    Args:
        path: where to draw it, as `.png` or `.svg`; no picture when absent.
        dims: the head sizes.
        seed: of q and k.

    Returns:
        The figures: `.scaled` and `.unscaled`, a `Spread` for each D.

    Raises:
        ArgumentError: a head size below 1, or another suffix.
        ArgumentTypeError: dims that are no integers.
        MissingExtra: a path is given, and matplotlib is not installed.

    Example:
        >>> from attnx import viz
        >>> found = viz.scaling(dims=(16, 256))
        >>> [round(x.variance) for x in found.scaled], [round(x.variance) for x in found.unscaled]
        ([1, 1], [16, 256])
        >>> found.unscaled[1].entropy < 0.5 < found.scaled[1].entropy
        True
    """
    target = None if path is None else Path(path)
    if target is not None and target.suffix.lower() not in (".png", ".svg"):
        raise ArgumentError(f"path: expected a name that ends in .png or .svg, got {path}")
    if isinstance(dims, str) or not hasattr(dims, "__iter__"):
        raise ArgumentTypeError(f"dims: expected several head sizes, got {dims!r}")
    sizes = [_size(D) for D in dims]
    if not sizes:
        raise ArgumentError("dims: expected at least one head size, got none")
    rng = np.random.default_rng(seed)
    pairs = [_spreads(rng, D) for D in sizes]
    found = Scaling(KEYS, tuple(x for x, _ in pairs), tuple(x for _, x in pairs))
    if target is not None:
        made = _drawn(found, target.suffix.lower()[1:])
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(made)
    return found


def _size(D: Any) -> int:
    try:
        number = operator.index(D)
    except TypeError:
        raise ArgumentTypeError(f"dims: expected integers, got {D!r}") from None
    if number < 1:
        raise ArgumentError(f"dims: expected head sizes >= 1, got {number}")
    return number


def _spreads(rng: np.random.Generator, D: int) -> tuple[Spread, Spread]:
    q, k = rng.standard_normal((ROWS, D)), rng.standard_normal((KEYS, D))
    return _spread(q, k, 1 / math.sqrt(D)), _spread(q, k, 1.0)


def _spread(q: Any, k: Any, scale: float) -> Spread:
    scores = scale * (q @ k.T)
    P = attention_weights(q, k, scale=scale, backend="numpy")
    parts = P * np.log(P, out=np.zeros_like(P), where=P > 0)
    return Spread(
        q.shape[-1], scale, float(scores.var()), float(-parts.sum(axis=-1).mean()),
        float(P.max(axis=-1).mean()),
    )  # fmt: skip


def _drawn(found: Scaling, kind: str) -> bytes:
    told: dict[str, Any] = {"Software": None} if kind == "png" else {"Date": None, "Creator": None}
    buffer = io.BytesIO()
    with settings():
        _figure(found).savefig(buffer, format=kind, dpi=DPI, metadata=told)
    return buffer.getvalue()


def _figure(found: Scaling) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    made = Figure(figsize=(8, 3.4), facecolor="white", layout="constrained")
    FigureCanvasAgg(made)
    left, right = made.subplots(1, 2)
    dims = [x.D for x in found.scaled]
    for axes, field in ((left, "variance"), (right, "entropy")):
        for spreads, colour, marker, name in (
            (found.unscaled, "#D55E00", "s", "scale 1"),
            (found.scaled, "#0072B2", "o", "scale 1/sqrt(D)"),
        ):
            values = [getattr(x, field) for x in spreads]
            axes.plot(dims, values, color=colour, marker=marker, markersize=5, label=name)
        axes.set_xscale("log", base=2)
        axes.set_xticks(dims, [str(D) for D in dims])
        axes.grid(color="#DDDDDD", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlabel("head size D")
    left.set(yscale="log", ylabel="variance of the scores")
    left.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    left.minorticks_off()
    right.minorticks_off()
    left.legend(frameon=False)
    right.axhline(math.log(found.keys), color="#555555", linestyle="--", linewidth=0.9)
    right.annotate(
        f"even weights: log {found.keys}", (dims[0], math.log(found.keys)), (0, -11),
        textcoords="offset points", color="#555555", fontsize=7.5,
    )  # fmt: skip
    right.set(ylabel="entropy of a row of weights (nats)", ylim=(0, math.log(found.keys) * 1.08))
    return made
