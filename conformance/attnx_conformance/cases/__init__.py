"""The cases, by class. Each is data: what goes in, and which clauses and known faults it guards."""

from . import (
    alibi,
    bias,
    dropout,
    empty_rows,
    gradients,
    isolation,
    masks,
    more,
    numerics,
    outputs,
    strides,
    wild,
)
from ._case import BASE, DTYPES, HEAVY, LOW, Case, Inputs, Recipe, Shape

__all__ = [
    "BASE", "CASES", "DTYPES", "HEAVY", "LOW", "Case", "Inputs", "Recipe", "Shape", "find",
]  # fmt: skip

CASES: tuple[Case, ...] = (
    *outputs.CASES,
    *masks.CASES,
    *bias.CASES,
    *empty_rows.CASES,
    *isolation.CASES,
    *numerics.CASES,
    *gradients.CASES,
    *strides.CASES,
    *more.CASES,
    *dropout.CASES,
    *alibi.CASES,
    *wild.CASES,
)


def find(name: str) -> Case:
    """The case of that name.

    Raises:
        KeyError: There is none.
    """
    for case in CASES:
        if case.name == name:
            return case
    raise KeyError(name)
