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
from sybil.integration.pytest import SybilItem
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser
from sybil.parsers.rest import DocTestParser

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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keeps a document's blocks together, and in order, when tests are spread over processes."""
    for item in items:
        if isinstance(item, SybilItem):
            item.add_marker(pytest.mark.xdist_group(str(item.path)))
