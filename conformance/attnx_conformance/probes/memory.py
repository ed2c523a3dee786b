"""Memory grows with the length, not with its square: nobody keeps a matrix of scores.

One process measures all; the probes read its figures.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import lru_cache

from ._kit import Kit
from ._probe import Probe

__all__ = ["PROBES", "peaks"]

LENGTHS = (3072, 6144)
"""One head of these lengths, without a mask."""
HEADS, WIDE = 8, 2048
"""As many heads of this length share one dense mask."""
NOT_FOUND = 3
"""Exit status of the process that measures, where it finds no such subject."""
TINY = 16 << 20  # of no weight beside the noise of an allocator
SCORE = 4  # bytes of a score


@lru_cache(maxsize=16)
def peaks(spec: str, dtype: str, layout: str) -> dict[str, int] | str:
    """Peaks in bytes by name, from a process of their own; or why there are none.

    There are none at all where the other process does not find the subject, as with a backend that
    was registered by hand.
    """
    path = os.pathsep.join(p for p in sys.path if p)
    # One thread: its stacks and its scratch are what is weighed, and not how many there are.
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", f"{__package__}._memory", spec, dtype, layout]
    done = subprocess.run(command, env=environment, text=True, capture_output=True, check=False)
    if done.returncode == NOT_FOUND:
        return {}
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    return {str(name): int(size) for name, size in json.loads(done.stdout.splitlines()[-1]).items()}


def _measured(kit: Kit) -> dict[str, int]:
    if not sys.platform.startswith("linux"):
        kit.inapplicable(f"memory is measured on Linux, not on {sys.platform}")
    if "cpu" not in kit.has.devices:
        kit.inapplicable("its arrays are not in the memory of a process")
    if not kit.subject.spec:
        kit.inapplicable("it cannot be made again in another process: it has no spec")
    found = peaks(kit.subject.spec, kit.dtype, kit.layout)
    if not found:
        kit.inapplicable("it cannot be made again in another process: it is not found there")
    if isinstance(found, str):
        raise RuntimeError(f"the process that measures memory failed: {found}")
    return found


def _grows_with_the_length(kit: Kit, what: str) -> None:
    found = _measured(kit)
    first, second = (found[f"{what} {length}"] for length in LENGTHS)
    matrix = SCORE * LENGTHS[1] ** 2
    kit.require(
        second < matrix / 4,
        f"{what} of {LENGTHS[1]} tokens peaks at {second / 1e6:.0f} MB; their scores are "
        f"{matrix / 1e6:.0f} MB, and a quarter of it is allowed",
    )
    if second > TINY:
        kit.require(
            second <= 2.6 * max(first, 1),
            f"{what} peaks at {first / 1e6:.0f} MB for {LENGTHS[0]} tokens and at "
            f"{second / 1e6:.0f} MB for {LENGTHS[1]}: more than in proportion",
        )


def _forward_memory(kit: Kit) -> None:
    """A forward pass holds what grows with the length alone."""
    _grows_with_the_length(kit, "forward")


def _backward_memory(kit: Kit) -> None:
    """And so do a forward and a backward pass together."""
    _grows_with_the_length(kit, "backward")


def _mask_memory(kit: Kit) -> None:
    """A mask that every head shares is not copied for each (S3.3)."""
    if "dense" not in kit.has.masks:
        kit.inapplicable("not declared: dense")
    peak = _measured(kit)["mask"]
    allowed = SCORE * HEADS * WIDE**2 // 4
    kit.require(
        peak < allowed,
        f"{HEADS} heads of {WIDE} tokens with one dense mask peak at {peak / 1e6:.0f} MB, and "
        f"{allowed / 1e6:.0f} MB are allowed",
    )


PROBES = (
    Probe("memory-of-forward", ("S2.5",), "system", _forward_memory, needs=("memory",),
          ids=("K5", "O3"), dtypes=("float32",)),
    Probe("memory-of-backward", ("S2.5",), "system", _backward_memory,
          needs=("memory", "gradient"), dtypes=("float32",)),
    Probe("memory-of-a-shared-mask", ("S3.3",), "system", _mask_memory, needs=("memory",),
          ids=("O5",), dtypes=("float32",)),
)  # fmt: skip
