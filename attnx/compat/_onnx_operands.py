"""The operands of ONNX's Attention as attnx takes them: heads apart, the past in front, one dtype.

ONNX joins what attnx keeps apart: heads packed into one axis, a cache that the operator extends,
values of another type than keys. Each is undone here by array-API operations on the caller's own
arrays, so that a framework that differentiates sees all of it. Nothing may be promoted by accident,
so dtypes are compared before arrays meet.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from array_api_compat import array_namespace

from attnx.errors import ArgumentError, ArgumentTypeError, UnsupportedError

__all__ = ["Operands", "dtype_name", "namespace", "operands"]

FLOATING = ("float16", "bfloat16", "float32", "float64")
PRECISIONS = {1: "float32", 10: "float16", 11: "float64", 16: "bfloat16"}


class Operands(NamedTuple):
    """The operator's inputs with four axes.

    Attributes:
        xp: the array namespace of all of them.
        q: `(B, Hq, Lq, D)`.
        k: `(B, Hk, Lk, D)`, the past in front.
        v: `(B, Hk, Lk, Dv)`, alike.
        past: how many keys are of the past.
        packed: whether Q, K and V had three axes.
    """

    xp: Any
    q: Any
    k: Any
    v: Any
    past: int
    packed: bool

    @property
    def grid(self) -> tuple[int, int, int, int]:
        """(B, Hq, Lq, Lk)."""
        return (*self.q.shape[:3], self.k.shape[2])

    def computed(self, softmax_precision: int | None) -> tuple[Any, Any, Any]:
        """q, k and v in the one dtype that attnx computes in.

        It is that of Q; the wider of two where V has another; float64 where `softmax_precision`
        asks for it. attnx never takes a softmax in less than float32, nor in less than the inputs'
        type, so every other precision is kept as it is.
        """
        q, v = dtype_name(self.q), dtype_name(self.v)
        wanted = _wider(q, v)
        if softmax_precision is not None:
            if softmax_precision not in PRECISIONS:
                raise ArgumentError(
                    "softmax_precision: expected 1 (float), 10 (float16), 11 (double) or "
                    f"16 (bfloat16), got {softmax_precision!r}"
                )
            if PRECISIONS[softmax_precision] == "float64":
                wanted = "float64"
        if wanted == q == v:
            return self.q, self.k, self.v
        if wanted == "float64" and not _has_float64(self.xp):
            raise UnsupportedError(
                f"softmax_precision: {self.xp.__name__} has no float64 here; for JAX, switch "
                "jax_enable_x64 on at the start of the program"
            )
        dtype = getattr(self.xp, wanted)
        q, k, v = (self.xp.astype(x, dtype) for x in (self.q, self.k, self.v))
        return q, k, v


def operands(
    inputs: dict[str, Any], q_heads: int | None, kv_heads: int | None, opset: int
) -> Operands:
    """Q, K and V with heads apart and the past in front of K and V.

    Args:
        inputs: Q, K, V, past_key and past_value, by the operator's names.
        q_heads: `q_num_heads`.
        kv_heads: `kv_num_heads`.
        opset: of the operator.
    """
    xp = namespace(inputs)
    q, k, v, past_key, past_value = inputs.values()
    if q.ndim not in (3, 4) or not q.ndim == k.ndim == v.ndim:
        shapes = ", ".join(f"{name} {tuple(inputs[name].shape)}" for name in "QKV")
        raise ArgumentError(
            "Q, K, V: expected 4 axes (B, H, L, D) each, or 3 axes (B, L, H * D) each, "
            f"got {shapes}"
        )
    for name in "QV":
        if dtype_name(inputs[name]) not in FLOATING:
            raise ArgumentTypeError(
                f"{name}: expected one of {', '.join(FLOATING)}, got {dtype_name(inputs[name])}"
            )
    if dtype_name(k) != dtype_name(q):
        raise ArgumentTypeError(f"K: expected the type of Q, {dtype_name(q)}, got {dtype_name(k)}")
    packed = q.ndim == 3
    if packed:
        q = _heads_apart(xp, "Q", q, "q_num_heads", q_heads)
        k = _heads_apart(xp, "K", k, "kv_num_heads", kv_heads)
        v = _heads_apart(xp, "V", v, "kv_num_heads", kv_heads)
    else:
        _check_heads("q_num_heads", q_heads, q.shape[1], opset)
        _check_heads("kv_num_heads", kv_heads, k.shape[1], opset)
    if (past_key is None) != (past_value is None):
        raise ArgumentError("past_key, past_value: expected both or neither, got one of the two")
    past = 0
    if past_key is not None:
        k = _joined(xp, "past_key", past_key, "K", k)
        v = _joined(xp, "past_value", past_value, "V", v)
        past = past_key.shape[2]
    return Operands(xp, q, k, v, past, packed)


def namespace(inputs: dict[str, Any]) -> Any:
    """The array namespace that all inputs share."""
    try:
        return array_namespace(*(x for x in inputs.values() if x is not None))
    except TypeError:
        found = ", ".join(
            f"{name} is {type(x).__module__.split('.')[0]}.{type(x).__name__}"
            for name, x in inputs.items()
            if x is not None
        )
        raise ArgumentTypeError(
            f"inputs: expected arrays of one framework, got: {found}; convert them first"
        ) from None


def dtype_name(array: Any) -> str:
    """`"float32"`, whatever the framework calls it."""
    return str(array.dtype).rsplit(".", 1)[-1]


def _wider(one: str, other: str) -> str:
    """The type that holds both without loss."""
    if one == other:
        return one
    return "float64" if "float64" in (one, other) else "float32"


def _has_float64(xp: Any) -> bool:
    """JAX without its 64-bit switch gives float32 where float64 is asked for, and warns."""
    if xp.__name__ != "jax.numpy":
        return True
    return dtype_name(xp.zeros(0, dtype=float)) == "float64"


def _heads_apart(xp: Any, name: str, array: Any, attribute: str, heads: int | None) -> Any:
    """`(B, L, H * D)` as `(B, H, L, D)`: the heads lie one after the other in a token."""
    if heads is None:
        raise ArgumentError(
            f"{attribute}: expected the number of heads beside {name} of 3 axes, "
            f"{tuple(array.shape)}, got None"
        )
    B, L, size = array.shape
    if heads < 1 or size % heads:
        raise ArgumentError(
            f"{attribute}: expected a divisor of the last axis of {name}, "
            f"{tuple(array.shape)}, got {heads}"
        )
    return xp.permute_dims(xp.reshape(array, (B, L, heads, size // heads)), (0, 2, 1, 3))


def _check_heads(attribute: str, given: int | None, heads: int, opset: int) -> None:
    if given is None or (opset < 25 and given == heads):
        return
    raise ArgumentError(
        f"{attribute}: expected None beside inputs of 4 axes, which have their heads "
        f"({heads}) in the second, got {given}"
    )


def _joined(xp: Any, name: str, past: Any, new_name: str, new: Any) -> Any:
    """The past and the new tokens behind it."""
    B, H, _, D = new.shape
    if past.ndim != 4 or (past.shape[0], past.shape[1], past.shape[3]) != (B, H, D):
        raise ArgumentError(
            f"{name}: expected (B, kv_num_heads, past, head size) = ({B}, {H}, past, {D}) beside "
            f"{new_name}, got {tuple(past.shape)}"
        )
    if dtype_name(past) != dtype_name(new):
        raise ArgumentTypeError(
            f"{name}: expected the type of {new_name}, {dtype_name(new)}, got {dtype_name(past)}"
        )
    return xp.concat([past, new], axis=2)
