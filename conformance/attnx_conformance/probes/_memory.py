"""How much memory calls add to a process of their own: `python -m ... SPEC DTYPE LAYOUT`.

Peaks belong to a process, so they are measured in one that does nothing else. Each call is run once
before it is weighed, so that code, threads and compiled kernels are not counted, and what the
allocator kept from that is given back to the system first, or the second run would seem free.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from attnx.errors import AttnxError
from attnx_conformance.resident import peak_above
from attnx_conformance.subject import Subject, resolve

from ._kit import Kit
from .memory import HEADS, LENGTHS, NOT_FOUND, WIDE

__all__ = ["main", "peak_of"]


def peak_of(work: Callable[[], object]) -> int:
    """Bytes that `work` adds at its peak to the resident memory of this process, once warm."""
    work()
    return peak_above(work)[0] or 0


def _works(subject: Subject, dtype: str, layout: str) -> Iterator[tuple[str, Callable[[], object]]]:
    kit = Kit(subject, dtype, np.random.default_rng(0), layout)
    gradients = subject.capabilities.gradient and bool(subject.ways)
    for length in LENGTHS:
        q, k, v = (kit.draw(1, 1, length, 32) for _ in range(3))
        args, given = kit.arguments(q, k, v)
        yield f"forward {length}", _forward(kit, args, given)
        if gradients:
            yield f"backward {length}", _backward(kit, args, given)
    if "dense" in subject.capabilities.masks:
        q, k, v = (kit.draw(1, HEADS, WIDE, 8) for _ in range(3))
        mask = kit.rng.random((WIDE, WIDE)) < 0.5
        args, given = kit.arguments(q, k, v, mask=mask)
        yield "mask", _forward(kit, args, given)


def _forward(kit: Kit, args: Any, given: dict[str, Any]) -> Callable[[], object]:
    def work() -> None:
        kit.lane.wait(kit.subject.attention(args.q, args.k, args.v, **given))

    return work


def _backward(kit: Kit, args: Any, given: dict[str, Any]) -> Callable[[], object]:
    gradient = kit.vjp if kit.subject.ways[0] == "vjp" else kit.own

    def work() -> None:
        made, grads = gradient(args, given)
        kit.lane.wait(made[0], *(x for x in grads.values() if x is not None))

    return work


def main(spec: str, dtype: str, layout: str) -> None:
    """Print the peaks as one line of JSON."""
    try:
        subject = resolve(spec)
    except (AttnxError, ImportError, AttributeError, ValueError) as error:
        print(error, file=sys.stderr)
        sys.exit(NOT_FOUND)
    found = {name: peak_of(work) for name, work in _works(subject, dtype, layout)}
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
