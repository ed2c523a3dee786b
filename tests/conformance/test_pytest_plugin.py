"""The suite in a plugin author's own test run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

DEVIATION = '[[deviation]]\ncase = "{}"\nreason = "known"\nlink = "https://example.org/1"\n'


def ran(folder: Path, *arguments: str) -> tuple[int, str]:
    command = [
        sys.executable, "-m", "pytest", "-p", "attnx_conformance.plugin", "-p", "no:cacheprovider",
        "--pyargs", "attnx_conformance", *arguments,
    ]  # fmt: skip
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_each_trial_is_a_test(tmp_path: Path) -> None:
    junit = tmp_path / "junit.xml"
    status, text = ran(
        tmp_path, "-v", "--attnx-backend", "numpy", "--attnx-case", "self", "--attnx-case",
        "causal-6?", "--attnx-seed", "3", f"--junitxml={junit}",
    )  # fmt: skip
    assert status == 0, text
    assert "2 passed" in text
    assert "test_conforms[numpy-self-" in text
    assert 'tests="2"' in junit.read_text()


def test_a_known_deviation_is_expected_to_fail(tmp_path: Path) -> None:
    file = tmp_path / "known.toml"
    file.write_text(DEVIATION.format("self"))
    chosen = ("--attnx-backend", "numpy", "--attnx-case", "self")
    status, text = ran(tmp_path, *chosen, "--attnx-deviations", str(file))
    assert status == 1
    assert "waived, and yet it passes: take the line out (known)" in text
    assert "attnx conformance numpy --case self --dtype " in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "name a backend to examine: --attnx-backend NAME"),
        (("--attnx-backend", "nobody"), "no backend 'nobody'"),
        (("--attnx-backend", "numpy", "--attnx-case", "causall"), "did you mean causal"),
    ],
    ids=["none", "unknown", "case"],
)
def test_wrong_use_is_told(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    status, text = ran(tmp_path, *arguments)
    assert status != 0
    assert said in text
    assert "Traceback" not in text
