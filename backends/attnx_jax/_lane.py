"""JAX's arrays: tracers, the 64-bit switch, and exchange without a silent change of dtype.

JAX turns float64 and int64 into 32 bits wherever `jax_enable_x64` is off, and says nothing. Here
float64 is then refused with the hint, and integers (lengths, ids, positions) are looked at before
they become int32. Making the lane registers the mask classes as pytrees and joins the chosen
backend to the key of `jax.jit`'s cache.
"""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from attnx.errors import ArgumentError, UnsupportedError
from attnx.plugin import Lane, Reason, Transforms
from attnx_jax._pytrees import register_trees

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from attnx.plugin import Far

__all__ = ["LANE", "X64", "JaxLane", "x64_enabled"]

X64 = Reason(
    "dtype", "float64", "float64 while jax_enable_x64 is on",
    'jax.config.update("jax_enable_x64", True) at the start of the program',
)  # fmt: skip
_PLATFORMS = {"gpu": "cuda"}
_config: Any = jax.config


def x64_enabled() -> bool:
    """Whether JAX has 64-bit types here and now."""
    return bool(_config.jax_enable_x64)


class JaxLane(Lane):
    """`jax.Array` and tracers; each thread's chosen backend is part of the jit cache's key."""

    name = "jax"
    host = "numpy"
    any_shape = False
    xp = jnp
    array_types = (jax.Array, jax.core.Tracer)

    def __init__(self) -> None:
        register_trees()
        self._choice = jax.make_user_context(None)
        self._local = threading.local()
        with jax.ensure_compile_time_eval():  # the first call may be one inside a trace
            self._probe = jnp.zeros(())
        self._concrete = type(self._probe)
        self._one_cpu: bool | None = None

    def device(self, array: Any) -> str:
        """`"cpu"`, `"cuda:0"`, …; a tracer has no device yet, so it gets the default one."""
        if self.traced(array):
            return self.device_name(_config.jax_default_device or jax.devices()[0])
        devices = array.devices()
        first = min(devices, key=lambda device: device.id)
        name = self.device_name(first)
        return name if len(devices) == 1 else name.split(":")[0]

    @staticmethod
    def device_name(device: Any) -> str:
        """A JAX device as `"cpu"` or `"cuda:0"`; also the name of a platform alone."""
        if isinstance(device, str):
            return _PLATFORMS.get(device, device)
        name = _PLATFORMS.get(device.platform, str(device.platform))
        return name if name == "cpu" else f"{name}:{device.id}"

    def traced(self, array: Any) -> bool:
        """Since JAX 0.8.2 a tracer is no `jax.Array` by its class, so `Tracer` is asked for."""
        return isinstance(array, jax.core.Tracer)

    def readable(self, array: Any) -> bool:
        """Concrete, on the host, and not spread over processes."""
        if self.traced(array):
            return False
        return self.device(array) == "cpu" and bool(array.is_fully_addressable)

    def extremes(self, array: Any) -> tuple[int, int]:
        """By NumPy: inside a trace, JAX would trace even what it does to concrete arrays."""
        values = np.asarray(array)
        return int(values.min()), int(values.max())

    def fast_key(self, q: Any, k: Any, v: Any) -> Any:
        """The dtype and device, for concrete arrays; a tracer takes the long way."""
        concrete = self._concrete
        if type(q) is not concrete or type(k) is not concrete or type(v) is not concrete:
            return None
        dtype = q.dtype
        if k.dtype != dtype or v.dtype != dtype:
            return None
        if self._one_cpu is None:
            self._one_cpu = jax.device_count() == 1 and jax.default_backend() == "cpu"
        return ("jax", dtype) if self._one_cpu else ("jax", dtype, self.device(q))

    def detached(self, array: Any) -> Any:
        """Constant to `jax.grad` and forward mode."""
        return jax.lax.stop_gradient(array) if self.owns(array) else array

    def constant(self, array: Any, refuse: Callable[[], NoReturn]) -> Any:
        """JAX finds out when it differentiates, so the refusal is the values' derivative."""
        if not self.traced(array):
            return array
        same = jax.custom_jvp(lambda x: x)
        same.defjvp(lambda primals, tangents: refuse())
        return same(array)

    def quiet(self) -> AbstractContextManager[Any]:
        """JAX warns of nothing; but products are no TF32 unless the user asked for it (S5.2)."""
        asked = _config.jax_default_matmul_precision
        return nullcontext() if asked else jax.default_matmul_precision("highest")

    def eager(self) -> AbstractContextManager[Any]:
        """Only inside a trace, for it is a part of jit's key: all would be compiled twice."""
        staged = self.traced(-self._probe)
        return jax.ensure_compile_time_eval() if staged else nullcontext()

    def arange(self, start: int, stop: int, like: Any) -> Any:
        """int32, whatever the 64-bit switch says."""
        return jnp.arange(start, stop, dtype=jnp.int32)

    def integers(self, value: Any, like: Any) -> Any:
        """As int32, or int64 where JAX has it and the values ask for it."""
        if not self.owns(value):
            value = jnp.asarray(_narrowed(np.asarray(value, np.int64)))  # nested tuples
        if jnp.iinfo(value.dtype).max <= jnp.iinfo(jnp.int32).max:
            return value.astype(jnp.int32)
        if x64_enabled():
            return value.astype(jnp.int64)
        if not self.readable(value):
            raise UnsupportedError(
                f"integers: {value.dtype} values cannot be read under a transform, and int32 may "
                "not hold them; convert them to int32 first",
                backend="jax",
            )
        return jnp.asarray(_int32(np.asarray(value)))

    def write(self, buffer: Any, new: Any, rows: Any, real: Any, axis: int) -> Any:
        """A new array, which takes the buffer's memory in a program that was donated it."""
        entries = jnp.arange(buffer.shape[0], dtype=jnp.int32)[:, None]
        at = buffer.at[(entries, *(slice(None),) * (axis - 1), rows)]
        values = jnp.moveaxis(new, axis, 1)
        promise: Any = {"mode": "promise_in_bounds", "unique_indices": True}
        if real is not None:
            values = jnp.where(jnp.reshape(real, (*real.shape, 1, 1)), values, at.get(**promise))
        return at.set(values, **promise)

    def to_numpy(self, array: Any) -> Any:
        """A read-only view of JAX's memory; bfloat16 is ml_dtypes' by itself."""
        return np.asarray(array)

    def from_numpy(self, array: Any, like: Any = None) -> Any:
        """A copy, in no other dtype; float64 is refused while JAX has no 64-bit types."""
        copy = np.array(_narrowed(array), order="C")
        if like is None or self.traced(like):
            return jnp.asarray(copy)
        return jax.device_put(copy, like.sharding if len(like.devices()) == 1 else None)

    def export(self, array: Any) -> Any:
        """DLPack; NumPy has no bfloat16 by DLPack, so on the host that goes as a NumPy view."""
        if array.dtype == jnp.bfloat16 and self.device(array) == "cpu":
            return np.asarray(array)
        return array

    def adopt(self, exported: Any) -> Any:
        """Without a copy at 64-byte alignment and compact strides, else with one."""
        if isinstance(exported, np.ndarray):
            return jnp.asarray(_narrowed(exported))
        dtype = str(exported.dtype).rsplit(".", 1)[-1]
        if not x64_enabled() and dtype in ("float64", "int64", "uint64", "uint32"):
            return jnp.asarray(_narrowed(np.from_dlpack(exported)))
        try:
            return jnp.from_dlpack(exported)
        except jax.errors.JaxRuntimeError:
            # Strides that XLA cannot hold. The owner makes them compact, if it knows how.
            if hasattr(exported, "contiguous"):
                return jnp.from_dlpack(exported.contiguous())
            return jnp.asarray(np.ascontiguousarray(np.from_dlpack(exported)))

    def own(self, array: Any) -> Any:
        """A copy, made before the other framework can touch the memory again."""
        return jnp.array(array, copy=True).block_until_ready()

    def wait(self, *arrays: Any) -> None:
        """JAX computes asynchronously."""
        jax.block_until_ready(arrays)

    def bridge(self, far: Far) -> Callable[..., Any]:
        """`custom_vjp` and callbacks around another framework's backend; see `Lane.bridge`."""
        from attnx_jax._bridge import bridge

        return bridge(far)

    def attach(self, far: Far) -> Callable[..., Any]:
        """`custom_vjp` around functions that JAX traces; see `Lane.attach`."""
        from attnx_jax._bridge import attach

        return attach(far)

    def vjp(
        self, fn: Callable[..., Any], inputs: Sequence[Any], cotangents: Sequence[Any]
    ) -> tuple[Any, Any]:
        """By `jax.vjp`; a cotangent of None counts as 0."""
        from attnx_jax._transforms import vjp

        outputs, gradients = vjp(fn, inputs, cotangents)
        return outputs, gradients

    def transforms(self) -> Transforms:
        """JAX's own."""
        from attnx_jax._transforms import TRANSFORMS

        return TRANSFORMS

    def follow(self, choice: Any, default: Any) -> None:
        """Make the chosen backend part of the key of jit's cache, in this thread.

        A context of JAX's own is entered and left again, whatever the order in which tasks leave
        their `use_backend`; nothing but JAX's public API is used.
        """
        held = getattr(self._local, "held", None)
        if held is not None:
            held.__exit__(None, None, None)
        self._choice.set_global(default)
        self._local.held = None
        if choice is not None:
            self._local.held = self._choice(choice)
            self._local.held.__enter__()


def _narrowed(array: Any) -> Any:
    """What JAX can hold, unchanged in value: without x64, no float64, and int64 within 32 bits."""
    if x64_enabled() or array.dtype.itemsize < 4:
        return array
    if array.dtype == np.float64:
        raise UnsupportedError(f"jax: {X64}", backend="jax", reasons=(X64,))
    if array.dtype.kind in "iu" and array.dtype != np.uint32:
        return _int32(array)
    return array


def _int32(array: Any) -> Any:
    limits = np.iinfo(np.int32)
    if array.size and not (limits.min <= array.min() and array.max() <= limits.max):
        raise ArgumentError(
            "integers: expected values that fit 32 bits, since jax_enable_x64 is off, got "
            f"{array.min()} to {array.max()}"
        )
    return array.astype(np.int32)


LANE = JaxLane()
