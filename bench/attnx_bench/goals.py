"""The performance goals, each read off the rows and the special measures of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .report import Goal, Row

__all__ = ["GOALS", "Figures", "judge"]


@dataclass
class Figures:
    """What a run has measured.

    Attributes:
        seconds: by (workload, implementation).
        special: by name: overhead in µs, import in ms, peaks in MB, callers as a ratio.
    """

    seconds: dict[tuple[str, str], float] = field(default_factory=dict)
    special: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: Sequence[Row], special: Mapping[str, float]) -> Figures:
        """The figures of some rows."""
        found = cls(special=dict(special))
        for row in rows:
            for cell in row.cells:
                if cell.seconds is not None:
                    found.seconds[row.name, cell.implementation] = cell.seconds
        return found

    def ratio(self, workload: str, faster: str, slower: str) -> float | None:
        """How many times as fast the first is as the second."""
        a, b = (self.seconds.get((workload, name)) for name in (faster, slower))
        return None if a is None or b is None else b / a

    def spread(self, workloads: Sequence[str], implementation: str) -> float | None:
        """The slowest of some workloads by the fastest."""
        found = [self.seconds.get((name, implementation)) for name in workloads]
        known = [x for x in found if x is not None]
        return max(known) / min(known) if len(known) == len(found) else None


Read = Callable[[Figures], "float | None"]


@dataclass(frozen=True)
class Wanted:
    """One goal.

    Attributes:
        text: what is asked.
        must: the figure that must be reached: a ratio at least, anything else at most.
        read: the figure, from what was measured.
        after: what we are after beyond it.
        unit: "x" for a ratio where more is better; "x at most", "µs", "ms" or "MB" where less is.
        needs: the workloads that it reads.
        measure: what it reads of the special measures, or "".
    """

    text: str
    must: float
    read: Read
    after: float | None = None
    unit: str = "x"
    needs: tuple[str, ...] = ()
    measure: str = ""


def _faster(text: str, workload: str, one: str, other: str, must: float, **more: Any) -> Wanted:
    def read(figures: Figures) -> float | None:
        return figures.ratio(workload, one, other)

    return Wanted(f"{one} / {other}: {text}", must, read, needs=(workload,), **more)


def _special(text: str, name: str, must: float, unit: str, after: float | None = None) -> Wanted:
    def read(figures: Figures) -> float | None:
        return figures.special.get(name)

    return Wanted(text, must, read, after, unit, measure=name)


def _beside(text: str, implementation: str, one: str, other: str, must: float) -> Wanted:
    """A workload may take at most so many times what a plainer one takes."""

    def read(figures: Figures) -> float | None:
        times = [figures.seconds.get((name, implementation)) for name in (one, other)]
        return None if None in times or times[1] is None else (times[0] or 0.0) / times[1]

    told = f"{implementation}: {text}"
    return Wanted(told, must, read, unit="x at most", needs=(one, other))


def _between(
    text: str, implementation: str, one: str, below: str, above: str, share: float, must: float
) -> Wanted:
    """A size may take at most so many times what lies between its two neighbours' times."""

    def read(figures: Figures) -> float | None:
        names = (one, below, above)
        times = [figures.seconds.get((name, implementation)) for name in names]
        a, low, high = times
        if a is None or low is None or high is None:
            return None
        return a / (low + share * (high - low))

    needs = (one, below, above)
    return Wanted(f"{implementation}: {text}", must, read, unit="x at most", needs=needs)


def _even(text: str, implementation: str, workloads: tuple[str, ...], must: float) -> Wanted:
    def read(figures: Figures) -> float | None:
        return figures.spread(workloads, implementation)

    return Wanted(f"{implementation}: {text}", must, read, unit="x at most", needs=workloads)


NUMPY, TORCH, JAX = "attnx numpy", "attnx torch", "attnx jax"
SDPA, NAIVE, PEER = "torch SDPA", "numpy naive", "jax.nn"
OURS = (NUMPY, TORCH, JAX)

GOALS: tuple[Wanted, ...] = (
    _faster("forward", "forward", NUMPY, SDPA, 0.90, after=1.0),
    _faster("causal", "causal", NUMPY, SDPA, 0.85, after=1.0),
    _faster("forward and backward", "backward", NUMPY, SDPA, 0.90, after=1.0),
    _faster("forward", "forward", NUMPY, NAIVE, 4.5),
    _faster("causal", "causal", NUMPY, NAIVE, 10.0),
    _faster("N 256", "forward-256", NUMPY, NAIVE, 1.3),
    _faster("N 128", "forward-128", NUMPY, NAIVE, 1.3),
    _faster("forward", "forward", TORCH, SDPA, 0.97, after=1.0),
    _faster("causal", "causal", TORCH, SDPA, 0.97, after=1.0),
    _faster("window 512 at 8k", "window-8k", TORCH, SDPA, 10.0),
    _faster("window 512 at 16k", "window-16k", TORCH, SDPA, 18.0),
    _faster("16 packed documents", "packed-16k", TORCH, SDPA, 18.0),
    _faster("softcap, causal", "softcap-causal", TORCH, "torch eager", 10.0),
    _faster("window backward", "window-backward-8k", TORCH, SDPA, 8.0),
    _faster("grouped decode", "decode-gqa", TORCH, SDPA, 2.0),
    _faster("float16 gradient", "float16-backward", TORCH, SDPA, 15.0),
    _faster("forward", "forward", JAX, PEER, 3.0),
    _faster("causal", "causal", JAX, PEER, 5.0),
    _faster("causal gradient at 8k", "causal-backward-8k", JAX, PEER, 6.0),
    _faster("window 512 at 8k", "window-8k", JAX, PEER, 20.0),
    _faster("grouped decode", "decode-gqa", JAX, PEER, 3.5),
    _faster("gradient at N 512", "backward-512", JAX, PEER, 1.0),
    *(
        _special(f"{name}: peak memory at N 32768, {what}", f"peak {name}: {row}", most, "MB")
        for name in OURS
        for what, row, most in (
            ("forward", "long", 20.0), ("forward and backward", "long-backward", 100.0),
        )
    ),
    *(
        _even("logits 1, 10, 100", name, ("forward-2k", "logits-10", "logits-100"), 1.3)
        for name in OURS
    ),
    *(
        _even("gradients at logits 1 and 100", name, ("backward-2k", "logits-100-backward"), 1.3)
        for name in OURS
    ),
    *(_special(f"{n}: 4 callers at once", f"callers {n}", 1.1, "x at most") for n in OURS),
    *(
        _special(f"{name}: overhead of a call", f"overhead {name}", most, "µs", after)
        for name, most, after in ((NUMPY, 2.0, 1.4), (TORCH, 3.0, 2.0), (JAX, 3.0, 2.0))
    ),
    _special("import attnx over bare Python", "import", 60.0, "ms", 30.0),
    *(_beside("lse as well", name, "lse", "forward-2k", 1.2) for name in OURS),
    *(_beside("N 4095 beside 4096", name, "ragged", "forward", 1.15) for name in OURS),
    *(
        _between(f"D {D} between 64 and 128", name, f"heads-{D}", "forward-2k", "heads-128",
                 (D - 64) / 64, 1.15)
        for name in OURS
        for D in (72, 80, 96)
    ),
    *(
        _between("Dv 128 beside D 64", name, "values", "forward-2k", "heads-128", 0.5, 1.2)
        for name in OURS
    ),
)  # fmt: skip


MEASURES = {"overhead": "overhead", "import": "import", "callers": "callers", "peak": "memory"}
"""The special measure that gives a figure, by the first word of the figure's name."""


def judge(figures: Figures, measured: Sequence[str], specials: Sequence[str]) -> list[Goal]:
    """The goals that a run could have met, with what it measured.

    Args:
        figures: of the run.
        measured: the workloads that it ran.
        specials: the special measures that it took.
    """
    found = []
    for wanted in GOALS:
        kind = wanted.measure.split(" ")[0]
        asked = MEASURES[kind] in specials if kind else set(wanted.needs) <= set(measured)
        if asked:
            figure = wanted.read(figures)
            why = "" if figure is not None else "one of the two did not run"
            found.append(
                Goal(wanted.text, figure, wanted.must, wanted.unit, after=wanted.after, why=why)
            )
    return found
