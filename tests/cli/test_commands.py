"""`attnx backends`, `explain`, `doctor`, and the command line around them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner

import attnx
from attnx.cli._app import app

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def _invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def _json(*arguments: str) -> Any:
    done = _invoke(*arguments, "--json")
    assert done.exit_code in (0, 1), done.output
    return json.loads(done.stdout)


def test_importing_attnx_does_not_import_the_command_line() -> None:
    """typer and rich wait until the command runs."""
    code = (
        "import sys, attnx, attnx.cli; "
        "print([m for m in ('typer', 'rich', 'attnx.cli._app', 'attnx_conformance') "
        "if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("command", ["backends", "explain", "doctor", "compare", "new-backend"])
def test_help_has_an_example(command: str) -> None:
    """`--help` shows how the command is written."""
    done = _invoke(command, "--help")
    assert done.exit_code == 0
    assert f"attnx {command}" in done.stdout
    assert "For example" in done.stdout


def test_the_bare_command_lists_the_commands() -> None:
    """`attnx` alone is a question, not an error to puzzle over."""
    done = _invoke()
    for command in ("backends", "explain", "doctor", "compare", "new-backend"):
        assert command in done.output


def test_backends_as_json() -> None:
    """Name, status, versions, devices, the whole declaration, and a reason where there is one."""
    records = {record["name"]: record for record in _json("backends")}
    assert set(records) == {info.name for info in attnx.backends()}
    numpy = records["numpy"]
    assert numpy["status"] == "available"
    assert numpy["devices"] == ["cpu"]
    assert numpy["framework"] == "numpy"
    assert "float32" in numpy["capabilities"]["dtypes"]
    assert numpy["capabilities"]["softcap"] is True
    assert numpy["reason"] is None
    for record in records.values():
        assert (record["status"] == "available") == (record["reason"] is None)


def test_backends_as_a_table() -> None:
    """The same for a person: what each has and lacks, or why it is not available."""
    done = _invoke("backends")
    assert done.exit_code == 0
    for info in attnx.backends():
        assert info.name in done.stdout
    assert "dtypes: " in done.stdout
    assert "masks: all" in done.stdout


def test_explain_says_who_and_why_not() -> None:
    """The choice, its route, and each candidate's reasons, without a computation."""
    found = _json("explain", "--shape", "1,8,4096,64", "--causal", "--gradient")
    assert found["choice"] == "numpy"
    assert found["route"]
    assert set(found) == {"choice", "why", "route", "exchange", "candidates"}
    names = {candidate["name"]: candidate for candidate in found["candidates"]}
    assert names["numpy"]["chosen"] is True
    assert names["numpy"]["reasons"] == []
    for candidate in names.values():
        for reason in candidate["reasons"]:
            assert set(reason) == {"option", "got", "supported", "hint"}


def test_explain_follows_the_variable(run: Run) -> None:
    """ATTNX_BACKEND chooses for `explain` as it does for a call."""
    few = {"ATTNX_BACKEND": "jax", "ATTNX_PLUGINS": "numpy,jax"}
    done = run("explain", "--shape", "1,2,4,8", "--json", **few)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["choice"] == "jax"
    assert "ATTNX_BACKEND" in found["why"]


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
def test_explain_takes_every_option_in_every_framework(framework: str) -> None:
    """Each option reaches the call; masks combine."""
    found = _json(
        *("explain", "--framework", framework, "--q", "2,8,5,16", "--k", "2,2,7,16"),
        *("--v", "2,2,7,24", "--causal", "bottom_right", "--window", "3,none", "--lengths", "7,4"),
        *("--mask", "5,7", "--bias", "1,8,5,7", "--sinks", "--scale", "-0.5", "--softcap", "30"),
        *("--dtype", "bfloat16", "--bias-dtype", "float32", "--return-lse", "--assume-finite"),
    )
    assert found["choice"] == framework


def test_explain_in_the_other_layout() -> None:
    """Heads are found on their own axis."""
    shapes = ("--q", "2,5,8,16", "--k", "2,7,2,16", "--layout", "bshd", "--sinks")
    assert _json("explain", *shapes)["choice"] == "numpy"


def test_explain_prints_a_table() -> None:
    """The table of reasons is the API's own."""
    done = _invoke("explain", "--shape", "1,2,4,8", "--backend", "numpy")
    assert done.exit_code == 0, done.output
    assert "numpy" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "expected --shape B,H,L,D, or --q, --k and --v"),
        (("--shape", "1,2,x"), "--shape: expected integers >= 0 with commas, got '1,2,x'"),
        (("--shape", "1,2,3,4", "--window", "3"), "--window: expected two sizes L,R"),
        (("--shape", "1,2,3,4", "--dtype", "int8"), "dtype: expected one of float16"),
        (("--shape", "1,2,3,4", "--framework", "tensorflow"), "--framework: expected one of"),
        (("--q", "1,2,3,4", "--k", "1,2,5,4", "--causal"), "bottom_right"),
        (("--q", "1,2,3,4", "--k", "1,2,5,6"), "D"),
        (("--shape", "1,2,3,4", "--backend", "nunpy"), "nunpy"),
        (("--shape", "1,2,3,4", "--causal=middle"), "--causal: expected nothing, top_left"),
    ],
)
def test_explain_refuses_in_one_line(arguments: tuple[str, ...], words: str) -> None:
    """Wrong use of the command, or of the call, is one line and status 2."""
    done = _invoke("explain", *arguments)
    assert done.exit_code == 2, done.output
    assert done.stderr.startswith("attnx: ")
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_version_is_the_distributions() -> None:
    """`attnx --version` names what pip installed."""
    from importlib.metadata import version

    assert _invoke("--version").stdout == f"attnx {version('attnx')}\n"
