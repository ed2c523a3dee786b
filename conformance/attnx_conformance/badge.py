"""A report as a badge: one line for a README, made from what a run showed and nothing else.

A refusal counts for a backend, so a badge of profiles alone would be green for one that refuses
everything. Where trials were refused it therefore says how much was computed.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from xml.sax.saxutils import escape

from .results import OK, Report, profiles, unproven

__all__ = ["badge", "draw", "write"]

COLOURS = {"green": "#2e7d32", "yellow": "#8a6d00", "red": "#c62828", "grey": "#616161"}
"""By outcome; white text on each has a contrast of 4.5 or more."""

NAMED = 2
"""How many profiles are named; of more, the number is told."""

WIDTH, NARROW, SPACE, HEIGHT = 6.6, 3.6, 6, 20
"""Of a character, of a thin one, beside a text, and of the badge, in pixels."""


def write(report: Report, path: Path | str) -> Path:
    """Write a report's badge as SVG; its folder is made where it does not exist.

    Example:
        >>> from attnx_conformance.badge import write
        >>> from attnx_conformance.results import read
        >>> write(read("report.jsonl"), "badge.svg")  # doctest: +SKIP
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(badge(report), encoding="utf-8", newline="\n")
    return target


def badge(report: Report) -> str:
    """A report's badge: the same text for the same results.

    Args:
        report: of one subject or several, which are told together.

    Raises:
        ValueError: it is no report of this suite.
    """
    subjects = ", ".join(dict.fromkeys(result.subject for result in report.results)) or "nothing"
    message, colour = _outcome(report)
    counts = Counter(result.verdict for result in report.results)
    told = ", ".join(f"{n} {verdict}" for verdict, n in sorted(counts.items())) or "no trials"
    return draw(message, colour, f"attnx conformance of {subjects}: {message}; {told}")


def _outcome(report: Report) -> tuple[str, str]:
    """What the badge says, and its colour."""
    planned = report.header.get("planned", len(report.results))
    if type(planned) is not int:
        raise ValueError(f"planned: expected an integer, got {planned!r}")
    if not report.results or not report.complete or len(report.results) < planned:
        return "cut short", "grey"
    from ._items import PROFILES  # with every case, which a picture alone does not need

    by_profile: dict[str, Counter[str]] = {}
    for table in profiles(report.results).values():
        for profile, counts in table.items():
            by_profile.setdefault(profile, Counter()).update(counts)
    if strange := by_profile.keys() - set(PROFILES):
        raise ValueError(f"profile: expected those of this suite, got {', '.join(sorted(strange))}")
    order = sorted(by_profile, key=PROFILES.index)
    broken = [p for p in order if by_profile[p].keys() - OK]
    if broken or report.footer.get("errors"):
        return f"fails {_named(broken, len(order)) or 'to start'}", "red"
    held = [p for p in order if by_profile[p]["passed"] or by_profile[p]["waived"]]
    if unproven(report.results) or not held:
        return "nothing shown", "grey"
    total = sum(by_profile.values(), Counter[str]())
    message = f"passes {_named(held, len(order))}"
    if total["refused"]:
        share = total["passed"] / (total["passed"] + total["refused"] + total["waived"])
        message += f", computes {max(1, int(100 * share))}%"
    if report.header.get("sample"):
        return f"{message}, of a sample", "grey"
    if total["waived"]:
        known = total["waived"]
        return f"{message}, {known} known deviation{'s' * (known > 1)}", "yellow"
    return message, "green"


def _named(some: list[str], total: int) -> str:
    if len(some) <= NAMED:
        return ", ".join(some)
    return f"{len(some)} of {total} profiles"


def draw(message: str, colour: str, title: str) -> str:
    """The picture: `attnx` on the left, the message on the right, a title for screen readers.

    Args:
        message: what it says.
        colour: one of `COLOURS`.
        title: what a screen reader reads, and what is shown under the pointer.
    """
    left, right = _width("attnx"), _width(message)
    total, middle = left + right, HEIGHT / 2 + 4
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" width="{total}" height="{HEIGHT}" role="img" \
aria-labelledby="title">
  <title id="title">{_plain(title)}</title>
  <clipPath id="round"><rect width="{total}" height="{HEIGHT}" rx="3"/></clipPath>
  <g clip-path="url(#round)">
    <rect width="{left}" height="{HEIGHT}" fill="#424242"/>
    <rect x="{left}" width="{right}" height="{HEIGHT}" fill="{COLOURS[colour]}"/>
  </g>
  <g fill="#fff" font-family="Verdana, DejaVu Sans, sans-serif" font-size="11" \
text-anchor="middle">
    {_text("attnx", left / 2, middle, left)}
    {_text(message, left + right / 2, middle, right)}
  </g>
</svg>
"""


def _width(text: str) -> int:
    """The room of a text; `textLength` then fits any font into it."""
    thin = sum(character in " .,:;il1|'()ftj" for character in text)
    return round((len(text) - thin) * WIDTH + thin * NARROW) + 2 * SPACE


def _text(text: str, x: float, y: float, width: int) -> str:
    place = f'x="{x:g}" y="{y:g}" textLength="{width - 2 * SPACE}" lengthAdjust="spacingAndGlyphs"'
    return f"<text {place}>{_plain(text)}</text>"


def _plain(text: str) -> str:
    """As XML may hold it: a name of a backend may hold anything."""
    return escape("".join(c if c.isprintable() else " " for c in text))
