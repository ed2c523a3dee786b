"""The types of the public API are part of it.

That a strict checker agrees with `typing_api.py` is for the checkers to say: it is one of the files
that `mypy` and `pyright` read. Here stands that they see anything at all.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import attnx
from attnx import errors, masks, plugin

ROOT = Path(__file__).resolve().parents[1]


def mypy(path: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", f"--cache-dir={cache}", str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


def test_wrong_use_is_seen_before_it_runs(tmp_path: Path) -> None:
    """The checker sees attnx's types at all: without `py.typed` it would take anything."""
    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        "import attnx\n"
        "attnx.attention(1, 2, 3, casual=True)\n"
        "attnx.Causal() & 3\n"
        "attnx.Window('left', 0)\n",
        "utf-8",
    )
    done = mypy(wrong, tmp_path / "cache")
    lines = [line for line in done.stdout.splitlines() if ": error:" in line]
    assert [line.split(":")[1] for line in lines] == ["2", "3", "4"], done.stdout


@pytest.mark.parametrize("module", [attnx, errors, masks, plugin], ids=lambda m: m.__name__)
def test_every_public_name_exists_and_every_public_function_is_annotated(module: object) -> None:
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isfunction(value):
            parameters = inspect.signature(value).parameters.values()
            assert all(p.annotation is not p.empty for p in parameters), name
            assert inspect.signature(value).return_annotation is not inspect.Signature.empty, name
