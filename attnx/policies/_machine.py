"""What a measurement holds for: this processor, its cores, its GPUs, this attnx.

Frameworks are not looked at here, and not imported: their versions stand beside each measurement,
so that a new PyTorch makes PyTorch be measured again and nobody else.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

from attnx._registry import registry
from attnx.plugin import PROJECT

__all__ = ["machine", "version"]

CPUINFO = Path("/proc/cpuinfo")
GPUS = Path("/proc/driver/nvidia/gpus")


@functools.cache
def machine() -> dict[str, Any]:
    """What decides how fast this machine is, as JSON holds it."""
    usable = getattr(os, "sched_getaffinity", None)
    return {
        "attnx": importlib.metadata.version(PROJECT),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu(),
        "cores": len(usable(0)) if usable else os.cpu_count() or 1,
        "gpus": _gpus(),
    }


def _cpu() -> str:
    """The processor's model; Python itself does not know it on Linux."""
    return _field(CPUINFO, "model name") or platform.processor() or platform.machine()


def _gpus() -> list[str]:
    """The models that NVIDIA's driver tells of; asking it needs no framework."""
    try:
        found = sorted(GPUS.glob("*/information"))
    except OSError:
        return []
    return [_field(path, "Model") for path in found]


def _field(path: Path, name: str) -> str:
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.startswith(name):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return ""


def version(name: str) -> str:
    """The versions of what a registered backend computes with, without importing it if possible."""
    spec = registry.specs[name]
    parts = [registry._distributions.get(name, "")]
    for module in spec.requires or (spec.framework or spec.name,):
        try:
            parts.append(f"{module} {importlib.metadata.version(module)}")
        except importlib.metadata.PackageNotFoundError:
            parts.append(f"{module} {registry.backend(name).version()}")
    return ", ".join(part for part in parts if part)
