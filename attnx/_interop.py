"""Exchange: one framework's arrays, another's backend.

Naming a backend of another framework is the opt-in. On one device arrays go through DLPack,
without a copy where both sides can share the memory; a result is owned by the caller's framework
alone (S1.5). A move between devices needs `use_backend(..., transfer=True)`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnx.masks import map_leaves
from attnx.plugin import Reason

if TYPE_CHECKING:
    from collections.abc import Callable

    from attnx.plugin import Backend, Call, CallClass, Lane

__all__ = ["Exchange", "describe", "device_of", "exchange", "reasons"]


def _foreign(backend: Backend, cls: CallClass) -> bool:
    return backend.lane.name != cls.framework


def _moves(backend: Backend, cls: CallClass) -> bool:
    return cls.device.split(":")[0] not in backend.capabilities.devices


def device_of(backend: Backend, cls: CallClass) -> str:
    """The device on which a backend would compute a class of calls."""
    if _foreign(backend, cls) and _moves(backend, cls):
        return (*backend.devices(), cls.device)[0]
    return cls.device


def reasons(backend: Backend, cls: CallClass, transfer: bool) -> tuple[Reason, ...]:
    """Why arrays of this class cannot reach a backend."""
    if not backend.devices():
        return (Reason("device", cls.device, backend.no_device()),)
    found = []
    if _foreign(backend, cls):
        name = backend.lane.name
        if cls.gradient == "framework":
            found.append(Reason(
                "gradient", f"recorded by {cls.framework}", f"attention_vjp through {name}",
                "a gradient does not flow through another framework yet: use attention_vjp, or "
                "detach q, k, v, bias and sinks",
            ))  # fmt: skip
        if cls.traced:
            found.append(Reason(
                "tracing", f"by {cls.framework}", f"concrete arrays through {name}",
                "call it outside the transform",
            ))  # fmt: skip
        if _moves(backend, cls) and not transfer:
            found.append(Reason(
                "device", cls.device, ", ".join(sorted(backend.capabilities.devices)),
                "use_backend(..., transfer=True) lets arrays move between devices",
            ))  # fmt: skip
    return tuple(found)


def describe(backend: Backend, cls: CallClass) -> str | None:
    """How arrays reach a backend and come back; None when they need not."""
    if not _foreign(backend, cls):
        return None
    if _moves(backend, cls):
        return f"moved from {cls.device} to {device_of(backend, cls)} and back"
    return f"{cls.framework} to {backend.lane.name} and back, DLPack where memory can be shared"


def exchange(backend: Backend, cls: CallClass, lanes: Any) -> Exchange | None:
    """The exchange that a plan needs, or None."""
    if not _foreign(backend, cls):
        return None
    return Exchange(lanes.lane(cls.framework), backend.lane, _moves(backend, cls))


class Exchange:
    """Arrays of one lane, computed in another."""

    __slots__ = ("here", "moves", "there")

    def __init__(self, here: Lane, there: Lane, moves: bool) -> None:
        self.here, self.there, self.moves = here, there, moves

    def around(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """`run(*arrays, call)` on the other side: everything goes there, the results come back."""

        def exchanged(*arguments: Any) -> Any:
            *arrays, call = arguments
            like = next(a for a in arrays if a is not None)
            results = run(*(self.send(a) for a in arrays), self.send_call(call))
            if isinstance(results, tuple):
                return tuple(self.bring_back(r, like) for r in results)
            return self.bring_back(results, like)

        return exchanged

    def send(self, array: Any) -> Any:
        """The same values over there."""
        if array is None:
            return None
        if self.moves:
            return self.there.from_numpy(self.here.to_numpy(array))
        return self.there.adopt(self.here.export(array))

    def bring_back(self, array: Any, like: Any) -> Any:
        """A result as the caller's own array, on the caller's device."""
        if array is None:
            return None
        self.there.wait(array)
        if self.moves:
            return self.here.from_numpy(self.there.to_numpy(array), like)
        return self.here.own(self.here.adopt(self.there.export(array)))

    def send_call(self, call: Call) -> Call:
        """The record, with every array in it over there."""
        mask = call.mask
        if mask is not None:
            mask = map_leaves(
                mask, lambda _, __, leaf: leaf if isinstance(leaf, int) else self.send(leaf)
            )
        return call._replace(mask=mask, bias=self.send(call.bias), sinks=self.send(call.sinks))
