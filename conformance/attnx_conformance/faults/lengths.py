"""Faults of lengths, starts and windows: dropped, one off, the first entry's for all, ignored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from attnx.masks import Dense, Lengths, Window

from ._fault import Fault, of_kind
from ._kernel import Kernel
from ._sight import Call

__all__ = ["FAULTS"]

lengths = of_kind("lengths")
windows = of_kind("windows")


def _kv(rule: Callable[[Any, Call], Any]) -> Any:
    """The lengths of keys are changed; alignment is right."""

    def lengths_rule(self: Kernel, c: Call, mask: Any) -> Any:
        kv = rule(self.entries(c, mask.kv), c)
        seen = self.j(c) < kv
        return seen if mask.q is None else seen & (self.i(c) < self.entries(c, mask.q))

    return lengths_rule


def _first(counts: Any, c: Call) -> Any:
    return counts[:1] if counts.size else counts


def _mixed_batch(counts: Any, c: Call) -> Any:
    """Two batch axes are flattened in the wrong order."""
    if len(c.grid.batch) < 2:
        return counts
    return counts.reshape(c.grid.batch).T.reshape(counts.shape)


def _beside(kind: type) -> Callable[[Kernel, Call], bool]:
    return lambda self, c: any(isinstance(part, kind) for part in self.parts(c))


def _without(name: str, when: Callable[[Kernel, Call], bool]) -> dict[str, Any]:
    """A kind of mask is dropped in some calls."""
    right = getattr(Kernel, f"{name}_rule")
    return {f"{name}_rule": lambda self, c, mask: True if when(self, c) else right(self, c, mask)}


def _edges(left: Callable[[int], int | None], right: Callable[[int], int | None]) -> Any:
    """The two sizes of a window are changed where they are given."""

    def window_rule(self: Kernel, c: Call, mask: Any) -> Any:
        away = self.key_positions(c, mask) - self.positions(c, mask)
        before = None if mask.left is None else left(mask.left)
        after = None if mask.right is None else right(mask.right)
        seen = np.ones(away.shape, dtype=bool)
        seen &= True if before is None else away >= -before
        seen &= True if after is None else away <= after
        return seen

    return window_rule


def _symmetric(self: Kernel, c: Call, mask: Any) -> Any:
    """Only `left` is read, for both sides."""
    if mask.left is None:
        return Kernel.window_rule(self, c, mask)
    away = self.key_positions(c, mask) - self.positions(c, mask)
    return abs(away) <= mask.left


def _closed(self: Kernel, c: Call, mask: Any) -> Any:
    """None, which stands for no limit, is read as 0."""
    return Kernel.window_rule(
        self, c, _Sized(mask.left or 0, mask.right or 0, mask.align, mask.q_pos, mask.kv_pos)
    )


class _Sized:
    """The fields of a window."""

    def __init__(self, left: Any, right: Any, align: Any, q_pos: Any, kv_pos: Any) -> None:
        self.left, self.right, self.align = left, right, align
        self.q_pos, self.kv_pos = q_pos, kv_pos


def _without_self(self: Kernel, c: Call, mask: Any) -> Any:
    seen = Kernel.window_rule(self, c, mask)
    return seen & (self.key_positions(c, mask) != self.positions(c, mask))


def _top_left(self: Kernel, c: Call, mask: Any) -> Any:
    return Kernel.window_rule(
        self, c, _Sized(mask.left, mask.right, "top_left", mask.q_pos, mask.kv_pos)
    )


def _one_tile_too_few(self: Kernel, c: Call, rows: slice) -> Any:
    """Tiles before the window are skipped by the last row's window, not the first's."""
    blocks = list(Kernel.key_blocks(self, c, rows))
    wins = [part for part in self.parts(c) if isinstance(part, Window)]
    if not wins or wins[0].left is None or wins[0].q_pos is not None or wins[0].kv_pos is not None:
        return blocks
    offset = Kernel.offset(self, c) if wins[0].align == "bottom_right" else 0
    if np.ndim(offset):
        return blocks
    return [cols for cols in blocks if cols.stop > rows.stop - 1 + offset - wins[0].left]


def _rounded_window(self: Kernel, c: Call, mask: Any) -> Any:
    """The left edge is rounded down to a tile, and not masked within it."""
    if mask.left is None or mask.kv_pos is not None:
        return Kernel.window_rule(self, c, mask)
    first = (self.positions(c, mask) - mask.left) // 8 * 8
    seen = self.j(c) >= first
    return (
        seen if mask.right is None else seen & (self.j(c) <= self.positions(c, mask) + mask.right)
    )


def _never(n: int) -> int | None:
    return None


def _same(n: int) -> int | None:
    return n


_LENGTHS = (
    lengths("lengths-dropped", "lengths hide nothing", **_without("lengths", lambda self, c: True)),
    lengths("lengths-one-more", "j <= kv", lengths_rule=_kv(lambda n, c: n + 1)),
    lengths("lengths-one-less", "j < kv - 1", lengths_rule=_kv(lambda n, c: n - 1)),
    lengths("lengths-first-entry", "the first entry's length for all", lengths_rule=_kv(_first)),
    lengths("lengths-longest", "the greatest length for all",
            lengths_rule=_kv(lambda n, c: n.max(initial=0))),
    lengths("lengths-in-tiles", "lengths are rounded up to 8",
            lengths_rule=_kv(lambda n, c: -(-n // 8) * 8)),
    lengths("lengths-zero-is-all", "a length of 0 is read as none",
            lengths_rule=_kv(lambda n, c: np.where(n == 0, c.grid.Lk, n))),
    lengths("lengths-mixed-batch", "two batch axes are flattened the wrong way round",
            lengths_rule=_kv(_mixed_batch)),
    lengths("lengths-ignored-with-mask", "a boolean mask beside them wins",
            **_without("lengths", _beside(Dense))),
    lengths("lengths-ignored-with-causal", "causal beside them wins",
            **_without("lengths", lambda self, c: c.causal is not False)),
    lengths("lengths-ignored-at-one-query", "a decoding step reads the whole cache",
            **_without("lengths", lambda self, c: c.grid.Lq == 1)),
    lengths("lengths-of-queries-dropped", "padded queries are live",
            lengths_rule=lambda self, c, mask: self.j(c) < self.entries(c, mask.kv)),
    lengths("lengths-of-queries-by-keys", "queries are cut at the length of keys",
            lengths_rule=lambda self, c, mask: Kernel.lengths_rule(self, c, mask)
            & (self.i(c) < self.entries(c, mask.kv))),
    lengths("lengths-not-in-backward", "the backward pass reads padded keys",
            cotangents=lambda self, c, d_out, d_lse: _forgotten(self, c, d_out, d_lse)),
    lengths("starts-dropped", "left padding is seen", starts_rule=lambda self, c, mask: True),
    lengths("starts-one-late", "j > kv",
            starts_rule=lambda self, c, mask: self.j(c) > self.entries(c, mask.kv)),
    lengths("starts-one-early", "j >= kv - 1",
            starts_rule=lambda self, c, mask: self.j(c) >= self.entries(c, mask.kv) - 1),
    lengths("starts-first-entry", "the first entry's start for all",
            starts_rule=lambda self, c, mask: self.j(c)
            >= _first(self.entries(c, mask.kv), c)),
    lengths("starts-as-lengths", "left padding is read as right padding",
            starts_rule=lambda self, c, mask: self.j(c)
            < c.grid.Lk - self.entries(c, mask.kv)),
)  # fmt: skip

_WINDOWS = (
    windows("window-dropped", "windows hide nothing", window_rule=lambda self, c, mask: True),
    windows("window-left-one-more", "a key more on the left",
            window_rule=_edges(lambda n: n + 1, _same)),
    windows("window-left-one-less", "the width counts the query's own key",
            window_rule=_edges(lambda n: n - 1, _same)),
    windows("window-right-one-more", "a key more on the right",
            window_rule=_edges(_same, lambda n: n + 1)),
    windows("window-right-one-less", "a key less on the right",
            window_rule=_edges(_same, lambda n: n - 1)),
    windows("window-left-dropped", "no limit on the left", window_rule=_edges(_never, _same)),
    windows("window-right-dropped", "no limit on the right", window_rule=_edges(_same, _never)),
    windows("window-symmetric", "`left` serves both sides", window_rule=_symmetric),
    windows("window-open-is-closed", "no limit is read as 0", window_rule=_closed),
    windows("window-without-self", "the query's own key is left out", window_rule=_without_self),
    windows("window-always-top-left", "bottom_right is read as top_left", window_rule=_top_left),
    windows("window-dropped-with-causal", "causal beside it wins",
            **_without("window", lambda self, c: c.causal is not False)),
    windows("window-dropped-with-lengths", "lengths beside it win",
            **_without("window", _beside(Lengths))),
    windows("window-ignored-with-mask", "a boolean mask beside it wins",
            **_without("window", _beside(Dense))),
    windows("window-dropped-with-softcap", "lost on the route of capped scores",
            **_without("window", lambda self, c: c.softcap is not None)),
    windows("window-dropped-at-one-query", "a decoding step reads the whole cache",
            **_without("window", lambda self, c: c.grid.Lq == 1)),
    windows("window-tile-too-few", "tiles are skipped by the last row's left edge",
            key_blocks=_one_tile_too_few),
    windows("window-in-tiles", "the left edge is rounded down to 8 keys",
            window_rule=_rounded_window),
)  # fmt: skip


def _forgotten(self: Kernel, c: Call, d_out: Any, d_lse: Any) -> Any:
    """The backward pass takes every key for real; its causal triangle is right."""
    made = Kernel.cotangents(self, c, d_out, d_lse)
    c.given = {**c.given, "mask": None if isinstance(c.mask, Lengths) else c.mask}
    c.visible = self.visible(c) & c.live[..., None]
    return made


FAULTS: tuple[Fault, ...] = (*_LENGTHS, *_WINDOWS)
