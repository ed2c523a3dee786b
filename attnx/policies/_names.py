"""The names that a policy is given: checked for type at once, for being registered at each plan.

A plugin may be registered after the policy was made, or be installed on some machines only, so an
unknown name is told of, once, and passed over; a registered one that cannot do a call is a reason
in `explain`.
"""

from __future__ import annotations

from typing import Any

from attnx._dispatch import warn
from attnx._registry import registry
from attnx._settings import nearest
from attnx.errors import ArgumentError, ArgumentTypeError

__all__ = ["Names", "check_names"]


def check_names(policy: str, names: tuple[Any, ...]) -> tuple[str, ...]:
    """Names without doubles.

    Raises:
        ArgumentTypeError: something that is no name.
        ArgumentError: an empty name, or one that comes twice.
    """
    for name in names:
        if not isinstance(name, str):
            hint = "; write the names one by one" if isinstance(name, (list, tuple)) else ""
            raise ArgumentTypeError(
                f"{policy}: expected names of backends, got {type(name).__name__}{hint}"
            )
        if not name or names.count(name) > 1:
            raise ArgumentError(f"{policy}: expected each name once, got {names!r}")
    return names


class Names:
    """Names that a policy was given, of which some may not be registered yet."""

    def __init__(self, policy: str, names: tuple[Any, ...]) -> None:
        self.policy, self.all = policy, check_names(policy, names)
        self._told: set[str] = set()

    def registered(self) -> list[str]:
        """Those that are registered now; of any other a warning is given, once."""
        known = registry.names()
        for name in self.all:
            if name not in known and name not in self._told:
                self._told.add(name)
                near = nearest(name, known)
                hint = f"; did you mean {near!r}?" if near else ""
                warn(
                    f"{self.policy}: no backend {name!r} is registered, so it is passed over{hint}"
                )
        return [name for name in self.all if name in known]
