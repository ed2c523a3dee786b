"""What a plugin hands over, looked at before anybody builds on it.

The registry keeps what is registered; here stands what may be wrong with one spec, one backend or
one lane. What stands here may raise anything, because a plugin may: the registry guards it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from attnx._diagnosis import say
from attnx.errors import UnavailableBackend
from attnx.plugin import SUPPORTED_API_VERSIONS, Backend, BackendSpec, Capabilities, Lane

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = [
    "check_specs", "framework", "is_a", "load", "load_lane", "other_version", "say",
    "with_its_own",
]  # fmt: skip

TEXTS = ("name", "framework", "summary", "install_hint")
LISTS = ("array_types", "requires", "settings")


def framework(spec: BackendSpec) -> str:
    """The name of the lane that a spec's backend computes in."""
    return spec.framework or spec.name


def check_specs(specs: Iterable[Any]) -> list[BackendSpec]:
    """What `attnx_backends` returned, each spec of the types that the contract gives."""
    checked = list(specs)
    for spec in checked:
        if not isinstance(spec, BackendSpec):
            raise TypeError(
                f"attnx_backends: expected BackendSpec objects, got {type(spec).__name__}"
            )
        wrong = [name for name in TEXTS if not isinstance(getattr(spec, name), str)]
        wrong += [name for name in LISTS if not _are_texts(getattr(spec, name))]
        wrong += ["load"] * (not callable(spec.load))
        wrong += ["lane"] * (spec.lane is not None and not callable(spec.lane))
        wrong += ["api_version"] * (type(spec.api_version) is not int)  # True is no version 1
        wrong += ["name"] * (not spec.name)
        if wrong:
            name = wrong[0]
            raise TypeError(f"BackendSpec.{name}: got {getattr(spec, name)!r} in {spec.name!r}")
    return checked


def other_version(spec: BackendSpec) -> tuple[str, str] | None:
    """What to say of a version of the contract that is not supported, and what to do about it."""
    known, version = SUPPORTED_API_VERSIONS, spec.api_version
    if version in known:
        return None
    told = f"versions {known[0]} to {known[-1]}" if len(known) > 1 else f"version {known[0]}"
    return (
        f"backend {spec.name!r} was written for version {version} of the plugin contract; this "
        f"attnx supports {told}",
        "update attnx" if version > known[-1] else "update the plugin",
    )


def _are_texts(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and all(isinstance(item, str) for item in value)


def load(spec: BackendSpec) -> Backend:
    """Make a spec's backend.

    Raises:
        UnavailableBackend: a module that it requires is not installed.
        TypeError: what it made is no backend of the contract.
    """
    missing = [module for module in spec.requires if not _importable(module)]
    if missing:
        hint = f"; {spec.install_hint}" if spec.install_hint else ""
        raise UnavailableBackend(
            f"backend {spec.name!r}: {', '.join(missing)} is not installed{hint}"
        )
    backend = spec.load()
    if not isinstance(backend, Backend):
        raise TypeError(f"load() returned {type(backend).__name__}, not a Backend")
    if not isinstance(backend.capabilities, Capabilities):
        raise TypeError(f"capabilities is {type(backend.capabilities).__name__}, not Capabilities")
    _check_lane(backend.lane, framework(spec))
    backend.name = spec.name
    return backend


def load_lane(spec: BackendSpec) -> Lane:
    """Make a spec's lane.

    Raises:
        TypeError: what it made is no lane, or one of another framework.
    """
    assert spec.lane is not None
    lane = spec.lane()
    _check_lane(lane, framework(spec))
    return lane


def _check_lane(lane: Any, expected: str) -> None:
    if not isinstance(lane, Lane):
        raise TypeError(f"its lane is {type(lane).__name__}, not a Lane")
    if lane.name != expected:
        raise TypeError(
            f"its lane is that of {lane.name!r}, and its spec says {expected!r}; "
            f"set BackendSpec(framework={lane.name!r})"
        )


def _importable(module: str) -> bool:
    if module in sys.modules:
        return sys.modules[module] is not None
    import importlib.util

    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def is_a(array: Any, dotted: str) -> bool:
    """Whether a value is of a class named by a dotted path, without importing its module."""
    module, _, name = dotted.rpartition(".")
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and isinstance(array, kind)


def with_its_own(function: Callable[..., Any], names: Sequence[str], **arguments: Any) -> Any:
    """Call a hook's implementation, which may name fewer arguments than the hook has."""
    return function(*(arguments[name] for name in names))
