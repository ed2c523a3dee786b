"""What docs/writing-a-backend.md shows of a new project is what `attnx new-backend` writes."""

from __future__ import annotations

import re
from pathlib import Path

from attnx.cli._new_backend import project_files

PAGE = Path(__file__).parents[1] / "docs" / "writing-a-backend.md"


def test_every_excerpt_stands_in_its_file() -> None:
    files = project_files("demo")
    text = PAGE.read_text("utf-8")
    shown = re.findall(r"<!-- file: (\S+) -->\n\n```\w+\n(.*?)\n```", text, re.DOTALL)
    assert len(shown) == text.count("<!-- file: ") == 5
    for path, excerpt in shown:
        assert f"\n{excerpt}\n" in files[path], path


def test_every_file_is_named() -> None:
    text = PAGE.read_text("utf-8")
    table = text[text.index("| file | what |") : text.index("The entry point names a module")]
    assert set(re.findall(r"`([^`]+)`", table)) - {"py.typed"} == {
        path for path in project_files("demo") if not path.endswith("py.typed")
    }
