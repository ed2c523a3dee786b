"""The suite, on this backend: each trial is a test, and there is nothing else to write."""

from attnx_conformance.test_conformance import test_conforms

__all__ = ["test_conforms"]
