"""The conformance suite: what an attention backend must get right, as data, with its judge."""

__all__ = ["Bounds", "Judgement", "Reference", "bounds", "judge", "reference"]

from .oracle import Reference, reference
from .tolerance import Bounds, Judgement, bounds, judge
