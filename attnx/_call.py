"""One call of attention as a record: what was asked, checked and brought to one shape.

`prepare` turns the arguments of the API into arrays of four axes and a frozen `Call`, or raises
before anything is computed (S8.1). A backend therefore never sees a layout, a rank or an unchecked
value. What a plan may depend on stands apart, in `CallClass`: a plan made for one call may serve
every other call of its class, and no others.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from attnx import _check_masks, _checks
from attnx._check_alibi import check_alibi
from attnx._dropout import Drop
from attnx.masks import And, Causal, Mask, leaves, map_leaves

if TYPE_CHECKING:
    from collections.abc import Callable

    from attnx._alibi import Alibi
    from attnx._lane import Lane

__all__ = ["Call", "CallClass", "Dims", "Options", "Prepared", "prepare"]

HOLE: Any = object()
"""What stands in a call where an array was."""


class CallClass(NamedTuple):
    """Exactly what a plan may depend on; it is the key under which a plan is kept.

    Attributes:
        framework: the caller's framework (its lane's name).
        device: the arrays' device.
        dtype: of q, k and v.
        D: head size of q and k.
        Dv: head size of v.
        grouped: whether Hq != Hk.
        square: whether Lq == Lk.
        layout: `"bhsd"` or `"bshd"`.
        mask: the mask's structure, `causal` folded in and alignments resolved; None without one.
        scale_sign: -1, 0 or 1; None for the default scale, which is positive.
        softcap: whether it is given.
        bias: (dtype, which axes are full) of a bias that is an array, or None.
        alibi: whether the bias is an `Alibi`.
        sinks: dtype of the sinks, or None.
        dropout: whether it drops anything.
        need_lse: whether the caller needs lse.
        assume_finite: S4.4.
        gradient: `None`, `"framework"` (recorded by the framework) or `"vjp"` (attention_vjp).
        traced: whether a transform of the framework is looking.
    """

    framework: str
    device: str
    dtype: str
    D: int
    Dv: int
    grouped: bool
    square: bool
    layout: str = "bhsd"
    mask: str | None = None
    scale_sign: int | None = None
    softcap: bool = False
    bias: tuple[str, tuple[bool, ...]] | None = None
    alibi: bool = False
    sinks: str | None = None
    dropout: bool = False
    need_lse: bool = False
    assume_finite: bool = False
    gradient: str | None = None
    traced: bool = False


class Call(NamedTuple):
    """One call, as a backend gets it beside q, k and v of shape (B, H, L, D).

    Attributes:
        cls: the call's class.
        B: batch entries, flattened.
        Hq: query heads.
        Hk: key/value heads.
        Lq: queries.
        Lk: keys.
        D: head size of q and k.
        Dv: head size of v.
        scale: the factor of S2, a finite Python float.
        softcap: positive and finite, or None.
        mask: a canonical mask with `causal` folded in, or None (see `attnx.tiling.visible`).
        bias: (1 or B, 1 or Hq, 1 or Lq, 1 or Lk), or None.
        sinks: (Hq,), or None.
        dropout: what is dropped of P (see `attnx.tiling.kept`), or None.
        alibi: with slopes (Hq,), instead of a bias (see `attnx.tiling.alibi_tile`), or None.
    """

    cls: CallClass
    B: int
    Hq: int
    Hk: int
    Lq: int
    Lk: int
    D: int
    Dv: int
    scale: float
    softcap: float | None = None
    mask: Mask | None = None
    bias: Any = None
    sinks: Any = None
    dropout: Drop | None = None
    alibi: Alibi | None = None

    @property
    def dtype(self) -> str:
        """The dtype of q, k and v, such as `"float32"`."""
        return self.cls.dtype

    @property
    def need_lse(self) -> bool:
        """Whether lse is part of the answer."""
        return self.cls.need_lse

    @property
    def assume_finite(self) -> bool:
        """Whether the caller vouches that nothing unseen is NaN or inf (S4.4)."""
        return self.cls.assume_finite

    def map_arrays(self, fn: Callable[[Any], Any]) -> Call:
        """The same call with `fn(array)` in place of each array in it, always in one order."""
        bias = None if self.bias is None else fn(self.bias)
        sinks = None if self.sinks is None else fn(self.sinks)
        return self._mapped(fn, bias, sinks)

    def taken_apart(self) -> tuple[Call, tuple[Any, ...]]:
        """The call without its arrays, and its arrays, for a framework that must hold them itself.

        What is left compares by value. `put_together` is the way back.

        Returns:
            The call, and (bias, sinks, *rest): bias and sinks are None where they are not given.
        """
        rest: list[Any] = []

        def take(array: Any) -> Any:
            rest.append(array)
            return HOLE

        bare = self._mapped(take, None, None)
        return bare, (self.bias, self.sinks, *rest)

    def put_together(self, bias: Any, sinks: Any, *rest: Any) -> Call:
        """The call that was `taken_apart`, with these arrays, or others in their place."""
        if not rest:
            return self._replace(bias=bias, sinks=sinks)
        left = iter(rest)
        return self._mapped(lambda _: next(left), bias, sinks)

    def _mapped(self, fn: Callable[[Any], Any], bias: Any, sinks: Any) -> Call:
        mask = self.mask
        if mask is not None:
            mask = map_leaves(mask, lambda _, __, x: x if isinstance(x, int) else fn(x))
        drop = None if self.dropout is None else self.dropout.map_arrays(fn)
        alibi = None if self.alibi is None else self.alibi.map_arrays(fn)
        return self._replace(mask=mask, bias=bias, sinks=sinks, dropout=drop, alibi=alibi)


class Options(NamedTuple):
    """The keyword arguments of the API, as given."""

    mask: Any = None
    causal: Any = False
    bias: Any = None
    scale: Any = None
    softcap: Any = None
    sinks: Any = None
    dropout: Any = None
    layout: str = "bhsd"
    return_lse: bool = False
    assume_finite: bool = False


class Dims(NamedTuple):
    """The sizes of a call and the caller's own batch axes."""

    batch: tuple[int, ...]
    rank: int
    layout: str
    B: int
    Hq: int
    Hk: int
    Lq: int
    Lk: int
    D: int
    Dv: int

    @property
    def plain(self) -> bool:
        """Whether the caller's arrays already have the backend's shape."""
        return self.rank == 4 and self.layout == "bhsd"

    def inward(self, xp: Any, array: Any) -> Any:
        """The caller's (*B, H, L, D), in its layout, as (B, H, L, D)."""
        if self.plain:
            return array
        if self.layout == "bshd" and self.rank > 2:
            axes = list(range(self.rank))
            axes[-3], axes[-2] = axes[-2], axes[-3]
            array = xp.permute_dims(array, tuple(axes))
        if self.rank == 4:
            return array
        H = array.shape[-3] if self.rank > 2 else 1
        return xp.reshape(array, (self.B, H, *array.shape[-2:]))

    def inward_rows(self, xp: Any, array: Any) -> Any:
        """`inward` for a cotangent: like out, or like lse, which has no last axis."""
        if self.plain:
            return array
        if array.ndim == self.rank:
            return self.inward(xp, array)
        return self.inward(xp, array[..., None])[..., 0]

    def outward(self, xp: Any, array: Any) -> Any:
        """A backend's (B, H, L, …) as the caller's, for out and gradients; lse has no last axis."""
        if array is None or self.plain:
            return array
        if self.rank != 4:
            rest = tuple(array.shape[1:])
            array = xp.reshape(array, rest[1:] if self.rank == 2 else (*self.batch, *rest))
        if self.layout == "bshd" and self.rank > 2:
            axes = list(range(array.ndim))
            first = len(self.batch)
            axes[first], axes[first + 1] = axes[first + 1], axes[first]
            array = xp.permute_dims(array, tuple(axes))
        return array


class Prepared(NamedTuple):
    """A checked call: the arrays for the backend, its record, and the way back."""

    q: Any
    k: Any
    v: Any
    call: Call
    dims: Dims


def prepare(
    lane: Lane, q: Any, k: Any, v: Any, options: Options, *, gradient: str | None = None
) -> Prepared:
    """Check a call and bring it to four axes.

    Args:
        lane: the lane of q's framework.
        q: queries, (*B, Hq, Lq, D) in the caller's layout.
        k: keys, (*B, Hk, Lk, D).
        v: values, (*B, Hk, Lk, Dv).
        options: the keyword arguments.
        gradient: `"vjp"` when a pullback will be asked for; else the lane is asked.

    Raises:
        ArgumentError: wrong shapes, lengths or values (S8.1).
        ArgumentTypeError: wrong types or dtypes, or several frameworks.
    """
    _checks.check_frameworks(lane, q, k, v, options)
    q, k, v = lane.admit(q, k, v)
    dims = Dims(*_checks.check_shapes(q, k, v, options.layout))
    dtype = _checks.check_dtypes(lane, q, k, v)
    _checks.check_flags(options)
    scale = _checks.check_scale(options.scale, dtype)
    softcap = _checks.check_softcap(options.softcap, dtype)
    mask = _fold_causal(_check_masks.check_mask(lane, options.mask, q, dims), options.causal, dims)
    mask = None if mask is None else _check_masks.check_positions(mask, dims)
    bias = _checks.check_bias(lane, options.bias, q, dtype, dims)
    alibi = check_alibi(lane, options.bias, q, dtype, mask, dims)
    sinks = _checks.check_sinks(lane, options.sinks, dtype, dims)
    drop = _checks.check_dropout(lane, options.dropout)
    if gradient is None and lane.wants_gradient(q, k, v, bias, sinks):
        gradient = "framework"
    given = () if mask is None else [x for _, _, x in leaves(mask) if not isinstance(x, int)]
    for part in (drop, alibi):
        given = (*given, *(() if part is None else part.arrays))
    device = lane.device(q)
    xp = lane.xp  # a transform may stage what is done to concrete arrays too: `traced` comes after
    q, k, v = dims.inward(xp, q), dims.inward(xp, k), dims.inward(xp, v)
    cls = CallClass(
        framework=lane.name,
        device=device,
        dtype=dtype,
        D=dims.D,
        Dv=dims.Dv,
        grouped=dims.Hq != dims.Hk,
        square=dims.Lq == dims.Lk,
        layout=dims.layout,
        mask=None if mask is None else mask.structure,
        scale_sign=None if scale is None else (scale > 0) - (scale < 0),
        softcap=softcap is not None,
        bias=None if bias is None else (lane.dtype_name(bias), tuple(n != 1 for n in bias.shape)),
        alibi=alibi is not None,
        sinks=None if sinks is None else lane.dtype_name(sinks),
        dropout=drop is not None,
        need_lse=bool(options.return_lse) or gradient == "vjp",
        assume_finite=bool(options.assume_finite),
        gradient=gradient,
        traced=any(lane.traced(x) for x in (q, k, v, bias, sinks, *given) if x is not None),
    )
    call = Call(
        cls, dims.B, dims.Hq, dims.Hk, dims.Lq, dims.Lk, dims.D, dims.Dv,
        1.0 / math.sqrt(dims.D) if scale is None else scale, softcap, mask, bias, sinks, drop,
        alibi,
    )  # fmt: skip
    return Prepared(q, k, v, call, dims)


def _fold_causal(mask: Mask | None, causal: Any, dims: Dims) -> Mask | None:
    """`causal` and `mask` always intersect (S3.1)."""
    align = _check_masks.check_causal(causal, dims)
    if align is None:
        return mask
    return Causal(align) if mask is None else And((Causal(align), mask))
