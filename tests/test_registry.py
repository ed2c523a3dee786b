"""A broken plugin breaks nothing but itself, and says so to `attnx doctor`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attnx
from attnx import plugin
from attnx._registry import registry
from attnx.errors import (
    ArgumentTypeError,
    PluginError,
    UnknownBackend,
    UnsupportedError,
)

Plug = Callable[..., None]
Python = Callable[..., str]
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


MODULES = {
    "syntax": "def",
    "missing": "import surely_no_such_module",
    "raises": "raise ValueError('at import')",
    "exits": "raise SystemExit(3)",
    "generator_exit": "raise GeneratorExit",
    "multiline": "raise RuntimeError('one\\ntwo')",
    "unknown_hook": (
        "from attnx.plugin import hookimpl\n@hookimpl\ndef attnx_bakends():\n    return []\n"
    ),
    "wrong_argument": (
        "from attnx.plugin import hookimpl\n@hookimpl\ndef attnx_planned(nothing):\n    pass\n"
    ),
    "hook_raises": "def attnx_backends():\n    raise OSError('no')\n",
    "hook_exits": "def attnx_backends():\n    raise SystemExit\n",
    "hook_gives_none": "def attnx_backends():\n    return None\n",
    "hook_gives_text": "def attnx_backends():\n    return ['numpy']\n",
    "half_good": (
        "from attnx.plugin import BackendSpec\n"
        "def attnx_backends():\n    yield BackendSpec('half', print)\n    yield 3\n"
    ),
    "future": (
        "from attnx.plugin import BackendSpec\n"
        "def attnx_backends():\n    return [BackendSpec('future', print, api_version=99)]\n"
    ),
    "thief": (
        "from attnx.plugin import BackendSpec\n"
        "def attnx_backends():\n    return [BackendSpec('numpy', print)]\n"
    ),
    "noisy_attributes": (
        "class Plugin:\n"
        "    def __getattr__(self, name):\n        raise RuntimeError(name)\n"
        "plugin = Plugin()\n"
    ),
}
DETAILS = {
    "syntax": ("failed", "SyntaxError: invalid syntax (attnx_bad_syntax.py, line 1)"),
    "missing": ("failed", "ModuleNotFoundError: No module named 'surely_no_such_module'"),
    "raises": ("failed", "ValueError: at import"),
    "exits": ("failed", "SystemExit: 3"),
    "generator_exit": ("failed", "GeneratorExit"),
    "multiline": ("failed", "RuntimeError: one"),
    "no_module": ("failed", "ModuleNotFoundError: No module named 'attnx_bad_no_module'"),
    "no_attribute": ("failed", "AttributeError: module 'numbers' has no attribute 'plugin'"),
    "unknown_hook": (
        "failed", "attnx_bakends is no hook of attnx; did you mean attnx_backends?"
    ),
    "wrong_argument": (
        "failed", "Plugin 'wrong_argument' for hook 'attnx_planned' hookimpl definition: "
    ),
    "hook_raises": ("failed", "OSError: no"),
    "hook_exits": ("failed", "SystemExit"),
    "hook_gives_none": ("failed", "TypeError: 'NoneType' object is not iterable"),
    "hook_gives_text": (
        "failed", "TypeError: attnx_backends: expected BackendSpec objects, got str"
    ),
    "half_good": ("failed", "TypeError: attnx_backends: expected BackendSpec objects, got int"),
    "future": (
        "refused",
        "backend 'future' was written for version 99 of the plugin contract; this attnx supports "
        "version 1",
    ),
    "noisy_attributes": ("failed", "RuntimeError: "),
}  # fmt: skip


@pytest.fixture(scope="module")
def bad_plugins(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with an installed distribution whose every plugin is broken in its own way."""
    folder = tmp_path_factory.mktemp("bad")
    lines = ["[attnx]"]
    for name, source in MODULES.items():
        (folder / f"attnx_bad_{name}.py").write_text(source, "utf-8")
        target = ":plugin" if name == "noisy_attributes" else ""
        lines.append(f"{name} = attnx_bad_{name}{target}")
    lines += ["no_module = attnx_bad_no_module", "no_attribute = numbers:plugin"]
    info = folder / "attnx_bad-2.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: attnx-bad\nVersion: 2.5\n", "utf-8"
    )
    (info / "entry_points.txt").write_text("\n".join(lines), "utf-8")
    return str(folder)


SLOW = """
import time
time.sleep(0.5)
from attnx.plugin import ArrayBackend, BackendSpec
def load():
    import attnx
    return ArrayBackend("slow", attnx.get_backend("numpy").lane)
def attnx_backends():
    return [BackendSpec("slow", load, framework="numpy")]
"""
CALL = "import attnx, numpy as np\nx = np.ones((3, 4), np.float32)\n"


def test_no_broken_plugin_breaks_an_import_a_call_or_another_plugin(
    python: Python, bad_plugins: str
) -> None:
    code = CALL + (
        "assert attnx.attention(x, x, x).shape == (3, 4)\n"
        "from attnx._registry import registry\n"
        "print(registry.names())\n"
        "for r in registry.records:\n"
        "    print(r.subject, r.status, r.distribution, r.detail, sep='|')\n"
    )
    first, *lines = python(code, path=bad_plugins).splitlines()
    assert first in ("['cupy', 'jax', 'numpy', 'torch']", "['jax', 'numpy', 'torch']")
    found = {tuple(line.split("|")[:2]): line.split("|")[2:] for line in lines}
    for name, (status, detail) in DETAILS.items():
        distribution, said = found[name, status]
        assert distribution == "attnx-bad 2.5"
        assert said.startswith(detail), name
    taken = "the name is taken by the plugin 'numpy' of attnx "
    assert found["numpy", "refused"][1].startswith(taken)
    assert found["numpy", "ok"][0].startswith("attnx ")


def test_a_broken_plugin_raises_when_strict(python: Python, bad_plugins: str) -> None:
    """`ATTNX_STRICT_PLUGINS=1`, at every call, with the cause; `import attnx` still works."""
    code = CALL + (
        "for _ in range(2):\n"
        "    try:\n        attnx.attention(x, x, x)\n"
        "    except attnx.errors.PluginError as e:\n        print(e, '|', repr(e.__cause__))\n"
    )
    strict = {"ATTNX_STRICT_PLUGINS": "1", "ATTNX_PLUGINS": "numpy,raises"}
    said = (
        "plugin 'raises': ValueError: at import; repair or uninstall raises | "
        "ValueError('at import')"
    )
    assert python(code, path=bad_plugins, **strict).splitlines() == [said, said]
    strict["ATTNX_PLUGINS"] = "numpy,future"
    text = python(CALL + "attnx.attention(x, x, x)", path=bad_plugins, fails=True, **strict)
    assert "PluginError: plugin 'future': backend 'future' was written for version 99" in text


def test_plugins_are_allowed_and_blocked_before_they_are_imported(
    python: Python, bad_plugins: str
) -> None:
    code = CALL + (
        "import sys\n"
        "attnx.attention(x, x, x)\n"
        "from attnx._registry import registry\n"
        "print(registry.names(), 'attnx_bad_raises' in sys.modules, 'attnx_torch' in sys.modules)\n"
        "print(sorted({r.status for r in registry.records if r.subject == 'raises'}))\n"
    )
    only = python(code, path=bad_plugins, ATTNX_PLUGINS="numpy")
    assert only.splitlines() == ["['numpy'] False False", "['blocked']"]
    blocked = ",".join(f"-{name}" for name in ["torch", "jax", "cupy", *MODULES])
    assert python(code, path=bad_plugins, ATTNX_PLUGINS=blocked) == only


def test_calls_wait_while_another_thread_collects_the_plugins(
    python: Python, tmp_path: Path
) -> None:
    """A slow import in one plugin must not hide it from the calls of other threads."""
    (tmp_path / "attnx_slow.py").write_text(SLOW, "utf-8")
    info = tmp_path / "slow-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: slow\nVersion: 1\n", "utf-8")
    (info / "entry_points.txt").write_text("[attnx]\nslow = attnx_slow\n", "utf-8")
    code = CALL + (
        "import threading, time\n"
        "failed = []\n"
        "def work(delay):\n"
        "    time.sleep(delay)\n"
        "    try:\n        attnx.attention(x, x, x, backend='slow')\n"
        "    except BaseException as error:\n        failed.append(error)\n"
        "threads = [threading.Thread(target=work, args=(n / 10,)) for n in range(6)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\n"
        "print(failed)\n"
    )
    assert python(code, path=str(tmp_path), ATTNX_PLUGINS="numpy,slow") == "[]\n"


def test_who_goes_through_the_backends_is_not_disturbed_by_registering(
    marked: Callable[..., Any],
) -> None:
    """Another thread may be choosing one of them meanwhile."""
    registry.names()
    going = iter(registry.specs)
    first = next(going)
    marked("one more", 1.0)
    assert first not in list(going)


def test_a_backend_that_goes_while_all_are_explained_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its name was listed, and then another thread took it out."""
    monkeypatch.setattr(registry, "names", lambda: [*sorted(registry.specs), "gone"])
    told = attnx.explain(x, x, x)
    assert told.choice == "numpy"
    assert "gone" not in [candidate.name for candidate in told.candidates]


def test_a_name_is_its_first_owners(plug: Plug, marked: Callable[..., Any]) -> None:
    first = marked("twice", 1.0)
    with pytest.raises(PluginError, match="the name is taken by the plugin 'numpy'"):
        plug("second", spec("twice", load=lambda: "never asked"), spec("numpy"))
    assert attnx.get_backend("twice") is first
    said = {r.subject: r.detail for r in registry.records if r.status == "refused"}
    assert said["twice"] == "the name is taken by the plugin 'twice'"
    assert said["numpy"].startswith("the name is taken by the plugin 'numpy' of attnx ")
    assert not registry.manager.has_plugin("second")


def test_registering_twice_and_taking_out_what_is_not_there_raise(plug: Plug) -> None:
    plug("once", spec("once"))
    with pytest.raises(PluginError, match="plugin 'once' is registered already"):
        plug("once", spec("other"))
    with pytest.raises(UnknownBackend, match="no plugin 'never' is registered"):
        attnx.unregister("never")


def test_a_plugin_that_was_taken_out_leaves_nothing(plug: Plug, marked: Callable[..., Any]) -> None:
    before = registry.generation, registry.names(), list(registry.records)
    marked("brief", 5.0)
    assert attnx.attention(x, x, x, backend="brief")[0, 0] == 5
    attnx.unregister("brief")
    with pytest.raises(UnknownBackend, match="no backend 'brief' is registered"):
        attnx.attention(x, x, x, backend="brief")
    assert (registry.names(), registry.records) == before[1:]
    assert registry.generation > before[0]


def test_a_wrong_name_comes_with_the_nearest_one() -> None:
    with pytest.raises(UnknownBackend) as caught:
        attnx.get_backend("nunpy")
    names = ", ".join(map(repr, registry.names()))
    assert str(caught.value) == (
        f"backend: no backend 'nunpy' is registered; there are {names}; did you mean 'numpy'?"
    )
    for wrong in (None, [], 3):
        with pytest.raises(ArgumentTypeError, match="backend: expected a name, got"):
            attnx.get_backend(wrong)  # type: ignore[arg-type]


def test_a_third_party_computes_when_named_and_the_lanes_owner_by_default(
    marked: Callable[..., Any],
) -> None:
    """Design section 2."""
    marked("aaa", 5.0)
    assert attnx.explain(x, x, x).choice == "numpy"
    assert attnx.attention(x, x, x, backend="aaa")[0, 0] == 5


def test_a_backend_object_needs_no_registration() -> None:
    class Mine(plugin.ArrayBackend):
        """The array kernel under another name."""

    mine = Mine("mine", attnx.get_backend("numpy").lane)
    assert attnx.explain(x, x, x, backend=mine).choice == "mine"
    assert np.allclose(attnx.attention(x, x, x, backend=mine), attnx.attention(x, x, x))
    with pytest.raises(UnsupportedError, match="backend 'mine' cannot do this call: dtype=float16"):
        attnx.attention(*[x.astype(np.float16)] * 3, backend=mine)


def test_every_backend_is_described(tmp_path: Path) -> None:
    for info in attnx.backends():
        assert info.status in ("available", "unavailable")
        assert info.distribution.startswith("attnx ")
        assert info.summary
        assert info.array_types
        assert (info.status == "available") == bool(info.devices)
        assert (info.status == "available") == (info.reason is None)
    # A machine that is slow or cold is warned of.
    assert {record.status for record in attnx.doctor()} <= {"ok", "unavailable", "warning"}
