"""Looking at what is registered, and registering by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnx._registry import BackendInfo, Record, registry
from attnx.errors import ArgumentError
from attnx.plugin import hookspecs

if TYPE_CHECKING:
    from collections.abc import Callable

    from attnx.plugin import Backend

__all__ = ["backends", "doctor", "get_backend", "implementations", "register", "unregister"]


def backends() -> tuple[BackendInfo, ...]:
    """Every registered backend: whether it can compute here, where, and what it declares.

    Each is loaded, so frameworks are imported; one that fails becomes a line with its reason.

    Example:
        >>> import attnx
        >>> [b.status for b in attnx.backends() if b.name == "numpy"]
        ['available']
    """
    return registry.infos()


def get_backend(name: str) -> Backend:
    """Load a backend by name.

    Raises:
        UnknownBackend: nobody registered that name.
        UnavailableBackend: its framework or device is missing here, or its plugin fails.

    Example:
        >>> import attnx
        >>> attnx.get_backend("numpy").lane.name
        'numpy'
    """
    return registry.backend(name)


def doctor() -> tuple[Record, ...]:
    """What was found while collecting plugins and loading every backend: one record a finding.

    Strict settings (`ATTNX_STRICT_PLUGINS=1`) raise nothing here. The command `attnx doctor` makes
    some calls on each backend as well.

    Example:
        >>> import attnx
        >>> {r.status for r in attnx.doctor() if r.subject == "numpy"}
        {'ok'}
    """
    with registry.tolerant():
        infos = backends()
        for info in infos:
            if info.capabilities is not None:
                registry.install(info.framework)
    found = []
    for info in infos:
        if info.status == "unavailable":
            spec = registry.specs[info.name]
            found.append(
                Record(
                    info.name, "unavailable", info.reason or "", spec.install_hint,
                    info.distribution, registry.owner(info.name),
                )
            )  # fmt: skip
    return (*registry.records, *found)


def register(plugin: Any, name: str | None = None) -> None:
    """Register a plugin by hand, as its entry point would.

    Args:
        plugin: a module or object with `attnx.plugin.hookimpl` functions.
        name: a unique name; by default the module's or the class's.

    Raises:
        PluginError: it is registered already, or is broken; `doctor` keeps the record.
    """
    registry.register(plugin, name)


def implementations(hook: str) -> tuple[tuple[str, Callable[..., Any]], ...]:
    """Each plugin that implements a hook, by name, and what to call with the hook's arguments.

    For tools that ask plugins something, such as the conformance suite; the last one registered
    comes first. What an implementation raises is the caller's to handle.

    Args:
        hook: a name such as `"attnx_conformance_cases"`.

    Raises:
        ArgumentError: there is no such hook.

    Example:
        >>> import attnx
        >>> attnx.implementations("attnx_rank")
        ()
    """
    known = sorted(name for name in vars(hookspecs()) if name.startswith("attnx_"))
    if hook not in known:
        raise ArgumentError(f"hook: expected one of {', '.join(known)}, got {hook!r}")
    return tuple(registry.implementations(hook))


def unregister(name: str) -> None:
    """Take a plugin that was registered, and its backends, out again.

    Raises:
        UnknownBackend: there is no such plugin.
    """
    registry.unregister(name)
