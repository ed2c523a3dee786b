"""The checks of S8.1: wrong use is told before anything is computed.

Every message names the argument, what was expected with its axis names, what came, and what to
write instead. The checks of arrays' contents run only where they can be read without tracing or
synchronising a device; elsewhere counts are clamped to [0, L], as S8.1 says.
"""

from __future__ import annotations

import math
import numbers
import operator
from typing import TYPE_CHECKING, Any

from attnx import masks
from attnx._alibi import Alibi
from attnx._dropout import AXES, Drop, Dropout, check_shift
from attnx._mask_base import is_scalar
from attnx.errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    from attnx._call import Dims, Options
    from attnx._lane import Lane

__all__ = [
    "FLOAT32_MAX",
    "check_bias",
    "check_companion",
    "check_dropout",
    "check_dtypes",
    "check_flags",
    "check_frameworks",
    "check_scale",
    "check_shapes",
    "check_sinks",
    "check_softcap",
    "four_axes",
]

FLOAT32_MAX = 3.4028234663852886e38
FLOATING = ("float16", "bfloat16", "float32", "float64")
SHAPES = {
    "bhsd": {"q": "(*B, Hq, Lq, D)", "k": "(*B, Hk, Lk, D)", "v": "(*B, Hk, Lk, Dv)"},
    "bshd": {"q": "(*B, Lq, Hq, D)", "k": "(*B, Lk, Hk, D)", "v": "(*B, Lk, Hk, Dv)"},
}


def check_frameworks(lane: Lane, q: Any, k: Any, v: Any, options: Options) -> None:
    """The framework is q's; every other array must be of the same one."""
    arrays = {"q": q, "k": k, "v": v}
    if isinstance(options.bias, Alibi):
        arrays |= {f"Alibi.{name}": leaf for name, leaf in options.bias.given().items()}
    else:
        arrays["bias"] = options.bias
    arrays["sinks"] = options.sinks
    if isinstance(options.mask, masks.Mask):
        for node, name, leaf in masks.leaves(options.mask):
            if not isinstance(leaf, (int, tuple)):
                arrays[f"{type(node).__name__}.{name}"] = leaf
    else:
        arrays["mask"] = options.mask
    for name, array in arrays.items():
        if array is None and name not in "qkv":
            continue
        if isinstance(array, lane.refused_types):
            raise ArgumentTypeError(
                f"{name}: {type(array).__name__} has a meaning of its own that attention would "
                f"drop; convert it to a plain {lane.name} array first"
            )
        if not lane.owns(array):
            _refuse_type(lane, name, array, arrays)


def _refuse_type(lane: Lane, name: str, array: Any, arrays: dict[str, Any]) -> None:
    if not hasattr(array, "shape") or is_scalar(array):
        wanted = (
            "a boolean array or a mask object of attnx.masks"
            if name == "mask"
            else f"a {lane.name} array like q"
        )
        raise ArgumentTypeError(f"{name}: expected {wanted}, got {type(array).__name__}")
    found = ", ".join(f"{n} is {_type_name(a)}" for n, a in arrays.items() if a is not None)
    raise ArgumentTypeError(
        f"{name}: expected an array of q's framework, {lane.name}; arrays of different frameworks "
        f"came in one call: {found}. Convert {name} to {lane.name} first"
    )


def _type_name(array: Any) -> str:
    kind = type(array)
    return f"{kind.__module__.split('.')[0]}.{kind.__name__}"


def check_integer(name: str, value: Any, least: int | None = None, *, other: str = "") -> int:
    """A Python or NumPy integer, of at least `least`; `other` says what else would do."""
    if isinstance(value, bool) or not hasattr(type(value), "__index__"):
        raise ArgumentTypeError(f"{name}: expected an integer{other}, got {type(value).__name__}")
    try:
        number = operator.index(value)
    except TypeError as error:  # an array of more than one number, or one that is traced
        kind = type(value).__name__
        raise ArgumentTypeError(f"{name}: expected an integer{other}, got {kind}") from error
    if least is not None and number < least:
        raise ArgumentError(f"{name}: expected an integer >= {least}, got {value}")
    return number


def check_device(lane: Lane, name: str, array: Any, like_name: str, like: Any) -> None:
    """On the device of another array, where that can be told."""
    if lane.traced(like) or lane.traced(array) or lane.device(array) == lane.device(like):
        return
    raise ArgumentError(
        f"{name}: expected the device of {like_name}, {lane.device(like)}, got "
        f"{lane.device(array)}; nothing is moved silently"
    )


def check_cotangent(lane: Lane, name: str, given: Any, shape: tuple[int, ...], dtype: str) -> None:
    """A cotangent that is there has the framework of q, and the shape and dtype of its answer."""
    if given is None:
        return
    if not lane.owns(given) or isinstance(given, lane.refused_types):
        raise ArgumentTypeError(
            f"{name}: expected a {lane.name} array like q, got {type(given).__name__}"
        )
    if tuple(given.shape) != shape:
        raise ArgumentError(
            f"{name}: expected the shape of {name[2:]}, {shape}, got {tuple(given.shape)}"
        )
    if lane.dtype_name(given) != dtype:
        raise ArgumentTypeError(
            f"{name}: expected the dtype of {name[2:]}, {dtype}, got {lane.dtype_name(given)}"
        )


def check_shapes(q: Any, k: Any, v: Any, layout: Any) -> tuple[Any, ...]:
    """The fields of `Dims`, from three shapes that belong together (S1.1 to S1.3)."""
    if not isinstance(layout, str) or layout not in SHAPES:
        raise ArgumentError(f"layout: expected 'bhsd' or 'bshd', got {layout!r}")
    shapes = {"q": tuple(q.shape), "k": tuple(k.shape), "v": tuple(v.shape)}
    rank = len(shapes["q"])
    for name, shape in shapes.items():
        if len(shape) < 2 or len(shape) != rank:
            beside = "" if name == "q" else f" beside q {shapes['q']}"
            raise ArgumentError(
                f"{name}: expected {SHAPES[layout][name]} with as many axes as q, at least 2, "
                f"got shape {shape}{beside}"
            )
    batch: tuple[int, ...] = shapes["q"][:-3]
    (Hq, Lq, D), (Hk, Lk, Dk), (Hv, Lv, Dv) = (_split(shape, layout) for shape in shapes.values())
    for name in ("k", "v"):
        if shapes[name][:-3] != batch:
            raise ArgumentError(
                f"{name}: expected the batch axes of q, {batch}, got {shapes[name][:-3]}; "
                "batch axes are never broadcast, so expand them"
            )
    _equal("k", "head size D of q", D, Dk, shapes, layout)
    _equal("v", "number of keys Lk of k", Lk, Lv, shapes, layout)
    _equal("v", "number of heads Hk of k", Hk, Hv, shapes, layout)
    if D < 1 or Dv < 1:
        name = "q" if D < 1 else "v"
        raise ArgumentError(
            f"{name}: expected {SHAPES[layout][name]} with a head size >= 1, got {shapes[name]}"
        )
    if Hk < 1 or Hq < 1 or Hq % Hk:
        raise ArgumentError(
            f"q: expected Hq to be a multiple of Hk, both >= 1, got Hq={Hq} and Hk={Hk} from "
            f"q {shapes['q']} and k {shapes['k']} in layout {layout!r}"
            + ("; is it the other layout?" if rank > 2 else "")
        )
    return batch, rank, layout, math.prod(batch), Hq, Hk, Lq, Lk, D, Dv


def _split(shape: tuple[int, ...], layout: str) -> tuple[int, int, int]:
    if len(shape) == 2:
        return 1, shape[0], shape[1]
    H, L, D = shape[-3:]
    return (H, L, D) if layout == "bhsd" else (L, H, D)


def _equal(
    name: str, what: str, expected: int, got: int, shapes: dict[str, Any], layout: str
) -> None:
    if expected != got:
        raise ArgumentError(
            f"{name}: expected {SHAPES[layout][name]} with the {what}, {expected}, got {got} "
            f"in {shapes[name]} (q is {shapes['q']}, k is {shapes['k']}, layout {layout!r})"
        )


def check_dtypes(lane: Lane, q: Any, k: Any, v: Any) -> str:
    """One floating dtype for q, k and v (S5.1)."""
    dtype = lane.dtype_name(q)
    for name, array in (("q", q), ("k", k), ("v", v)):
        got = lane.dtype_name(array)
        if got not in FLOATING:
            raise ArgumentTypeError(
                f"{name}: expected one of {', '.join(FLOATING)}, got {got}; nothing is cast "
                "silently, so convert it first"
            )
        if got != dtype:
            raise ArgumentTypeError(
                f"{name}: expected the dtype of q, {dtype}, got {got}; q, k and v have one dtype"
            )
    return dtype


def check_flags(options: Options) -> None:
    """return_lse and assume_finite are Python booleans."""
    for name in ("return_lse", "assume_finite"):
        value = getattr(options, name)
        if not isinstance(value, bool):
            raise ArgumentTypeError(f"{name}: expected True or False, got {value!r}")


def check_scale(scale: Any, dtype: str) -> float | None:
    """A finite real scalar, 0 and negatives included, or None (S1.6, S2).

    Finite where the scores are held: frameworks make an error, inf or NaN of a number beyond
    float32's, each in its own way.
    """
    if scale is None:
        return None
    number = _real("scale", scale)
    if not _finite(number):
        raise ArgumentError(f"scale: expected a finite number, got {number}")
    if abs(number) > FLOAT32_MAX and dtype != "float64":
        raise ArgumentError(
            f"scale: expected a number within float32's range, 3.4e+38, in which the "
            f"scores of {dtype} arrays are held, got {number}; multiply q by part of it"
        )
    return number


def check_softcap(softcap: Any, dtype: str) -> float | None:
    """A positive finite real scalar, or None (S1.6, S2).

    Beyond 1e30 a cap changes no score, and below 1e-30 each score is 0, within S5.4; float32 could
    not hold such a cap, or the quotients of the scores by it, and would give NaN.
    """
    if softcap is None:
        return None
    number = _real("softcap", softcap)
    if not (number > 0 and _finite(number)):
        raise ArgumentError(
            f"softcap: expected a finite number > 0, got {number}; None means no softcap"
        )
    return number if dtype == "float64" else min(max(number, 1e-30), 1e30)


def _finite(number: float) -> bool:
    """As a compiler can guard it for a symbol: by comparisons with numbers of this code.

    It reads no `math.isfinite`, takes a comparison with infinity for granted, and may take a number
    of a module for a symbol too.
    """
    return -1.7976931348623157e308 <= number <= 1.7976931348623157e308


def _real(name: str, value: Any) -> float:
    if isinstance(value, bool) or type(value).__name__ in ("bool_", "bool"):
        raise ArgumentTypeError(f"{name}: expected a real number, got the boolean {value}")
    if not isinstance(value, numbers.Real):
        instead = f"multiply q by it and pass {name}=1.0" if name == "scale" else "pass a float"
        raise ArgumentTypeError(
            f"{name}: expected a Python or NumPy scalar, got {_type_name(value)}; {instead}"
        )
    try:
        return float(value)
    except OverflowError:
        raise ArgumentError(f"{name}: expected a number that fits into a float") from None


def check_bias(lane: Lane, bias: Any, q: Any, dtype: str, dims: Dims) -> Any:
    """A floating array that broadcasts like a mask (S2.4, S3.3), with four axes."""
    if bias is None or isinstance(bias, Alibi):
        return None
    got = lane.dtype_name(bias)
    if got == "bool":
        raise ArgumentTypeError(
            "bias: expected floating values that are added to the scores, got bool; "
            "pass a boolean array as mask="
        )
    check_companion("bias", got, dtype)
    return four_axes(lane, "bias", bias, dims)


def check_companion(name: str, got: str, dtype: str) -> None:
    """What is added to the scores is of q's dtype or float32 (S2.4)."""
    allowed = dict.fromkeys((dtype, "float32"))
    if got not in allowed:
        raise ArgumentTypeError(
            f"{name}: expected {' or '.join(allowed)} beside {dtype} q, k and v, got {got}; "
            "nothing is cast silently, so convert it first"
        )


def four_axes(lane: Lane, name: str, array: Any, dims: Dims) -> Any:
    """(1 or B, 1 or Hq, 1 or Lq, 1 or Lk); a partly broadcast *B is expanded, the rest is not."""
    full = (*dims.batch, dims.Hq, dims.Lq, dims.Lk)[-max(dims.rank, 2) :]
    shape = tuple(array.shape)
    if len(shape) != 2 and len(shape) != dims.rank:
        hint = {
            1: f"; {name}[None] is one row for every query",
            3: f" (is it (B, Lq, Lk) or (Hq, Lq, Lk)?); {name}[:, None] or {name}[None] says which",
        }.get(len(shape), "")
        raise ArgumentError(
            f"{name}: expected shape (Lq, Lk) = {full[-2:]} or (*B, Hq, Lq, Lk) = {full}, each "
            f"axis 1 or full, got {len(shape)} axes {shape}{hint}"
        )
    wanted = full if len(shape) == dims.rank else full[-2:]
    if any(n not in (1, m) for n, m in zip(shape, wanted, strict=True)):
        axes = "(*B, Hq, Lq, Lk)" if len(shape) > 2 else "(Lq, Lk)"
        raise ArgumentError(
            f"{name}: expected shape {axes} = {wanted}, each axis 1 or full, got {shape}; "
            + (
                f"for one row a batch entry write {name}[:, None, None, :]"
                if dims.rank == 4 and shape == (dims.B, dims.Lk)
                else "the axes of a mask or a bias are the same in either layout"
            )
        )
    if len(shape) == 4:
        return array
    batch = shape[:-3]
    if any(n != 1 for n in batch) and batch != dims.batch:
        if lane.dtype_name(array) in ("float16", "bfloat16"):  # its gradient sums over entries
            array = lane.xp.astype(array, lane.xp.float32)
        array = lane.xp.broadcast_to(array, (*dims.batch, *shape[-3:]))
        batch = dims.batch
    flat = math.prod(batch) if batch != () else 1
    heads = shape[-3] if len(shape) > 2 else 1
    return lane.xp.reshape(array, (flat, heads, *shape[-2:]))


def check_sinks(lane: Lane, sinks: Any, dtype: str, dims: Dims) -> Any:
    """One floating logit a query head (S2.3, S2.4)."""
    if sinks is None:
        return None
    got = lane.dtype_name(sinks)
    check_companion("sinks", got, dtype)
    if tuple(sinks.shape) != (dims.Hq,):
        raise ArgumentError(
            f"sinks: expected shape (Hq,) = ({dims.Hq},), one logit a query head, "
            f"got {tuple(sinks.shape)}"
        )
    return sinks


def check_dropout(lane: Lane, dropout: Any) -> Drop | None:
    """What a backend needs of it (S9); None where nothing is dropped.

    Its own numbers were checked when it was made; here, that its arrays are of q's framework, and
    the offsets among them where they can be read.
    """
    if dropout is None:
        return None
    if not isinstance(dropout, Dropout):
        raise ArgumentTypeError(
            f"dropout: expected attnx.Dropout(p, seed), got {type(dropout).__name__}; a seed says "
            "which elements are dropped"
        )
    for name, array in (("seed", dropout.seed), *zip(AXES, dropout.offset, strict=True)):
        if not isinstance(array, int) and not lane.owns(array):
            what = name if name == "seed" else f"the offset of {name}"
            raise ArgumentTypeError(
                f"dropout: expected {what} as an integer or an array of q's framework, "
                f"{lane.name}, got {_type_name(array)}"
            )
        if name != "seed" and not isinstance(array, int) and lane.readable(array):
            check_shift(name, int(array))
    threshold = dropout.threshold
    return Drop(threshold, dropout.seed, dropout.offset) if threshold else None
