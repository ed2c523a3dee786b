"""`attnx tune`: what it measures is what `fastest` then finds, and it is kept class by class."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import attnx
from attnx import plugin
from attnx.cli._app import app
from attnx.policies import fastest

QUICK = ("--backend", "numpy,other", "--lengths", "16,32", "--head-size", "8")
x = np.ones((1, 4, 8, 8), np.float32)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder of the test's own, and a second backend on NumPy's arrays."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    class Other:
        @plugin.hookimpl
        def attnx_backends(self) -> list[plugin.BackendSpec]:
            load = lambda: plugin.ArrayBackend("other", plugin.lane("numpy"))  # noqa: E731
            return [plugin.BackendSpec("other", load, framework="numpy")]

    attnx.register(Other(), "other")
    yield tmp_path
    attnx.unregister("other")


def tune(*arguments: str, code: int = 0) -> Any:
    done = CliRunner().invoke(app, ["tune", *arguments])
    assert done.exit_code == code, done.output
    return done


def test_a_table_and_then_the_policy_knows() -> None:
    """Each backend's times at each length; nothing is measured twice."""
    done = tune(*QUICK, "--causal")
    assert "numpy float32 cpu D=8 mask=causal[top_left]" in done.stdout
    assert "fastest" in done.stdout
    assert "at 32" in done.stdout
    policy = fastest("numpy", "other", lengths=(16, 32), measure=lambda runs: 1 / 0)  # type: ignore[arg-type,return-value]
    found = policy.known(attnx.explain(x, x, x, causal=True).call)
    assert sorted(found) == ["numpy", "other"]
    assert policy.known(attnx.explain(x, x, x).call) == {}
    assert policy.tune(attnx.explain(x, x, x, causal=True).call) == found


def test_json_show_and_clear() -> None:
    report = json.loads(tune(*QUICK, "--dtype", "float32,float64", "--json").stdout)
    assert report["interrupted"] is False
    assert [each["call"]["dtype"] for each in report["classes"]] == ["float32", "float64"]
    first = report["classes"][0]
    assert sorted(first["order"]) == sorted(first["backends"]) == ["numpy", "other"]
    assert [len(kept["seconds"]) for kept in first["backends"].values()] == [2, 2]
    assert (first["lengths"], first["why"]) == ([16, 32], "")
    shown = json.loads(tune("--show", "--json").stdout)["classes"]
    assert sorted(each["call"]["dtype"] for each in shown) == ["float32", "float64"]
    assert shown[0]["order"]
    assert "numpy float64 cpu D=8" in tune("--show").stdout
    assert json.loads(tune("--clear", "--json").stdout) == {"removed": 2}
    assert json.loads(tune("--show", "--json").stdout)["classes"] == []
    assert "removed 0 file(s)" in tune("--clear").stdout


def test_show_names_a_file_that_cannot_be_used(cache: Path) -> None:
    tune(*QUICK)
    (file,) = cache.rglob("*.json")
    file.write_text("{", "utf-8")
    assert "cannot be used" in tune("--show").stdout
    assert json.loads(tune("--show", "--json").stdout)["classes"][0]["fault"]


@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        (["--decode", "--causal", "bottom_right"], {"square": False, "grouped": False}),
        (["--grouped", "--softcap"], {"grouped": True, "softcap": True}),
        (["--layout", "bshd", "--gradient"], {"layout": "bshd", "gradient": "vjp"}),
    ],
    ids=["decode", "grouped", "gradient"],
)  # fmt: skip
def test_options_say_the_class(arguments: list[str], fields: dict[str, Any]) -> None:
    (found,) = json.loads(tune(*QUICK, *arguments, "--json").stdout)["classes"]
    assert {name: found["call"][name] for name in fields} == fields
    assert len(found["order"]) == 2


def test_a_framework_that_records_gradients_has_two_ways_to_them() -> None:
    arguments = ["--framework", "torch", "-b", "torch,numpy", "--gradient", "--json"]
    found = json.loads(tune(*arguments, "--lengths", "16", "--head-size", "8").stdout)["classes"]
    assert [each["call"]["gradient"] for each in found] == ["vjp", "framework"]


def test_a_class_without_an_order_is_exit_status_1() -> None:
    done = tune("-b", "numpy,cupy", "--lengths", "16", code=1)
    assert "fewer than two candidates can do it" in done.stdout


def test_an_interrupted_run_keeps_the_classes_that_are_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, count = fastest.tune, iter(range(9))

    def stops(self: fastest, *arguments: Any) -> Any:
        if next(count):
            raise KeyboardInterrupt
        return run(self, *arguments)

    monkeypatch.setattr(fastest, "tune", stops)
    done = tune(*QUICK, "--dtype", "float32,float64", "--json", code=130)
    report = json.loads(done.stdout)
    assert (report["interrupted"], len(report["classes"])) == (True, 1)
    assert len(json.loads(tune("--show", "--json").stdout)["classes"]) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--backend", "numpy"], "--backend: expected at least two candidates, got ['numpy']"),
        (["--backend", "numpy,nunpy"], "--backend: no backend named 'nunpy'; installed: "),
        (["--dtype", "int8"], "--dtype: expected one of float16, bfloat16, float32, float64"),
        (["--head-size", "x"], "--head-size: expected integers >= 0 with commas"),
        (["--lengths", "8"], "fastest: lengths: expected integers >= 16, each once"),
        (["--framework", "lisp"], "--framework: expected one of "),
        (["--show", "--clear"], "--show and --clear: expected one of them"),
    ],
    ids=["alone", "unknown", "dtype", "head size", "lengths", "framework", "both"],
)
def test_wrong_use_is_one_line_and_exit_status_2(arguments: list[str], said: str) -> None:
    done = tune(*arguments, code=2)
    assert done.stderr.startswith(f"attnx: {said}")
    assert len(done.stderr.splitlines()) == 1


def test_help_has_an_example() -> None:
    done = tune("--help")
    assert "For example" in done.stdout
    assert "attnx tune --causal --backend numpy,torch,jax" in done.stdout
