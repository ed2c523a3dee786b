"""A good plugin, end to end: docs/examples/attnx-echo, found through its own entry point."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import attnx
from attnx_conformance.cases import find
from attnx_conformance.runner import run

Python = Callable[..., str]
CALL = "import attnx, numpy as np\nx = np.ones((3, 4), np.float32)\n"


def test_it_is_installed_and_that_is_all(python: Python, echo: Path) -> None:
    """Found, told with its distribution, planned, explained; the default stays the lane's owner."""
    code = CALL + (
        "import json, sys\n"
        "assert 'attnx_echo' not in sys.modules\n"
        "y, pullback = attnx.attention_vjp(x, x, x, causal=True, softcap=2.0, backend='echo')\n"
        "assert np.allclose(y, attnx.attention(x, x, x, causal=True, softcap=2.0))\n"
        "assert pullback(y).q.shape == (3, 4)\n"
        "explained = attnx.explain(x, x, x, backend='echo')\n"
        "info = next(i for i in attnx.backends() if i.name == 'echo')\n"
        "print(json.dumps({\n"
        "    'plan': attnx.plan(x, x, x, backend='echo').backend, 'route': explained.route,\n"
        "    'choice': explained.choice, 'default': attnx.explain(x, x, x).choice,\n"
        "    'info': [info.status, info.framework, info.summary, info.distribution],\n"
        "    'doctor': [r[1:5] for r in attnx.doctor() if r.subject == 'echo'],\n"
        "}))\n"
    )
    assert json.loads(python(code, path=str(echo), ATTNX_PLUGINS="numpy,echo")) == {
        "plan": "echo",
        "route": "array tiles",
        "choice": "echo",
        "default": "numpy",
        "info": ["available", "numpy", "the array base class", "attnx-echo 0.1.0"],
        "doctor": [["ok", "1 backend(s)", "", "attnx-echo 0.1.0"]],
    }


def test_the_command_shows_it(python: Python, echo: Path) -> None:
    code = "import sys\nfrom attnx.cli import main\nsys.argv = ['attnx', 'backends']\nmain()\n"
    shown = python(code, path=str(echo), ATTNX_PLUGINS="numpy,echo")
    (row,) = [line.split() for line in shown.splitlines() if " echo " in line]
    assert row[1:6] == ["echo", "│", "available", "│", np.__version__]
    assert row[-3:-1] == ["attnx-echo", "0.1.0"]


def test_a_plugin_that_is_blocked_is_not_imported(python: Python, echo: Path) -> None:
    code = CALL + (
        "import sys\n"
        "try:\n    attnx.attention(x, x, x, backend='echo')\n"
        "except attnx.errors.UnknownBackend as error:\n    print(str(error).split(';')[0])\n"
        "print('attnx_echo' in sys.modules)\n"
        "print([r.status for r in attnx.doctor() if r.subject == 'echo'])\n"
    )
    first = python(code, path=str(echo), ATTNX_PLUGINS="numpy").splitlines()
    assert first == ["backend: no backend 'echo' is registered", "False", "['blocked']"]


@pytest.fixture
def registered(echo: Path) -> Iterator[None]:
    """The same module in this process, registered by hand."""
    spec = importlib.util.spec_from_file_location("attnx_echo", echo / "attnx_echo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    attnx.register(module, "echo")
    yield
    attnx.unregister("echo")


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("case", ["grouped", "window-left", "gradient-ones"])
def test_the_suite_holds_it(case: str) -> None:
    assert run(find(case), "echo", "float32").verdict == "passed"
