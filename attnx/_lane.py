"""A lane speaks for one framework's arrays: how to look at them, reshape them and hand them over.

Everything the core must know of an array type stands in its lane, so the core itself imports no
array library. A lane is not a backend: it computes no attention, and one lane may serve several
backends. The base class is right for any array-API library on one host device; a framework
overrides what differs (devices, tracing, autodiff, formats without DLPack).
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from attnx._contract import Far

__all__ = ["Lane", "Transforms"]


class Transforms(NamedTuple):
    """What a framework does to functions, in words that are the same for every framework.

    Nothing in a call needs it: the conformance suite asks here for what a backend's `compile`,
    `vmap`, `forward_mode` and `higher_order` must be seen through. Functions take arrays and masks
    and give an array or a tuple of arrays. A field is None where the framework has no such thing.

    Attributes:
        compile: `compile(fn) -> fn`, compiled as one program; a part that cannot be is an error.
        vmap: `vmap(fn, in_axes) -> fn`, mapped over an axis of each argument, or over none of it
            where `in_axes` has None; all arrays in a mask have the mask's axis.
        vjp: `vjp(fn, inputs, cotangents) -> (outputs, gradients)`, which can itself be compiled and
            mapped, unlike `Lane.vjp`.
        second: `second(fn, inputs, cotangents, directions) -> gradients` of what the gradients of
            `fn` give along `directions`, by the framework's usual way to differentiate twice.
        jvp: `jvp(fn, inputs, tangents) -> (outputs, tangents)`.
        checkpoint: `checkpoint(fn) -> fn` that keeps nothing for the gradient and computes again.
        scan: `scan(fn, arrays) -> arrays`, `fn` on each entry of the first axes, as a loop of the
            framework's.
        autocast: `autocast(dtype)`, a context in which functions take that dtype (S5.1).
    """

    compile: Callable[..., Any] | None = None
    vmap: Callable[..., Any] | None = None
    vjp: Callable[..., Any] | None = None
    second: Callable[..., Any] | None = None
    jvp: Callable[..., Any] | None = None
    checkpoint: Callable[..., Any] | None = None
    scan: Callable[..., Any] | None = None
    autocast: Callable[..., Any] | None = None


class Lane:
    """One framework's array type.

    Attributes:
        name: the framework's name, as errors and tables say it.
        xp: its array namespace in array-API terms.
        array_types: the classes whose instances are arrays of this framework.
        refused_types: subclasses of those with another meaning (`np.ma.MaskedArray`), each refused.
        vjp: `vjp(fn, inputs, cotangents) -> (outputs, gradients)` by the framework's own
            differentiation, or None where it has none.
        bridge: `bridge(far) -> apply(q, k, v, call)`: the framework's differentiation and
            transforms around another framework's backend (`plugin.Far`), or None where there are
            none.
        attach: the same around functions that compute on this framework's own arrays, and may be
            traced; or None.
        host: the framework whose arrays a bridge's functions take under a transform, where they are
            not this framework's own: those of a callback that the compiled program makes, say.
        any_shape: whether a call costs the same at shapes not met before; False where a program is
            compiled for each, so that decoding had better keep to one.
    """

    name: ClassVar[str]
    host: ClassVar[str | None] = None
    any_shape: ClassVar[bool] = True
    xp: Any
    array_types: tuple[type, ...] = ()
    refused_types: tuple[type, ...] = ()
    vjp: Callable[[Callable[..., Any], Sequence[Any], Sequence[Any]], tuple[Any, Any]] | None = None
    bridge: Callable[[Far], Callable[..., Any]] | None = None
    attach: Callable[[Far], Callable[..., Any]] | None = None

    def transforms(self) -> Transforms:
        """What the framework does to functions; nothing, unless a lane says more."""
        return Transforms()

    def owns(self, value: Any) -> bool:
        """Whether a value is an array of this framework, a tracer included."""
        return isinstance(value, self.array_types)

    def dtype_name(self, array: Any) -> str:
        """`"float32"`, whatever the framework calls it."""
        return str(array.dtype).rsplit(".", 1)[-1]

    def device(self, array: Any) -> str:
        """The device's name: `"cpu"`, `"cuda:0"` and so on."""
        return "cpu"

    def traced(self, array: Any) -> bool:
        """Whether a transform is looking: the contents are not there to be read."""
        return False

    def admit(self, q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
        """q, k and v as the call takes them, before any check (torch's autocast, S5.1)."""
        return q, k, v

    def readable(self, array: Any) -> bool:
        """Whether the contents can be read without tracing or synchronising a device (S8.1)."""
        return not self.traced(array) and self.device(array) == "cpu"

    def extremes(self, array: Any) -> tuple[int, int]:
        """The least and greatest value of a readable array of integers, of at least one."""
        return int(self.xp.min(array)), int(self.xp.max(array))

    def fast_key(self, q: Any, k: Any, v: Any) -> Any:
        """What a plain call's plan depends on beyond shapes, as far as it is cheap to tell.

        Returns:
            A hashable key that no other lane gives (a dtype and a device, say), or None when the
            call must take the long way, as under a transform.
        """
        return None

    def late_key(self, q: Any, k: Any, v: Any) -> Any:
        """The rest of what its plan depends on: whether a gradient is recorded, say.

        It is asked where no backend's `direct` served, so `direct` looks after this itself.

        Returns:
            A hashable key, or None when the call must take the long way: where dtypes differ and
            `fast_key` did not look, or where a switch gives the call another meaning (autocast).
        """
        return True

    def detached(self, array: Any) -> Any:
        """The same values, constant to the framework's differentiation."""
        return array

    def wants_gradient(self, *arrays: Any) -> bool:
        """Whether the framework is recording a gradient of any of these (None is skipped)."""
        return False

    def constant(self, array: Any, refuse: Callable[[], NoReturn]) -> Any:
        """The same values, which have no gradient: `refuse` raises where one is recorded."""
        if self.wants_gradient(array):
            refuse()
        return array

    def arange(self, start: int, stop: int, like: Any) -> Any:
        """Integers from start to stop on the device of `like`."""
        return self.xp.arange(start, stop)

    def full(self, shape: tuple[int, ...], value: Any, dtype: Any, like: Any) -> Any:
        """A filled array on the device of `like`."""
        return self.xp.full(shape, value, dtype=dtype)

    def write(self, buffer: Any, new: Any, rows: Any, real: Any, axis: int) -> Any:
        """The buffer with rows of each entry written, in place where the framework can.

        Here it costs a pass over the buffer where rows differ, in array-API terms. Where a gradient
        is recorded of the buffer or of what is written, the result is a new array.

        Args:
            buffer: entries along the first axis, slots along `axis`.
            new: what is written, of the buffer's shape but for its n rows along `axis`.
            rows: (B, n), the slot of each row; no slot comes twice in an entry. Or a slice with a
                start and a stop, where all entries are written at the same slots; it comes only to
                a lane of `any_shape`.
            real: (B, n), False for rows that are not written; None for all.
            axis: 1 or more.
        """
        xp = self.xp
        if isinstance(rows, slice):
            buffer[(*(slice(None),) * axis, rows, ...)] = new
            return buffer
        if not math.prod(new.shape):
            return buffer
        slots = self.arange(0, buffer.shape[axis], buffer)
        hit = rows[:, :, None] == slots[None, None, :]
        if real is not None:
            hit = hit & real[:, :, None]
        source = xp.argmax(xp.astype(hit, xp.int8), axis=1)
        entries = range(buffer.shape[0])
        moved = [xp.take(new[b, ...], source[b, :], axis=axis - 1) for b in entries]
        shape = [1] * buffer.ndim
        shape[0], shape[axis] = buffer.shape[0], buffer.shape[axis]
        return xp.where(xp.reshape(xp.any(hit, axis=1), tuple(shape)), xp.stack(moved), buffer)

    def quiet(self) -> AbstractContextManager[Any]:
        """Silence the floating-point warnings that NaN and inf in the data would give."""
        return nullcontext()

    def eager(self) -> AbstractContextManager[Any]:
        """Compute with concrete arrays now, though a transform stages what is done meanwhile."""
        return nullcontext()

    def integers(self, value: Any, like: Any) -> Any:
        """An integer array of the framework's index type on the device of `like`.

        Args:
            value: an integer array of this framework, or nested tuples of Python integers.
            like: an array of the call.
        """
        return self.xp.asarray(value, dtype=self.xp.int64)

    def floats(self, value: tuple[float, ...], dtype: Any, like: Any) -> Any:
        """An array of these numbers on the device of `like`."""
        return self.xp.asarray(value, dtype=dtype)

    def to_numpy(self, array: Any) -> Any:
        """The same values as a NumPy array, which may share memory; bfloat16 by ml_dtypes."""
        raise NotImplementedError

    def from_numpy(self, array: Any, like: Any = None) -> Any:
        """A copy of a NumPy array (bfloat16 by ml_dtypes), on the device of `like` if given."""
        raise NotImplementedError

    def export(self, array: Any) -> Any:
        """What another lane can adopt: an object with `__dlpack__`, or a NumPy array."""
        return array

    def adopt(self, exported: Any) -> Any:
        """An array of this framework for what another lane exported; copies only where it must."""
        return self.xp.from_dlpack(exported)

    def own(self, array: Any) -> Any:
        """A result whose memory no other framework can reach: a copy where it is shared."""
        return array

    def follow(self, choice: Any, default: Any) -> None:
        """Learn which backend is asked for in this thread now, and by default: hashables or None.

        A framework with a cache of compiled programs makes it part of their key.
        """

    def read_instead(self, original: Callable[..., Any], traced: Callable[..., Any]) -> None:
        """Have the framework's compiler read `traced` wherever it meets a call of `original`."""

    def compile_with(self, forward: Callable[..., Any], backward: Callable[..., Any]) -> None:
        """Learn what an operation that the compiler does not look into computes with.

        Args:
            forward: `forward(choice, q, k, v, call)` gives out and lse by the chosen backend.
            backward: `backward(choice, arrays, call)` gives the gradients for the seven arrays of
                `Backend.backward`.
        """

    def compiled(self, choice: str, backend: str, q: Any, k: Any, v: Any, call: Any) -> Any:
        """out and lse inside a program that the framework compiles.

        Args:
            choice: who was asked, for `forward` and `backward` of `compile_with`.
            backend: the name of the backend that was chosen.
            q: (B, Hq, Lq, D), like k and v as a backend gets it.
            k: (B, Hk, Lk, D).
            v: (B, Hk, Lk, Dv).
            call: the call.
        """
        raise NotImplementedError

    def compiling(self, array: Any) -> bool:
        """Whether a compiler records what is done, with sizes that may stand for any number."""
        return False

    def wait(self, *arrays: Any) -> None:
        """Return only when the arrays are computed (asynchronous frameworks)."""
