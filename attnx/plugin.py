"""The contract for a backend: everything a plugin author imports, and nothing else.

pluggy is the control plane: a plugin is a module (or object) with `hookimpl` functions, found
through the entry-point group `attnx` or registered by hand. A hook never stands on the path of a
call; it is asked when backends are collected and when a plan is made.

A backend in a few lines:

    >>> import array_api_strict as xp
    >>> from attnx import plugin
    >>> class StrictLane(plugin.Lane):
    ...     name, xp, array_types = "strict", xp, (type(xp.zeros(1)),)
    >>> lane = StrictLane()
    >>> spec = plugin.BackendSpec(
    ...     name="strict",
    ...     array_types=("array_api_strict.Array",),
    ...     load=lambda: plugin.ArrayBackend("strict", lane),
    ...     lane=lambda: lane,
    ... )
    >>> spec.api_version
    1
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from attnx import _install
from attnx._alibi import Alibi
from attnx._call import Call, CallClass
from attnx._contract import (
    MASK_KINDS,
    Backend,
    Capabilities,
    Far,
    Gradients,
    Ranking,
    Reason,
    mask_kinds,
)
from attnx._dropout import Dropout
from attnx._lane import Lane, Transforms

if TYPE_CHECKING:
    from collections.abc import Callable

    import pluggy

    from attnx._array_backend import ArrayBackend
    from attnx._from_function import from_function
    from attnx._supports import Supports

    hookspec: pluggy.HookspecMarker
    hookimpl: pluggy.HookimplMarker

__all__ = [
    "API_VERSION",
    "MASK_KINDS",
    "RECORDS",
    "SUPPORTED_API_VERSIONS",
    "Alibi",
    "ArrayBackend",
    "Backend",
    "BackendSpec",
    "Call",
    "CallClass",
    "Capabilities",
    "Dropout",
    "Far",
    "Gradients",
    "Lane",
    "Ranking",
    "Reason",
    "Supports",
    "Transforms",
    "from_function",
    "hookimpl",
    "hookspecs",
    "lane",
    "mask_kinds",
]

API_VERSION = 1
"""The version of this contract."""

SUPPORTED_API_VERSIONS = range(1, 2)
"""Versions a spec may name; a spec outside them is refused with both numbers."""

RECORDS: list[type] = []
"""Records of the core with arrays in them, beside masks and `Dropout`: the arrays are what
`_array_fields` names, `_static_fields` the rest, both in the order of the constructor. A lane whose
framework has trees registers each."""

PROJECT = "attnx"

LATE = {
    "ArrayBackend": "attnx._array_backend",
    "Supports": "attnx._supports",
    "from_function": "attnx._from_function",
}
"""Where those names stand that only a backend needs."""


class BackendSpec(NamedTuple):
    """A backend before it is loaded: cheap to make, and it imports no framework.

    Attributes:
        name: what users write in `backend=`; lower case, unique.
        load: makes the `Backend`; the framework is imported here.
        array_types: dotted names of the array classes of its framework, such as `"torch.Tensor"`.
        lane: makes the `Lane` of those types, or None when another plugin's lane serves.
        api_version: the version of the contract it was written for; 1 where a plugin says none,
            whatever the latest is.
        framework: the name of the lane it computes in; by default its own name.
        requires: modules that must be importable, looked for without importing them.
        summary: one line for tables.
        install_hint: what to run when `requires` is not met.
        settings: names of `ATTNX_*` environment variables that the plugin reads.
    """

    name: str
    load: Callable[[], Backend]
    array_types: tuple[str, ...] = ()
    lane: Callable[[], Lane] | None = None
    api_version: int = 1
    framework: str = ""
    requires: tuple[str, ...] = ()
    summary: str = ""
    install_hint: str = ""
    settings: tuple[str, ...] = ()


def lane(framework: str) -> Lane:
    """The lane of a framework that a registered plugin brings, for a backend that brings none.

    A backend that computes on arrays of a known framework uses that framework's lane, says so in
    `BackendSpec(framework=...)`, and asks for it in `load`: the framework is imported here.

    Args:
        framework: a name such as `"numpy"` or `"torch"`.

    Raises:
        UnavailableBackend: no registered plugin brings it, or its framework is not installed.

    Example:
        >>> from attnx import plugin
        >>> plugin.ArrayBackend("mine", plugin.lane("numpy")).lane.name
        'numpy'
    """
    found: Lane = _install.lane(framework)
    return found


def __getattr__(name: str) -> Any:
    """What only a backend needs is imported with its first use: `import attnx` stays light."""
    if name in LATE:
        import importlib

        found = globals()[name] = getattr(importlib.import_module(LATE[name]), name)
        return found
    if name not in ("hookspec", "hookimpl"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import pluggy

    markers = {
        "hookspec": pluggy.HookspecMarker(PROJECT),
        "hookimpl": pluggy.HookimplMarker(PROJECT),
    }
    globals().update(markers)
    return markers[name]


def hookspecs() -> Any:
    """The hook specifications, as a pluggy namespace."""
    import pluggy

    spec = pluggy.HookspecMarker(PROJECT)

    class Hooks:
        """What a plugin may implement."""

        @spec
        def attnx_backends(self) -> list[BackendSpec]:  # type: ignore[empty-body]
            """The backends of this plugin. It must not import a framework."""

        @spec(firstresult=True)
        def attnx_rank(
            self, call: CallClass, candidates: list[str], explaining: bool
        ) -> list[str] | Ranking | None:
            """An order of preference, asked when a plan is made; None to pass.

            It decides where no backend was asked for by name. `candidates` compute in the arrays'
            own framework, the owner of its lane first; others may be named. `explaining` is True
            where nothing will be computed: an implementation then says what it knows and finds out
            nothing.
            """

        @spec
        def attnx_planned(self, plan: Any, explanation: Any) -> None:
            """Observe a new plan."""

        @spec
        def attnx_conformance_cases(self, backend: str) -> list[Any]:  # type: ignore[empty-body]
            """Cases of the plugin's own for the conformance suite."""

    return Hooks
