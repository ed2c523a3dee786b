"""The examples under docs/examples run, and say the same on every backend."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "train_small_model.py"


def losses(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]


@pytest.mark.parametrize("backend", ["numpy", pytest.param("jax", marks=pytest.mark.sweep)])
def test_a_small_model_trains_alike_on_every_backend(
    backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`ATTNX_BACKEND` chooses; the first losses agree closely, and it does learn."""
    pytest.importorskip(backend)
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    expected = losses(capsys.readouterr().out)
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)],
        env={**os.environ, "ATTNX_BACKEND": backend}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert f"attention by {backend}" in done.stdout
    found = losses(done.stdout)
    assert len(expected) > 5
    assert expected[-1] < 0.8 * expected[0]
    assert found[:4] == pytest.approx(expected[:4], rel=1e-5)
    assert found == pytest.approx(expected, rel=1e-3)
