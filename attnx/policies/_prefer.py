"""`prefer`: an order that a person has in mind, perhaps for some calls only.

What it may look at is the class of a call and nothing else: its answer is kept for every other call
of that class, so lengths, batch and values cannot decide (decision 5).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnx.errors import ArgumentError, ArgumentTypeError
from attnx.plugin import CallClass, Ranking, hookimpl
from attnx.policies._names import Names

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["prefer"]

PRESENCE = ("bias", "gradient", "mask", "scale_sign", "sinks")
"""Fields that True and False ask to be given or left out."""

TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("framework", "device", "dtype", "layout"), (str,)),
    **dict.fromkeys(("D", "Dv"), (int,)),
    **dict.fromkeys(("mask", "sinks", "gradient"), (str, bool, type(None))),
    "scale_sign": (int, bool, type(None)),
    "bias": (tuple, bool, type(None)),
}
"""Of the values that a field may have here; the others are flags."""


class prefer:
    """Backends in order of preference, where nobody was asked for by name.

    The first that can do the call computes; when none of them can, the arrays' own framework does,
    as without a policy. Naming another framework's backend is the opt-in to exchange, as it is in
    `backend=`.

    Args:
        *names: backends; one that is not registered is told of once and passed over.
        when: only for calls whose class it says True of: `when(call) -> bool` of an
            `attnx.plugin.CallClass`. It is asked when a plan is made, not at each call.
        **fields: only for calls whose class has these values, by the fields of `CallClass`:
            `dtype="float32"`, `device="cuda"` (any of that kind), `gradient=True`, `mask=False`,
            `mask="causal"` (of any alignment); a set or a list allows any of its values.

    Raises:
        ArgumentError: no names, a name twice, or a field that `CallClass` does not have. Lengths
            are none: a plan serves calls of all lengths.
        ArgumentTypeError: something that is no name, a `when` that is no function, or a value that
            the field cannot have.

    Example:
        >>> import attnx, numpy as np
        >>> from attnx import policies
        >>> attnx.register(policies.prefer("torch", dtype="float32"), "mine")
        >>> x = np.ones((1, 2, 3, 4), np.float32)
        >>> attnx.explain(x, x, x).choice, attnx.explain(x, x, x).why
        ('torch', "the plugin 'mine': prefer('torch', dtype='float32')")
        >>> attnx.unregister("mine")
    """

    __name__ = "prefer"

    def __init__(
        self, *names: str, when: Callable[[CallClass], bool] | None = None, **fields: Any
    ) -> None:
        if not names:
            raise ArgumentError("prefer: expected at least one name of a backend, got none")
        if when is not None and not callable(when):
            raise ArgumentTypeError(
                f"prefer: when: expected a function of a CallClass, got {type(when).__name__}"
            )
        for field, wanted in fields.items():
            if field not in CallClass._fields:
                raise ArgumentError(
                    f"prefer: a call's class has no {field!r}; it has "
                    f"{', '.join(CallClass._fields)}. Lengths and batch are not in it, because a "
                    "plan serves calls of all lengths: pass backend= to such calls"
                )
            _check_values(field, wanted)
        self._names = Names("prefer", names)
        self._when, self._fields = when, fields

    def __repr__(self) -> str:
        given = [repr(name) for name in self._names.all]
        given += [f"{name}={value!r}" for name, value in self._fields.items()]
        if self._when is not None:
            given.append(f"when={getattr(self._when, '__name__', self._when)}")
        return f"prefer({', '.join(given)})"

    @hookimpl
    def attnx_rank(self, call: CallClass, candidates: list[str]) -> Ranking | None:
        """The order, then the owner of the arrays' lane; None for other calls."""
        if not all(_matches(call, name, wanted) for name, wanted in self._fields.items()):
            return None
        if self._when is not None and not self._when(call):
            return None
        order = self._names.registered()
        return Ranking([*order, *(n for n in candidates[:1] if n not in order)], repr(self))


def _check_values(field: str, wanted: Any) -> None:
    """A value of a wrong type would never match, and nobody would hear of it."""
    kinds = TYPES.get(field, (bool,))
    for value in wanted if isinstance(wanted, (set, frozenset, list)) else [wanted]:
        if type(value) not in kinds:
            expected = " or ".join(kind.__name__ for kind in kinds)
            raise ArgumentTypeError(
                f"prefer: {field}: expected {expected}, or a set or a list of such, got {value!r}"
            )


def _matches(call: CallClass, field: str, wanted: Any) -> bool:
    value = getattr(call, field)
    if isinstance(wanted, (set, frozenset, list)):
        return any(_matches(call, field, each) for each in wanted)
    if field in PRESENCE and isinstance(wanted, bool):
        return (value is not None) == wanted
    if field == "device" and isinstance(wanted, str) and ":" not in wanted:
        return bool(value.split(":")[0] == wanted)
    if field == "mask" and isinstance(wanted, str) and "[" not in wanted:
        return bool(value is not None and value.split("[")[0] == wanted)
    return bool(value == wanted)
