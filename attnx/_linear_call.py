"""Arguments of a linear attention to one checked record, and results back to the caller's axes.

A normalised call is the plain one with a column of ones beside v: the sums of phi(k) stand in the
last column of the state, and what a query finds there is its divisor.
"""

from __future__ import annotations

import math
import numbers
from typing import TYPE_CHECKING, Any, NamedTuple

from attnx import _checks
from attnx._call import Dims
from attnx._call import Options as Attention
from attnx._linear_chunks import Inputs
from attnx._linear_decay import LEAST, Steady, Varying
from attnx.errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    from attnx._lane import Lane

__all__ = [
    "Call", "LinearState", "Options", "divisor", "inputs", "map_features", "outward", "pack",
    "prepare", "spoil", "unpack",
]  # fmt: skip


class LinearState(NamedTuple):
    """All that linear attention keeps of the tokens it has seen, in float32 at least.

    Hs is Hk, or Hq where the decays are an array, one value or more a query head. The axes are the
    same in either layout; arrays with two axes leave out *B and Hs.

    Attributes:
        S: `(*B, Hs, D, Dv)`, the sum of phi(k) v^T, each term decayed; D is that of phi(k).
        z: `(*B, Hs, D)`, the sum of phi(k), or None where nothing is normalised.
    """

    S: Any
    z: Any = None


class Options(NamedTuple):
    """The keyword arguments, as given."""

    decay: Any = None
    log_decay: Any = None
    feature_map: Any = None
    normalize: Any = None
    causal: Any = True
    chunk: Any = 64
    state: Any = None
    return_state: Any = False
    layout: Any = "bhsd"


class Call(NamedTuple):
    """A checked call.

    Attributes:
        lane: of q's framework.
        dims: its sizes and the caller's axes.
        options: as given.
        dtype: of the arrays, by name.
        narrow: the same, as the framework has it.
        wide: of the sums and the state, by name.
        normalize: whether out is divided.
        decay: as `Inputs` has it.
        Hs: heads of the state.
    """

    lane: Lane
    dims: Dims
    options: Options
    dtype: str
    narrow: Any
    wide: str
    normalize: bool
    decay: Any
    Hs: int


def prepare(lane: Lane, q: Any, k: Any, v: Any, options: Options) -> tuple[Any, Any, Any, Call]:
    """Check a call, apart from what only the feature map can tell.

    Returns:
        q, k and v as the call takes them, and the call.

    Raises:
        ArgumentError: wrong shapes, lengths or values (S8.1).
        ArgumentTypeError: wrong types or dtypes, or several frameworks.
    """
    _checks.check_frameworks(lane, q, k, v, Attention())
    q, k, v = lane.admit(q, k, v)
    dims = Dims(*_checks.check_shapes(q, k, v, options.layout))
    dtype = _checks.check_dtypes(lane, q, k, v)
    wide = "float64" if dtype == "float64" else "float32"
    _check_flags(options)
    if options.causal and dims.Lq != dims.Lk:
        raise ArgumentError(
            f"causal: expected as many queries as keys, got Lq={dims.Lq} and Lk={dims.Lk}; "
            "causal=False is for queries that see every key"
        )
    normalize = options.normalize
    if normalize is None:
        normalize = isinstance(options.feature_map, str)
    decay = _check_decay(lane, options, q, dtype, wide, dims)
    Hs = dims.Hk if decay is None or not decay.learnt else dims.Hq
    call = Call(lane, dims, options, dtype, q.dtype, wide, normalize, decay, Hs)
    _check_state(call, q, None if callable(options.feature_map) else dims.D)
    return q, k, v, call


def _check_flags(options: Options) -> None:
    for name in ("causal", "return_state", "normalize"):
        value = getattr(options, name)
        if not isinstance(value, bool) and not (name == "normalize" and value is None):
            none = ", or None for the feature map's own choice" if name == "normalize" else ""
            raise ArgumentTypeError(f"{name}: expected True or False{none}, got {value!r}")
    chunk = options.chunk
    if isinstance(chunk, bool) or not isinstance(chunk, numbers.Integral):
        raise ArgumentTypeError(f"chunk: expected a Python integer, got {chunk!r}")
    if chunk < 1:
        raise ArgumentError(f"chunk: expected a number of steps >= 1, got {chunk}")
    phi = options.feature_map
    named = isinstance(phi, str)
    if not (phi is None or callable(phi) or (named and phi == "elu")):
        kind = ArgumentError if named else ArgumentTypeError
        raise kind(f"feature_map: expected None, 'elu' or a function of one array, got {phi!r}")


def _check_decay(
    lane: Lane, options: Options, q: Any, dtype: str, wide: str, dims: Dims
) -> Steady | Varying | None:
    if options.decay is None and options.log_decay is None:
        return None
    if options.decay is not None and options.log_decay is not None:
        raise ArgumentError("decay: given beside log_decay; one of the two says how fast to forget")
    name = "decay" if options.log_decay is None else "log_decay"
    if not options.causal:
        raise ArgumentError(
            f"{name}: needs an order, and causal=False has none; leave it out or pass causal=True"
        )
    value = getattr(options, name)
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        log = max(_scalar(name, float(value)), LEAST)
        return Steady(lane.full((1, 1, 1, 1), log, getattr(lane.xp, wide), like=q), learnt=False)
    _check_array(lane, name, value, q, (dtype, "float32"), " or a number")
    return _decay_array(lane, name, value, wide, dims)


def _scalar(name: str, value: float) -> float:
    """The log of a decay that is one number."""
    if name == "log_decay":
        if not value <= 0:
            raise ArgumentError(f"log_decay: expected a number <= 0, got {value}")
        return value
    if not 0 < value <= 1:
        raise ArgumentError(f"decay: expected a number in (0, 1], got {value}")
    return math.log(value)


def _check_array(
    lane: Lane, name: str, array: Any, q: Any, dtypes: tuple[str, ...], other: str = ""
) -> None:
    if not lane.owns(array) or isinstance(array, lane.refused_types):
        kind = type(array)
        raise ArgumentTypeError(
            f"{name}: expected a {lane.name} array like q{other}, got "
            f"{kind.__module__.split('.')[0]}.{kind.__name__}"
        )
    got, allowed = lane.dtype_name(array), list(dict.fromkeys(dtypes))
    if got not in allowed:
        raise ArgumentTypeError(
            f"{name}: expected {' or '.join(allowed)} here, got {got}; nothing is cast silently, "
            "so convert it first"
        )
    _checks.check_device(lane, name, array, "q", q)


def _decay_array(lane: Lane, name: str, value: Any, wide: str, dims: Dims) -> Steady | Varying:
    xp, shape = lane.xp, tuple(value.shape)
    steps = (
        (*dims.batch, dims.Hq, dims.Lq)
        if dims.layout == "bhsd"
        else (*dims.batch, dims.Lq, dims.Hq)
    )
    steps = steps if dims.rank > 2 else (dims.Lq,)
    if shape not in ((dims.Hq,), steps):
        axes = (
            "(L,)" if dims.rank == 2 else f"(*B, {'Hq, L' if dims.layout == 'bhsd' else 'L, Hq'})"
        )
        hint = f"; for one learnt number write {name}[None]" if shape == () else ""
        hint += " and repeat it for each head" if shape == () and dims.Hq > 1 else ""
        raise ArgumentError(
            f"{name}: expected one value a query head, (Hq,) = ({dims.Hq},), or one a step, "
            f"{axes} = {steps}, got {shape}{hint}"
        )
    log = xp.astype(value, getattr(xp, wide), copy=False)
    _check_values(lane, name, value)
    log = log if name == "log_decay" else xp.log(log)
    g = dims.Hq // dims.Hk
    if shape == (dims.Hq,):
        return Steady(xp.reshape(log, (1, dims.Hk, g, 1)))
    return Varying(xp.reshape(dims.inward_rows(xp, log), (dims.B, dims.Hk, g, dims.Lq)))


def _check_values(lane: Lane, name: str, value: Any) -> None:
    """Only where they can be read; a concrete array may give a traced answer under a transform."""
    if not lane.readable(value) or math.prod(value.shape) == 0:
        return
    xp = lane.xp
    if name == "decay":
        right, expected, hint = (
            (value > 0) & (value <= 1),
            "values in (0, 1]",
            ("; a step that forgets all is log_decay=-inf"),
        )
    else:
        right, expected, hint = value <= 0, "values <= 0", ""
    right = xp.all(right)
    if not lane.traced(right) and not bool(right):
        low, high = xp.min(value), xp.max(value)
        raise ArgumentError(
            f"{name}: expected {expected}, got values from {float(low)} to {float(high)}{hint}"
        )


def _check_state(call: Call, q: Any, D: int | None) -> None:
    """A state that the call can go on from; D is that of phi(k), or None while it is unknown."""
    lane, dims, state = call.lane, call.dims, call.options.state
    if state is None:
        return
    if not isinstance(state, LinearState):
        raise ArgumentTypeError(
            f"state: expected the LinearState of an earlier call, got {type(state).__name__}"
        )
    if call.normalize != (state.z is not None):
        has = "has none" if state.z is None else "has one"
        raise ArgumentError(
            f"state.z: expected {'an array' if call.normalize else 'None'} with "
            f"normalize={call.normalize}, the state {has}; all calls over one sequence are alike"
        )
    heads = (*dims.batch, call.Hs) if dims.rank > 2 else ()
    for name, array, last in (("S", state.S, (dims.Dv,)), ("z", state.z, ())):
        if array is None:
            continue
        _check_array(lane, f"state.{name}", array, q, (call.wide,))
        shape = tuple(array.shape)
        known = D if D is not None or len(shape) <= len(heads) else shape[len(heads)]
        if shape != (*heads, known, *last):
            axes = "(*B, Hs, D, Dv)" if name == "S" else "(*B, Hs, D)"
            raise ArgumentError(
                f"state.{name}: expected {axes} = {(*heads, known, *last)}, got {shape}; Hs is Hq "
                "where the decays are an array, else Hk"
            )


def map_features(call: Call, name: str, x: Any) -> Any:
    """phi of q or k in the caller's axes and the dtype of the sums."""
    xp, phi = call.lane.xp, call.options.feature_map
    x = xp.astype(x, getattr(xp, call.wide), copy=False)
    if phi is None:
        return x
    if not callable(phi):
        return xp.where(x > 0, x + 1, xp.exp(xp.minimum(x, xp.zeros_like(x))))
    mapped = phi(x)
    if not call.lane.owns(mapped) or tuple(mapped.shape[:-1]) != tuple(x.shape[:-1]):
        got = tuple(mapped.shape) if call.lane.owns(mapped) else type(mapped).__name__
        raise ArgumentError(
            f"feature_map: expected {call.lane.name} features (…, D') for each row of {name}, "
            f"shape {(*x.shape[:-1], 'D')}, got {got}"
        )
    kind = call.lane.dtype_name(mapped)
    if not kind.startswith(("float", "bfloat")):
        raise ArgumentTypeError(
            f"feature_map: expected floating features, got {kind}; nothing is cast silently"
        )
    return xp.astype(mapped, x.dtype, copy=False)


def inputs(call: Call, q: Any, k: Any, v: Any) -> Inputs:
    """The record for the sums, from mapped q and k."""
    lane, dims, xp = call.lane, call.dims, call.lane.xp
    D = q.shape[-1]
    if k.shape[-1] != D or D < 1:
        raise ArgumentError(
            f"feature_map: expected as many features of k as of q, at least 1, got {k.shape[-1]} "
            f"and {D}"
        )
    if callable(call.options.feature_map):
        _check_state(call, q, D)
    wide = getattr(xp, call.wide)
    q, k, v = (dims.inward(xp, x) for x in (q, k, v))
    v = xp.astype(v, wide, copy=False)
    if call.normalize:
        v = xp.concat([v, xp.ones_like(v[..., :1])], axis=-1)
    q = xp.reshape(q, (dims.B, dims.Hk, dims.Hq // dims.Hk, dims.Lq, D))
    k, (v, spoilt) = k[:, :, None, ...], _settled(call, v[:, :, None, ...])
    state = call.options.state
    shape = (dims.B, dims.Hk, call.Hs // dims.Hk, D, v.shape[-1])
    if state is None:
        start = lane.full(shape, 0.0, wide, like=q)
    else:
        start = xp.reshape(pack(call, state.S, state.z), shape)
    return Inputs(q, k, v, call.decay, start, spoilt)


def _settled(call: Call, v: Any) -> tuple[Any, Any]:
    """v with 0 in place of what is no number, and that as NaN from its own step on, or None.

    A chunk multiplies the values of later steps by weights of 0, and 0 times NaN is NaN. So they
    are summed apart, and no step is spoilt by one that comes after it.
    """
    lane, xp = call.lane, call.lane.xp
    if not call.options.causal or call.dims.Lk == 0:
        return v, None
    finite = xp.isfinite(v)
    if lane.readable(v):
        all_finite = xp.all(finite)
        if not lane.traced(all_finite) and bool(all_finite):
            return v, None
    step, none = lane.arange(0, call.dims.Lk, like=v)[:, None], xp.zeros_like(v)
    first = xp.where(finite, xp.full_like(step, call.dims.Lk), step)
    dead = step >= xp.min(first, axis=3, keepdims=True)
    return xp.where(finite, v, none), xp.where(dead, xp.full_like(v, math.nan), none)


def spoil(x: Inputs, state: Any) -> Any:
    """The last state, NaN where a value that it holds is no number."""
    return state if x.spoilt is None else state + x.spoilt[:, :, :, -1:, :]


def pack(call: Call, S: Any, z: Any) -> Any:
    """S, with z beside it."""
    return S if z is None else call.lane.xp.concat([S, z[..., None]], axis=-1)


def unpack(call: Call, state: Any) -> LinearState:
    """A state (B, Hk, g or 1, D, Dv) for the caller."""
    dims = call.dims
    heads = (*dims.batch, call.Hs) if dims.rank > 2 else ()
    state = call.lane.xp.reshape(state, (*heads, *state.shape[-2:]))
    if not call.normalize:
        return LinearState(state)
    return LinearState(state[..., :-1], state[..., -1])


def divisor(call: Call, out: Any) -> tuple[Any, Any]:
    """Where the last column of an answer is not 0, and that column with 1 in place of 0."""
    xp, z = call.lane.xp, out[..., -1:]
    some = z != 0
    return some, xp.where(some, z, xp.ones_like(z))


def outward(call: Call, out: Any, spoilt: Any) -> Any:
    """An answer (B, Hk, g, Lq, Dv) of the sums as the caller's out."""
    xp, dims = call.lane.xp, call.dims
    if call.normalize:
        some, z = divisor(call, out)
        out = xp.where(some, out[..., :-1] / z, xp.zeros_like(out[..., :-1]))
    if spoilt is not None:
        out = out + spoilt[..., : dims.Dv]
    out = xp.reshape(out, (dims.B, dims.Hq, dims.Lq, dims.Dv))
    return dims.outward(xp, xp.astype(out, call.narrow, copy=False))
