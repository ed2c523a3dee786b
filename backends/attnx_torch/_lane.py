"""PyTorch's tensors: what the core asks of them, and how they are handed over.

Three kinds of tensor look like numbers and are not: those that a `torch.func` transform or forward
AD is looking at, those that autocast is about to cast, and those whose layout is not strided. Each
is told apart here, so that no later step detaches a tangent or reads memory that is not there.

The exchange is written around two hazards: `torch.from_dlpack` of an array with a negative stride
ends the process, and of a read-only one it gives a writable alias.
"""

from __future__ import annotations

import importlib
import sys
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import array_api_compat.torch as xp
import ml_dtypes
import numpy as np
import torch
from torch.autograd import forward_ad
from torch.masked import MaskedTensor

from attnx.errors import ArgumentError, ArgumentTypeError
from attnx.plugin import Lane, Transforms
from attnx_torch._pytrees import register_trees

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from attnx.plugin import Far

__all__ = [
    "LANE", "TorchLane", "any_autocast", "autocast_dtype", "is_batched", "transformed",
]  # fmt: skip

# There is no public way to ask whether vmap, grad or jvp of torch.func is active, nor whether a
# cotangent is one of `torch.autograd.grad(is_grads_batched=True)`.
transformed: Callable[[], bool] = torch._C._are_functorch_transforms_active
is_batched: Callable[[torch.Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor
any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled
_is_compiling = torch.compiler.is_compiling
# Modes that record what is done, as make_fx does: their tensors may look plain. It takes a third of
# the time of `is_compiling`, and what that adds are traces whose tensors are no plain ones.
_recording = torch._C._len_torch_dispatch_stack
_grad_enabled = torch.is_grad_enabled
# An operation of a library's own, as a compiled program calls it, puts autograd aside; what it runs
# may still ask for a gradient.
_with_autograd: Callable[[], AbstractContextManager[None]] = partial(
    torch._C._SetExcludeDispatchKeyGuard, torch._C.DispatchKey.AutogradFunctionality, False
)
_Tensor = torch.Tensor


class TorchLane(Lane):
    """`torch.Tensor`, dense and strided; parameters included, masked tensors refused."""

    name = "torch"
    xp = xp
    array_types = (torch.Tensor,)
    refused_types = (MaskedTensor,)

    def __init__(self) -> None:
        register_trees()

    def dtype_name(self, array: torch.Tensor) -> str:
        """PyTorch's name without `torch.`."""
        return str(array.dtype)[6:]

    def device(self, array: torch.Tensor) -> str:
        """PyTorch's name, such as `"cuda:0"`."""
        return str(array.device)

    def traced(self, array: torch.Tensor) -> bool:
        """Under `torch.func`, `torch.compile`, or as a dual number of forward AD."""
        if _is_compiling() or transformed():
            return True
        if forward_ad._current_level < 0:
            return False
        return forward_ad.unpack_dual(array).tangent is not None

    def admit(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[Any, Any, Any]:
        """Refuse what is no dense tensor on one device; under autocast, take its dtype (S5.1)."""
        for name, x in (("q", q), ("k", k), ("v", v)):
            if x.is_nested or x.layout is not torch.strided:
                kind = "a nested tensor" if x.is_nested else f"layout {x.layout}"
                raise ArgumentTypeError(
                    f"{name}: expected a dense, strided tensor, got {kind}; "
                    f"call {name}.to_{'padded_tensor' if x.is_nested else 'dense'}() first"
                )
            if x.device != q.device:
                raise ArgumentError(
                    f"{name}: expected the device of q, {q.device}, got {x.device}; "
                    "nothing is moved silently"
                )
        target = autocast_dtype(q.device.type)
        if target is None:
            return q, k, v
        q, k, v = (x if x.dtype is torch.float64 else x.to(target) for x in (q, k, v))
        return q, k, v

    def fast_key(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        """The dtype and device of q; None where a transform asks for a longer look.

        Every attribute of a tensor costs 100 ns here.
        """
        if (
            not type(q) is type(k) is type(v) is _Tensor
            or _recording()
            or transformed()
            or forward_ad._current_level >= 0
        ):
            return None
        return q.dtype if q.is_cpu else (q.dtype, q.device)

    def late_key(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        """Whether autograd is recording; None under autocast or where dtypes differ.

        Layouts and the devices of k and v are left to PyTorch's own checks, which the backend
        tells as S8.1 says.
        """
        if any_autocast() or not k.dtype is q.dtype is v.dtype:
            return None
        return self.wants_gradient(q, k, v)

    def detached(self, array: Any) -> Any:
        """A tensor that shares the memory and records nothing."""
        return array.detach() if isinstance(array, _Tensor) else array

    def wants_gradient(self, *arrays: Any) -> bool:
        """Whether autograd is recording and any of these requires a gradient."""
        return _grad_enabled() and any(a is not None and a.requires_grad for a in arrays)

    def arange(self, start: int, stop: int, like: torch.Tensor) -> torch.Tensor:
        """Integers on the device of `like`."""
        return torch.arange(start, stop, device=like.device)

    def full(self, shape: tuple[int, ...], value: Any, dtype: Any, like: Any) -> torch.Tensor:
        """A filled tensor on the device of `like`."""
        return torch.full(shape, value, dtype=dtype, device=like.device)

    def integers(self, value: Any, like: torch.Tensor) -> torch.Tensor:
        """Integers as int64 on the device of `like`."""
        if isinstance(value, torch.Tensor):
            return value.to(device=like.device, dtype=torch.int64)
        return torch.tensor(value, dtype=torch.int64, device=like.device)

    def write(
        self, buffer: torch.Tensor, new: torch.Tensor, rows: Any, real: Any, axis: int
    ) -> torch.Tensor:
        """In place, unless autograd is recording or `torch.func` is looking."""
        kept = self.wants_gradient(buffer, new) or (not _is_compiling() and transformed())
        if isinstance(rows, slice):
            if kept:
                return torch.slice_scatter(buffer, new, axis, rows.start, rows.stop)
            buffer.narrow(axis, rows.start, rows.stop - rows.start).copy_(new)
            return buffer
        entries = torch.arange(buffer.shape[0], device=buffer.device)[:, None]
        at: Any = (entries, *(slice(None),) * (axis - 1), rows)
        values = new.movedim(axis, 1)
        if real is not None:
            values = torch.where(real.reshape(*real.shape, 1, 1), values, buffer[at])
        if kept:
            places = [entries, *(None,) * (axis - 1), rows]
            return torch.ops.aten.index_put(buffer, places, values)  # type: ignore[no-any-return]
        buffer[at] = values
        return buffer

    def floats(self, value: tuple[float, ...], dtype: Any, like: torch.Tensor) -> torch.Tensor:
        """Numbers on the device of `like`."""
        return torch.tensor(value, dtype=dtype, device=like.device)

    def quiet(self) -> AbstractContextManager[Any]:
        """PyTorch warns of nothing; but autocast must not cast the steps of a kernel (S5.2)."""
        return _NoAutocast() if any_autocast() else nullcontext()

    def vjp(
        self, fn: Callable[..., Any], inputs: Sequence[Any], cotangents: Sequence[Any]
    ) -> tuple[Any, Any]:
        """Outputs and gradients by `torch.autograd.grad`, zeros for an input that is not used."""
        with torch.enable_grad(), _with_autograd():
            leaves = [x.detach().requires_grad_() for x in inputs]
            outputs = fn(*leaves)
            made = outputs if isinstance(outputs, tuple) else (outputs,)
            pairs = [
                (y, dy) for y, dy in zip(made, cotangents, strict=True)
                if dy is not None and y.requires_grad
            ]  # fmt: skip
            gradients = torch.autograd.grad(
                [y for y, _ in pairs], leaves, [dy for _, dy in pairs],
                allow_unused=True, materialize_grads=True,
            )  # fmt: skip
        outputs = (
            tuple(y.detach() for y in made) if isinstance(outputs, tuple) else made[0].detach()
        )
        return outputs, gradients

    def bridge(self, far: Far) -> Callable[..., Any]:
        """Autograd and `torch.func` around another framework's backend; see `Lane.bridge`."""
        from attnx_torch._bridge import bridge

        return bridge(far)

    def attach(self, far: Far) -> Callable[..., Any]:
        """The same: its functions take PyTorch's tensors, which no transform looks into."""
        return self.bridge(far)

    def transforms(self) -> Transforms:
        """`torch.compile`, `torch.func`, checkpoint and autocast."""
        from attnx_torch._transforms import TRANSFORMS

        return TRANSFORMS

    def to_numpy(self, array: torch.Tensor) -> Any:
        """A view where the tensor is on the host; bfloat16, which NumPy lacks, by its bits."""
        array = _plain(array).cpu()
        if array.dtype is torch.bfloat16:
            return array.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return array.numpy()

    def from_numpy(self, array: Any, like: torch.Tensor | None = None) -> torch.Tensor:
        """A copy."""
        tensor = _wrap(np.array(array, order="C", copy=True))
        return tensor if like is None else tensor.to(like.device)

    def export(self, array: torch.Tensor) -> Any:
        """The tensor without autograd; on the host as NumPy, which is one view away."""
        return self.to_numpy(array) if array.device.type == "cpu" else _plain(array)

    def adopt(self, exported: Any) -> torch.Tensor:
        """Zero-copy, except where the array is read-only or has strides that torch lacks."""
        if not isinstance(exported, np.ndarray):
            return torch.from_dlpack(exported)
        size = exported.itemsize
        strange = any(stride < 0 or stride % size for stride in exported.strides)
        if strange or not exported.flags.writeable or not exported.dtype.isnative:
            exported = np.array(exported, dtype=exported.dtype.newbyteorder("="), order="C")
        return _wrap(exported)

    def read_instead(self, original: Callable[..., Any], traced: Callable[..., Any]) -> None:
        """By Dynamo's table of substitutes."""
        from attnx_torch import _compile

        _compile.substitute(original, traced)

    def compile_with(self, forward: Callable[..., Any], backward: Callable[..., Any]) -> None:
        """The operations exist from here on: they must not come into being during a trace."""
        from attnx_torch import _compile

        _compile.forward_by.update(forward=forward, backward=backward)

    def compiled(self, choice: str, backend: str, q: Any, k: Any, v: Any, call: Any) -> Any:
        """See `attnx_torch._compile`."""
        from attnx_torch import _compile

        return _compile.compiled(xp, choice, backend, q, k, v, call)

    def compiling(self, array: torch.Tensor) -> bool:
        """Under `torch.export` and `make_fx`; Dynamo reads another function and never asks."""
        if not (_is_compiling() or _recording() > 0):
            return False
        if "torch._dynamo" not in sys.modules:  # attnx waits for it, and make_fx does not import it
            importlib.import_module("torch._dynamo")
        return True

    def own(self, array: torch.Tensor) -> torch.Tensor:
        """A copy: the memory may be another framework's, and read-only there."""
        return array.clone(memory_format=torch.contiguous_format)


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype that autocast asks for on a kind of device, or None when it is off."""
    if not any_autocast() or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


class _NoAutocast:
    """Switch autocast off, on every kind of device where it is on."""

    def __init__(self) -> None:
        kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
        self._contexts = [torch.autocast(kind, enabled=False) for kind in kinds]

    def __enter__(self) -> None:
        for context in self._contexts:
            context.__enter__()

    def __exit__(self, *error: Any) -> None:
        for context in reversed(self._contexts):
            context.__exit__(*error)


def _plain(array: torch.Tensor) -> torch.Tensor:
    """Detached, with pending conjugation and negation done."""
    return array.detach().resolve_conj().resolve_neg()


def _wrap(array: Any) -> torch.Tensor:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


LANE = TorchLane()
