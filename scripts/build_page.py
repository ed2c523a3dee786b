r"""Run a page's code and write what it prints into the page.

    python scripts/build_page.py docs/attention.md            # runs all of it
    python scripts/build_page.py docs/attention.md --check    # writes nothing, tells what changed

No number on such a page is typed. A `python` block with prompts gets its output below each prompt,
as a doctest has it: it must be the same everywhere, and the tests run it. A `python` block that
comes right before a `text` block has its output there: figures of one machine, which the tests do
not repeat (`<!-- skip: next -->` stands before the block).
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import doctest
import io
import re
import sys
from pathlib import Path
from typing import Any

FENCE = re.compile(
    r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<text>.*?)^```\n)?", re.DOTALL | re.MULTILINE
)


def built(page: str) -> str:
    """The page with every output made anew, its blocks run in order in one namespace."""
    names: dict[str, Any] = {"__name__": "__main__"}

    def run(block: re.Match[str]) -> str:
        code = block["code"]
        if ">>>" in code:
            return f"```python\n{_prompted(code, names)}```\n"
        printed = _printed(compile(code, "page", "exec"), names)
        if block["text"] is None:
            return block[0]
        return f"```python\n{code}```\n\n```text\n{printed}```\n"

    return FENCE.sub(run, page)


def _prompted(code: str, names: dict[str, Any]) -> str:
    """The examples of a block, each with what it prints."""
    parts = []
    for part in doctest.DocTestParser().parse(code):
        if isinstance(part, str):
            parts.append(part)
            continue
        lines = part.source.splitlines(keepends=True)
        parts.append("".join((">>> " if n == 0 else "... ") + x for n, x in enumerate(lines)))
        parts.append(_printed(compile(part.source, "page", "single"), names))
    return "".join(parts)


def _printed(code: Any, names: dict[str, Any]) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(code, names)
    return out.getvalue()


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Run a page's code and write what it prints.")
    parser.add_argument("page", type=Path)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if it would change")
    given = parser.parse_args()
    old = given.page.read_text("utf-8")
    new = built(old)
    if given.check:
        told = difflib.unified_diff(old.splitlines(), new.splitlines(), "old", "new", lineterm="")
        print("\n".join(told))
        return int(old != new)
    given.page.write_text(new, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
