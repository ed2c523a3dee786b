"""Finding and loading plugins, each by itself, so that a broken one breaks nothing else.

Plugins are collected at the first call, not at import: a scan of the installed distributions costs
milliseconds, and a plugin's module may be slow. Whatever goes wrong in one becomes a record for
`attnx doctor`; under `ATTNX_STRICT_PLUGINS=1` it raises instead.
"""

from __future__ import annotations

import threading
import warnings
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from attnx import _install, _loading, _settings
from attnx._loading import framework, say
from attnx.errors import (
    ArgumentTypeError,
    AttnxWarning,
    PluginError,
    UnavailableBackend,
    UnknownBackend,
)
from attnx.plugin import PROJECT, SUPPORTED_API_VERSIONS, Backend, BackendSpec, Lane, hookspecs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["BackendInfo", "Record", "Registry", "registry"]

GROUP = "attnx"


class Record(NamedTuple):
    """One line of `attnx doctor`.

    Attributes:
        subject: the plugin, backend or setting.
        status: `"ok"`, `"blocked"`, `"unavailable"`, `"refused"`, `"failed"` or `"warning"`.
        detail: what was found.
        remedy: what to do, or "".
        distribution: the distribution that brought it, with its version, or "".
    """

    subject: str
    status: str
    detail: str
    remedy: str = ""
    distribution: str = ""


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


class Registry:
    """The plugins of this process. `generation` changes with every change of what is registered."""

    def __init__(self, settings: _settings.Settings) -> None:
        self.settings = settings
        self.specs: dict[str, BackendSpec] = {}
        self.records: list[Record] = []
        self.generation = 0
        self.on_change: list[Callable[[], None]] = []
        self._distributions: dict[str, str] = {}
        self._owner: dict[str, str] = {}
        self._backends: dict[str, Backend | UnavailableBackend] = {}
        self._lanes: dict[str, Lane] = {}
        self._manager: Any = None
        self._collected = False
        self._lock = threading.RLock()

    @property
    def manager(self) -> Any:
        """The pluggy manager, with every plugin collected.

        Other threads wait while one collects; a plugin that comes here while it is being imported
        sees what has been collected so far.
        """
        if not self._collected:
            with self._lock:
                if self._manager is None:
                    self._collect_or_forget()
        return self._manager

    def implementations(self, hook: str) -> Iterator[tuple[str, Callable[..., Any]]]:
        """Each plugin's implementation of a hook, the last one registered first, as pluggy does.

        One by one, so that the caller decides what becomes of one that raises.
        """
        caller = getattr(self.manager.hook, hook)
        for found in reversed(caller.get_hookimpls()):
            yield found.plugin_name, partial(_loading.with_its_own, found.function, found.argnames)

    def _collect_or_forget(self) -> None:
        """Collect; whatever raises (strict settings, Ctrl-C) leaves nothing half collected."""
        try:
            self._collect()
            self._collected = True
        except BaseException:
            for kept in (self.specs, self._owner, self._distributions, self._backends, self._lanes):
                kept.clear()
            self.records.clear()
            self._manager = None
            raise

    def _collect(self) -> None:
        import importlib.metadata

        import pluggy

        manager = pluggy.PluginManager(PROJECT)
        manager.add_hookspecs(hookspecs())
        self._manager = manager
        found = importlib.metadata.entry_points(group=GROUP)
        # Our own plugins first, so that a third party cannot take their names or lanes.
        for entry in sorted(found, key=lambda e: (not _is_ours(e), e.name)):
            self._load_entry(entry)
        self._check_settings()

    def _load_entry(self, entry: Any) -> None:
        name = entry.name
        distribution = f"{entry.dist.name} {entry.dist.version}" if entry.dist else ""
        allow, block = self.settings.allow, self.settings.block
        if name in block or (allow is not None and name not in allow):
            self._note(Record(name, "blocked", "blocked by ATTNX_PLUGINS", "", distribution))
            return
        try:
            plugin = entry.load()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit and pytest's Skipped included
            self._fail_plugin(name, distribution, error)
            return
        self._register(plugin, name, distribution)

    def _register(self, plugin: Any, name: str, distribution: str) -> None:
        """Register a plugin and ask it alone for its backends."""
        try:
            self._manager.register(plugin, name)
            try:
                self._manager.check_pending()
            except Exception:
                self._manager.unregister(plugin)
                raise
            hook = getattr(plugin, "attnx_backends", None)
            specs = _loading.check_specs([] if hook is None else hook())
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            if self._manager.is_registered(plugin):
                self._manager.unregister(plugin)
            self._fail_plugin(name, distribution, error)
            return
        for spec in specs:
            self._add(spec, name, distribution)
        self._note(Record(name, "ok", f"{len(specs)} backend(s)", "", distribution))
        self._changed()

    def _add(self, spec: BackendSpec, plugin: str, distribution: str) -> None:
        supported = SUPPORTED_API_VERSIONS
        if spec.api_version not in supported:
            detail = (
                f"backend {spec.name!r} was written for version {spec.api_version} of the plugin "
                f"contract; this attnx supports {supported.start} to {supported.stop - 1}"
            )
            self._fail(spec.name, "refused", detail, "update the plugin or attnx", distribution)
        elif spec.name in self.specs:
            detail = f"the name is taken by the plugin {self._owner[spec.name]!r}"
            self._fail(spec.name, "refused", detail, "rename one of them", distribution)
        else:
            self._note_lane(spec, distribution)
            self.specs[spec.name] = spec
            self._owner[spec.name] = plugin
            self._distributions[spec.name] = distribution

    def _note_lane(self, spec: BackendSpec, distribution: str) -> None:
        """The first spec with a lane owns an array type; a second one is told of, and not asked."""
        for other in self.specs.values():
            shared = set(spec.array_types) & set(other.array_types)
            if spec.lane is not None and other.lane is not None and shared:
                detail = f"the lane of {', '.join(sorted(shared))} belongs to {other.name!r}"
                remedy = f"leave the spec's lane out and set framework={other.name!r}"
                self._note(Record(spec.name, "warning", detail, remedy, distribution))

    def _note(self, record: Record) -> None:
        if record not in self.records:
            self.records.append(record)

    def _fail(
        self, subject: str, status: str, detail: str, remedy: str, distribution: str,
        error: BaseException | None = None,
    ) -> None:  # fmt: skip
        self._note(Record(subject, status, detail, remedy, distribution))
        if self.settings.strict:
            raise PluginError(f"plugin {subject!r}: {detail}; {remedy}") from error

    def _fail_plugin(self, name: str, distribution: str, error: BaseException) -> None:
        remedy = f"repair or uninstall {name}"
        self._fail(name, "failed", say(error), remedy, distribution, error)

    def _check_settings(self) -> None:
        declared = [name for spec in self.specs.values() for name in spec.settings]
        for name, near in _settings.unknown(self.settings, declared):
            hint = f"; did you mean {near}?" if near else ""
            self._note(Record(name, "warning", f"unknown setting{hint}", "unset or correct it"))
            if self.settings.strict:
                raise PluginError(f"{name}: no part of attnx reads it{hint}")
            warnings.warn(f"{name}: no part of attnx reads it{hint}", AttnxWarning, stacklevel=2)

    def _changed(self) -> None:
        self.generation += 1
        for listener in self.on_change:
            listener()

    def register(self, plugin: Any, name: str | None = None) -> None:
        """Register a plugin by hand, as an entry point would; here its faults raise."""
        with self._lock:
            manager = self.manager
            name = name or getattr(plugin, "__name__", None) or type(plugin).__name__
            if manager.is_registered(plugin) or manager.has_plugin(name):
                raise PluginError(f"plugin {name!r} is registered already")
            before = len(self.records)
            self._register(plugin, name, "")
            faults = [r for r in self.records[before:] if r.status in ("failed", "refused")]
            if faults:
                raise PluginError("; ".join(f"plugin {name!r}: {r.detail}" for r in faults))

    def unregister(self, name: str) -> None:
        """Take a plugin and its backends out again."""
        with self._lock:
            if self.manager.unregister(name=name) is None:
                raise UnknownBackend(f"no plugin {name!r} is registered")
            for backend in [b for b, owner in self._owner.items() if owner == name]:
                spec = self.specs.pop(backend)
                del self._owner[backend], self._distributions[backend]
                self._backends.pop(backend, None)
                if spec.lane is not None:
                    self._lanes.pop(framework(spec), None)
                    _install.followers.pop(framework(spec), None)
            self.records = [r for r in self.records if r.subject != name]
            self._changed()

    def names(self) -> list[str]:
        """Every registered backend."""
        _ = self.manager
        return sorted(self.specs)

    def backend(self, name: str) -> Backend:
        """Load a backend, once.

        Raises:
            UnknownBackend: nobody registered that name.
            UnavailableBackend: its framework or device is missing, or its plugin fails.
        """
        _ = self.manager
        if not isinstance(name, str):
            raise ArgumentTypeError(f"backend: expected a name, got {type(name).__name__}")
        loaded = self._backends.get(name)
        if loaded is None:
            with self._lock:
                loaded = self._backends.get(name) or self._load(name)
                self._backends[name] = loaded
        if isinstance(loaded, UnavailableBackend):
            raise UnavailableBackend(*loaded.args) from loaded.__cause__
        return loaded

    def _load(self, name: str) -> Backend | UnavailableBackend:
        spec = self.specs.get(name)
        if spec is None:
            import difflib

            near = difflib.get_close_matches(name, self.names(), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UnknownBackend(
                f"backend: no backend {name!r} is registered; there are "
                f"{', '.join(map(repr, self.names()))}{hint}"
            )
        try:
            return _loading.load(spec)
        except KeyboardInterrupt:
            raise
        except UnavailableBackend as error:
            return error
        except BaseException as error:
            detail = f"loading failed: {say(error)}"
            self._fail(name, "failed", detail, "see the cause", self._distributions[name], error)
            failure = UnavailableBackend(f"backend {name!r}: {detail}")
            failure.__cause__ = error
            return failure

    def lane_of(self, array: Any) -> Lane | None:
        """The lane of the framework that an array belongs to, or None."""
        _ = self.manager
        for spec in self.specs.values():
            if spec.lane is not None and any(_loading.is_a(array, t) for t in spec.array_types):
                return self.lane(framework(spec))
        return None

    def lane(self, name: str) -> Lane:
        """The lane of a framework; the first registered spec with one owns it.

        Raises:
            UnavailableBackend: nobody brings it, or its plugin fails.
        """
        _ = self.manager
        found = self._lanes.get(name)
        if found is None:
            with self._lock:
                for spec in self.specs.values():
                    if spec.lane is not None and framework(spec) == name:
                        found = self._lanes[name] = self._load_lane(spec)
                        found.follow(*_install.current())
                        _install.followers[name] = found.follow
                        break
        if found is None:
            raise UnavailableBackend(f"no registered backend brings a lane for {name!r}")
        return found

    def install(self, name: str) -> None:
        """Make a framework's lane before its arrays come, if anybody brings it."""
        with suppress(UnavailableBackend):
            self.lane(name)

    def _load_lane(self, spec: BackendSpec) -> Lane:
        try:
            return _loading.load_lane(spec)
        except (KeyboardInterrupt, UnavailableBackend):
            raise
        except BaseException as error:
            detail = f"the lane failed: {say(error)}"
            distribution = self._distributions[spec.name]
            self._fail(spec.name, "failed", detail, "see the cause", distribution, error)
            raise UnavailableBackend(f"backend {spec.name!r}: {detail}") from error

    def native(self, name: str) -> list[str]:
        """Backends that compute in a framework, the owner of its lane first."""
        names = [n for n, s in self.specs.items() if framework(s) == name]
        return sorted(names, key=lambda n: self.specs[n].lane is None)

    def info(self, name: str) -> BackendInfo:
        """What is known of a backend; loads it."""
        spec = self.specs[name]
        blank = BackendInfo(
            name, "unavailable", None, (), framework(spec), spec.array_types, None, None,
            spec.summary, self._distributions[name],
        )  # fmt: skip
        try:
            backend = self.backend(name)
            devices = tuple(backend.devices())
            return blank._replace(
                status="available" if devices else "unavailable",
                version=backend.version(),
                devices=devices,
                capabilities=backend.capabilities,
                reason=None if devices else f"installed, but {backend.no_device()}",
            )
        except KeyboardInterrupt:
            raise
        except UnavailableBackend as error:
            status = "failed" if error.__cause__ is not None else "unavailable"
            return blank._replace(status=status, reason=str(error))
        except BaseException as error:
            detail = f"it does not say what it is: {say(error)}"
            self._fail(name, "failed", detail, "see the cause", self._distributions[name], error)
            return blank._replace(status="failed", reason=detail)


def _is_ours(entry: Any) -> bool:
    return entry.dist is not None and entry.dist.name == PROJECT


registry = Registry(_settings.SETTINGS)
_install.install = registry.install
_install.lane = registry.lane
