"""What the docs site shows beside docs/: pages of the root, of the code, and links that reach them.

Nothing is written into docs/. README, CONTRIBUTING and CHANGELOG are pages with their links turned;
every public module has a page of its docstrings; the tables come from the code (`tables.py`).
"""

from __future__ import annotations

import posixpath
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "scripts")]

import public_api  # noqa: E402
import tables  # noqa: E402

EXAMPLES = ROOT / "docs" / "examples"
CSS = ".md-typeset table:not([class]) td:first-child code { white-space: nowrap }"

MOVED = {
    "README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md",
}  # fmt: skip
"""Files of the root, and the pages that they become."""

LINK = re.compile(r"(?<!!)\[(?P<text>[^]\n]*)]\((?P<to>[^)\s#]+)(?P<anchor>#[^)\s]*)?\)")
CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def on_config(config: Any) -> Any:
    """Give every example and every public module its line."""
    sections = {name: lines for entry in config.nav for name, lines in entry.items()}
    sections["Examples"] += [{name: page} for name, page in _examples().items()]
    sections["Reference"] += [{name: f"reference/{name}.md"} for name in public_api.modules()]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that no file in docs/ holds."""
    pages = {page: (ROOT / file).read_text("utf-8") for file, page in MOVED.items()}
    pages["decisions/index.md"] = _decisions()
    pages["reference/index.md"] = _reference()
    pages["reference/hooks.md"] = tables.hooks()
    pages["reference/capabilities.md"] = tables.capabilities()
    pages["reference/matrix.md"] = tables.matrix()
    pages |= {f"reference/{name}.md": _module(name) for name in public_api.modules()}
    for name, page in _examples().items():
        if name.endswith(".py"):
            pages[page] = _listing(EXAMPLES / name)
    pages["assets/site.css"] = CSS
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn links that hold in the repository into those that hold on the site."""
    uri = page.file.src_uri
    origin = next((file for file, moved in MOVED.items() if moved == uri), f"docs/{uri}")
    kept: list[str] = []

    def hide(block: re.Match[str]) -> str:
        kept.append(block[0])
        return f"\0{len(kept) - 1}\0"

    def turned(link: re.Match[str]) -> str:
        to = link["to"]
        if re.match(r"[a-z]+:", to):
            return link[0]
        target = _on_site(posixpath.normpath(posixpath.join(posixpath.dirname(origin), to)))
        if target is None:
            return f"`{link['text'].strip('`')}`"
        new = posixpath.relpath(target, posixpath.dirname(uri) or ".")
        return f"[{link['text']}]({new}{link['anchor'] or ''})"

    text = LINK.sub(turned, CODE.sub(hide, markdown))
    return re.sub(r"\0(\d+)\0", lambda found: kept[int(found[1])], text)


def _on_site(path: str) -> str | None:
    """The page for a path of the repository; None where the file exists and has no page."""
    if path in MOVED:
        return MOVED[path]
    if path.startswith("docs/"):
        inside = path.removeprefix("docs/")
        if inside.removeprefix("examples/") in _examples():
            return _examples()[inside.removeprefix("examples/")]
        return f"{inside}/index.md" if (ROOT / path).is_dir() else inside
    module = path.removesuffix(".py").replace("/", ".")
    if path.endswith(".py") and module in public_api.modules():
        return f"reference/{module}.md"
    return None if (ROOT / path).exists() else path  # mkdocs complains of what does not exist


@cache
def _examples() -> dict[str, str]:
    """Programs and projects in docs/examples, each with its page."""
    programs = {path.name: f"examples/{path.stem}.md" for path in sorted(EXAMPLES.glob("*.py"))}
    projects = sorted(path.parent.name for path in EXAMPLES.glob("*/README.md"))
    return programs | {name: f"examples/{name}/README.md" for name in projects}


def _listing(program: Path) -> str:
    return f"# {program.name}\n\n```python\n{program.read_text('utf-8')}```\n"


def _decisions() -> str:
    pages = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    lines = [f"- [{_title(page)}]({page.name})" for page in pages]
    return "# Decisions\n\nEach says what was decided, why, and what was rejected.\n\n" + "\n".join(
        lines
    )


def _title(page: Path) -> str:
    return page.read_text("utf-8").split("\n", 1)[0].lstrip("# ")


def _reference() -> str:
    """The first line of each module's docstring."""
    rows = [f"| [`{name}`]({name}.md) | {_summary(name)} |" for name in public_api.modules()]
    return "\n".join(
        [
            "# Reference",
            "",
            "Every public name, from its docstring; [stability](../stability.md) says what public "
            "means. The contract for a backend is [`attnx.plugin`](attnx.plugin.md) with its "
            "[hooks](hooks.md).",
            "",
            "| module | what |",
            "| --- | --- |",
            *rows,
        ]
    )


def _summary(module: str) -> str:
    first = public_api.docstring(module).split("\n\n")[0]
    return " ".join(first.split()).replace("|", "\\|")


def _module(name: str) -> str:
    """A module's page: its docstring, then each name that is described here."""
    here, elsewhere = public_api.described(name)
    parts = [f"# {name}", f"::: {name}\n    options:\n      members: false\n      {BARE}"]
    parts += [f"::: {name}.{public}" for public in here]
    if elsewhere:
        parts.append("## Names that stand here too")
        parts.append(
            "\n".join(f"- `{public}`: {_reference_to(home)}" for public, home in elsewhere)
        )
    return "\n\n".join(parts)


def _reference_to(home: str) -> str:
    is_module = home in public_api.modules()
    return f"[`{home}`]({home}.md)" if is_module else f"[`{home}`][{home}]"


BARE = "show_root_heading: false\n      show_root_toc_entry: false"
