"""Properties of a subject that no single call can show, as data beside the cases."""

from . import (
    differences,
    dropout,
    layers,
    memory,
    merging,
    orders,
    refusals,
    relatives,
    rows,
    sequences,
    system,
    transforms,
)
from ._kit import Kit
from ._probe import Probe, examine_probe

__all__ = ["PROBES", "Kit", "Probe", "examine_probe", "find"]

PROBES: tuple[Probe, ...] = (
    *rows.PROBES,
    *orders.PROBES,
    *sequences.PROBES,
    *merging.PROBES,
    *differences.PROBES,
    *system.PROBES,
    *dropout.PROBES,
    *memory.PROBES,
    *refusals.PROBES,
    *transforms.PROBES,
    *layers.PROBES,
    *relatives.PROBES,
)


def find(name: str) -> Probe:
    """The probe of that name.

    Raises:
        KeyError: there is none.
    """
    for probe in PROBES:
        if probe.name == name:
            return probe
    raise KeyError(name)
