"""Every kind of broken plugin leaves the others working, and is told of with cause and remedy."""

from __future__ import annotations

import importlib.metadata
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attnx
from attnx import _collection, _entries, plugin
from attnx._collection import Collection
from attnx._entries import Entry
from attnx._registry import Registry, registry
from attnx._settings import read
from attnx.errors import AttnxWarning, PluginError, UnknownBackend

Collect = Callable[..., Registry]
x = np.ones((3, 4), np.float32)


class Module(types.SimpleNamespace):
    """A plugin's module."""


def module(*specs: plugin.BackendSpec, **hooks: Callable[..., Any]) -> Module:
    hooks = {"attnx_backends": lambda: list(specs), **hooks} if specs else hooks
    return Module(**{name: plugin.hookimpl(hook) for name, hook in hooks.items()})


def spec(name: str, **fields: Any) -> plugin.BackendSpec:
    return plugin.BackendSpec(**({"name": name, "load": lambda: None} | fields))


def entry(name: str, made: Any = None, distribution: str = "") -> Entry:
    def load() -> Any:
        if isinstance(made, BaseException):
            raise made
        return made() if callable(made) else made

    return Entry(name, f"attnx_{name}", distribution or f"attnx-{name} 1.0", load)


GOOD = entry("good", module(spec("good")))


@pytest.fixture
def collect(monkeypatch: pytest.MonkeyPatch) -> Collect:
    """`collect(entry, …, ATTNX_PLUGINS=…)`: a registry of those installed plugins alone."""

    def collect(*installed: Entry, listening: bool = False, **variables: str) -> Registry:
        monkeypatch.setattr(_collection, "entries", lambda: (list(installed), []))
        made = Registry(read(variables))
        made.listening = listening
        return made

    return collect


@pytest.fixture(autouse=True)
def unchanged() -> Iterator[None]:
    """The process's own registry is as it was."""
    registry.names()
    before, plugins = list(registry.records), list(registry.plugins)
    yield
    registry.records, registry.plugins = before, plugins


def told(found: Collection, subject: str, status: str = "failed") -> Any:
    (record,) = [r for r in found.records if r.subject == subject and r.status == status]
    assert "\n" not in record.detail + record.remedy
    assert record.remedy
    return record


class Unreadable(Exception):
    """An error whose message is made by code that fails."""

    def __str__(self) -> str:
        raise RuntimeError


def raiser(error: BaseException) -> Callable[..., Any]:
    def hook(**_: Any) -> Any:
        raise error

    return hook


BROKEN = {
    "import": entry("bad", ModuleNotFoundError("No module named 'mlx'", name="mlx")),
    "abi": entry("bad", ValueError("numpy.dtype size changed, may indicate")),
    "exit": entry("bad", SystemExit(3)),
    "hook": entry("bad", module(attnx_backends=lambda: 1 // 0)),
    "unreadable": entry("bad", Unreadable()),
    "misspelt hook": entry("bad", module(attnx_bakends=lambda: None)),
    "hook arguments": entry("bad", module(attnx_planned=lambda nothing: None)),
    "no spec": entry("bad", module(attnx_backends=lambda: ["numpy"])),
    "version": entry("bad", module(spec("bad", api_version=99))),
    "plugin's name": entry("good", module(spec("bad")), "attnx-bad 2.0"),
    "backend's name": entry("bad", module(spec("good"))),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_plugin_is_named_with_its_distribution_cause_and_remedy(
    kind: str, collect: Collect
) -> None:
    broken = BROKEN[kind]
    found = collect(GOOD, broken)
    assert found.names() == ["good"]
    (record,) = [r for r in found.records if r.status in ("failed", "refused")]
    assert record.distribution == broken.distribution
    assert record.plugin == broken.name
    assert record.remedy
    assert found.records[0].status == "ok"
    if record.status == "failed":
        assert not found.manager.has_plugin(broken.name)


@pytest.mark.parametrize("kind", BROKEN)
def test_strict_settings_raise_it_with_plugin_remedy_and_cause_and_keep_nothing(
    kind: str, collect: Collect
) -> None:
    broken = BROKEN[kind]
    told = next(r for r in _records(collect(GOOD, broken)) if r.status in ("failed", "refused"))
    found = collect(GOOD, broken, ATTNX_STRICT_PLUGINS="1")
    for _ in range(2):
        with pytest.raises(PluginError, match=f"^plugin '{broken.name}': ") as caught:
            found.names()
        assert told.detail in str(caught.value)
        assert str(caught.value).endswith(told.remedy)
        assert (caught.value.__cause__ is not None) == bool(told.traceback)
        assert (found.specs, found.records, found.plugins) == ({}, [], [])


def _records(found: Registry) -> list[Any]:
    found.names()
    return found.records


def test_whoever_asks_what_is_wrong_is_told_it_under_strict_settings_too(collect: Collect) -> None:
    found = collect(GOOD, BROKEN["abi"], ATTNX_STRICT_PLUGINS="1")
    with found.tolerant():
        assert found.names() == ["good"]
    assert told(found, "bad").detail.startswith("ABI error (built for another NumPy): ")
    assert found.settings.strict


def test_an_unmarked_hook_is_told_of(collect: Collect) -> None:
    """pluggy passes over it without a word."""
    silent = module(spec("silent"))
    silent.attnx_rank = lambda call, candidates: candidates
    silent.attnx_plan = lambda: None
    found = collect(entry("silent", silent), entry("empty", Module()))
    found.names()
    details = [r.detail for r in found.records if r.status == "warning"]
    assert details == [
        "attnx_plan is no hook of attnx; did you mean attnx_planned?",
        "attnx_rank is not marked as a hook, so that it is never asked",
        "it implements no hook of attnx",
    ]


def test_a_plugin_that_imports_a_framework_is_told_which(
    collect: Collect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "tinygrad", raising=False)

    def load() -> Module:
        monkeypatch.setitem(sys.modules, "tinygrad", types.ModuleType("tinygrad"))
        return module(spec("heavy"))

    found = collect(entry("heavy", load))
    assert found.names() == ["heavy"]
    record = told(found, "heavy", "warning")
    assert record.detail.endswith(" s and imported tinygrad")
    assert record.remedy == "import tinygrad in BackendSpec.load, not with the plugin"
    assert record.seconds >= 0


def test_a_slow_import_is_told_of_with_its_seconds(
    collect: Collect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnx._watch.SLOW_IMPORT", -1.0)
    found = collect(GOOD)
    found.names()
    assert "finding its backends took 0.0 s" in told(found, "good", "warning").detail


def test_the_command_hears_what_a_plugin_prints_and_warns(
    collect: Collect, capsys: pytest.CaptureFixture[str]
) -> None:
    def load() -> Module:
        print("hello\nthere")
        warnings.warn("old", DeprecationWarning, stacklevel=1)
        return module(spec("loud"))

    found = collect(entry("loud", load), listening=True)
    assert found.names() == ["loud"]
    assert [r.detail for r in found.records if r.status == "warning"] == [
        "it prints when it is imported: 'hello'",
        "it warns when it is imported: DeprecationWarning: old",
    ]
    assert capsys.readouterr().out == ""


def test_in_a_users_process_warnings_are_the_users_and_may_be_errors(collect: Collect) -> None:
    def load() -> Module:
        warnings.warn("old", DeprecationWarning, stacklevel=1)
        return module(spec("loud"))

    found = collect(GOOD, entry("loud", load))
    assert found.names() == ["good"]
    assert "turns into an error" in told(found, "loud").remedy


def test_a_distribution_without_a_name_has_none_in_the_records(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its folder may have lost its metadata; the name is not "None" then."""
    info = tmp_path / "attnx_bare-1.dist-info"
    info.mkdir()
    (info / "entry_points.txt").write_text("[attnx]\nbare = attnx_bare\n", "utf-8")
    points = list(importlib.metadata.PathDistribution(info).entry_points)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points)
    (found,), records = _entries.entries()
    assert (found.name, found.distribution, records) == ("bare", "", [])


def test_metadata_that_cannot_be_read_hides_no_other_plugin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`importlib.metadata.entry_points` raises for all of them."""

    class Spoilt(importlib.metadata.PathDistribution):
        def __init__(self) -> None: ...

        @property
        def metadata(self) -> Any:
            return {"Name": "attnx-spoilt"}

        @property
        def entry_points(self) -> Any:
            raise UnicodeDecodeError("utf-8", b"", 0, 1, "no")

    real = list(importlib.metadata.distributions(name="attnx"))
    monkeypatch.setattr(importlib.metadata, "entry_points", raiser(TypeError("no pair")))
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: [Spoilt(), *real])
    found, (record,) = _entries.entries()
    assert {"numpy", "torch", "jax"} <= {e.name for e in found}
    assert (record.subject, record.status) == ("attnx-spoilt", "failed")
    assert record.remedy == "pip install --force-reinstall attnx-spoilt"


ALLOWED = {
    "good": ["good"], " good , ,other": ["good", "other"], "-other": ["good"],
    "- other": ["good"], "good,-good": [], "good,good": ["good"], "-": ["good", "other"],
    "-good,-other": [], "good,-other": ["good"],
}  # fmt: skip


@pytest.mark.parametrize("given", ALLOWED)
def test_plugins_are_allowed_and_blocked(given: str, collect: Collect) -> None:
    found = collect(GOOD, entry("other", module(spec("other"))), ATTNX_PLUGINS=given)
    assert found.names() == ALLOWED[given]
    blocked = {r.subject for r in found.records if r.status == "blocked"}
    assert blocked == {"good", "other"} - set(ALLOWED[given])
    if blocked:
        name = min(blocked)
        with pytest.raises(
            UnknownBackend, match=f"the plugin '{name}' is blocked by ATTNX_PLUGINS"
        ):
            found.backend(name)


@pytest.mark.parametrize("given", ["goood", "-goood"])
def test_a_name_that_no_plugin_has_is_told_of_with_the_nearest(
    given: str, collect: Collect
) -> None:
    """A block is harmless where there is nothing to block; an allowed plugin was wanted."""
    found = collect(GOOD, ATTNX_PLUGINS=given)
    found.names()
    record = told(found, "ATTNX_PLUGINS", "warning")
    assert record[2:4] == ("no installed plugin is called 'goood'", "did you mean good?")
    strict = collect(GOOD, ATTNX_PLUGINS=given, ATTNX_STRICT_PLUGINS="1")
    if given.startswith("-"):
        assert strict.names() == ["good"]
    else:
        with pytest.raises(PluginError, match=r"ATTNX_PLUGINS: .* did you mean good\?"):
            strict.names()


def test_a_plugin_registered_by_hand_is_not_asked_about(collect: Collect) -> None:
    found = collect(GOOD, ATTNX_PLUGINS="good")
    found.register(module(spec("mine")), "mine")
    assert found.names() == ["good", "mine"]


def test_registering_by_hand_is_all_or_nothing_and_has_its_cause(collect: Collect) -> None:
    found = collect(GOOD)
    with pytest.raises(PluginError, match="the name is taken by the plugin 'good' of attnx-good"):
        found.register(module(spec("mine"), spec("good")), "mine")
    assert found.names() == ["good"]
    with pytest.raises(PluginError, match="OSError: no") as caught:
        found.register(module(attnx_backends=raiser(OSError("no"))), "mine")
    assert isinstance(caught.value.__cause__, OSError)
    found.register(module(spec("mine")), "mine")
    assert [r.status for r in found.records if r.plugin == "mine"] == ["ok"]


def test_an_unknown_setting_is_left_to_the_record_where_the_command_listens(
    collect: Collect,
) -> None:
    """Warnings may be errors there, and must not end the doctor."""
    found = collect(GOOD, listening=True, ATTNX_BACKND="numpy")
    assert found.names() == ["good"]
    assert told(found, "ATTNX_BACKND", "warning").detail.endswith("did you mean ATTNX_BACKEND?")


def test_settings_that_collide_are_told_of(collect: Collect) -> None:
    one = entry("one", module(spec("one", settings=("ATTNX_ONE", "ATTNX_PLUGINS", "HOME"))))
    two = entry("two", module(spec("two", settings=("ATTNX_ONE",))))
    found = collect(one, two, ATTNX_ONE="1")
    found.names()
    assert [(r.subject, r.detail) for r in found.records if r.status == "warning"] == [
        ("one", "declares the setting ATTNX_PLUGINS, which attnx itself reads"),
        ("one", "declares the setting 'HOME', not an ATTNX_* name"),
        ("two", "declares the setting ATTNX_ONE, which 'one' declares too"),
    ]


def test_a_blocked_framework_is_named_where_its_arrays_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`ATTNX_PLUGINS=-numpy` takes the lane away with the backend."""
    blocked = attnx._registry.PluginInfo("elsewhere", "", "", "blocked")
    monkeypatch.setattr(registry, "plugins", [blocked])

    class Array:
        __module__ = "elsewhere.core"

    with pytest.raises(attnx.errors.ArgumentTypeError, match="'elsewhere' is blocked by ATTNX_PLU"):
        attnx.attention(Array(), Array(), Array())


HOOKS = {"attnx_rank": raiser(OSError("no")), "attnx_planned": raiser(SystemExit(2))}


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_that_raises_at_a_call_warns_and_is_recorded_once(
    hook: str, plug: Callable[..., None]
) -> None:
    plug("noisy", **{hook: HOOKS[hook]})
    for length in (5, 6):
        with pytest.warns(AttnxWarning, match=f"{hook} of 'noisy' failed"):
            assert attnx.attention(*[np.ones((2, 1, length, 4 + length), np.float32)] * 3).any()
    record = told(registry, "noisy")
    assert record.detail.startswith(f"{hook}: ")
    assert record.remedy == f"repair {hook} of noisy"
    assert "raise error" in record.traceback


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_that_raises_at_a_call_raises_under_strict_settings(
    hook: str, plug: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plug("noisy", **{hook: HOOKS[hook]})
    monkeypatch.setattr(registry, "settings", registry.settings._replace(strict=True))
    with pytest.raises(PluginError, match=f"plugin 'noisy': {hook}: "):
        attnx.attention(*[np.ones((2, 1, 7, 13), np.float32)] * 3)
