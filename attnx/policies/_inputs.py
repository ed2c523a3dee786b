"""A synthetic call of a given class, made from the class alone.

A class holds no lengths, no batch and no values, so they are chosen here, once for everybody: one
batch entry, four heads (two key heads where heads are grouped), Lq = Lk where the class says so
and else one query against Lk keys, as in decoding. Masks show about what they show in practice.
That the made call is of the class is checked, not believed.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from attnx._call import Options, Prepared, prepare
from attnx._dropout import Dropout
from attnx.errors import AttnxError
from attnx.masks import (
    And,
    BlockMask,
    Causal,
    Dense,
    Lengths,
    Mask,
    Not,
    Or,
    Predicate,
    Prefix,
    Segments,
    Starts,
    Window,
)
from attnx.plugin import Alibi

if TYPE_CHECKING:
    from attnx.plugin import CallClass, Lane

__all__ = ["CannotBeMade", "make"]

HEADS, KEY_HEADS = 4, 2
BLOCK = 64


class CannotBeMade(Exception):
    """There is no synthetic call of this class here."""


def make(lane: Lane, cls: CallClass, length: int) -> Prepared:
    """A call of a class with `length` keys.

    Raises:
        CannotBeMade: the arrays cannot be had here, or the call would be of another class.
    """
    made = _Maker(lane, cls, length)
    try:
        q, k, v = (made.array(shape, cls.dtype) for shape in made.shapes())
        ready = prepare(lane, q, k, v, made.options(), gradient=cls.gradient)
    except (AttnxError, MemoryError, TypeError, ValueError, RuntimeError) as error:
        raise CannotBeMade(f"{type(error).__name__}: {error}") from error
    got = ready.call.cls
    if got != cls:
        differ = [f for f, a, b in zip(cls._fields, cls, got, strict=True) if a != b]
        raise CannotBeMade(f"the synthetic call differs in {', '.join(differ)}")
    return ready


class _Maker:
    """The sizes of one call, and arrays for it."""

    def __init__(self, lane: Lane, cls: CallClass, length: int) -> None:
        self.lane, self.cls = lane, cls
        self.rng = np.random.default_rng(0)
        axes = (False,) * 4 if cls.bias is None else cls.bias[1]
        self.B = 2 if axes[0] else 1  # an axis of one entry counts as not given
        self.Lk = length
        self.Lq = length if cls.square else max(length // 4, 2) if axes[2] else 1
        self.Hk = KEY_HEADS if cls.grouped else HEADS

    def shapes(self) -> list[tuple[int, ...]]:
        """Of q, k and v."""
        cls = self.cls
        sizes = [(HEADS, self.Lq, cls.D), (self.Hk, self.Lk, cls.D), (self.Hk, self.Lk, cls.Dv)]
        if cls.layout == "bshd":
            sizes = [(L, H, D) for H, L, D in sizes]
        return [(self.B, *size) for size in sizes]

    def array(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Random numbers in the class's framework, on its device."""
        kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
        return self.placed(self.rng.standard_normal(shape).astype(kind))

    def placed(self, array: Any) -> Any:
        """A NumPy array as one of the class's framework, on its device."""
        made = self.lane.from_numpy(array)
        if self.lane.device(made) != self.cls.device:
            made = self.lane.xp.asarray(made, device=self.cls.device)
        return made

    def options(self) -> Options:
        """What the class says is given."""
        cls = self.cls
        sizes = self.B, HEADS, self.Lq, self.Lk
        bias = None
        if cls.bias is not None:
            dtype, axes = cls.bias
            shape = tuple(n if full else 1 for n, full in zip(sizes, axes, strict=True))
            bias = self.array(shape, dtype)
        if cls.alibi:
            align = "top_left" if cls.square else "bottom_right"
            bias = Alibi([2.0**-n for n in range(1, HEADS + 1)], align)
        return Options(
            mask=None if cls.mask is None else self.mask(cls.mask),
            bias=bias,
            scale=None if cls.scale_sign is None else cls.scale_sign / cls.D**0.5,
            softcap=30.0 if cls.softcap else None,
            sinks=None if cls.sinks is None else self.array((HEADS,), cls.sinks),
            dropout=Dropout(0.1, 0) if cls.dropout else None,
            layout=cls.layout,
            return_lse=cls.need_lse and cls.gradient != "vjp",
            assume_finite=cls.assume_finite,
        )

    def mask(self, structure: str) -> Mask:
        """A mask of a structure."""
        mask, rest = self._parse(structure)
        if rest or mask.structure != structure:
            raise CannotBeMade(f"the mask {structure!r} is not understood")
        return mask

    def _parse(self, text: str) -> tuple[Mask, str]:
        """The mask that a text begins with, and the rest."""
        if text.startswith("~"):
            part, rest = self._parse(text[1:])
            return Not(part), rest
        if text.startswith("("):
            parts: list[Mask] = []
            sign = ""
            while text[:1] not in ("", ")"):
                sign = text[0]
                part, text = self._parse(text[1:])
                parts.append(part)
            return (Or if sign == "|" else And)(parts), text[1:]
        found = re.match(r"([a-z]+)(?:\[([^]]*)\])?", text)
        if found is None:
            raise CannotBeMade(f"the mask {text!r} is not understood")
        return self._leaf(found[1], (found[2] or "").split(",")), text[found.end() :]

    def _leaf(self, kind: str, words: list[str]) -> Mask:
        Lq, Lk = self.Lq, self.Lk
        if kind == "causal":
            return Causal(**self._positions(words[-1]))
        if kind == "window":
            left, right = (None if word == "*" else max(Lk // 8, 1) for word in words[:2])
            return Window(left, right, **self._positions(words[-1]))
        if kind == "lengths":
            return Lengths(3 * Lk // 4, *([Lq] if "q" in words else []))
        if kind in ("starts", "prefix"):
            return (Starts if kind == "starts" else Prefix)(Lk // 4)
        if kind == "segments":
            return Segments(self._ids(Lk - Lq), self._ids(0))
        if kind == "dense":
            return Dense(self.placed(self.rng.random((Lq, Lk)) < 0.5))
        if kind == "blocks":
            shape = -(-Lq // BLOCK), -(-Lk // BLOCK)
            return BlockMask(self.placed(np.tri(*shape, shape[1] - shape[0], dtype=bool)), BLOCK)
        if kind == "predicate":
            return Predicate(lambda b, h, i, j: j <= i + (Lk - Lq))
        raise CannotBeMade(f"the mask {kind!r} is not known here")

    def _positions(self, word: str) -> dict[str, Any]:
        """An alignment, or positions where those are explicit."""
        if not word.endswith("pos"):
            return {"align": None if word == "square" else word}
        given: dict[str, Any] = {}
        if "q" in word:
            given["q_pos"] = list(range(self.Lk - self.Lq, self.Lk))
        if "k" in word:
            given["kv_pos"] = list(range(self.Lk))
        return given

    def _ids(self, start: int) -> list[int]:
        """Four documents of one length; rows from `start` on."""
        return [4 * position // self.Lk for position in range(start, self.Lk)]
