"""How the tests run the command: in this process where it is quick, else as a user would."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

PLUGIN = '''
"""A plugin with one backend for each way in which a backend can fail."""

import os
import signal
import time

import attnx
from attnx import errors, plugin


class Faulty(plugin.ArrayBackend):
    def forward(self, q, k, v, call):
        if self.name == "dies":
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.name == "quits":
            os._exit(7)
        if self.name == "raises":
            raise RuntimeError("a message\\nof two lines")
        if self.name == "hangs":
            time.sleep(60)
        out, lse = super().forward(q, k, v, call)
        return (out * 1.001, lse) if self.name == "wrong" else (out, lse)


def capabilities(name):
    gradient = name != "forward-only"
    softcap = name != "no-softcap"
    return plugin.Capabilities(dtypes=frozenset({"float32"}), gradient=gradient, softcap=softcap)


def load(name):
    if name == "broken":
        raise RuntimeError("cannot be loaded")
    return Faulty(name, attnx.get_backend("numpy").lane, capabilities(name))


NAMES = (
    "wrong", "dies", "quits", "raises", "hangs", "forward-only", "no-softcap", "broken",
)


@plugin.hookimpl
def attnx_backends():
    return [
        plugin.BackendSpec(name=n, framework="numpy", load=lambda n=n: load(n)) for n in NAMES
    ]
'''


@pytest.fixture(scope="session")
def faulty_plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH that holds an installed third-party plugin."""
    folder = tmp_path_factory.mktemp("faulty")
    (folder / "attnx_faulty_plugin.py").write_text(PLUGIN, encoding="utf-8")
    info = folder / "attnx_faulty-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: attnx-faulty\nVersion: 1.5\n", encoding="utf-8"
    )
    (info / "entry_points.txt").write_text(
        "[attnx]\nfaulty = attnx_faulty_plugin\n", encoding="utf-8"
    )
    return folder


Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """`run("compare", "--json", path=[...], ATTNX_BACKEND="numpy")`, in a folder of its own."""

    def run(
        *arguments: object, path: tuple[Path, ...] = (), **variables: str
    ) -> subprocess.CompletedProcess[str]:
        kept = {name: text for name, text in os.environ.items() if not name.startswith("ATTNX_")}
        entries = [str(entry) for entry in (*path, *sys.path) if str(entry)]
        return subprocess.run(
            [sys.executable, "-m", "attnx", *map(str, arguments)],
            env={**kept, "PYTHONPATH": os.pathsep.join(entries), **variables},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    return run
