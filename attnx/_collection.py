"""Finding and registering plugins, each by itself, so that a broken one breaks nothing else.

Plugins are collected at the first call, not at import: a scan of the installed distributions costs
milliseconds, and a plugin's module may be slow. Whatever goes wrong in one becomes a record for
`attnx doctor`; under `ATTNX_STRICT_PLUGINS=1` it raises instead.
"""

from __future__ import annotations

import threading
import warnings
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from attnx import _install, _loading, _settings
from attnx._diagnosis import diagnose, say, traceback_of
from attnx._entries import Entry, entries
from attnx._findings import FAILURES, PluginInfo, Record, same
from attnx._hooks import Hooks, hooks_of
from attnx._loading import framework
from attnx._spec_checks import rivals, settings_claimed
from attnx._watch import Watch, watching
from attnx.errors import AttnxWarning, PluginError, UnavailableBackend, UnknownBackend
from attnx.plugin import PROJECT, Backend, BackendSpec, Lane, hookspecs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Collection"]


class _Source(NamedTuple):
    """Where a plugin comes from."""

    name: str
    target: str = ""
    distribution: str = ""


class Collection:
    """What has been registered, by whom, and what was found on the way.

    Attributes:
        generation: changes with every change of what may be chosen: of backends and of policies.
        policy: makes the plugin that `ATTNX_POLICY` asks for, if it is set.
        listening: whether what plugins print and warn is kept for the record (see `_watch`).
    """

    def __init__(self, settings: _settings.Settings) -> None:
        self.settings = settings
        self.specs: dict[str, BackendSpec] = {}
        self.plugins: list[PluginInfo] = []
        self.records: list[Record] = []
        self.generation = 0
        self.policy: Callable[[], Any] | None = None
        self.listening = False
        self.on_change: list[Callable[[], None]] = []
        self._distributions: dict[str, str] = {}
        self._owner: dict[str, str] = {}
        self._backends: dict[str, Backend | UnavailableBackend] = {}
        self._lanes: dict[str, Lane] = {}
        self._causes: list[BaseException] = []
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

    @contextmanager
    def tolerant(self) -> Iterator[None]:
        """Record what strict settings would raise: whoever asks what is wrong wants all of it."""
        with self._lock:
            before, self.settings = self.settings, self.settings._replace(strict=False)
            try:
                yield
            finally:
                self.settings = before

    def implementations(self, hook: str) -> Iterator[tuple[str, Callable[..., Any]]]:
        """Each plugin's implementation of a hook, the last one registered first, as pluggy does.

        One by one, so that the caller decides what becomes of one that raises; it is recorded.
        """
        caller = getattr(self.manager.hook, hook)
        for found in reversed(caller.get_hookimpls()):
            ask = partial(_loading.with_its_own, found.function, found.argnames)
            yield found.plugin_name, partial(self._asked, found.plugin_name, hook, ask)

    def _asked(self, plugin: str, hook: str, ask: Callable[..., Any], **arguments: Any) -> Any:
        try:
            return ask(**arguments)
        except (Exception, SystemExit) as error:
            self.fail_hook(plugin, hook, say(error), error)
            if isinstance(error, SystemExit):
                raise PluginError(f"plugin {plugin!r}: {hook} raised {say(error)}") from error
            raise

    def fail_hook(
        self, plugin: str, hook: str, what: str, error: BaseException | None = None
    ) -> None:
        """Record that a hook raised, or gave what it must not give."""
        distribution = self._origin(plugin)
        remedy = f"repair {hook} of {plugin}, or block it: ATTNX_PLUGINS=-{plugin}"
        if not distribution:
            remedy = f"repair {hook} of {plugin}"
        self._fail(Record(plugin, "failed", f"{hook}: {what}", remedy, distribution, plugin), error)

    def _origin(self, plugin: str) -> str:
        return next((p.distribution for p in self.plugins if p.name == plugin), "")

    def owner(self, backend: str) -> str:
        """The plugin that brought a backend."""
        return self._owner.get(backend, "")

    def _collect_or_forget(self) -> None:
        """Collect; whatever raises (strict settings, Ctrl-C) leaves nothing half collected."""
        try:
            self._collect()
            self._collected = True
        except BaseException:
            for kept in (self.specs, self._owner, self._distributions, self._backends, self._lanes):
                kept.clear()
            self.records.clear()
            self.plugins.clear()
            self._manager = None
            raise

    def _collect(self) -> None:
        import pluggy

        manager = pluggy.PluginManager(PROJECT)
        manager.add_hookspecs(hookspecs())
        self._manager = manager
        found, unreadable = entries()
        for record in unreadable:
            self._fail(record)
        for entry in found:
            self._load_entry(entry)
        if self.policy is not None:
            policy = self.policy()
            self._register(_Source("ATTNX_POLICY"), lambda: policy)
        self._check_names([entry.name for entry in found])
        self._check_settings()

    def _load_entry(self, entry: Entry) -> None:
        name, target, distribution, load = entry
        source = _Source(name, target, distribution)
        if self.settings.blocks(name):
            self._found(source, "blocked")
            remedy = f"take -{name} out of ATTNX_PLUGINS"
            if name not in self.settings.block:
                remedy = f"name {name} in ATTNX_PLUGINS"
            detail = "blocked by ATTNX_PLUGINS"
            self.note(Record(name, "blocked", detail, remedy, distribution, name))
        elif self._manager.has_plugin(name):
            owner = self._origin(name)
            self._found(source, "refused")
            detail = f"the plugin name {name!r} is taken by {owner or 'a plugin of this process'}"
            remedy = f"uninstall {owner.split(' ')[0] or 'it'} or {distribution.split(' ')[0]}"
            self._fail(Record(name, "refused", detail, remedy, distribution, name))
        else:
            self._register(source, load)

    def _register(self, source: _Source, make: Callable[[], Any]) -> None:
        """Register a plugin and ask it alone for its backends."""
        name, target, distribution = source
        watch = Watch()
        try:
            with watching(self.listening) as watch:
                plugin = make()
                hooks = hooks_of(plugin, self._manager)
                self._manager.register(plugin, name)
                self._manager.check_pending()
                hook = getattr(plugin, "attnx_backends", None)
                specs = _loading.check_specs([] if hook is None else hook())
        except KeyboardInterrupt:
            self._manager.unregister(name=name)
            raise
        except BaseException as error:  # SystemExit and pytest's Skipped included
            self._manager.unregister(name=name)
            self._found(source, "failed", watch=watch)
            cause = diagnose(error, name, distribution, target)
            self._fail(Record(name, "failed", *cause, distribution, name, watch.seconds), error)
            return
        self._found(source, "ok", specs, hooks, watch)
        for spec in specs:
            self._add(spec, source)
        detail = f"{len(specs)} backend(s)"
        self.note(Record(name, "ok", detail, "", distribution, name, watch.seconds))
        for detail, remedy in (*hooks.complaints, *watch.complaints()):
            record = Record(name, "warning", detail, remedy, distribution, name, watch.seconds)
            self.note(record)
        self._changed(plugin)

    def _found(
        self, source: _Source, status: str, specs: list[BackendSpec] | None = None,
        hooks: Hooks | None = None, watch: Watch | None = None,
    ) -> None:  # fmt: skip
        backends = tuple(spec.name for spec in specs or ())
        names = () if hooks is None else hooks.names
        seconds = None if watch is None else watch.seconds
        self.plugins.append(PluginInfo(
            source.name, source.target, source.distribution, status, backends, names, seconds
        ))  # fmt: skip

    def _add(self, spec: BackendSpec, source: _Source) -> None:
        name, where = spec.name, (source.distribution, source.name)
        wrong = _loading.other_version(spec)
        if wrong is not None:
            self._fail(Record(name, "refused", *wrong, *where))
        elif name in self.specs:
            owner = self._owner[name]
            detail = f"the name is taken by the plugin {owner!r}"
            origin = self._distributions[name]
            detail += f" of {origin}" if origin else ""
            remedy = f"rename the backend of {source.name!r}, or block one of the two plugins"
            self._fail(Record(name, "refused", detail, remedy, *where))
        else:
            for detail, remedy in rivals(spec, self.specs.values()):
                self.note(Record(name, "warning", detail, remedy, *where))
            self._owner[name] = source.name
            self._distributions[name] = source.distribution
            self.specs = {**self.specs, name: spec}  # anew: other threads may go through it

    def note(self, record: Record) -> None:
        """Keep a record, once."""
        if not any(same(record, other) for other in self.records):
            self.records.append(record)

    def _fail(self, record: Record, error: BaseException | None = None) -> None:
        """Record a failure; raise it under strict settings."""
        if error is not None:
            record = record._replace(traceback=traceback_of(error))
            self._causes[:] = [error]
        self.note(record)
        if self.settings.strict:
            who = record.plugin or record.subject
            of = "" if record.subject == who else f"backend {record.subject!r}: "
            of = "" if record.detail.startswith("backend ") else of
            raise PluginError(f"plugin {who!r}: {of}{record.detail}; {record.remedy}") from error

    def _check_names(self, names: list[str]) -> None:
        """Names in `ATTNX_PLUGINS` that no installed plugin has."""
        allow, block = self.settings.allow or frozenset(), self.settings.block
        for name in sorted((allow | block) - set(names)):
            near = _settings.nearest(name, names)
            detail = f"no installed plugin is called {name!r}"
            remedy = f"did you mean {near}?" if near else f"there are {', '.join(names)}"
            self.note(Record("ATTNX_PLUGINS", "warning", detail, remedy))
            if self.settings.strict and name in allow:
                raise PluginError(f"ATTNX_PLUGINS: {detail}; {remedy}")
        for name in sorted(allow & block):
            detail = f"{name} is allowed and blocked, so it is blocked"
            self.note(Record("ATTNX_PLUGINS", "warning", detail, "name it once"))

    def _check_settings(self) -> None:
        for name, detail, remedy in settings_claimed(self.specs.values()):
            distribution, plugin = self._distributions[name], self._owner[name]
            self.note(Record(name, "warning", detail, remedy, distribution, plugin))
        declared = [name for spec in self.specs.values() for name in spec.settings]
        for name, near in _settings.unknown(self.settings, declared):
            hint = f"; did you mean {near}?" if near else ""
            self.note(Record(name, "warning", f"unknown setting{hint}", "unset or correct it"))
            if self.settings.strict:
                raise PluginError(f"{name}: no part of attnx reads it{hint}")
            if not self.listening:  # who listens reads the record
                warnings.warn(
                    f"{name}: no part of attnx reads it{hint}", AttnxWarning, stacklevel=2
                )

    def _changed(self, plugin: Any) -> None:
        """Plans are made anew; compiled programs too, unless the plugin only observes."""
        ranks = hasattr(plugin, "attnx_rank")
        if ranks or hasattr(plugin, "attnx_backends"):
            self.generation += 1
        if ranks:
            _install.ranked()
        for listener in self.on_change:
            listener()

    def register(self, plugin: Any, name: str | None = None) -> None:
        """Register a plugin by hand, as an entry point would; here its faults raise.

        `ATTNX_PLUGINS` has no say in it: who registers a plugin by hand names it himself.
        """
        with self._lock:
            manager = self.manager
            name = name or getattr(plugin, "__name__", None) or type(plugin).__name__
            if manager.is_registered(plugin) or manager.has_plugin(name):
                raise PluginError(f"plugin {name!r} is registered already")
            self._drop_records(name)
            before = len(self.records)
            self._causes.clear()
            with self.tolerant():
                self._register(_Source(name), lambda: plugin)
            faults = [r for r in self.records[before:] if r.status in FAILURES]
            if faults:
                if manager.has_plugin(name):
                    self._take_out(name)
                told = "; ".join(f"plugin {name!r}: {r.detail}; {r.remedy}" for r in faults)
                raise PluginError(told) from next(iter(self._causes), None)

    def unregister(self, name: str) -> None:
        """Take a plugin and its backends out again."""
        with self._lock:
            if not self.manager.has_plugin(name):
                raise UnknownBackend(f"no plugin {name!r} is registered")
            self._take_out(name)
            self._drop_records(name)

    def _drop_records(self, name: str) -> None:
        self.records = [r for r in self.records if name not in (r.plugin, r.subject)]
        self.plugins = [p for p in self.plugins if p.name != name]

    def _take_out(self, name: str) -> None:
        plugin = self._manager.unregister(name=name)
        for backend in [b for b, owner in self._owner.items() if owner == name]:
            spec = self.specs[backend]
            self.specs = {n: other for n, other in self.specs.items() if n != backend}
            del self._owner[backend], self._distributions[backend]
            self._backends.pop(backend, None)
            if spec.lane is not None:
                self._lanes.pop(framework(spec), None)
                _install.followers.pop(framework(spec), None)
        self._changed(plugin)

    def names(self) -> list[str]:
        """Every registered backend."""
        _ = self.manager
        return sorted(self.specs)
