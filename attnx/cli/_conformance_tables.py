"""How a run of the suite reads in a terminal: profiles first, then what is wrong and where."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from attnx_conformance.results import Report, Result

__all__ = ["print_report", "print_self_test"]

SHOWN, ALIKE = 20, 2
"""Failures that are told one by one, and how many of those that break the same clauses."""


def print_report(console: Console, report: Report, absent: Sequence[str]) -> None:
    """The summary of a run."""
    from attnx_conformance.results import profiles, unproven

    table = Table(title=None, title_justify="left")
    for column in ("subject", "profile", "verdict"):
        table.add_column(column)
    for column in ("passed", "failed", "refused", "waived", "not applicable"):
        table.add_column(column, justify="right")
    for subject, by_profile in profiles(report.results).items():
        for profile, counts in by_profile.items():
            table.add_row(subject, profile, _verdict(counts), *_numbers(counts))
    console.print(table)
    _print_failures(console, [result for result in report.results if not result.ok])
    _print_route(console, report)
    for subject in unproven(report.results):
        told = f"{subject}: no trial applies to what it takes, so nothing was shown"
        console.print(Text(told, style="bold red"))
    for profile, why in report.header.get("absent", {}).items():
        console.print(Text(f"The profile {profile} was not run: {why}", style="yellow"))
    for line in absent:
        console.print(Text(line))
    planned = int(report.header.get("planned", len(report.results)))
    if len(report.results) < planned:
        console.print(
            Text(f"Cut short: {len(report.results)} of {planned} trials ran.", style="bold red")
        )


def _verdict(counts: Counter[str]) -> Text:
    if _wrong(counts):
        return Text("not held", style="bold red")
    if counts["waived"]:
        return Text("held, with deviations", style="yellow")
    return Text("held", style="green") if counts["passed"] else Text("not claimed", style="dim")


def _numbers(counts: Counter[str]) -> list[str]:
    others = (counts[verdict] for verdict in ("refused", "waived", "not-applicable"))
    return [str(n or "") for n in (counts["passed"], _wrong(counts), *others)]


def _wrong(counts: Counter[str]) -> int:
    return counts["failed"] + counts["crashed"] + counts["wrongly-accepted"]


def _print_failures(console: Console, wrong: Sequence[Result]) -> None:
    if not wrong:
        return
    clauses = Counter(clause for result in wrong for clause in result.clauses)
    named = ", ".join(f"{clause} ({count})" for clause, count in clauses.most_common(6))
    console.print(Text(f"\n{len(wrong)} trials went wrong; clauses: {named}", style="bold"))
    told = _varied(wrong)
    for result in told:
        way = "" if result.way is None else f", gradients by {result.way}"
        console.print(
            Text(f"\n{result.verdict}: {result.case} ", style="red").append(
                f"({', '.join(result.clauses)}; {result.dtype}, {result.layout}{way})", style="dim"
            )
        )
        lines = result.detail.strip().splitlines() or [""]
        for line in lines[-1:] if result.verdict == "crashed" else lines:
            console.print(Text(f"  {line}"))
        console.print(Text(f"  {result.command}", style="dim"), soft_wrap=True)
    if len(wrong) > len(told):
        left = len(wrong) - len(told)
        console.print(Text(f"\n... and {left} more; --report or --html has them all"))


def _varied(wrong: Sequence[Result]) -> list[Result]:
    """A few of each kind, so that one fault with a hundred witnesses does not hide another."""
    seen: Counter[tuple[str, ...]] = Counter()
    chosen = []
    for result in wrong:
        seen[result.clauses] += 1
        if seen[result.clauses] <= ALIKE:
            chosen.append(result)
    return chosen[:SHOWN]


def _print_route(console: Console, report: Report) -> None:
    for subject, route in report.footer.get("route", {}).items():
        calls: dict[str, int] = route.get("calls", {})
        if calls:
            counted = ", ".join(f"{name} {count}" for name, count in sorted(calls.items()))
            console.print(Text(f"{subject} itself was entered: {counted}", style="dim"))


def print_self_test(console: Console, made: Any) -> None:
    """The fault x case matrix in short: each fault and who caught it."""
    table = Table(title="Planted faults")
    for column in ("kind", "fault", "caught by"):
        table.add_column(column)
    for fault, caught in made.caught.items():
        style = "" if len(caught) >= 2 else "bold red"
        names = ", ".join(caught[:4]) or "nobody"
        names += f" and {len(caught) - 4} more" if len(caught) > 4 else ""
        table.add_row(fault.kind, fault.name, Text(names, style=style))
    console.print(table)
    for control, alarms in made.alarms.items():
        if alarms:
            console.print(Text(f"false alarm: {control}: {', '.join(alarms)}", style="bold red"))
    alone = sum(len(caught) < 2 for caught in made.caught.values())
    alarmed = sum(bool(alarms) for alarms in made.alarms.values())
    console.print(
        f"{len(made.caught)} faults, {alone} caught by fewer than two cases; "
        f"{len(made.alarms)} correct controls, {alarmed} with an alarm"
    )
