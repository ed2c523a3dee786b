"""`attnx new-backend`: a plugin project that installs and passes the suite as it is written.

The files are templates that ship beside this module. What is written declares little and is right
about it, so that an author starts from green and raises one line of the declaration at a time.
"""

from __future__ import annotations

import importlib.util
import keyword
import re
import shlex
import tempfile
from importlib import resources
from importlib.metadata import version as distribution_version
from pathlib import Path
from string import Template
from typing import Annotated

import typer

from attnx._loading import framework as framework_of
from attnx._registry import registry
from attnx.cli._options import one_line_errors
from attnx.errors import ArgumentError
from attnx.plugin import API_VERSION, BackendSpec

__all__ = ["new_backend", "project_files"]

BASES = ("array", "bare")
FILES = {
    "pyproject.toml": "pyproject.toml.in",
    "README.md": "README.md.in",
    "LICENSE": "LICENSE.in",
    ".gitignore": "gitignore.in",
    ".github/workflows/ci.yml": "ci.yml.in",
    "src/$package/__init__.py": "__init__.py.in",
    "src/$package/_backend.py": "_backend_$base.py.in",
    "src/$package/py.typed": "",
    "tests/test_conformance.py": "test_conformance.py.in",
    "badge.svg": "",
}
"""Where a file goes, and the template that it is made from; without one it is made here."""

LONGEST = 30
"""Letters of a name; the lines that are written are no longer than 100 with it."""

EXTRAS = {"numpy": "", "torch": "[torch]", "jax": "[jax]", "cupy": ""}
"""What of attnx brings a framework; CuPy's distribution depends on the machine."""

PATTERN = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
COMMANDS = ("badge", "export", "run", "verify")
"""What `attnx conformance WORD` takes for a command."""


@one_line_errors
def new_backend(
    name: Annotated[
        str,
        typer.Argument(show_default=False, help="What users will write in backend=: my_kernel."),
    ],
    base: Annotated[
        str,
        typer.Option(
            metavar="array|bare",
            help="array starts from ArrayBackend, which has every option and is slow; bare from "
            "a forward of its own, which computes plain attention alone.",
        ),
    ] = "array",
    framework: Annotated[
        str, typer.Option(metavar="NAME", help="Whose arrays it takes: numpy, torch, jax, cupy.")
    ] = "numpy",
    directory: Annotated[
        Path, typer.Option(metavar="DIR", help="Where the project's folder is made.")
    ] = Path(),
) -> None:
    """Write a plugin project: a backend that installs and passes the suite as it is written.

    The folder attnx-NAME gets the package with its entry point, tests, a CI file, a README with a
    badge. Nothing is overwritten.

    Exit status: 0, 2 wrong use.

    For example:

        attnx new-backend demo

        attnx new-backend my_kernel --base bare --framework torch --directory ~/src
    """
    files = project_files(name, base=base, framework=framework)
    target = directory / f"attnx-{name.replace('_', '-')}"
    _write(target, files)
    folder = shlex.quote(str(target))
    typer.echo(f"{target}: {len(files)} files, to be changed in src/attnx_{name}/_backend.py\n")
    typer.echo(f"  pip install -e {shlex.quote(f'{target}[test]')}")
    typer.echo(f"  attnx conformance {name} --badge {folder}/badge.svg")
    typer.echo(f"  pytest {folder}")


def project_files(name: str, *, base: str = "array", framework: str = "numpy") -> dict[str, str]:
    """The files of a new backend's project: their texts by their paths.

    Args:
        name: the backend's name, a Python identifier in lower case.
        base: `"array"` or `"bare"`.
        framework: whose arrays it takes; a plugin that is installed has its lane.

    Raises:
        ArgumentError: a name that cannot be used, or that is taken.
    """
    _check_name(name)
    _check_framework(framework)
    if base not in BASES:
        raise ArgumentError(f"--base: expected {' or '.join(BASES)}, got {base!r}")
    words = _words(name, base, framework)
    made = {Template(path).substitute(words): _filled(form, words) for path, form in FILES.items()}
    return made | {"badge.svg": _badge(name)}


def _check_name(name: str) -> None:
    if not PATTERN.fullmatch(name) or len(name) > LONGEST:
        near = re.sub(r"[^a-z0-9]+", "_", name.lower()).lstrip("_0123456789").rstrip("_")
        hint = f"; write {near}" if PATTERN.fullmatch(near) and len(near) <= LONGEST else ""
        raise ArgumentError(
            "NAME: expected lower-case letters, digits and single underscores, a letter first "
            f"(my_kernel) and at most {LONGEST} of them, got {name!r}{hint}"
        )
    if name == "attnx" or name.startswith("attnx_"):
        rest = name[len("attnx_") :] or "my_kernel"
        raise ArgumentError(f"NAME: {name!r}: leave attnx out, it is put in front; write {rest}")
    if keyword.iskeyword(name) or name in COMMANDS:
        what = "a word of Python" if keyword.iskeyword(name) else "a command of attnx conformance"
        raise ArgumentError(f"NAME: {name!r} is {what}; write my_{name}")
    if name in registry.names():
        raise ArgumentError(
            f"NAME: a backend {name!r} is registered already (see attnx backends); write my_{name}"
        )
    if importlib.util.find_spec(f"attnx_{name}") is not None:
        raise ArgumentError(
            f"NAME: a package attnx_{name} is installed already; write my_{name}, or uninstall it"
        )


def _check_framework(framework: str) -> None:
    _ = registry.manager  # with every plugin collected
    known = [framework_of(spec) for spec in registry.specs.values() if spec.lane is not None]
    if framework not in known:
        raise ArgumentError(
            f"--framework: expected one whose arrays are known ({', '.join(sorted(known))}), got "
            f"{framework!r}; for a library of its own see "
            "docs/writing-a-backend.md#an-array-library-of-its-own"
        )


def _words(name: str, base: str, framework: str) -> dict[str, str]:
    """What stands in the templates as `$word`."""
    cuda = framework == "cupy"
    return {
        "name": name,
        "base": base,
        "framework": framework,
        "module": _module(framework),
        "project": f"attnx-{name.replace('_', '-')}",
        "package": f"attnx_{name}",
        "class_name": "".join(part.capitalize() for part in name.split("_")) + "Backend",
        "summary": f"{'Plain a' if base == 'bare' else 'A'}ttention on {framework} arrays",
        "requirements": _requirements(framework),
        "api_version": str(API_VERSION),
        "device": "cuda" if cuda else "cpu",
        "runner": "[self-hosted, gpu] # CuPy needs a CUDA card" if cuda else "ubuntu-latest",
        "libraries": " 'attnx[cuda12]' # or cuda13: CuPy for the driver" if cuda else "",
        "imports": "import cupy\n" if cuda else "",
        "devices": _read("devices_cupy.in") if cuda else "",
    }


def _owner(framework: str) -> BackendSpec:
    """The spec that brings the lane of a framework."""
    owners = (spec for spec in registry.specs.values() if spec.lane is not None)
    return next(spec for spec in owners if framework_of(spec) == framework)


def _module(framework: str) -> str:
    """What must be importable: what the framework's own backend asks for."""
    return (*_owner(framework).requires, framework)[0]


def _requirements(framework: str) -> str:
    """This version of the contract, with the framework's extra or with the plugin of its lane."""
    major, minor = distribution_version("attnx").split(".")[:2]
    following = f"{int(major) + 1}" if int(major) else f"0.{int(minor) + 1}"
    needed = [f"attnx{EXTRAS.get(framework, '')}>={major}.{minor},<{following}"]
    if framework not in EXTRAS:
        plugin, _, version = registry.info(_owner(framework).name).distribution.partition(" ")
        needed += [f"{plugin}>={version}"] if plugin else []
    return ", ".join(f'"{requirement}"' for requirement in needed)


def _read(form: str) -> str:
    folder = resources.files("attnx.cli") / "data" / "new_backend"
    return (folder / form).read_text(encoding="utf-8")


def _filled(form: str, words: dict[str, str]) -> str:
    return Template(_read(Template(form).substitute(words))).substitute(words) if form else ""


def _badge(name: str) -> str:
    """The badge until the suite has run."""
    from attnx_conformance.badge import draw

    return draw("not examined yet", "grey", f"attnx conformance {name}: not examined yet")


def _empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _write(target: Path, files: dict[str, str]) -> None:
    """All files or none: they are written beside the target and moved there at the end."""
    try:
        if target.is_symlink() or (target.exists() and not _empty(target)):
            raise ArgumentError(
                f"{target} is there already; remove it, or choose another --directory"
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".attnx-new-", dir=target.parent) as beside:
            made = Path(beside) / target.name
            for path, text in files.items():
                file = made / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text, encoding="utf-8", newline="\n")
            if target.exists():
                target.rmdir()
            made.rename(target)
    except OSError as error:
        raise ArgumentError(f"cannot write {target}: {error.strerror}") from None
