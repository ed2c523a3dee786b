"""`attnx doctor --json`: what a bug report needs to say of a machine, in one document."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as distribution_version
from typing import TYPE_CHECKING, Any

from attnx._registry import registry
from attnx._settings import KNOWN
from attnx._watch import FRAMEWORKS
from attnx.cli._records import backend_record, doctor_record, plain

if TYPE_CHECKING:
    from collections.abc import Iterable

    from attnx import BackendInfo, Record

__all__ = ["bug_report", "own_names"]

BESIDE = ("numpy", "jaxlib", "ml_dtypes")


def bug_report(records: Iterable[Record], infos: Iterable[BackendInfo]) -> dict[str, Any]:
    """The document, paths and all."""
    return {
        "attnx": distribution_version("attnx"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "frameworks": _frameworks(),
        "settings": _settings(),
        "plugins": [plain(info) for info in registry.plugins],
        "records": [doctor_record(record) for record in records],
        "backends": [backend_record(info) for info in infos],
    }


def own_names() -> set[str]:
    """The words of a report that are nobody's name: plugins, backends and frameworks."""
    found = {"attnx", *FRAMEWORKS, *BESIDE, *registry.specs}
    for info in registry.plugins:
        found |= {info.name, *info.target.split("."), *info.distribution.split(" ")}
    return found


def _frameworks() -> dict[str, str]:
    """Versions of what is installed, as its distribution says; nothing is imported for it."""
    modules = {*FRAMEWORKS, *BESIDE}
    for spec in registry.specs.values():
        modules |= {name.split(".")[0] for name in (*spec.requires, *spec.array_types)}
    found = {}
    for name in sorted(modules - {""}):
        try:
            found[name] = distribution_version(name)
        except PackageNotFoundError:
            loaded = getattr(sys.modules.get(name), "__version__", None)
            if loaded is not None:
                found[name] = str(loaded)
    return found


def _settings() -> dict[str, str]:
    """The variables that are set; what a plugin's own one holds may be a secret."""
    return {
        name: os.environ.get(name, "") if name in KNOWN else "(set)"
        for name in registry.settings.given
    }
