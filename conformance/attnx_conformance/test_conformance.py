"""Collected by `pytest -p attnx_conformance.plugin --pyargs attnx_conformance`."""

from __future__ import annotations

from typing import Any

import pytest

from attnx_conformance.plugin import run_trial

__all__ = ["test_conforms"]


def test_conforms(attnx_trial: Any, request: pytest.FixtureRequest) -> None:
    """A trial holds, or is refused as declared."""
    run_trial(request.config, *attnx_trial)
