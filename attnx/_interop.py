"""Exchange: one framework's arrays, another's backend.

Naming a backend of another framework is the opt-in. On one device arrays go through DLPack,
without a copy where both sides can share the memory; a result is owned by the caller's framework
alone (S1.5). A move between devices needs `use_backend(..., transfer=True)`.

The other side only ever sees concrete arrays. Where the caller's framework records a gradient or
transforms the call, its lane bridges the gap (`Lane.bridge`), and a gradient is the other backend's
own backward, asked for as in `attention_vjp`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnx._registry import registry
from attnx.errors import UnsupportedError
from attnx.plugin import Far, Reason

if TYPE_CHECKING:
    from collections.abc import Callable

    from attnx.plugin import Backend, Call, CallClass, Lane

__all__ = ["Exchange", "describe", "device_of", "exchange", "local", "reasons"]


def _foreign(backend: Backend, cls: CallClass) -> bool:
    return backend.lane.name != cls.framework


def _bridged(cls: CallClass) -> bool:
    return cls.traced or cls.gradient == "framework"


def _handed_over(cls: CallClass) -> Lane:
    """The lane of the arrays that go over: the host's, where a transform hands those out."""
    lane = registry.lane(cls.framework)
    return registry.lane(lane.host) if cls.traced and lane.host is not None else lane


def _source(cls: CallClass) -> str:
    """The device on which arrays are handed over."""
    return cls.device if _handed_over(cls).name == cls.framework else "cpu"


def _moves(backend: Backend, cls: CallClass) -> bool:
    return _source(cls).split(":")[0] not in backend.capabilities.devices


def device_of(backend: Backend, cls: CallClass) -> str:
    """The device on which a backend would compute a class of calls."""
    if not _foreign(backend, cls):
        return cls.device
    return (*backend.devices(), cls.device)[0] if _moves(backend, cls) else _source(cls)


def local(backend: Backend, cls: CallClass) -> CallClass:
    """The class as the backend sees it: another framework's is concrete, and asks for a pullback.

    lse goes along with every gradient, since the backward starts from it.
    """
    if not _foreign(backend, cls):
        return cls
    wanted = cls.gradient is not None
    return cls._replace(
        device=device_of(backend, cls), traced=False, gradient="vjp" if wanted else None,
        need_lse=cls.need_lse or wanted,
    )  # fmt: skip


def reasons(backend: Backend, cls: CallClass, transfer: bool) -> tuple[Reason, ...]:
    """Why arrays of this class cannot reach a backend."""
    if not backend.devices():
        return (Reason("device", cls.device, backend.no_device()),)
    if not _foreign(backend, cls):
        return ()
    found = []
    name = backend.lane.name
    bridge = registry.lane(cls.framework).bridge
    if cls.gradient == "framework" and bridge is None:
        found.append(Reason(
            "gradient", f"recorded by {cls.framework}", f"attention_vjp through {name}",
            f"the lane of {cls.framework} carries no gradient to another framework: use "
            "attention_vjp, or detach q, k, v, bias and sinks",
        ))  # fmt: skip
    if cls.traced and (bridge is None or cls.gradient == "vjp"):
        hint = "call it outside the transform"
        if bridge is not None:
            hint = f"differentiate attention by {cls.framework}'s own means, or {hint}"
        found.append(Reason(
            "tracing", f"by {cls.framework}", f"concrete arrays through {name}", hint
        ))  # fmt: skip
    if not transfer and (_moves(backend, cls) or _source(cls) != cls.device):
        found.append(Reason(
            "device", cls.device, ", ".join(sorted(backend.capabilities.devices)),
            "use_backend(..., transfer=True) lets arrays move between devices",
        ))  # fmt: skip
    return tuple(found)


def describe(backend: Backend, cls: CallClass) -> str | None:
    """How arrays reach a backend and come back; None when they need not."""
    if not _foreign(backend, cls):
        return None
    here = _handed_over(cls)
    if _moves(backend, cls) or _source(cls) != cls.device:
        how = f"moved from {cls.device} to {device_of(backend, cls)} and back"
    else:
        how = f"{cls.framework} to {backend.lane.name} and back, DLPack where memory can be shared"
    if here.name != cls.framework:
        return f"{how}; by a callback that takes {here.name} arrays"
    return how


def exchange(backend: Backend, cls: CallClass) -> Exchange | None:
    """The exchange that a plan needs, or None."""
    if not _foreign(backend, cls):
        return None
    return Exchange(_handed_over(cls), backend, _moves(backend, cls))


class Exchange:
    """Arrays of one lane, computed by a backend of another."""

    __slots__ = ("backend", "here", "moves", "there")

    def __init__(self, here: Lane, backend: Backend, moves: bool) -> None:
        self.here, self.backend, self.there, self.moves = here, backend, backend.lane, moves

    def attend(self, cls: CallClass) -> Callable[..., Any]:
        """What `attention` runs: the backend's forward, bridged where somebody is looking."""
        forward = self.around(self.backend.forward)
        if not _bridged(cls):
            return forward
        recorded = local(self.backend, cls._replace(gradient="framework"))
        bridge = registry.lane(cls.framework).bridge
        assert bridge is not None  # `reasons` refused
        lacking = tuple(self.backend.reasons(recorded))
        backward = self.around(self.backend.backward)
        return bridge(Far(self.backend.name, forward, backward, lacking))

    def weights(self, cls: CallClass) -> Callable[..., Any]:
        """What `attention_weights` runs, which has no bridge."""
        if cls.traced:
            reason = Reason(
                "tracing", f"by {cls.framework}", f"concrete arrays through {self.there.name}",
                "call attention_weights outside the transform",
            )  # fmt: skip
            raise UnsupportedError.because(self.backend.name, reason)
        return self.around(self.backend.weights)

    def around(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """`run(*arrays, call)` on the other side: everything goes there, the results come back."""

        def exchanged(*arguments: Any) -> Any:
            *arrays, call = arguments
            like = next(a for a in arrays if a is not None)
            with self.here.eager(), self.there.eager():
                results = run(*(self.send(a) for a in arrays), self.send_call(call))
                if isinstance(results, tuple):
                    return tuple(self.bring_back(r, like) for r in results)
                return self.bring_back(results, like)

        return exchanged

    def send(self, array: Any) -> Any:
        """The same values over there; a cotangent may be traced where the call was not."""
        if array is None or self.here is self.there:
            return array
        if self.here.traced(array):
            reason = Reason(
                "tracing", f"by {self.here.name}", f"concrete arrays through {self.there.name}",
                "call it outside the transform",
            )  # fmt: skip
            raise UnsupportedError.because(self.backend.name, reason)
        if self.moves:
            return self.there.from_numpy(self.here.to_numpy(array))
        return self.there.adopt(self.here.export(array))

    def bring_back(self, array: Any, like: Any) -> Any:
        """A result as the caller's own array, on the caller's device."""
        if array is None or self.here is self.there:
            return array
        self.there.wait(array)
        if self.moves:
            return self.here.from_numpy(self.there.to_numpy(array), like)
        return self.here.own(self.here.adopt(self.there.export(array)))

    def send_call(self, call: Call) -> Call:
        """The record, with every array in it over there."""
        return call._replace(cls=local(self.backend, call.cls)).map_arrays(self.send)
