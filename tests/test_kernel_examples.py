"""The kernels under docs/examples are right, in the interpreters of their languages."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import attnx

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"


def test_the_pallas_kernel_gives_the_answer(make: Any) -> None:
    """Two tiles on both axes, their tails, groups and causal alignment; forward alone."""
    backend = runpy.run_path(str(EXAMPLES / "pallas_attention.py"))["load"]()
    arrays = make(B=(1,), Lq=33, Lk=40)
    q, k, v = map(jnp.asarray, arrays)
    out = attnx.attention(q, k, v, causal="bottom_right", backend=backend)
    np.testing.assert_allclose(out, attnx.attention(*arrays, causal="bottom_right"), atol=1e-5)
    told = attnx.explain(q, k, v, backend=backend, gradient=True).route
    assert told == "function pallas_attention, backward pallas_backward"


@pytest.mark.kernels
@pytest.mark.parametrize("name", ["triton", "pallas"])
def test_a_kernel_passes_what_its_header_runs(name: str) -> None:
    """The command in the example's header, in a process of its own."""
    if find_spec("triton" if name == "triton" else "jax") is None:
        pytest.skip(f"{name} is not installed")
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}_attention.py")],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split(" trials")[0]) > 30
