"""The proof of route: the backend under examination really did the work.

A name in a call proves nothing: a plugin may hand a call on, or a plan may have been made for
somebody else. So every plan that names the backend is wrapped when it is made, and what enters the
backend's own methods is counted and listed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import count
from typing import Any, Self

import attnx
from attnx.plugin import hookimpl

__all__ = ["Witness"]

AXES = (
    "dtype", "device", "layout", "D", "Dv", "grouped", "square", "mask", "scale_sign", "softcap",
    "bias", "alibi", "sinks", "dropout", "need_lse", "assume_finite", "gradient", "traced",
)  # fmt: skip


_numbers = count()


class Witness:
    """Watches one backend inside a `with` block.

    Attributes:
        calls: how often each of its methods was entered: "apply", "direct", "forward", "backward",
            "weights".
        ledger: for each axis of a call's class, the values that reached the backend.
    """

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self._name = f"attnx-conformance-{backend}-{next(_numbers)}"  # one may watch another
        self.calls: Counter[str] = Counter()
        self.ledger: defaultdict[str, set[Any]] = defaultdict(set)

    def __enter__(self) -> Self:
        attnx.register(self, self._name)  # and every older plan is gone
        return self

    def __exit__(self, *error: object) -> None:
        attnx.unregister(self._name)

    def notes(self) -> dict[str, Any]:
        """Counts and ledger in plain values."""
        ledger = {axis: sorted(map(str, values)) for axis, values in self.ledger.items()}
        return {"calls": dict(self.calls), "ledger": ledger}

    @hookimpl
    def attnx_planned(self, plan: Any) -> None:
        """Wrap what a new plan runs, if it runs the backend."""
        if plan.backend != self.backend:
            return
        cls = plan.cls
        plan.impl = _Counted(plan.impl, self, cls)
        plan.apply = self.counted("apply", plan.apply, cls)
        if plan.direct is not None:
            plan.direct = self.counted("direct", plan.direct, cls)

    def counted(self, method: str, run: Callable[..., Any], cls: Any) -> Callable[..., Any]:
        """The same function, and a note of each call."""

        def witnessed(*arguments: Any) -> Any:
            self.calls[method] += 1
            for axis in AXES:
                self.ledger[axis].add(getattr(cls, axis))
            return run(*arguments)

        return witnessed


class _Counted:
    """A backend whose work is counted."""

    def __init__(self, backend: Any, witness: Witness, cls: Any) -> None:
        self._backend, self._witness, self._cls = backend, witness, cls

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._backend, name)
        if name not in ("forward", "backward", "weights"):
            return found
        return self._witness.counted(name, found, self._cls)
