"""Runs what the documents say: every Python block in README and docs, every docstring example.

A document that is not executed drifts from the code within a release. One namespace lasts for a
whole document, as a reader would type it.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import pytest
from hypothesis import settings
from sybil import Sybil
from sybil.document import PythonDocStringDocument
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser
from sybil.parsers.rest import DocTestParser

collect_ignore = ["docs/examples/attnx-mlx"]  # it has an environment of its own, and MLX in it

settings.register_profile("quick", deadline=None, max_examples=20)
settings.register_profile("ci", deadline=None, max_examples=60, derandomize=True)
settings.register_profile("deep", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if "CI" in os.environ else "quick"))


def cuda_device() -> bool:
    """Whether CuPy is installed and finds a device."""
    if find_spec("cupy") is None:
        return False
    import cupy

    try:
        return bool(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError:
        return False


def namespace(names: dict[str, Any]) -> None:
    """Gives a document what its `skip` comments ask for."""
    names["cuda_device"] = cuda_device


documents = Sybil(
    parsers=[PythonCodeBlockParser(), SkipParser()],
    patterns=["README.md", "docs/*.md", "docs/**/*.md"],
    setup=namespace,
)
docstrings = Sybil(
    parsers=[DocTestParser()],
    patterns=["attnx/*.py", "attnx/**/*.py"],
    document_types={".py": PythonDocStringDocument},
)
pytest_collect_file = (documents + docstrings).pytest()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Spreads single tests over processes, but keeps whole what builds on its own beginning."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.split("::")[0]
            whole = path.startswith("attnx/") or path.endswith((".md", "test_packaging.py"))
            return path if whole else nodeid

    return Scheduling(config, log)
