"""What a fault is: a name, a line of prose, and the methods of the correct kernel it replaces."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from attnx_conformance.cases import DTYPES
from attnx_conformance.subject import FEATURES, FunctionSubject

from ._kernel import Kernel

__all__ = ["Fault", "of_kind"]

_SUPPORTS = FEATURES - {"causal_top_left", "causal_bottom_right"}


@dataclass(frozen=True, eq=False)
class Fault:
    """A correct kernel with some of its methods replaced.

    Attributes:
        name: unique, with words joined by hyphens.
        kind: its class, as conformance reports group them: "scale", "masks", "backward".
        what: one line for a person.
        change: the methods of `Kernel` that it replaces, or class attributes, by name.
        layout: the layout of its subject: some faults stand in one layout alone.
    """

    name: str
    kind: str
    what: str
    change: Mapping[str, Any]
    layout: str = "bhsd"

    def kernel(self) -> Kernel:
        """A fresh kernel with the fault in it."""
        unknown = [name for name in self.change if not hasattr(Kernel, name)]
        if unknown:
            raise AttributeError(f"{self.name} changes {', '.join(unknown)}, which no kernel has")
        made = type("Faulty", (Kernel,), dict(self.change))()
        assert isinstance(made, Kernel)
        return made

    def subject(self, layout: str | None = None) -> FunctionSubject:
        """The kernel as the suite examines it.

        Args:
            layout: "bhsd" or "bshd"; the fault's own when absent.
        """
        layout = layout or self.layout
        kernel = self.kernel()
        attribute = self.name.replace("-", "_") + ("" if layout == self.layout else f"__{layout}")
        return FunctionSubject(
            partial(kernel.attention, layout=layout),
            name=f"fault {self.name}",
            framework="numpy",
            layout=layout,
            dtypes=DTYPES,
            supports=_SUPPORTS,
            vjp=partial(kernel.attention_vjp, layout=layout),
            isolation="full",
            spec=f"function:attnx_conformance.faults:{attribute}",
        )


def of_kind(kind: str) -> Callable[..., Fault]:
    """A maker of faults of one kind: `fault(name, what, layout=..., method=replacement)`."""

    def fault(name: str, what: str, *, layout: str = "bhsd", **change: Any) -> Fault:
        return Fault(name, kind, what, change, layout)

    return fault
