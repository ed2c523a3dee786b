"""`attnx doctor` names what is broken and what is declared and fails, and tells no paths."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import attnx
from attnx import plugin
from attnx._registry import registry
from attnx.cli import _trials
from attnx.cli._app import app

Plug = Callable[..., None]
x = np.ones((3, 4), np.float32)
KEYS = {
    "attnx", "python", "platform", "frameworks", "settings", "plugins", "records", "backends",
}  # fmt: skip
RECORD = {
    "subject", "status", "detail", "remedy", "distribution", "plugin", "seconds", "traceback",
}  # fmt: skip


@pytest.fixture(autouse=True)
def unchanged() -> Iterator[None]:
    """What a test adds to the doctor's records is gone after it."""
    registry.names()
    before = list(registry.records)
    yield
    registry.records = before


def doctor(*arguments: str, status: int = 0) -> Any:
    done = CliRunner().invoke(app, ["doctor", *arguments])
    assert done.exit_code == status, done.output
    return json.loads(done.stdout) if "--json" in arguments else done.stdout


class Fickle(plugin.ArrayBackend):
    """A backend that is right but for the options it is told to spoil."""

    def __init__(self, name: str, *spoilt: str, **declared: Any) -> None:
        given = {"dtypes": frozenset({"float32"}), "alibi": True, "dropout": True} | declared
        super().__init__(name, attnx.get_backend("numpy").lane, plugin.Capabilities(**given))
        self.spoilt = spoilt

    def forward(self, q: Any, k: Any, v: Any, call: plugin.Call) -> tuple[Any, Any]:
        given = {
            "softcap": call.softcap is not None, "sinks": call.sinks is not None,
            "window": call.mask is not None and "window" in call.mask.structure,
            "dropout": call.dropout is not None, "alibi": call.alibi is not None,
            "gqa": call.Hq != call.Hk, "float16": q.dtype == np.float16, "all": True,
            "scale": call.cls.scale_sign is not None,
        }  # fmt: skip
        if "exit" in self.spoilt:
            raise SystemExit(3)
        if "raise" in self.spoilt and call.softcap is not None:
            raise RuntimeError(f"no kernel in {Path.home()}/cache")
        out, lse = super().forward(q, k, v, call)
        return (out * 1.5 if any(given[s] for s in self.spoilt if s in given) else out), lse

    def backward(self, *arguments: Any) -> plugin.Gradients:
        found = super().backward(*arguments)
        if "gradient" in self.spoilt:
            return found._replace(q=found.q * 1.5)
        if "bias_gradient" in self.spoilt and found.bias is not None:
            return found._replace(bias=found.bias * 1.5)
        return found


def fickle(plug: Plug, *spoilt: str, **declared: Any) -> None:
    backend = Fickle("fickle", *spoilt, **declared)
    plug("fickle", plugin.BackendSpec("fickle", lambda: backend, framework="numpy"))


FAULTS = {
    "softcap": "declares softcap, but out at ",
    "sinks": "declares sinks, but out at ",
    "scale": "declares scale, but out at ",
    "window": "declares the mask window, but out at ",
    "dropout": "declares dropout, but out at ",
    "alibi": "declares alibi, but out at ",
    "gqa": "declares gqa, but out at ",
    "float16": "declares the dtype float16, but out at ",
    "gradient": "declares gradient, but dq at ",
    "bias_gradient": "declares bias_gradient, but dbias at ",
    "raise": "declares softcap, but RuntimeError: no kernel in ",
    "all": "a plain call fails: out at ",
    "exit": "a small call ended the trial: SystemExit: 3",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_declared_and_fails_is_named_with_the_case_that_shows_it(
    fault: str, plug: Plug
) -> None:
    dtypes = frozenset({"float32", "float16"} if fault == "float16" else {"float32"})
    fickle(plug, fault, dtypes=dtypes)
    tried = _trials.try_backend("fickle")
    found = [r for r in (*registry.records, *tried) if r.status == "failed"]
    (record,) = found
    assert record.detail.startswith(FAULTS[fault])
    assert (record.subject, record.plugin) == ("fickle", "fickle")
    if fault != "exit":
        assert "; attnx conformance fickle --case " in record.remedy
        assert record.remedy.startswith("repair" if fault == "all" else "leave it out of")


def test_a_backend_that_does_what_it_declares_has_no_record(plug: Plug) -> None:
    """One that declares little is asked for no more than that."""
    fickle(plug)
    assert _trials.try_backend("fickle") == ()
    attnx.unregister("fickle")
    lacks = dict.fromkeys(
        ("gqa", "bias", "softcap", "sinks", "lse", "gradient", "alibi", "dropout", "scale"), False
    )
    fickle(plug, masks=frozenset({"causal"}), isolation="unseen", **lacks)
    assert _trials.try_backend("fickle") == ()


def test_every_option_that_is_declared_is_tried(
    plug: Plug, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one of the broad cases, or by its own."""
    fickle(plug)
    tried: set[str] = set()
    run = _trials._Backend.run

    def watched(self: Any, case: str, dtype: str, **options: Any) -> Any:
        from attnx_conformance.cases import find

        tried.update(_trials._needs(find(case), dtype))
        return run(self, case, dtype, **options)

    monkeypatch.setattr(_trials._Backend, "run", watched)
    _trials.try_backend("fickle")
    assert tried == set(_trials.SINGLE)


def test_a_hook_for_cases_that_raises_is_recorded(plug: Plug) -> None:
    def cases(backend: str) -> Any:
        raise OSError(backend)

    plug("casual", attnx_conformance_cases=cases)
    _trials.ask_hooks(["numpy", "torch"])
    (record,) = [r for r in registry.records if r.subject == "casual" and r.status == "failed"]
    assert record.detail == "attnx_conformance_cases: OSError: numpy"


def test_a_policy_that_raises_is_recorded(plug: Plug) -> None:
    """No trial leaves the choice to it."""

    def rank(call: Any, explaining: bool) -> Any:
        raise OSError(call.framework, explaining)

    plug("broken-policy", attnx_rank=rank)
    _trials.ask_hooks(["numpy"])
    (record,) = [r for r in registry.records if r.subject == "broken-policy" if r.remedy]
    assert record.detail == "attnx_rank: OSError: [Errno numpy] True"


def test_a_backend_for_another_device_is_not_said_to_fail(plug: Plug) -> None:
    """Arrays for the trials are made where a framework makes them."""
    fickle(plug, "all", devices=frozenset({"cuda"}))
    (record,) = _trials.try_backend("fickle")
    assert record.status == "warning"
    assert record.detail == "not tried: it computes on cuda, and numpy makes arrays on cpu"


def test_our_own_plugins_are_well() -> None:
    """One record a plugin; nothing failed, so the status is 0."""
    document = doctor("--json", "--no-calls")
    assert set(document) == KEYS
    assert {"numpy", "torch", "jax", "cupy"} <= {r["subject"] for r in document["records"]}
    assert all(set(record) == RECORD for record in document["records"])
    assert {"numpy", "torch", "jax"} <= {p["name"] for p in document["plugins"]}
    assert document["plugins"][-1]["backends"]
    assert document["frameworks"]["numpy"] == np.__version__
    assert "what to do" in doctor("--no-calls")


def test_numpy_does_what_it_declares() -> None:
    assert _trials.try_backend("numpy") == ()


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["torch", "jax"])
def test_the_others_do_what_they_declare(name: str) -> None:
    assert _trials.try_backend(name) == ()


def test_calls_are_made_unless_left_out_and_fail_the_command(
    plug: Plug, monkeypatch: pytest.MonkeyPatch
) -> None:
    fickle(plug, "softcap")
    only = [info for info in attnx.backends() if info.name == "fickle"]
    monkeypatch.setattr(attnx, "backends", lambda: tuple(only))
    (record,) = [r for r in doctor("--json", status=1)["records"] if r["status"] == "failed"]
    assert record["detail"].startswith("declares softcap, but out at ")
    assert record["plugin"] == "fickle"
    doctor("--no-calls")
    assert "declares softcap" in doctor(status=1)


def test_a_report_has_tracebacks_and_no_paths_unless_asked(
    plug: Plug, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    home = tmp_path / "Homes" / "kim"
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("LOGNAME", "kim")

    def load() -> Any:
        raise RuntimeError(f"no weights in {home}/models of kim, nor {str(home).upper()}")

    plug("broken", plugin.BackendSpec("broken", load, framework="numpy"))
    document = doctor("--json", "--no-calls", status=1)
    (record,) = [r for r in document["records"] if r["status"] == "failed"]
    assert record["detail"] == (
        "loading failed: RuntimeError: no weights in ~/models of <user>, nor ~"
    )
    assert record["remedy"] == "repair or uninstall broken"
    assert "in load" in record["traceback"]
    (info,) = [info for info in document["backends"] if info["name"] == "broken"]
    assert "~/models" in info["reason"]
    assert "kim" not in json.dumps(document).lower()
    asked = json.dumps(doctor("--json", "--paths", "--no-calls", status=1))
    assert f"{home}/models" in asked


def test_tracebacks_are_printed_when_asked_for(plug: Plug) -> None:
    def load() -> Any:
        raise RuntimeError("[red]no[/red] luck")

    plug("broken", plugin.BackendSpec("broken", load, framework="numpy"))
    assert "Traceback" not in doctor("--no-calls", status=1)
    told = doctor("--no-calls", "--verbose", status=1)
    assert "Traceback" in told
    assert "[red]no[/red] luck" in told


def test_settings_are_told_and_a_plugins_own_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a plugin's setting holds may be a secret."""
    given = ("ATTNX_BACKEND", "ATTNX_TOKEN")
    monkeypatch.setattr(registry, "settings", registry.settings._replace(given=given))
    monkeypatch.setenv("ATTNX_BACKEND", "numpy")
    monkeypatch.setenv("ATTNX_TOKEN", "secret")
    settings = doctor("--json", "--no-calls")["settings"]
    assert settings == {"ATTNX_BACKEND": "numpy", "ATTNX_TOKEN": "(set)"}


@pytest.mark.parametrize("command", ["backends", "explain --shape 1,2,3,4", "doctor --no-calls"])
def test_what_a_plugin_prints_is_not_among_the_json(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = attnx.backends

    def backends() -> Any:
        print("loading …")
        return [info for info in real() if info.name == "numpy"]

    monkeypatch.setattr(attnx, "backends", backends)
    done = CliRunner().invoke(app, [*command.split(), "--json"])
    assert json.loads(done.stdout)
    assert "loading …" in done.stderr


BROKEN = {
    "loud": (
        "print('spoilt')\nimport ctypes, os, warnings\nos.write(1, b'spoilt by an extension')\n"
        "ctypes.CDLL(None).puts(b'spoilt in C') if os.name == 'posix' else None\n"
        "warnings.warn('old', DeprecationWarning)\n"
        "from attnx.plugin import BackendSpec\n"
        "def load():\n    print('spoilt too')\n    raise OSError('no')\n"
        "def attnx_backends():\n    return [BackendSpec('loud', load, framework='numpy')]\n"
    ),
    "native": "raise ImportError('/x/y.so: undefined symbol: _ZN2at')\n",
    "exits": "import sys\nprint('bye')\nsys.exit(3)\n",
}


def test_an_installed_plugin_spoils_neither_the_document_nor_the_others(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    """Under strict settings and with warnings as errors, as a person with a fault may have it."""
    lines = ["[attnx]"]
    for name, source in BROKEN.items():
        (tmp_path / f"attnx_{name}.py").write_text(source, "utf-8")
        lines.append(f"{name} = attnx_{name}")
    info = tmp_path / "attnx_broken-0.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: attnx-broken\nVersion: 0.3\n")
    (info / "entry_points.txt").write_text("\n".join(lines), "utf-8")
    variables = {
        "ATTNX_PLUGINS": "numpy,loud,native,exits,nunpy", "ATTNX_STRICT_PLUGINS": "1",
        "PYTHONWARNINGS": "error",
    }  # fmt: skip
    done = run("doctor", "--json", "--no-calls", path=(tmp_path,), **variables)
    assert done.returncode == 1, done.stderr
    document = json.loads(done.stdout)
    found = {(r["subject"], r["detail"]) for r in document["records"] if r["status"] != "ok"}
    found -= {item for item in found if item[1] == "blocked by ATTNX_PLUGINS"}
    assert found == {
        ("loud", "it prints when it is imported: 'spoilt'"),
        ("loud", "it warns when it is imported: DeprecationWarning: old"),
        ("loud", "loading failed: OSError: no"),
        (
            "native",
            "ABI error (built for another version of a library): ImportError: /x/y.so: undefined "
            "symbol: _ZN2at",
        ),
        ("exits", "SystemExit: 3"),
        ("ATTNX_PLUGINS", "no installed plugin is called 'nunpy'"),
    }
    failed = [r for r in document["records"] if r["status"] == "failed"]
    assert {r["distribution"] for r in failed} == {"attnx-broken 0.3"}
    assert str(tmp_path) not in done.stdout
    assert "spoilt too" in done.stderr
    assert "spoilt by an extension" in done.stderr
