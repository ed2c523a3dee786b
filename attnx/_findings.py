"""What the registry found, as records that a person or a bug report can read."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["FAILURES", "BackendInfo", "PluginInfo", "Record", "same"]

FAILURES = ("failed", "refused")
"""The statuses that something is wrong with."""


class Record(NamedTuple):
    """One line of `attnx doctor`.

    Attributes:
        subject: the plugin, backend or setting.
        status: `"ok"`, `"blocked"`, `"unavailable"`, `"refused"`, `"failed"` or `"warning"`.
        detail: what was found.
        remedy: what to do, or "".
        distribution: the distribution that brought it, with its version, or "".
        plugin: the name of the plugin that it is about, or "".
        seconds: how long it took, where that was measured.
        traceback: where it was raised, or "".
    """

    subject: str
    status: str
    detail: str
    remedy: str = ""
    distribution: str = ""
    plugin: str = ""
    seconds: float | None = None
    traceback: str = ""


def same(one: Record, other: Record) -> bool:
    """Whether both say one thing, however long it took and wherever it was raised."""
    return one[:6] == other[:6]


class PluginInfo(NamedTuple):
    """A plugin that was found, whatever became of it.

    Attributes:
        name: of its entry point, or the one it was registered under.
        target: the module that its entry point names, or "".
        distribution: the distribution that brought it, with its version, or "".
        status: `"ok"`, `"blocked"`, `"failed"` or `"refused"`.
        backends: the backends it brought.
        hooks: the hooks it implements.
        seconds: how long it took to import it and to ask it for its backends.
    """

    name: str
    target: str
    distribution: str
    status: str
    backends: tuple[str, ...] = ()
    hooks: tuple[str, ...] = ()
    seconds: float | None = None


class BackendInfo(NamedTuple):
    """One line of `attnx backends`.

    Attributes:
        name: as users write it.
        status: `"available"`, `"unavailable"`, `"refused"` or `"failed"`.
        version: the framework's version, or None.
        devices: where it can compute.
        framework: the framework whose arrays it takes.
        array_types: their dotted names.
        capabilities: its declaration, or None when it could not be loaded.
        reason: why it is not available, or None.
        summary: one line.
        distribution: the distribution that brought it.
    """

    name: str
    status: str
    version: str | None
    devices: tuple[str, ...]
    framework: str
    array_types: tuple[str, ...]
    capabilities: Any
    reason: str | None
    summary: str
    distribution: str
