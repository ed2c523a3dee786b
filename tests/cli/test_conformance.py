"""`attnx conformance` as a user runs it: what it prints, writes and exits with."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from attnx.cli._app import app
from attnx_conformance.results import read

KERNELS = "tests.conformance.kernels"
FUNCTION = ("--isolation", "none", "--jobs", "1")


def ran(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["conformance", *arguments], catch_exceptions=False)
    return result.exit_code, result.output


def test_a_right_backend_holds_its_profiles(tmp_path: Path) -> None:
    report = tmp_path / "made" / "report.jsonl"
    status, text = ran("numpy", "--case", "self", "--case", "causal-6?", "--report", str(report))
    assert status == 0
    assert "held" in text
    assert "numpy itself was entered: apply" in text
    made = read(report)
    assert made.complete
    assert {r.case for r in made.results} == {"self", "causal-65"}
    assert made.header["planned"] == 2
    assert made.header["versions"]["numpy"]
    assert made.footer["route"]["numpy"]["calls"]["apply"] > 0


def test_a_wrong_function_is_told_where_and_how() -> None:
    """The clause, the element, what it looks like, and a line that repeats it."""
    status, text = ran(
        "--function", f"{KERNELS}:top_left", "--supports", "causal,mask,scale", *FUNCTION,
        "--case", "causal-bottom-right-w*", "--case", "causal-65",
    )  # fmt: skip
    assert status == 1
    assert "not held" in text
    assert "S3.5" in text
    assert "as if: " in text
    line = f"attnx conformance --function {KERNELS}:top_left --framework numpy --isolation none"
    assert f"{line} --supports causal,mask,scale --case causal-bottom-right-" in text
    assert "causal-65 (" not in text


def test_a_right_function_passes_what_it_supports() -> None:
    status, text = ran(
        "--function", f"{KERNELS}:naive", "--supports", "causal,mask,scale", *FUNCTION, "--quick",
        "--profile", "masks", "--profile", "forward",
    )  # fmt: skip
    assert status == 0, text


def test_a_page_and_a_badge_are_written(tmp_path: Path) -> None:
    """The badge also from the report alone, the same."""
    names = ("r.jsonl", "r.html", "a.svg", "b.svg")
    report, page, badge, again = (str(tmp_path / name) for name in names)
    status, _ = ran("numpy", "--case", "self", "--report", report, "--html", page, "--badge", badge)
    assert status == 0
    assert "<html" in Path(page).read_text("utf-8")
    assert ">passes forward, of a sample</text>" in Path(badge).read_text("utf-8")
    assert ran("badge", report, again) == (0, f"badge: {again}\n")
    assert Path(again).read_bytes() == Path(badge).read_bytes()
    for old, new in (
        ('"planned": 1', '"planned": "x"'),
        ('"profile": "forward"', '"profile": "x"'),
    ):
        strange = tmp_path / "strange.jsonl"
        strange.write_text(Path(report).read_text("utf-8").replace(old, new), "utf-8")
        status, said = ran("badge", str(strange), again)
        assert (status, said.count("\n")) == (2, 1), said
        assert "cannot be read as a report: p" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nobody",), "no backend named 'nobody'; installed: "),
        (("numpy", "--case", "causall"), "no case 'causall'; did you mean causal"),
        (("numpy", "--profile", "mask"), "did you mean masks"),
        (("numpy", "--deviations", "absent.toml"), "cannot read absent.toml"),
        (("--function", "absent_module:fn"), "cannot import 'absent_module:fn'"),
        (("--function", "naive"), "expected MODULE:CALLABLE, got 'naive'"),
        (("--function", f"{KERNELS}:absent"), "has no attribute 'absent'"),
        (("--function", f"{KERNELS}:__doc__"), "is a str, not a function"),
        (("--function", f"{KERNELS}:raises", "--supports", "mask"), "fn(q, k, v, mask=...)"),
        (("--function", f"{KERNELS}:naive", "--supports", "masks"), "supports: unknown masks"),
        (("--function", f"{KERNELS}:naive", "--isolation", "some"), "expected full, unseen or"),
        (("numpy", "--function", f"{KERNELS}:naive"), "without naming backends"),
        (("numpy", "--self-test"), "it examines the suite alone"),
        (("numpy", "--badge", "a.png"), "badge: expected a name that ends in .svg, got a.png"),
        (("badge", "pyproject.toml", "a.svg"), "pyproject.toml: cannot be read as a report: "),
        (("badge", "absent.jsonl", "a.svg"), "absent.jsonl: cannot be read as a report: "),
    ],
    ids=lambda value: value[-1].replace(":", "-") if isinstance(value, tuple) else None,
)
def test_wrong_use_is_one_line_and_status_2(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    result = CliRunner().invoke(app, ["conformance", *arguments])
    assert result.exit_code == 2
    assert said in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_a_deviation_is_waived_and_its_absence_a_failure(tmp_path: Path) -> None:
    file = tmp_path / "known.toml"
    text = (
        '[[deviation]]\ncase = "{}"\nreason = "causal is top-left"\nlink = "https://example.org"\n'
    )
    wrong = ("--function", f"{KERNELS}:top_left", "--supports", "causal,mask,scale", *FUNCTION)
    file.write_text(text.format("causal-bottom-right-wide"))
    status, told = ran(*wrong, "--case", "causal-bottom-right-wide", "--deviations", str(file))
    assert status == 0
    assert "held, with deviations" in told
    file.write_text(text.format("causal-65"))
    status, told = ran(*wrong, "--case", "causal-65", "--deviations", str(file))
    assert status == 1
    assert "waived, and yet it passes: take the line out" in told


def test_a_function_to_which_nothing_applies_has_shown_nothing() -> None:
    status, told = ran("--function", f"{KERNELS}:naive", "--case", "bias-full", *FUNCTION)
    assert status == 1
    assert "no trial applies to what it takes, so nothing was shown" in told


CASES = '''
"""A plugin with a case of its own for the NumPy backend."""

from attnx.plugin import hookimpl


@hookimpl
def attnx_conformance_cases(backend):
    from attnx_conformance.cases import Case, Recipe

    return [Case("mine-plain", ("S2",), "forward", Recipe())] if backend == "numpy" else []
'''


def test_a_case_of_an_installed_plugin_is_run_in_the_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "attnx_mine.py").write_text(CASES, "utf-8")
    info = tmp_path / "mine-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1\n", "utf-8")
    (info / "entry_points.txt").write_text("[attnx]\nmine = attnx_mine\n", "utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    report = tmp_path / "report.jsonl"
    done = subprocess.run(
        [
            sys.executable, "-m", "attnx", "conformance", "numpy", "--case", "mine-*", "--report",
            str(report),
        ],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert [(r.case, r.verdict) for r in read(report).results] == [("mine-plain", "passed")]


# A job in the background ignores Ctrl-C, and all that it starts inherits that.
IN_FOREGROUND = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("attnx", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.sweep)],
    ids=["ctrl-c", "terminated"],
)
def test_an_interrupted_run_says_so(tmp_path: Path, number: int) -> None:
    """Status 130, a summary of what ran, and a report that counts as cut short."""
    report = tmp_path / "report.jsonl"
    process = subprocess.Popen(
        [
            sys.executable, "-c", IN_FOREGROUND, "conformance", "numpy", "--jobs", "1", "--report",
            str(report),
        ],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while not report.exists() or len(report.read_text().splitlines()) < 4:
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(number)
    told, _ = process.communicate()
    assert process.returncode == 130
    assert "Cut short: " in told
    made = read(report)
    assert not made.complete
    assert 0 < len(made.results) < made.header["planned"]
    assert made.footer["route"]["numpy"]["calls"]["apply"] > 0


def test_a_killed_run_leaves_a_report_without_its_footer(tmp_path: Path) -> None:
    report = tmp_path / "report.jsonl"
    assert ran("numpy", "--case", "self", "--report", str(report))[0] == 0
    lines = report.read_text().splitlines()
    report.write_text("\n".join([*lines[:-1], lines[-1][:20]]))
    made = read(report)
    assert len(made.results) == 1
    assert not made.complete
    report.write_text(json.dumps({"attnx_conformance": 99}))
    with pytest.raises(ValueError, match="expected a report of format 1"):
        read(report)


def test_vectors_go_out_and_come_back(tmp_path: Path) -> None:
    """Export, compute from the files alone, verify."""
    out, results = tmp_path / "vectors", tmp_path / "results"
    assert ran("export", str(out), "--case", "self", "--dtype", "float32")[0] == 0
    results.mkdir()
    from safetensors.numpy import load_file, save_file

    import attnx

    (entry,) = json.loads((out / "manifest.json").read_text())["cases"]
    given = load_file(out / entry["file"])
    answer = attnx.attention(given["q"], given["k"], given["v"])
    save_file({"out": answer}, results / entry["file"])
    assert ran("verify", str(out), str(results))[0] == 0
    save_file({"out": answer * 1.01}, results / entry["file"])
    status, text = ran("verify", str(out), str(results))
    assert status == 1
    assert "out at (" in text


def test_the_self_test_names_who_was_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Status 1 for a fault with one killer, or an accused control."""
    from attnx_conformance import selftest
    from attnx_conformance.faults import FAULTS

    first, second = FAULTS[:2]
    made = selftest.SelfTest({first: ("self",), second: ("self", "cross")}, {"exp2": ("self f32",)})
    monkeypatch.setattr(selftest, "in_parts", lambda *args, **options: made)
    status, text = ran("--self-test")
    assert status == 1
    assert f"{first.name}" in text
    assert "false alarm: exp2: self f32" in text
    assert "2 faults, 1 caught by fewer than two cases; 1 correct controls, 1 with an alarm" in text
