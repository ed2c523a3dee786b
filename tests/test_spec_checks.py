"""A spec that does not tell the truth about its types, its lane or its framework is found out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import array_api_strict
import numpy as np
import pytest

import attnx
from attnx import plugin
from attnx._registry import registry
from attnx._spec_checks import lies, rivals
from attnx.errors import PluginError

x = np.ones((3, 4), np.float32)
Plug = Callable[..., None]


@pytest.fixture(autouse=True)
def unchanged() -> Iterator[None]:
    """What a test adds to the doctor's records is gone after it."""
    registry.names()
    before = list(registry.records)
    yield
    registry.records = before


class StrictLane(plugin.Lane):
    """The lane of array_api_strict."""

    name = "strict"
    xp = array_api_strict
    array_types = (type(array_api_strict.zeros(1)),)


LANE = StrictLane()


def strict(name: str = "strict", **fields: Any) -> plugin.BackendSpec:
    given = {"load": lambda: plugin.ArrayBackend(name, LANE), "lane": lambda: LANE}
    return plugin.BackendSpec(name, **(given | fields))


TYPES = {
    "right": (("array_api_strict._array_object.Array",), ""),
    "misspelt": (
        ("array_api_strict._array_object.Aray",),
        "array_api_strict._array_object has no class 'Aray'; did you mean 'Array'?",
    ),
    "a function": (("array_api_strict.zeros",), "array_api_strict has no class 'zeros'"),
    "no module": (("no.such.Type",), "loading the backend imported no module 'no.such'"),
    "no path": (("Array",), "loading the backend imported no module ''"),
    "another class": (("fractions.Fraction",), "the lane does not own it"),
    "another framework": (
        ("numpy.ndarray",), "it belongs to the framework 'numpy', and the spec says 'strict'"
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", TYPES)
def test_array_types_are_held_against_the_lane_when_the_framework_is_there(kind: str) -> None:
    types, wrong = TYPES[kind]
    spec = strict(array_types=types)
    others = [registry.specs[name] for name in registry.names()]
    found = list(lies(spec, LANE, [*others, spec]))
    if not wrong:
        assert found == []
        return
    ((detail, remedy),) = found
    assert detail == f"array_types: {types[0]!r}: {wrong}"
    assert remedy.endswith(
        "name the classes of strict arrays in BackendSpec(array_types=...): "
        "array_api_strict._array_object.Array"
    )


def test_a_lie_fails_in_doctor_and_nowhere_else(plug: Plug) -> None:
    plug("liar", strict("liar", framework="strict", array_types=("fractions.Fraction",)))
    assert [b.status for b in attnx.backends() if b.name == "liar"] == ["available"]
    failed = [r for r in attnx.doctor() if r.status == "failed"]
    assert [(r.subject, r.plugin) for r in failed] == [("liar", "liar")]
    assert attnx.explain(x, x, x).choice == "numpy"


def test_a_lie_raises_under_strict_settings(plug: Plug, monkeypatch: pytest.MonkeyPatch) -> None:
    plug("liar", strict("liar", framework="strict", array_types=("fractions.Fraction",)))
    monkeypatch.setattr(registry, "settings", registry.settings._replace(strict=True))
    with pytest.raises(PluginError, match="plugin 'liar': array_types"):
        attnx.get_backend("liar")


def test_a_framework_that_nobody_brings_is_told_of(plug: Plug) -> None:
    plug("lonely", strict("lonely", framework="strict", lane=None))
    attnx.get_backend("lonely")
    (record,) = [r for r in registry.records if r.status == "failed"]
    assert record.detail == (
        "nobody brings a lane for framework='strict', so that its arrays are not known"
    )
    assert record.remedy.startswith("install the plugin that brings it, or give BackendSpec('lone")


def test_our_own_specs_tell_the_truth() -> None:
    attnx.backends()
    specs = list(registry.specs.values())
    for name in ("numpy", "torch", "jax"):
        backend = attnx.get_backend(name)
        assert list(lies(registry.specs[name], backend.lane, specs)) == []


def test_two_lanes_for_one_framework_are_told_of() -> None:
    """The first one serves; the second would never be asked."""
    first, second = strict(), strict("second", framework="strict")
    assert list(rivals(second, [first])) == [
        (
            "the lane of strict belongs to 'strict'",
            "leave the spec's lane out and set framework='strict'",
        )
    ]
    assert list(rivals(strict("alone"), [first])) == []


def test_a_backend_that_raises_when_asked_is_in_doctor_with_its_traceback(plug: Plug) -> None:
    class Coy(plugin.ArrayBackend):
        """A backend that raises when it is asked what it can do."""

        def reasons(self, cls: plugin.CallClass) -> Any:
            raise ZeroDivisionError("coy")

    coy = Coy("coy", attnx.get_backend("numpy").lane)
    plug("coy", plugin.BackendSpec("coy", lambda: coy, framework="numpy"))
    attnx.explain(x, x, x)
    (record,) = [r for r in attnx.doctor() if r.status == "failed"]
    assert (record.subject, record.plugin) == ("coy", "coy")
    assert record.detail == "reasons or route: ZeroDivisionError: coy"
    assert "in reasons" in record.traceback


@pytest.mark.parametrize("wrong", [(1,), "3"], ids=str)
def test_devices_and_version_that_are_no_texts_fail(wrong: Any, plug: Plug) -> None:
    class Odd(plugin.ArrayBackend):
        """A backend whose devices are no names."""

        def devices(self) -> Any:
            return wrong if isinstance(wrong, tuple) else ("cpu",)

        def version(self) -> Any:
            return 3

    odd = Odd("odd", attnx.get_backend("numpy").lane)
    plug("odd", plugin.BackendSpec("odd", lambda: odd, framework="numpy"))
    (info,) = [info for info in attnx.backends() if info.name == "odd"]
    assert (info.status, info.devices) == ("failed", ())
    assert "not texts" in str(info.reason)
