"""The JAX backend: the kernels compiled, and a gradient attached to them.

One `jax.jit` around each kernel serves eager calls, a program for each set of shapes and static
structure: scale, softcap, lengths and ids are operands. Under a transform the same functions are
inlined into the caller's trace. `custom_vjp` gives the gradient; both kernels refuse to be
differentiated themselves, so a second derivative is an error and never a wrong number (S6.5).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import jax

from attnx.errors import UnsupportedError
from attnx.plugin import MASK_KINDS, Backend, Capabilities, Gradients, Reason
from attnx_jax import _backward, _dropout, _forward
from attnx_jax._lane import LANE, X64, x64_enabled
from attnx_jax._scores import Operands

if TYPE_CHECKING:
    from collections.abc import Callable

    from attnx.plugin import Call, CallClass

__all__ = ["JaxBackend"]


def _constant(kernel: Callable[..., Any], what: str) -> Callable[..., Any]:
    """The kernel compiled, with a derivative that raises; its first argument is static."""
    wrapped = jax.custom_vjp(kernel, nondiff_argnums=(0,))

    def run(static: Any, *arrays: Any) -> tuple[Any, None]:
        return kernel(static, *arrays), None

    def refuse(static: Any, _: None, cotangents: Any) -> Any:
        reason = Reason("gradient", f"of {what}", "none", "detach it with jax.lax.stop_gradient")
        raise UnsupportedError.because("jax", reason)

    wrapped.defvjp(run, refuse)
    return jax.jit(wrapped, static_argnums=0, inline=True)


_forward_kernel = _constant(_forward.forward, "the gradient (higher order)")
_backward_kernel = _constant(_backward.backward, "the gradient (higher order)")
_weights_kernel = _constant(lambda _, *arrays: _forward.weights(*arrays), "attention_weights")


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(careful: bool, q: Any, k: Any, v: Any, x: Operands) -> Any:
    return _forward_kernel(careful, q, k, v, x)


def _attend_forward(careful: bool, q: Any, k: Any, v: Any, x: Operands) -> tuple[Any, Any]:
    out, lse = _forward_kernel(careful, q, k, v, x)
    return (out, lse), (q, k, v, x, out, lse)


def _attend_backward(careful: bool, kept: Any, cotangents: tuple[Any, Any]) -> tuple[Any, ...]:
    made = _backward_kernel(careful, *kept, *cotangents)
    return made.q, made.k, made.v, Operands(made.bias, made.sinks, *[None] * 5)


_attend.defvjp(_attend_forward, _attend_backward)


class JaxBackend(Backend):
    """Attention on JAX arrays, eager and under its transforms."""

    name = "jax"

    def __init__(self) -> None:
        self.lane = LANE
        kinds = {LANE.device_name(device).split(":")[0] for device in jax.devices()}
        self.capabilities = Capabilities(
            dtypes=frozenset({"float16", "bfloat16", "float32", "float64"}),
            devices=frozenset(kinds | {"cpu"}),
            native_masks=MASK_KINDS - {"dense", "predicate"},
            dropout=True,
            alibi=True,
            vmap=True,
            compile=True,
        )

    def devices(self) -> tuple[str, ...]:
        """JAX's devices, as lanes name them; CPU devices are one."""
        return tuple(dict.fromkeys(LANE.device_name(device) for device in jax.devices()))

    def version(self) -> str:
        """JAX's version."""
        return jax.__version__

    def reasons(self, cls: CallClass) -> tuple[Reason, ...]:
        """Those of the declaration; float64 also needs JAX's 64-bit types switched on."""
        found = super().reasons(cls)
        if cls.dtype == "float64" and not x64_enabled():
            found = (X64, *found)
        return found

    def route(self, cls: CallClass) -> str:
        """One route serves every call."""
        return "blocked tiles under custom_vjp" + (", in the caller's trace" if cls.traced else "")

    def forward(self, q: Any, k: Any, v: Any, call: Call) -> tuple[Any, Any]:
        """See `Backend.forward`."""
        made: tuple[Any, Any] = _forward_kernel(*_static(call), q, k, v, _operands(call))
        return made

    def backward(
        self, q: Any, k: Any, v: Any, out: Any, lse: Any, d_out: Any, d_lse: Any, call: Call
    ) -> Gradients:
        """See `Backend.backward`."""
        x = _operands(call)
        made: Gradients = _backward_kernel(*_static(call), q, k, v, x, out, lse, d_out, d_lse)
        return made

    def apply(self, q: Any, k: Any, v: Any, call: Call) -> tuple[Any, Any]:
        """`forward` with the gradient attached, where a transform is looking."""
        cls = call.cls
        if not (cls.traced or LANE.traced(call.bias) or LANE.traced(call.sinks)):
            return self.forward(q, k, v, call)
        made: tuple[Any, Any] = _attend(*_static(call), q, k, v, _operands(call))
        return made

    def weights(self, q: Any, k: Any, call: Call) -> Any:
        """See `Backend.weights`; it has no gradient, and says so when one is asked for."""
        return _weights_kernel(*_static(call), q, k, _operands(call))


def _static(call: Call) -> tuple[bool]:
    """What is compiled in, once the dtype is known to be one that JAX has now."""
    if call.cls.dtype == "float64" and not x64_enabled():
        raise UnsupportedError.because("jax", X64)
    return (not call.cls.assume_finite,)


def _operands(call: Call) -> Operands:
    return Operands(
        call.bias,
        call.sinks,
        call.mask,
        call.scale,
        call.softcap,
        _dropout.operands(call),
        call.alibi,
    )
