r"""List the public API, one line a name, in the file that the tests hold it to.

    python scripts/public_api.py            # writes tests/data/public_api.txt
    python scripts/public_api.py --check    # writes nothing, tells what changed

What is public is said in docs/stability.md. Python names are read from the sources, without running
them: a list that imported every framework would be slow, and would differ where one is missing.
Annotations are left out, because `tests/typing_api.py` holds the types.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import inspect
import re
import sys
import tomllib
from collections.abc import Iterator
from copy import copy
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

__all__ = [
    "COMMAND", "LISTED", "described", "difference", "docstring", "exported", "lines", "modules",
]  # fmt: skip

ROOT = Path(__file__).resolve().parents[1]
LISTED = ROOT / "tests" / "data" / "public_api.txt"
COMMAND = "python scripts/public_api.py"

FOLDERS = {
    "attnx": ROOT / "attnx",
    "attnx_conformance": ROOT / "conformance" / "attnx_conformance",
}
SUITE = tuple(f"attnx_conformance{x}" for x in ("", ".cases", ".results", ".test_conformance"))
"""What is public of the suite; the rest of it is the command's."""

LONGEST = 120  # of a constant's value
MEANT = frozenset(
    f"__{name}__"
    for name in (
        "add", "and", "bool", "call", "contains", "enter", "eq", "exit", "getitem", "invert",
        "iter", "len", "mul", "or", "rand", "ror", "sub",
    )
)  # fmt: skip
"""Special methods that users write as operators."""

Definition = ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


class Found(NamedTuple):
    """Where a name is defined: a module, and a statement in it unless the module is meant."""

    module: str
    node: Definition | None
    name: str = ""


def modules() -> list[str]:
    """Every public module: no part of its name has an underscore in front."""
    found = list(SUITE)
    for path in FOLDERS["attnx"].rglob("*.py"):
        parts = path.relative_to(FOLDERS["attnx"].parent).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        if parts[1:2] != ("cli",) and not any(part.startswith("_") for part in parts):
            found.append(".".join(parts))
    return sorted(found)


def lines() -> list[str]:
    """The whole list."""
    homes = _homes()
    found = [line for name in homes for line in _name(name, homes)]
    return sorted([*found, *_hooks(), *_commands(), *_outside()])


@cache
def _tree(module: str) -> ast.Module | None:
    top, *rest = module.split(".")
    path = FOLDERS[top].joinpath(*rest)
    for file in (path / "__init__.py", path.with_suffix(".py")):
        if file.is_file():
            return ast.parse(file.read_text("utf-8"))
    return None


def exported(module: str) -> list[str]:
    """The names in a module's `__all__`."""
    tree = _tree(module)
    for node in tree.body if tree else ():
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return []


def docstring(module: str) -> str:
    """A module's docstring."""
    tree = _tree(module)
    return (tree and ast.get_docstring(tree)) or ""


def described(module: str) -> tuple[list[str], list[tuple[str, str]]]:
    """The names of a module that are described there, and those whose home is elsewhere."""
    homes = _homes()
    here: list[str] = []
    elsewhere: list[tuple[str, str]] = []
    for name in exported(module):
        found, home = homes[f"{module}.{name}"]
        if found.node is None or home != f"{module}.{name}":
            elsewhere.append((name, home if found.node else f"{found.module}"))
        else:
            here.append(name)
    return here, elsewhere


def _homes() -> dict[str, tuple[Found, str]]:
    """Each public name with its definition and the public name under which it is described."""
    found = {
        f"{module}.{name}": _resolve(module, name)
        for module in modules()
        for name in exported(module)
    }
    homes: dict[Found, str] = {}
    for full, at in sorted(found.items(), key=lambda item: (item[0].count("."), item[0])):
        if at not in homes or full == f"{at.module}.{at.name}":
            homes[at] = full
    return {full: (at, homes[at]) for full, at in found.items()}


def _bound(node: ast.stmt) -> Iterator[str]:
    """The names that a statement defines."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, ast.AnnAssign):
        yield ast.unparse(node.target)
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            yield from (ast.unparse(x) for x in getattr(target, "elts", [target]))


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Those of a module, and those under `if TYPE_CHECKING`, where lazy names are told."""
    for node in body:
        yield node
        if isinstance(node, ast.If):
            yield from _statements(node.body)


def _resolve(module: str, name: str) -> Found:
    """Where a name of a module is defined, through imports of our own.

    Raises:
        LookupError: `__all__` has a name that nothing defines.
    """
    if _tree(f"{module}.{name}") is not None:
        return Found(f"{module}.{name}", None)
    tree = _tree(module)
    found: Found | None = None
    for node in _statements(tree.body) if tree else ():
        if isinstance(node, ast.ImportFrom):
            aliases = {alias.asname or alias.name: alias.name for alias in node.names}
            source = _absolute(module, node)
            if name in aliases and source.split(".")[0] in FOLDERS:
                found = _resolve(source, aliases[name])
        elif name in _bound(node):
            assert isinstance(node, Definition)
            found = Found(module, node, name)  # the last one: overloads come before
    if found is None:
        raise LookupError(f"{module}.__all__ has {name!r}, which nothing there defines")
    return found


def _absolute(module: str, node: ast.ImportFrom) -> str:
    if node.level == 0:
        return node.module or ""
    parts = module.split(".")
    is_package = FOLDERS[parts[0]].joinpath(*parts[1:]).is_dir()
    up = node.level - is_package
    base = parts[: len(parts) - up]
    return ".".join([*base, *([node.module] if node.module else [])])


# One name -----------------------------------------------------------------------------------------


def _name(full: str, homes: dict[str, tuple[Found, str]]) -> Iterator[str]:
    found, home = homes[full]
    if found.node is None:
        yield f"{full}: module"
    elif home != full:
        yield f"{full}: {home}"
    elif isinstance(found.node, ast.FunctionDef):
        yield full + _signature(found.node)
    elif isinstance(found.node, ast.ClassDef):
        yield from _class(full, found, homes)
    else:
        yield f"{full}: constant{_value(found.node, found.name)}"


def _value(node: Definition, name: str) -> str:
    """What a statement assigns to a name."""
    value = getattr(node, "value", None)
    if value is None:
        return ""
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
        value = value.elts[list(_bound(node)).index(name)]
    text = ast.unparse(value)
    return f" = {text}" if len(text) <= LONGEST else " = ..."


def _signature(node: ast.FunctionDef, skip: int = 0) -> str:
    """The parameters as they are written, without annotations."""
    given = node.args
    for argument in [
        *given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg,
    ]:  # fmt: skip
        if argument is not None:
            argument.annotation = None
    first = min(skip, len(given.posonlyargs))
    bare = copy(given)
    bare.posonlyargs, bare.args = given.posonlyargs[first:], given.args[skip - first :]
    return f"({ast.unparse(bare)})"


def _class(full: str, found: Found, homes: dict[str, tuple[Found, str]]) -> Iterator[str]:
    bases, members = _members(found, dict(homes.values()))
    told = f" ({', '.join(sorted(bases))})" if bases else ""
    yield f"{full}: class{told}"
    for name, line in members.items():
        yield f"{full}{line}" if name == "__init__" else f"{full}.{line}"


def _members(found: Found, public: dict[Found, str]) -> tuple[list[str], dict[str, str]]:
    """The public bases, and what the class and its private bases give, the nearest first."""
    assert isinstance(found.node, ast.ClassDef)
    bases: list[str] = []
    members = _own_members(found.node)
    for base in found.node.bases:
        try:
            above = _resolve(found.module, ast.unparse(base))
        except LookupError:
            bases.append(ast.unparse(base))
            continue
        if above in public:
            bases.append(public[above])
        else:
            beyond, inherited = _members(above, public)
            bases += beyond
            members = inherited | members
    return bases, members


def _own_members(node: ast.ClassDef) -> dict[str, str]:
    """The constructor, attributes, properties and methods, each as its line goes on."""
    found: dict[str, str] = {}
    for part in node.body:
        if isinstance(part, ast.FunctionDef):
            found |= _method(part)
        elif isinstance(part, (ast.Assign, ast.AnnAssign)):
            found |= {name: name + _value(part, name) for name in _bound(part)}
    slots = [name for part in node.body for name in _slots(part) if name not in found]
    found |= {name: name for name in slots}
    kept = {n: line for n, line in found.items() if not n.startswith("_") or n in MEANT}
    if _is_record(node):  # its fields are told in the order in which they are given
        fields = [part for part in node.body if isinstance(part, ast.AnnAssign)]
        told = {name: _field(part) for part in fields for name in _bound(part)}
        kept = {name: line for name, line in kept.items() if name not in told}
        return kept | {"__init__": f"({', '.join(text for text in told.values() if text)})"}
    return kept | {n: line for n, line in found.items() if n == "__init__"}


def _is_record(node: ast.ClassDef) -> bool:
    """Whether the constructor is made from the fields."""
    makers = [*node.bases, *node.decorator_list]
    return any(ast.unparse(m).split("(")[0] in ("NamedTuple", "dataclass") for m in makers)


def _field(node: ast.AnnAssign) -> str:
    kind, name = ast.unparse(node.annotation), ast.unparse(node.target)
    if kind.startswith("ClassVar"):
        return ""
    return "*" if kind == "KW_ONLY" else name + _value(node, name).replace(" = ", "=", 1)


def _slots(node: ast.stmt) -> list[str]:
    names = list(_bound(node))
    return list(ast.literal_eval(node.value)) if names == ["__slots__"] else []  # type: ignore[attr-defined]


def _method(node: ast.FunctionDef) -> dict[str, str]:
    decorators = {ast.unparse(d).split(".")[-1] for d in node.decorator_list}
    if node.name in ("__init__", "__new__"):
        return {"__init__": _signature(node, skip=1)} | _assigned(node)
    if decorators & {"property", "cached_property"}:
        return {node.name: f"{node.name}: property"}
    static = "staticmethod" in decorators
    kind = next((f": {d}" for d in ("classmethod", "staticmethod") if d in decorators), "")
    return {node.name: f"{node.name}{_signature(node, skip=0 if static else 1)}{kind}"}


def _assigned(node: ast.FunctionDef) -> dict[str, str]:
    """What a constructor sets on the object."""
    found = {}
    for part in ast.walk(node):
        targets = part.targets if isinstance(part, ast.Assign) else []
        targets = [part.target] if isinstance(part, ast.AnnAssign) else targets
        flat = [x for target in targets for x in getattr(target, "elts", [target])]
        for target in flat:
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                found[target.attr] = target.attr
    return found


# What is no Python name ---------------------------------------------------------------------------


def _hooks() -> Iterator[str]:
    from attnx.plugin import hookspecs

    for name, hook in vars(hookspecs()).items():
        if name.startswith("attnx_"):
            names = ", ".join(p for p in inspect.signature(hook).parameters if p != "self")
            yield f"hook {name}({names})"


def _commands() -> Iterator[str]:
    import typer

    from attnx.cli._app import app

    yield from _command("attnx", typer.main.get_command(app))


def _command(path: str, command: Any) -> Iterator[str]:
    status = " ".join((command.help or "").split()).partition("Exit status: ")[2]
    yield f"$ {path}" + (f": exit status {status.partition('. ')[0].rstrip('.')}" if status else "")
    for option in command.params:
        names = [*option.opts, *option.secondary_opts]
        spelled = ", ".join(names) if option.param_type_name == "option" else option.name.upper()
        flag = getattr(option, "is_flag", False)
        many = ", repeated" if getattr(option, "multiple", False) or option.nargs == -1 else ""
        given = option.default
        given = str(given) if isinstance(given, Path) else given
        default = "" if flag or given in (None, (), "") else f" = {given!r}"
        kind = "flag" if flag else option.metavar or "value"
        yield f"$ {path} {spelled}: {kind}{many}{default}"
    for name, inner in sorted(getattr(command, "commands", {}).items()):
        yield from _command(f"{path} {name}", inner)


def _outside() -> Iterator[str]:
    """Environment variables, options of pytest, entry points, and versions of files' formats."""
    from attnx._settings import KNOWN

    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    yield from (f"entry point group {group}" for group in project["entry-points"])
    extras = set(project["optional-dependencies"]) - {"dev", "docs"}  # the checkout's own
    yield from (f"extra attnx[{name}]" for name in extras)
    yield from (f"environment variable {name}" for name in KNOWN)
    text = (FOLDERS["attnx_conformance"] / "plugin.py").read_text("utf-8")
    yield from (f"pytest option {name}" for name in set(re.findall(r'"(--attnx-[a-z-]+)"', text)))
    for told, module in (
        ("report", "attnx_conformance.results"),
        ("vectors", "attnx_conformance._vector_files"),
    ):
        found = _resolve(module, "FORMAT").node
        assert isinstance(found, ast.Assign)
        yield f"format of the suite's {told}: {ast.unparse(found.value)}"


# The file -----------------------------------------------------------------------------------------


def difference() -> list[str]:
    """What the file says and the code does not (`-`), and the other way round (`+`)."""
    old = LISTED.read_text("utf-8").splitlines() if LISTED.exists() else []
    told = difflib.unified_diff(old, lines(), lineterm="", n=0)
    return [line for line in told if not line.startswith(("---", "+++", "@@"))]


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="List the public API.")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if it would change")
    changed = difference()
    if parser.parse_args().check:
        print("\n".join(changed))
        return int(bool(changed))
    LISTED.parent.mkdir(exist_ok=True)
    LISTED.write_text("\n".join(lines()) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
