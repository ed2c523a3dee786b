"""The cases, by class. Each is data: what goes in, and which clauses and known faults it guards."""

from . import bias, empty_rows, gradients, isolation, masks, more, numerics, outputs, strides, wild
from ._case import DTYPES, HEAVY, Case, Inputs, Shape

__all__ = ["CASES", "DTYPES", "HEAVY", "Case", "Inputs", "Shape", "find"]

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
