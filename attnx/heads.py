"""Multi-head attention: the projections around the operation, for arrays of any framework.

Heads are attention side by side. x is projected to all of them at once, each attends in its own
part of the features, and one more projection mixes what they found:

    y = concat_h(attention(x wq_h + bq_h, c wk_h + bk_h, c wv_h + bv_h)) wo + bo,  c = context or x

The weights are a plain record of arrays, so that a framework's own tools (trees, optimisers,
checkpoints) hold them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from attnx._api import attention_vjp
from attnx._attention import attention
from attnx._checks import FLOATING, check_device, check_integer
from attnx._dispatch import lane_of
from attnx._weights import HeadWeights
from attnx.errors import ArgumentError, ArgumentTypeError
from attnx.positions import RopeTable, rotate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from attnx.plugin import Backend, Lane

__all__ = [
    "HeadGradients",
    "HeadWeights",
    "Rotary",
    "multi_head_attention",
    "multi_head_attention_vjp",
]


class Rotary(NamedTuple):
    """Rotary positions of one call: queries and keys are turned after their projection.

    Attributes:
        table: `attnx.positions.rope_table` of where the queries stand, and the keys with them.
        style: as in `attnx.rope`.
        keys: that of where the keys stand, in cross-attention say; None for that of the queries.
    """

    table: RopeTable
    style: str
    keys: RopeTable | None = None


class HeadGradients(NamedTuple):
    """The gradients of one call, each in its input's shape and dtype; None for what was not given.

    Attributes:
        x: of x; without a context it has the part of keys and values too.
        context: of the context.
        weights: of each array of the weights.
        bias: of the bias.
        sinks: of the sinks.
    """

    x: Any
    context: Any
    weights: HeadWeights
    bias: Any
    sinks: Any


def multi_head_attention(
    x: Any,
    context: Any = None,
    *,
    weights: HeadWeights,
    num_heads: int,
    num_kv_heads: int | None = None,
    mask: Any = None,
    causal: bool | str = False,
    bias: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    dropout: Any = None,
    rotary: Rotary | None = None,
    assume_finite: bool = False,
    backend: str | Backend | Sequence[str | Backend] | None = None,
) -> Any:
    """Multi-head attention of x over itself, or over a context.

    It is differentiable by the framework's own means wherever `attention` is; on NumPy and CuPy
    there is `multi_head_attention_vjp`. Masks, biases and the other options are those of
    `attention`, over `(*B, Hq, Lq, Lk)`.

    Args:
        x: `(*B, Lq, E)`: what asks.
        context: `(*B, Lk, Ec)`: what is asked; x itself when absent.
        weights: the projections, in x's dtype.
        num_heads: Hq; D and Dv follow from the weights.
        num_kv_heads: Hk, a divisor of Hq that several query heads share; Hq when absent.
        mask: as in `attention`.
        causal: as in `attention`.
        bias: as in `attention`.
        scale: as in `attention`; 1/sqrt(D) when absent.
        softcap: as in `attention`.
        sinks: as in `attention`.
        dropout: as in `attention`.
        rotary: positions that turn queries and keys, or None.
        assume_finite: as in `attention`.
        backend: as in `attention`.

    Returns:
        y `(*B, Lq, Eo)`, in x's dtype.

    Raises:
        ArgumentError: shapes that do not fit, named by the argument.
        ArgumentTypeError: another dtype or framework than x's.
        UnsupportedError: as in `attention`.

    Example:
        >>> import numpy as np, attnx
        >>> x = np.ones((2, 5, 8), np.float32)
        >>> w = attnx.HeadWeights(*(np.eye(8, dtype=np.float32) for _ in range(4)))
        >>> attnx.multi_head_attention(x, weights=w, num_heads=2, causal=True).shape
        (2, 5, 8)
    """
    heads = _Heads(x, context, weights, num_heads, num_kv_heads, rotary)
    out = attention(
        *heads.projected(), mask=mask, causal=causal, bias=bias, scale=scale, softcap=softcap,
        sinks=sinks, dropout=dropout, layout="bshd", assume_finite=assume_finite, backend=backend,
    )  # fmt: skip
    return heads.mixed(out)


def multi_head_attention_vjp(
    x: Any,
    context: Any = None,
    *,
    weights: HeadWeights,
    num_heads: int,
    num_kv_heads: int | None = None,
    rotary: Rotary | None = None,
    **options: Any,
) -> tuple[Any, Callable[[Any], HeadGradients]]:
    """Multi-head attention and its pullback, on every backend, NumPy and CuPy included.

    The arguments are those of `multi_head_attention`. The inputs count as constants to the
    framework's own differentiation, and must still hold the same values when the pullback is
    called.

    Returns:
        (y, pullback): `pullback(d_y)` takes a cotangent of y's shape and dtype and gives
        `HeadGradients`.

    Raises:
        ArgumentError: as in `multi_head_attention`; also from the pullback, for a wrong cotangent.
        ArgumentTypeError: alike.
        UnsupportedError: as in `attention`.

    Example:
        >>> import numpy as np, attnx
        >>> x = np.ones((2, 5, 8), np.float32)
        >>> w = attnx.HeadWeights(*(np.eye(8, dtype=np.float32) for _ in range(4)))
        >>> y, pullback = attnx.multi_head_attention_vjp(x, weights=w, num_heads=2)
        >>> pullback(np.ones_like(y)).weights.wo.shape
        (8, 8)
    """
    if "layout" in options or "return_lse" in options:
        name = "layout" if "layout" in options else "return_lse"
        raise ArgumentTypeError(f"{name}: multi_head_attention_vjp has no such option")
    lane = lane_of(x, "x")
    weights = HeadWeights(*(None if w is None else lane.detached(w) for w in weights))
    context = None if context is None else lane.detached(context)
    heads = _Heads(lane.detached(x), context, weights, num_heads, num_kv_heads, rotary)
    out, pullback = attention_vjp(*heads.projected(), layout="bshd", **options)
    y, shape = heads.mixed(out), tuple(out.shape)
    flat = lane.xp.reshape(lane.xp.astype(out, heads.x.dtype, copy=True), heads.flat(out))

    def pull(d_y: Any) -> HeadGradients:
        """Gradients for a cotangent of y."""
        heads.check_cotangent(d_y, y)
        d_out = lane.xp.reshape(heads.back(d_y, weights.wo), shape)
        # Under autocast the operation took another dtype than x has.
        *parts, d_bias, d_sinks = pullback(lane.xp.astype(d_out, out.dtype, copy=False))
        dq, dk, dv = (lane.xp.astype(d, d_out.dtype, copy=False) for d in parts)
        return heads.gradients(d_y, flat, (dq, dk, dv), (d_bias, d_sinks))

    return y, pull


class _Heads:
    """One call's arrays, checked, and what is done with them."""

    def __init__(
        self, x: Any, context: Any, weights: HeadWeights, num_heads: int,
        num_kv_heads: int | None, rotary: Rotary | None,
    ) -> None:  # fmt: skip
        self.lane: Lane = lane_of(x, "x")
        self.x, self.weights = x, weights
        self.Hq = check_integer("num_heads", num_heads, 1)
        self.Hk = (
            self.Hq if num_kv_heads is None else check_integer("num_kv_heads", num_kv_heads, 1)
        )
        _check(self.lane, x, context, weights, self.Hq, self.Hk)
        self.alone, self.rotary = context is None, rotary
        _check_rotary(rotary)
        self.context = x if context is None else context

    def projected(self) -> tuple[Any, Any, Any]:
        """q, k and v, `(*B, L, H, D)`."""
        w = self.weights
        q = self._split(self._into(self.x, w.wq, w.bq), self.Hq)
        k = self._split(self._into(self.context, w.wk, w.bk), self.Hk)
        v = self._split(self._into(self.context, w.wv, w.bv), self.Hk)
        return *self._turned(q, k, 1), v

    def _turned(self, q: Any, k: Any, sign: int) -> tuple[Any, Any]:
        """Queries and keys at their positions; with -1, what pulls a gradient back from there."""
        if self.rotary is None:
            return q, k
        mine, style, other = self.rotary
        return (
            rotate(q, mine.cos, sign * mine.sin, style=style, layout="bshd"),
            rotate(k, (other or mine).cos, sign * (other or mine).sin, style=style, layout="bshd"),
        )

    def flat(self, out: Any) -> tuple[int, ...]:
        """The shape of out with its heads side by side."""
        return (*out.shape[:-2], out.shape[-2] * out.shape[-1])

    def mixed(self, out: Any) -> Any:
        """y."""
        out = self.lane.xp.reshape(out, self.flat(out))
        return self._into(out, self.weights.wo, self.weights.bo)

    def _into(self, x: Any, w: Any, b: Any) -> Any:
        xp = self.lane.xp
        # NumPy multiplies bfloat16 into float32, and autocast casts what it likes.
        made = xp.astype(xp.matmul(x, w), self.x.dtype, copy=False)
        return made if b is None else made + b

    def _split(self, x: Any, heads: int) -> Any:
        return self.lane.xp.reshape(x, (*x.shape[:-1], heads, x.shape[-1] // heads))

    # The way back

    def check_cotangent(self, d_y: Any, y: Any) -> None:
        """It has y's framework, shape and dtype."""
        if not self.lane.owns(d_y):
            raise ArgumentTypeError(
                f"d_y: expected a {self.lane.name} array like x, got {type(d_y).__name__}"
            )
        if tuple(d_y.shape) != tuple(y.shape) or d_y.dtype != y.dtype:
            kind = ArgumentTypeError if d_y.dtype != y.dtype else ArgumentError
            raise kind(
                f"d_y: expected y's shape {tuple(y.shape)} and dtype {self.lane.dtype_name(y)}, "
                f"got {tuple(d_y.shape)} and {self.lane.dtype_name(d_y)}"
            )

    def back(self, d: Any, w: Any) -> Any:
        """The gradient of what was multiplied with w."""
        xp = self.lane.xp
        return xp.astype(xp.matmul(d, xp.permute_dims(w, (1, 0))), self.x.dtype, copy=False)

    def gradients(
        self, d_y: Any, flat: Any, parts: tuple[Any, Any, Any], rest: tuple[Any, Any]
    ) -> HeadGradients:
        """All of them, from those of y, q, k and v."""
        xp, w = self.lane.xp, self.weights
        parts = (*self._turned(*parts[:2], -1), parts[2])
        dq, dk, dv = (xp.reshape(d, (*d.shape[:-2], d.shape[-2] * d.shape[-1])) for d in parts)
        d_x, d_context = self.back(dq, w.wq), self.back(dk, w.wk) + self.back(dv, w.wv)
        made = HeadWeights(
            self._of_matrix(self.x, dq), self._of_matrix(self.context, dk),
            self._of_matrix(self.context, dv), self._of_matrix(flat, d_y),
            *(
                None if b is None else self._of_vector(d)
                for b, d in ((w.bq, dq), (w.bk, dk), (w.bv, dv), (w.bo, d_y))
            ),
        )  # fmt: skip
        if self.alone:
            return HeadGradients(d_x + d_context, None, made, *rest)
        return HeadGradients(d_x, d_context, made, *rest)

    def _of_matrix(self, x: Any, d: Any) -> Any:
        xp = self.lane.xp
        x, d = xp.reshape(x, (-1, x.shape[-1])), xp.reshape(d, (-1, d.shape[-1]))
        product = xp.matmul(xp.permute_dims(x, (1, 0)), d)
        return xp.astype(product, self.x.dtype, copy=False)

    def _of_vector(self, d: Any) -> Any:
        xp = self.lane.xp
        wide = xp.float64 if self.lane.dtype_name(d) == "float64" else xp.float32
        total = xp.sum(xp.astype(d, wide), axis=tuple(range(d.ndim - 1)))
        return xp.astype(total, self.x.dtype)


def _check_rotary(rotary: Any) -> None:
    if rotary is None:
        return
    if not isinstance(rotary, Rotary):
        raise ArgumentTypeError(
            f"rotary: expected attnx.heads.Rotary(table, style), got {type(rotary).__name__}"
        )
    for name in ("table", "keys"):
        table = getattr(rotary, name)
        if not isinstance(table, RopeTable) and not (name == "keys" and table is None):
            raise ArgumentTypeError(
                f"rotary.{name}: expected a table of attnx.positions.rope_table, "
                f"got {type(table).__name__}"
            )


def _check(lane: Lane, x: Any, context: Any, weights: HeadWeights, Hq: int, Hk: int) -> None:
    dtype = lane.dtype_name(x)
    if isinstance(x, lane.refused_types) or dtype not in FLOATING:
        raise ArgumentTypeError(
            f"x: expected a plain {lane.name} array of one of {', '.join(FLOATING)}, got "
            f"{type(x).__name__} of {dtype}"
        )
    if x.ndim < 2:
        raise ArgumentError(f"x: expected (*B, Lq, E), got {tuple(x.shape)}")
    if Hq % Hk:
        raise ArgumentError(f"num_kv_heads: expected a divisor of num_heads={Hq}, got {Hk}")
    if not isinstance(weights, HeadWeights):
        raise ArgumentTypeError(
            f"weights: expected attnx.HeadWeights(wq, wk, wv, wo), got {type(weights).__name__}"
        )
    arrays = {"context": context, **{f"weights.{n}": w for n, w in weights._asdict().items()}}
    for name, array in arrays.items():
        if array is None and name not in REQUIRED:
            continue
        if not lane.owns(array) or isinstance(array, lane.refused_types):
            raise ArgumentTypeError(
                f"{name}: expected a plain {lane.name} array like x, got {type(array).__name__}"
            )
        check_device(lane, name, array, "x", x)
        if lane.dtype_name(array) != dtype:
            raise ArgumentTypeError(
                f"{name}: expected x's dtype {dtype}, got {lane.dtype_name(array)}; nothing is "
                "cast silently, so convert it first"
            )
    if context is not None and tuple(context.shape[:-2]) != tuple(x.shape[:-2]):
        raise ArgumentError(
            f"context: expected (*B, Lk, Ec) with *B = {tuple(x.shape[:-2])} like x, "
            f"got {tuple(context.shape)}"
        )
    _check_weights(weights, x.shape[-1], (x if context is None else context).shape[-1], Hq, Hk)


REQUIRED = frozenset(f"weights.{name}" for name in ("wq", "wk", "wv", "wo"))


def _check_weights(w: HeadWeights, E: int, Ec: int, Hq: int, Hk: int) -> None:
    """Every matrix and vector against what stands before it and after it."""
    for name, rows, axis in (("wq", E, "E"), ("wk", Ec, "Ec"), ("wv", Ec, "Ec")):
        heads, count = ("Hq", Hq) if name == "wq" else ("Hk", Hk)
        size = "Dv" if name == "wv" else "D"
        shape = tuple(getattr(w, name).shape)
        if len(shape) != 2 or shape[0] != rows or shape[1] % count:
            raise ArgumentError(
                f"weights.{name}: expected ({axis}, {heads} * {size}) = ({rows}, {count} * {size}),"
                f" got {shape}; a torch.nn.Linear holds the transpose"
            )
    D, Dv = w.wq.shape[1] // Hq, w.wv.shape[1] // Hk
    if w.wk.shape[1] != Hk * D:
        raise ArgumentError(
            f"weights.wk: expected ({Ec}, {Hk} * {D}) for {Hk} heads of wq's D={D}, "
            f"got {tuple(w.wk.shape)}; num_kv_heads says how many there are"
        )
    if w.wo.ndim != 2 or w.wo.shape[0] != Hq * Dv:
        raise ArgumentError(
            f"weights.wo: expected (Hq * Dv, Eo) = ({Hq} * {Dv}, Eo), got {tuple(w.wo.shape)}"
        )
    for name, matrix in (("bq", w.wq), ("bk", w.wk), ("bv", w.wv), ("bo", w.wo)):
        vector = getattr(w, name)
        if vector is not None and tuple(vector.shape) != (matrix.shape[1],):
            raise ArgumentError(
                f"weights.{name}: expected ({matrix.shape[1]},), got {tuple(vector.shape)}"
            )
