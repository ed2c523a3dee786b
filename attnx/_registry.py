"""The backends and lanes of this process, each loaded when it is first asked for.

A backend that cannot be loaded is remembered as unavailable with its reason, so that a call that
names it says why, again and again, and nobody else is disturbed.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from attnx import _install, _loading, _settings
from attnx._collection import Collection
from attnx._diagnosis import diagnose, say
from attnx._findings import BackendInfo, PluginInfo, Record
from attnx._loading import framework
from attnx._spec_checks import lies
from attnx._watch import SLOW_LOAD, watching
from attnx.errors import ArgumentTypeError, PluginError, UnavailableBackend, UnknownBackend
from attnx.plugin import Backend, BackendSpec, Lane

__all__ = ["BackendInfo", "PluginInfo", "Record", "Registry", "registry"]


class Registry(Collection):
    """The plugins of this process, and what they bring once it is loaded."""

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
            near = _settings.nearest(name, self.names())
            hint = f"; did you mean {near!r}?" if near else ""
            if name.startswith("@"):  # as a compiled program knows it
                hint = "; a compiled program finds a backend object by its name: register it"
            raise UnknownBackend(
                f"backend: no backend {name!r} is registered; there are "
                f"{', '.join(map(repr, self.names()))}{self.blocked(name) or hint}"
            )
        try:
            with watching(listen=False) as watch:
                backend = _loading.load(spec)
        except KeyboardInterrupt:
            raise
        except UnavailableBackend as error:
            return error
        except BaseException as error:
            self.fail_backend(name, "loading failed", error)
            failure = UnavailableBackend(f"backend {name!r}: loading failed: {say(error)}")
            failure.__cause__ = error
            return failure
        self._weigh(spec, "loading it", watch.seconds)
        for detail, remedy in lies(spec, backend.lane, self.specs.values()):
            self._fail(self._about(name, "failed", detail, remedy))
        return backend

    def blocked(self, name: str) -> str:
        """What to say of a plugin that is installed and blocked, or ""."""
        found = [p.name for p in self.plugins if p.name == name and p.status == "blocked"]
        return f"; the plugin {name!r} is blocked by ATTNX_PLUGINS" if found else ""

    def _about(self, backend: str, status: str, detail: str, remedy: str) -> Record:
        distribution, plugin = self._distributions[backend], self._owner[backend]
        return Record(backend, status, detail, remedy, distribution, plugin)

    def _weigh(self, spec: BackendSpec, what: str, seconds: float) -> None:
        if seconds > SLOW_LOAD:
            detail = f"{what} took {seconds:.0f} s"
            remedy = "every process waits so long for its first call: load less"
            record = self._about(spec.name, "warning", detail, remedy)
            self.note(record._replace(seconds=seconds))

    def fail_backend(self, name: str, what: str, error: BaseException) -> None:
        """Record what a registered backend raised, and in what."""
        if name in self.specs:
            cause = diagnose(error, name, self._distributions[name])
            record = self._about(name, "failed", f"{what}: {cause.detail}", cause.remedy)
            self._fail(record, error)

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
                        found.follow(*_install.asked())
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
            with watching(listen=False) as watch:
                lane = _loading.load_lane(spec)
        except (KeyboardInterrupt, UnavailableBackend):
            raise
        except BaseException as error:
            self.fail_backend(spec.name, "the lane failed", error)
            detail = f"the lane failed: {say(error)}"
            raise UnavailableBackend(f"backend {spec.name!r}: {detail}") from error
        self._weigh(spec, "making its lane", watch.seconds)
        return lane

    def native(self, name: str) -> list[str]:
        """Backends that compute in a framework, the owner of its lane first."""
        specs = [spec for spec in self.specs.values() if framework(spec) == name]
        return [spec.name for spec in sorted(specs, key=lambda spec: spec.lane is None)]

    def infos(self) -> tuple[BackendInfo, ...]:
        """What is known of every backend, none of which is taken out meanwhile."""
        with self._lock:
            return tuple(self.info(name) for name in self.names())

    def info(self, name: str) -> BackendInfo:
        """What is known of a backend; loads it."""
        spec = self.specs[name]
        blank = BackendInfo(
            name, "unavailable", None, (), framework(spec), spec.array_types, None, None,
            spec.summary, self._distributions[name],
        )  # fmt: skip
        try:
            backend = self.backend(name)
            devices, version = tuple(backend.devices()), backend.version()
            if not all(isinstance(text, str) for text in (*devices, version)):
                raise TypeError(f"devices() gave {devices!r} and version() {version!r}, not texts")
            return blank._replace(
                status="available" if devices else "unavailable",
                version=version,
                devices=devices,
                capabilities=backend.capabilities,
                reason=None if devices else f"installed, but {backend.no_device()}",
            )
        except UnavailableBackend as error:
            status = "failed" if error.__cause__ is not None else "unavailable"
            return blank._replace(status=status, reason=str(error))
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) or (
                self.settings.strict and isinstance(error, PluginError)
            ):
                raise
            what = "it does not say what it is"
            self.fail_backend(name, what, error)
            return blank._replace(status="failed", reason=f"{what}: {say(error)}")


registry = Registry(_settings.SETTINGS)
_install.install = registry.install
_install.lane = registry.lane
