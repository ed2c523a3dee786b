"""The performance goals, each read off the rows and the special measures of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .report import Goal, Row, ratio_of
from .workloads import PLAIN

__all__ = ["GOALS", "Figures", "judge"]


@dataclass
class Figures:
    """What a run has measured.

    Attributes:
        seconds: by (workload, implementation).
        beside: by (workload, what took turns with it, implementation).
        special: by name: overhead in µs, import in ms, peaks in MB, callers as a ratio.
        flops: by workload.
        machine: what it can do: "sgemm_gflops", "exp_ns", "cores".
    """

    seconds: dict[tuple[str, str], float] = field(default_factory=dict)
    beside: dict[tuple[str, str, str], float] = field(default_factory=dict)
    special: dict[str, float] = field(default_factory=dict)
    flops: dict[str, float] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls, rows: Sequence[Row], special: Mapping[str, float], machine: Mapping[str, Any]
    ) -> Figures:
        """The figures of some rows."""
        found = cls(special=dict(special), machine=dict(machine))
        for row in rows:
            found.flops[row.name] = row.flops
            for cell in row.cells:
                if cell.seconds is not None:
                    found.seconds[row.name, cell.implementation] = cell.seconds
            for other, taken in row.beside.items():
                for name, seconds in taken.items():
                    found.beside[row.name, other, name] = seconds
        return found

    def ratio(self, workload: str, faster: str, slower: str) -> float | None:
        """How many times as fast the first is as the second."""
        a, b = (self.seconds.get((workload, name)) for name in (faster, slower))
        return None if a is None or b is None else b / a

    def relative(self, workload: str, other: str, implementation: str) -> float | None:
        """What a workload takes, by another that took turns with it."""
        a = self.seconds.get((workload, implementation))
        b = self.beside.get((workload, other, implementation))
        return None if a is None or b is None else a / b

    def at_best(self, workload: str, exps: float, slower: str) -> float | None:
        """The ratio of a kernel that took NumPy's products and exponentials, and no time else.

        Args:
            workload: of head size 64, forward or with gradients.
            exps: exponentials of a visible pair.
            slower: what it is compared with.
        """
        known: list[Any] = [self.machine.get(x) for x in ("sgemm_gflops", "exp_ns", "cores")]
        seconds = self.seconds.get((workload, slower))
        if None in known or seconds is None:
            return None
        peak, exp, cores = known
        flops = self.flops[workload]
        pairs = flops / (256.0 * (3.5 if exps > 1 else 1.0))
        ratio: float = seconds / (flops / (1e9 * peak) + exps * pairs * 1e-9 * exp / cores)
        return ratio


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
        bound: what the figure could be at best on this machine, where that is known.
    """

    text: str
    must: float
    read: Read
    after: float | None = None
    unit: str = "x"
    needs: tuple[str, ...] = ()
    measure: str = ""
    bound: Read | None = None


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
        return figures.relative(one, other, implementation)

    return Wanted(f"{implementation}: {text}", must, read, unit="x at most", needs=(one,))


def _between(
    text: str, implementation: str, one: str, neighbours: tuple[str, str], share: float, must: float
) -> Wanted:
    """A size may take at most so many times what lies between its two neighbours' times."""

    def read(figures: Figures) -> float | None:
        low, high = (figures.relative(one, name, implementation) for name in neighbours)
        return None if low is None or high is None else 1 / (1 / low + share * (1 / high - 1 / low))

    return Wanted(f"{implementation}: {text}", must, read, unit="x at most", needs=(one,))


def _even(
    text: str, implementation: str, workloads: tuple[str, ...], plain: str, must: float
) -> Wanted:
    """The slowest of some workloads, the plain one among them, by the fastest."""

    def read(figures: Figures) -> float | None:
        found = [figures.relative(name, plain, implementation) for name in workloads]
        known = [1.0, *(x for x in found if x is not None)]
        return None if None in found else max(known) / min(known)

    return Wanted(f"{implementation}: {text}", must, read, unit="x at most", needs=workloads)


def _numpy(text: str, workload: str, must: float, exps: float) -> Wanted:
    """NumPy's speed by SDPA's, with what its own products and exponentials would allow."""

    def bound(figures: Figures) -> float | None:
        return figures.at_best(workload, exps, SDPA)

    return _faster(text, workload, NUMPY, SDPA, must, after=1.0, bound=bound)


NUMPY, TORCH, JAX = "attnx numpy", "attnx torch", "attnx jax"
SDPA, NAIVE, PEER = "torch SDPA", "numpy naive", "jax.nn"
OURS = (NUMPY, TORCH, JAX)

GOALS: tuple[Wanted, ...] = (
    _numpy("forward", "forward", 0.90, 1.0),
    _numpy("causal", "causal", 0.85, 1.0),
    _numpy("forward and backward", "backward", 0.90, 2.0),
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
        _even("logits 1, 10, 100", name, ("logits-10", "logits-100"), "forward-2k", 1.3)
        for name in OURS
    ),
    *(
        _even("gradients at logits 1 and 100", name, ("logits-100-backward",), "backward-2k", 1.3)
        for name in OURS
    ),
    *(_special(f"{n}: 4 callers at once", f"callers {n}", 1.1, "x at most") for n in OURS),
    *(
        _special(f"{name}: overhead of a call", f"overhead {name}", most, "µs", after)
        for name, most, after in ((NUMPY, 2.0, 1.4), (TORCH, 3.0, 2.0), (JAX, 3.0, 2.0))
    ),
    _special("import attnx over bare Python", "import", 60.0, "ms", 30.0),
    *(_beside("lse as well", name, "lse", "forward-2k", 1.2) for name in OURS),
    *(_beside("dropout as well", name, "dropout", "forward-2k", 3.0) for name in OURS),
    *(
        _beside("dropout as well, with gradients", name, "dropout-backward", "backward-2k", 3.0)
        for name in OURS
    ),
    *(_beside("N 4095 beside 4096", name, "ragged", "forward", 1.15) for name in OURS),
    *(
        _between(f"D {D} between 64 and 128", name, f"heads-{D}", PLAIN, (D - 64) / 64, 1.15)
        for name in OURS
        for D in (72, 80, 96)
    ),
    *(
        _between("Dv 128 beside D 64", name, "values", PLAIN, 0.5, 1.2)
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
            best = None if wanted.bound is None else wanted.bound(figures)
            if figure is not None and best is not None:
                why = f"at best {ratio_of(best)} here, by what NumPy's sgemm and exp take alone"
            found.append(
                Goal(wanted.text, figure, wanted.must, wanted.unit, after=wanted.after, why=why)
            )
    return found
