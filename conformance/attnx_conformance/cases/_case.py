"""What a case is: a frozen record with a seeded generator of inputs, and no code of its own.

A case says what goes in and which clauses it guards; the oracle says what comes out. Sizes are
chosen so that nothing agrees by accident: `B != Hq != L`, three query heads a key head and two key
heads, `D != Dv`, and no size is a multiple of a tile unless the edge of a tile is the point.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from attnx.plugin import Alibi
from attnx_conformance._visibility import Grid, visibility
from attnx_conformance.plain import numpy_dtype

__all__ = [
    "BASE",
    "DTYPES",
    "HEAVY",
    "LOW",
    "Case",
    "Context",
    "Inputs",
    "Recipe",
    "Shape",
    "square",
]

Array = NDArray[Any]
DTYPES = ("float16", "bfloat16", "float32", "float64")
LOW = frozenset({"float16", "bfloat16"})
"""Dtypes whose trials count for the profile "low-precision"."""
HEAVY = 40_000
"""Scores a head above which a case costs a tenth of a second: samples leave it out."""


class Shape(NamedTuple):
    """The sizes of one call. `batch=None` stands for 2-D inputs: one head and no batch."""

    batch: tuple[int, ...] | None = (2,)
    Hq: int = 6
    Hk: int = 2
    Lq: int = 9
    Lk: int = 11
    D: int = 8
    Dv: int = 5

    def of(self, heads: int, length: int, size: int) -> tuple[int, ...]:
        """The shape of one operand in the layout bhsd."""
        return (length, size) if self.batch is None else (*self.batch, heads, length, size)

    @property
    def grid(self) -> Grid:
        """The shape of its score matrix."""
        batch = self.batch or ()
        rank = 2 if self.batch is None else len(batch) + 3
        return Grid(batch, self.Hq, self.Lq, self.Lk, rank)


BASE = Shape()


def square(length: int, **sizes: Any) -> Shape:
    """Self-attention over `length` tokens; the other sizes as in `BASE`."""
    return BASE._replace(Lq=length, Lk=length)._replace(**sizes)


@dataclass(frozen=True)
class Inputs:
    """The arguments of one call, as NumPy arrays in the layout bhsd.

    Attributes:
        bias: An array, or an `Alibi` of NumPy arrays.
        views: How an operand lies in memory, by its name: "transposed", "offset", "reversed",
            "inner" (innermost stride 2) or "expanded" (stride 0 along the first axis).
    """

    q: Array
    k: Array
    v: Array
    d_out: Array
    d_lse: Array | None = None
    mask: Any = None
    bias: Any = None
    sinks: Array | None = None
    views: Mapping[str, str] = field(default_factory=dict)


class Context(NamedTuple):
    """What a generator of inputs may draw on."""

    rng: np.random.Generator
    dtype: str
    shape: Shape

    def normal(self, *shape: int) -> Array:
        """Standard normal values in float64; they are cast to the case's dtype at the end."""
        return self.rng.standard_normal(shape)

    @property
    def low(self) -> np.dtype[Any]:
        """The NumPy dtype of the case."""
        return numpy_dtype(self.dtype)


Edit = Callable[[Context, dict[str, Any], NDArray[np.bool_]], None]


@dataclass(frozen=True)
class Recipe:
    """A generator of inputs.

    Attributes:
        shape: Of the call.
        mask: A mask, or a function of the `Context` that makes one.
        bias: Makes the bias, in float64; or an `Alibi`.
        bias_dtype: Of the bias, or of an array of slopes; that of q when absent.
        sinks: Whether there are sinks.
        sinks_dtype: Of the sinks; that of q when absent.
        d_lse: Whether lse has a cotangent.
        causal: The option that the case passes, for edits that look at what is visible.
        edits: Change the drawn float64 arrays in place, before they are cast.
        views: As in `Inputs`.
    """

    shape: Shape = BASE
    _: KW_ONLY
    mask: Any = None
    bias: Callable[[Context], Array] | Alibi | None = None
    bias_dtype: str | None = None
    sinks: bool = False
    sinks_dtype: str | None = None
    d_lse: bool = True
    causal: bool | str = False
    edits: tuple[Edit, ...] = ()
    views: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, rng: np.random.Generator, dtype: str) -> Inputs:
        """The inputs for a generator of random numbers and a dtype."""
        ctx = Context(rng, dtype, self.shape)
        arrays = self._draw(ctx)
        mask = self.mask(ctx) if callable(self.mask) else self.mask
        if self.edits:
            seen = visibility(mask, self.causal, arrays.get("bias"), self.shape.grid)
            for edit in self.edits:
                edit(ctx, arrays, seen)
        types = dict.fromkeys(arrays, dtype)
        types["d_lse"] = "float64" if dtype == "float64" else "float32"
        types["bias"], types["sinks"] = self.bias_dtype or dtype, self.sinks_dtype or dtype
        with np.errstate(over="ignore", invalid="ignore"):
            cast = {name: arrays[name].astype(numpy_dtype(types[name])) for name in arrays}
        if mask is not None:
            cast["mask"] = mask
        if isinstance(self.bias, Alibi):
            low = numpy_dtype(types["bias"])
            cast["bias"] = self.bias.map_arrays(
                lambda x: x if x.dtype.kind == "i" else x.astype(low)
            )
        for name, kind in self.views.items():
            if kind == "expanded":
                cast[name] = np.array(np.broadcast_to(cast[name][:1], cast[name].shape))
        return Inputs(**cast, views=self.views)

    def _draw(self, ctx: Context) -> dict[str, Any]:
        shape = self.shape
        arrays: dict[str, Any] = {
            "q": ctx.normal(*shape.of(shape.Hq, shape.Lq, shape.D)),
            "k": ctx.normal(*shape.of(shape.Hk, shape.Lk, shape.D)),
            "v": ctx.normal(*shape.of(shape.Hk, shape.Lk, shape.Dv)),
            "d_out": ctx.normal(*shape.of(shape.Hq, shape.Lq, shape.Dv)),
        }
        if self.d_lse:
            arrays["d_lse"] = ctx.normal(*arrays["q"].shape[:-1])
        if callable(self.bias):
            arrays["bias"] = self.bias(ctx)
        if self.sinks:
            arrays["sinks"] = ctx.normal(shape.Hq)
        return arrays


@dataclass(frozen=True, eq=False)
class Case:
    """One thing that every backend must get right.

    Attributes:
        name: Unique, with words joined by hyphens.
        clauses: The clauses of the specification that it guards.
        profile: "forward", "masks", "gradients", "numerics" or "system"; in 16 bits a trial
            counts for "low-precision".
        make: Inputs for a generator and a dtype.
        options: Scalar arguments: causal, scale, softcap, assume_finite; and dropout, whose arrays
            are NumPy's here.
        compare: Results to judge; those that the call does not have are left out.
        needs: Capabilities beyond those that the inputs and options ask for by themselves.
        ids: Faults of the wild that it would have caught (`A1`, `B7`).
        dtypes: Those that it makes sense for.
    """

    name: str
    clauses: tuple[str, ...]
    profile: str
    make: Recipe
    options: Mapping[str, Any] = field(default_factory=dict)
    compare: tuple[str, ...] = ("out", "lse", "weights", "dq", "dk", "dv", "dbias", "dsinks")
    needs: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = DTYPES

    @property
    def scores(self) -> int:
        """How many scores it has a head: what it costs to judge."""
        return self.make.shape.Lq * self.make.shape.Lk

    def inputs(self, dtype: str, seed: int = 0) -> Inputs:
        """Its inputs, the same for a seed on any machine."""
        name = zlib.crc32(self.name.encode())
        return self.make(np.random.default_rng((seed, name, DTYPES.index(dtype))), dtype)
