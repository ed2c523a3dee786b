"""What a run leaves behind: one line a trial, between a header and a footer.

The file is JSON lines, written as the run goes on, so that an interrupted or killed run leaves what
it knows; without its footer a report counts as cut short, and says so.
"""

from __future__ import annotations

import json
import math
import platform
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

__all__ = [
    "OK", "VERDICTS", "Report", "Result", "Writer", "profiles", "read", "unproven", "versions",
]  # fmt: skip

FORMAT = 1

VERDICTS = (
    "passed", "failed", "crashed", "wrongly-accepted", "refused", "not-applicable", "waived",
)  # fmt: skip
"""Every verdict; README of the suite: `docs/conformance.md`."""

OK = frozenset({"passed", "refused", "not-applicable", "waived"})
"""Verdicts that count for the subject."""


@dataclass(frozen=True)
class Result:
    """One trial: a case on a subject, in one dtype, layout and way to gradients.

    Attributes:
        subject: the name of what was examined.
        case: the name of the case.
        profile: the case's profile.
        clauses: the clauses of the specification that it guards.
        ids: known faults that it would have caught.
        dtype: of q, k and v.
        layout: "bhsd" or "bshd".
        way: "vjp", "framework" or None, how gradients were asked for; "vectors" where results were
            handed in as files.
        seed: of the inputs.
        verdict: one of `VERDICTS`.
        detail: one line for a person; a traceback where it crashed.
        ratios: error over bound of each result that was compared.
        seconds: how long it took, compilation and the oracle included.
        target: what names the subject on the command line; "" where nothing does.
    """

    subject: str
    case: str
    profile: str
    clauses: tuple[str, ...]
    ids: tuple[str, ...]
    dtype: str
    layout: str
    way: str | None
    seed: int
    verdict: str
    detail: str = ""
    ratios: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    target: str = ""

    @property
    def ok(self) -> bool:
        """Whether the verdict counts for the subject."""
        return self.verdict in OK

    @property
    def command(self) -> str:
        """What repeats this trial alone; of vectors, what writes its file again.

        Of a function that was handed to `check`, the arguments that choose the trial.
        """
        if self.way == "vectors":
            return (
                f"attnx conformance export vectors --case {self.case} --dtype {self.dtype} "
                f"--seed {self.seed}"
            )
        if not self.target:
            return f"cases={(self.case,)!r}, dtypes={(self.dtype,)!r}, seed={self.seed}"
        way = "" if self.way is None else f" --way {self.way}"
        return (
            f"attnx conformance {self.target} --case {self.case} --dtype {self.dtype} "
            f"--layout {self.layout}{way} --seed {self.seed}"
        )


@dataclass(frozen=True)
class Report:
    """A whole run.

    Attributes:
        header: versions, machine, seed, subjects and selection.
        results: in the order in which they came.
        footer: the route of each subject, and how the run ended; empty when it was cut short.
    """

    header: Mapping[str, Any]
    results: tuple[Result, ...]
    footer: Mapping[str, Any]

    @property
    def complete(self) -> bool:
        """Whether every trial that was planned was run."""
        return bool(self.footer) and not self.footer.get("interrupted", False)


class Writer:
    """Writes a report as a run goes on."""

    def __init__(self, path: Path | str, header: Mapping[str, Any]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[str] = self.path.open("w", encoding="utf-8")
        self._line({"attnx_conformance": FORMAT, **header})

    def add(self, result: Result) -> None:
        """Append one trial; JSON has no infinity, so such a ratio stands as text."""
        ratios = {n: x if math.isfinite(x) else str(x) for n, x in result.ratios.items()}
        self._line(asdict(result) | {"ratios": ratios})

    def finish(self, footer: Mapping[str, Any]) -> None:
        """Append the footer: the run came to its end, or was stopped by a person."""
        self._line({"footer": dict(footer)})

    def _line(self, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()


def read(path: Path | str) -> Report:
    """A report from its file; a last line that was cut off is left out.

    Raises:
        ValueError: it is no report, or one of another format.
    """
    records = []
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    header = records[0] if records and isinstance(records[0], dict) else {}
    if header.get("attnx_conformance") != FORMAT:
        raise ValueError(f"{path}: expected a report of format {FORMAT}")
    footer = records[-1].get("footer", {})
    lines = records[1:-1] if footer else records[1:]
    return Report(header, tuple(_result(line) for line in lines), footer)


def _result(record: dict[str, Any]) -> Result:
    ratios = {name: float(x) for name, x in record["ratios"].items()}
    known = {"clauses": tuple(record["clauses"]), "ids": tuple(record["ids"]), "ratios": ratios}
    return Result(**{**record, **known})


def profiles(results: Iterable[Result]) -> dict[str, dict[str, Counter[str]]]:
    """How often each verdict came, by subject and profile."""
    table: dict[str, dict[str, Counter[str]]] = {}
    for result in results:
        counts = table.setdefault(result.subject, {}).setdefault(result.profile, Counter())
        counts[result.verdict] += 1
    return table


def unproven(results: Iterable[Result]) -> list[str]:
    """The subjects to which no trial applied: nothing is wrong, because nothing was shown."""
    applied: dict[str, bool] = {}
    for result in results:
        shown = result.verdict != "not-applicable"
        applied[result.subject] = applied.get(result.subject, False) or shown
    return [subject for subject, shown in applied.items() if not shown]


def versions() -> dict[str, str]:
    """The machine, Python, and every installed package that may matter to a result."""
    found = {
        "python": platform.python_version(), "machine": platform.machine(),
        "system": platform.system(),
    }  # fmt: skip
    for name in ("attnx", "numpy", "torch", "jax", "jaxlib", "cupy", "ml_dtypes"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
