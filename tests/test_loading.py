"""What a plugin hands over is looked at before anybody builds on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import array_api_strict
import numpy as np
import pytest

import attnx
from attnx import _loading, plugin
from attnx._registry import registry
from attnx.errors import ArgumentTypeError, PluginError, UnavailableBackend, UnknownBackend

Plug = Callable[..., None]
x = np.ones((3, 4), np.float32)


@pytest.fixture(autouse=True)
def unchanged() -> Iterator[None]:
    """What a test adds to the doctor's records is gone after it."""
    before = list(registry.records)
    yield
    registry.records = before


def records(subject: str) -> list[Any]:
    return [record for record in registry.records if record.subject == subject]


def works() -> None:
    """Everybody else goes on."""
    assert attnx.attention(x, x, x).shape == (3, 4)
    assert attnx.explain(x, x, x).choice == "numpy"
    assert "numpy" in [info.name for info in attnx.backends() if info.status == "available"]


def spec(name: str = "bad", **fields: Any) -> plugin.BackendSpec:
    given: dict[str, Any] = {"name": name, "load": lambda: None}
    return plugin.BackendSpec(**(given | fields))


def raising(error: BaseException) -> Callable[..., Any]:
    def hook(*_: Any) -> Any:
        raise error

    return hook


@pytest.mark.parametrize(
    ("hook", "detail"),
    [
        (raising(OSError("no")), "OSError: no"), (raising(SystemExit(2)), "SystemExit: 2"),
        (lambda: None, "TypeError: 'NoneType' object is not iterable"),
        (lambda: [spec(), 3], "TypeError: attnx_backends: expected BackendSpec objects, got int"),
        (lambda: spec(), "TypeError: attnx_backends: expected BackendSpec objects, got str"),
        (lambda: [spec(name=3)], "TypeError: BackendSpec.name: got 3 in 3"),
        (lambda: [spec(name="")], "TypeError: BackendSpec.name: got '' in ''"),
        (lambda: [spec(name=["bad"])], "TypeError: BackendSpec.name: got ['bad'] in ['bad']"),
        (lambda: [spec(load=None)], "TypeError: BackendSpec.load: got None in 'bad'"),
        (lambda: [spec(lane=3)], "TypeError: BackendSpec.lane: got 3 in 'bad'"),
        (
            lambda: [spec(array_types="numpy.ndarray")],
            "TypeError: BackendSpec.array_types: got 'numpy.ndarray' in 'bad'",
        ),
        (lambda: [spec(array_types=None)], "TypeError: BackendSpec.array_types: got None in 'bad'"),
        (lambda: [spec(requires=(1,))], "TypeError: BackendSpec.requires: got (1,) in 'bad'"),
        (lambda: [spec(settings=None)], "TypeError: BackendSpec.settings: got None in 'bad'"),
        (lambda: [spec(framework=None)], "TypeError: BackendSpec.framework: got None in 'bad'"),
        (lambda: [spec(api_version="1")], "TypeError: BackendSpec.api_version: got '1' in 'bad'"),
        (lambda: [spec(api_version=True)], "TypeError: BackendSpec.api_version: got True in 'bad'"),
        (lambda: [spec(api_version=1.0)], "TypeError: BackendSpec.api_version: got 1.0 in 'bad'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_plugin_that_hands_over_nonsense_is_left_out_whole(
    hook: Callable[..., Any], detail: str, plug: Plug
) -> None:
    names = registry.names()
    with pytest.raises(PluginError, match="plugin 'nonsense'"):
        plug("nonsense", attnx_backends=hook)
    (record,) = records("nonsense")
    assert (record.status, record.detail) == ("failed", detail)
    assert registry.names() == names
    assert not registry.manager.has_plugin("nonsense")
    works()


def test_ctrl_c_in_a_hook_is_not_swallowed(plug: Plug) -> None:
    with pytest.raises(KeyboardInterrupt):
        plug("interrupted", attnx_backends=raising(KeyboardInterrupt()))
    registry.manager.unregister(name="interrupted")


@pytest.mark.parametrize(("version", "remedy"), [(0, "update the plugin"), (99, "update attnx")])
def test_another_version_of_the_contract_is_refused_with_both_numbers(
    version: int, remedy: str, plug: Plug
) -> None:
    with pytest.raises(PluginError, match="plugin 'future'"):
        plug("future", spec(api_version=version))
    (record,) = records("bad")
    assert (record.status, record.remedy) == ("refused", remedy)
    assert record.detail == (
        f"backend 'bad' was written for version {version} of the plugin contract; this attnx "
        "supports version 1"
    )
    with pytest.raises(UnknownBackend):
        attnx.get_backend("bad")


def test_a_plugin_that_names_no_version_stays_with_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As it will be when there are two: who wrote for version 1 need not have said so."""
    monkeypatch.setattr(_loading, "SUPPORTED_API_VERSIONS", range(1, 3))
    assert spec().api_version == 1
    assert _loading.other_version(spec()) is None
    assert _loading.other_version(spec(api_version=2)) is None
    detail, remedy = _loading.other_version(spec(api_version=3)) or ("", "")
    assert detail.endswith("version 3 of the plugin contract; this attnx supports versions 1 to 2")
    assert remedy == "update attnx"


def wrong_lane() -> Any:
    backend = plugin.Backend()
    backend.capabilities = plugin.Capabilities(dtypes=frozenset())
    backend.lane = attnx.get_backend("numpy").lane
    return backend


def without_capabilities() -> Any:
    backend = plugin.Backend()
    backend.lane = attnx.get_backend("numpy").lane
    return backend


@pytest.mark.parametrize(
    ("load", "detail"),
    [
        (raising(RuntimeError("no\nluck")), "loading failed: RuntimeError: no"),
        (raising(SystemExit(1)), "loading failed: SystemExit: 1"),
        (raising(ImportError("libcuda")), "loading failed: ImportError: libcuda"),
        (lambda: None, "loading failed: TypeError: load() returned NoneType, not a Backend"),
        (lambda: plugin.Backend, "loading failed: TypeError: load() returned type, not a Backend"),
        (
            without_capabilities,
            "loading failed: AttributeError: 'Backend' object has no attribute 'capabilities'",
        ),
        (
            wrong_lane,
            "loading failed: TypeError: its lane is that of 'numpy', and its spec says 'bad'; set "
            "BackendSpec(framework='numpy')",
        ),
        (
            lambda argument: argument,
            "loading failed: TypeError: test_registry.<lambda>() missing 1 required positional",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_backend_that_cannot_be_loaded_is_unavailable_with_its_reason(
    load: Callable[..., Any], detail: str, plug: Plug
) -> None:
    plug("broken", spec(load=load))
    for _ in range(2):
        with pytest.raises(UnavailableBackend, match=r"^backend 'bad': loading failed: ") as caught:
            attnx.get_backend("bad")
        assert isinstance(caught.value.__cause__, BaseException)
    (info,) = [info for info in attnx.backends() if info.name == "bad"]
    assert (info.status, info.capabilities, info.version, info.devices) == (
        "failed",
        None,
        None,
        (),
    )
    assert info.reason == str(caught.value)
    (record,) = records("bad")
    assert record.status == "failed"
    if "positional" not in detail:
        assert record.detail == detail
    with pytest.raises(UnavailableBackend, match=r"^backend 'bad': loading failed: "):
        attnx.attention(x, x, x, backend="bad")
    works()


def test_a_missing_framework_is_unavailable_with_a_hint_and_not_imported(plug: Plug) -> None:
    load = raising(AssertionError("never asked"))
    needs = ("numpy", "surely_no_such_module", "nor.this.one")
    plug("absent", spec("absent", load=load, requires=needs, install_hint="pip install it"))
    message = (
        "backend 'absent': surely_no_such_module, nor.this.one is not installed; pip install it"
    )
    with pytest.raises(UnavailableBackend) as caught:
        attnx.get_backend("absent")
    assert str(caught.value) == message
    (record,) = [record for record in attnx.doctor() if record.subject == "absent"][1:]
    assert record[:4] == ("absent", "unavailable", message, "pip install it")
    works()


class Coy(plugin.Backend):
    """A backend that loads, and then raises when it is asked anything."""

    def __init__(self, name: str, *silent: str) -> None:
        self.name = name
        self.lane = attnx.get_backend("numpy").lane
        self.capabilities = plugin.Capabilities(dtypes=frozenset({"float32"}))
        for method in silent:
            setattr(self, method, raising(ZeroDivisionError(method)))


@pytest.mark.parametrize("method", ["devices", "version", "reasons", "route"])
def test_a_backend_that_raises_when_asked_is_told_of(method: str, plug: Plug) -> None:
    """Listing and explaining go on; naming it raises with its reason."""
    plug("coy", Coy("coy", method))
    infos = {info.name: info for info in attnx.backends()}
    expected = "failed" if method in ("devices", "version") else "available"
    assert infos["coy"].status == expected
    assert infos["numpy"].status == "available"
    if method != "version":
        said = f"it failed: ZeroDivisionError: {method}"
        candidates = {c.name: c for c in attnx.explain(x, x, x).candidates}
        assert candidates["coy"].note == said
        with pytest.raises(UnavailableBackend, match=said):
            attnx.attention(x, x, x, backend="coy")
    works()


def test_reasons_that_are_no_reasons_are_a_failure(plug: Plug) -> None:
    backend = Coy("coy")
    backend.reasons = lambda cls: ["because"]  # type: ignore[method-assign, list-item, return-value]
    plug("coy", backend)
    with pytest.raises(UnavailableBackend, match="TypeError: reasons\\(\\) gave str, not Reason"):
        attnx.attention(x, x, x, backend="coy")


def test_a_lane_that_fails_harms_its_own_arrays_alone(plug: Plug) -> None:

    types = ("array_api_strict._array_object.Array",)
    broken = spec("lame", lane=raising(RuntimeError("no lane")), array_types=types)
    plug("lame", broken)
    mine = array_api_strict.zeros((3, 4))
    with pytest.raises(
        UnavailableBackend, match="backend 'lame': the lane failed: RuntimeError: no"
    ):
        attnx.attention(mine, mine, mine)
    works()
    assert "the lane failed: RuntimeError: no lane" in [r.detail for r in records("lame")]


def test_an_array_type_belongs_to_the_first_lane(plug: Plug) -> None:
    plug("rival", spec("rival", lane=raising(AssertionError), array_types=("numpy.ndarray",)))
    works()
    (record,) = [r for r in records("rival") if r.status == "warning"]
    assert record.detail == "the lane of numpy.ndarray belongs to 'numpy'"
    assert record.remedy == "leave the spec's lane out and set framework='numpy'"


@pytest.mark.parametrize("types", [("numpy.array",), ("numpy",), ("",), ("no.such.Type",)], ids=str)
def test_an_array_type_that_is_none_matches_nothing(types: tuple[str, ...], plug: Plug) -> None:
    plug("odd", spec("odd", lane=raising(AssertionError), array_types=types))
    works()
    with pytest.raises(ArgumentTypeError, match="expected an array of a registered framework"):
        attnx.attention([1], [1], [1])


def test_a_backend_is_loaded_once(plug: Plug) -> None:
    made: list[Any] = []

    def load() -> Any:
        made.append(Coy("lazy"))
        return made[-1]

    plug("lazy", spec("lazy", framework="numpy", load=load))
    assert made == []
    assert attnx.get_backend("lazy") is attnx.get_backend("lazy")
    assert len(made) == 1
