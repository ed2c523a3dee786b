"""`attnx new-backend`: what it writes is right as it is written, and it destroys nothing."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from typer.testing import CliRunner

import attnx
from attnx.cli._app import app
from attnx.cli._new_backend import project_files
from attnx.plugin import BackendSpec
from attnx_conformance.subject import BackendSubject
from attnx_conformance.suite import Selection, trials

SAMPLE = (
    "self", "cross", "grouped", "one-*", "edge-2*", "edge-513x70", "scale-*", "softcap", "causal",
    "two-batch-axes", "wild-lse-*", "none-*", "strides-transposed-q", "rows-of-*",
    "merge-two-parts", "heads-of-*", "tokens-from-*", "gradient-ones",
)  # fmt: skip
FILES = {
    ".github/workflows/ci.yml", ".gitignore", "LICENSE", "README.md", "badge.svg", "pyproject.toml",
    "src/attnx_demo/__init__.py", "src/attnx_demo/_backend.py", "src/attnx_demo/py.typed",
    "tests/test_conformance.py",
}  # fmt: skip
LONGEST = "a" * 30
VARIANTS = [
    ("demo", "array", "numpy"),
    ("demo", "bare", "numpy"),
    ("demo_two", "array", "torch"),
    ("demo_two", "bare", "jax"),
    (LONGEST, "array", "cupy"),
    (LONGEST, "bare", "cupy"),
]


def ran(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["new-backend", *map(str, arguments)], catch_exceptions=False)


def files_in(folder: Path) -> set[str]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix() for path in found}


def test_it_writes_a_project_and_says_what_comes_next(tmp_path: Path) -> None:
    done = ran("demo", "--directory", tmp_path / "new folder")
    target = tmp_path / "new folder" / "attnx-demo"
    assert done.exit_code == 0, done.output
    assert files_in(tmp_path) == {f"new folder/attnx-demo/{name}" for name in FILES}
    assert done.output.splitlines()[2:] == [
        f"  pip install -e '{target}[test]'",
        f"  attnx conformance demo --badge '{target}'/badge.svg",
        f"  pytest '{target}'",
    ]


def test_the_distribution_is_found_by_its_entry_point_and_needs_this_contract() -> None:
    files = project_files("my_kernel", framework="torch")
    project = tomllib.loads(files["pyproject.toml"])["project"]
    assert project["name"] == "attnx-my-kernel"
    assert project["entry-points"]["attnx"] == {"my_kernel": "attnx_my_kernel"}
    (needed,) = map(Requirement, project["dependencies"])
    assert (needed.name, needed.extras) == ("attnx", {"torch"})
    assert attnx.__version__ in needed.specifier
    assert "99" not in needed.specifier
    assert 'framework="torch"' in files["src/attnx_my_kernel/__init__.py"]


def test_a_red_run_makes_the_badge_red_too() -> None:
    """What follows a step that failed is left out, unless it says otherwise."""
    for framework, card in (("numpy", False), ("cupy", True)):
        workflow = project_files("demo", framework=framework)[".github/workflows/ci.yml"]
        steps = re.split(r"^      - ", workflow, flags=re.MULTILINE)
        suite = next(n for n, step in enumerate(steps) if "attnx conformance demo" in step)
        keep = next(n for n, step in enumerate(steps) if "git push" in step)
        assert not [step for step in steps[:suite] if "pytest" in step or "ruff" in step]
        assert suite < keep
        assert "if: (success() || failure()) && github.event_name == 'push'" in steps[keep]
        assert ("gpu" in workflow, "attnx[cuda12]" in workflow) == (card, card)


def test_a_framework_of_another_plugin_is_required_with_it(plug: Callable[..., None]) -> None:
    """Its lane comes from a distribution of its own, where it has one."""
    lane = attnx.get_backend("numpy").lane
    spec = BackendSpec("other", load=lambda: None, lane=lambda: lane, requires=("other_module",))
    plug("other", spec)
    files = project_files("demo", framework="other")
    assert 'dependencies = ["attnx>=' in files["pyproject.toml"]
    assert 'requires=("other_module",)' in files["src/attnx_demo/__init__.py"]
    assert 'lane("other")' in files["src/attnx_demo/_backend.py"]


def test_every_variant_is_formatted_and_clean(tmp_path: Path) -> None:
    """By the ruff of the project's own settings, up to the longest name."""
    for number, (name, base, framework) in enumerate(VARIANTS):
        for path, text in project_files(name, base=base, framework=framework).items():
            file = tmp_path / str(number) / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, "utf-8")
    ruff = [sys.executable, "-m", "ruff"]
    for command in (["check", "--no-cache", "."], ["format", "--no-cache", "--check", "."]):
        done = subprocess.run([*ruff, *command], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


@pytest.fixture
def registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """`registered("bare")`: a new project, registered by hand, as the suite's subject."""

    def register(base: str, framework: str = "numpy") -> BackendSubject:
        done = ran("demo", "--base", base, "--framework", framework, "--directory", tmp_path)
        assert done.exit_code == 0, done.output
        monkeypatch.syspath_prepend(tmp_path / "attnx-demo" / "src")
        attnx.register(importlib.import_module("attnx_demo"), "demo")
        return BackendSubject("demo")

    yield register
    attnx.unregister("demo")
    for name in [name for name in sys.modules if name.partition(".")[0] == "attnx_demo"]:
        del sys.modules[name]


def examined(subject: BackendSubject, **chosen: Any) -> dict[str, Any]:
    """The outcome of each trial by its case."""
    return {
        t.item.name: t.item.examine(subject, t.dtype, t.layout, t.way, t.seed)
        for t in trials(subject, Selection(**chosen))
    }


def wrong(outcomes: dict[str, Any]) -> dict[str, Any]:
    """What does not count for the subject."""
    return {name: outcome for name, outcome in outcomes.items() if not outcome.ok}


@pytest.mark.parametrize("base", ["array", "bare"])
def test_it_passes_as_it_is_written(base: str, registered: Callable[..., Any]) -> None:
    """A sample of plain calls, and of what stands around the operation.

    Where a case is not about gradients, one that is refused as declared leaves it passed.
    """
    outcomes = examined(registered(base), cases=SAMPLE)
    assert not wrong(outcomes)
    named = ("self", "grouped", "tokens-from-a-cache", "softcap", "causal", "gradient-ones")
    verdicts = [outcomes[name].verdict for name in named]
    assert verdicts == [*3 * ["passed"], *3 * ["refused"]]


@pytest.mark.sweep
@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("base", ["array", "bare"])
def test_it_passes_every_profile(base: str, framework: str, registered: Callable[..., Any]) -> None:
    assert not wrong(examined(registered(base, framework)))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("Demo",), "NAME: expected lower-case letters, digits and single underscores, a letter "
         "first (my_kernel) and at most 30 of them, got 'Demo'; write demo"),
        (("my-kernel",), "got 'my-kernel'; write my_kernel"),
        (("3d",), "got '3d'; write d"),
        (("",), "got ''"),
        (("../up",), "got '../up'; write up"),
        ((31 * "a",), "at most 30 of them"),
        (("attnx_demo",), "leave attnx out, it is put in front; write demo"),
        (("lambda",), "'lambda' is a word of Python; write my_lambda"),
        (("export",), "'export' is a command of attnx conformance; write my_export"),
        (("numpy",), "a backend 'numpy' is registered already (see attnx backends); write my_"),
        (("bench",), "a package attnx_bench is installed already; write my_bench"),
        (("demo", "--base", "arrays"), "--base: expected array or bare, got 'arrays'"),
        (("demo", "--framework", "mxnet"), "--framework: expected one whose arrays are known ("),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else "",
)  # fmt: skip
def test_wrong_use_is_one_line_and_status_2(
    arguments: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    done = ran(*arguments, "--directory", tmp_path)
    assert done.exit_code == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    """A folder with something in it stays, and so does a file; an empty folder may be filled."""
    target = tmp_path / "attnx-demo"
    target.mkdir()
    assert ran("demo", "--directory", tmp_path).exit_code == 0
    (target / "README.md").write_text("mine", "utf-8")
    done = ran("demo", "--directory", tmp_path)
    assert done.exit_code == 2
    assert f"{target} is there already; remove it, or choose another --directory" in done.stderr
    assert (target / "README.md").read_text("utf-8") == "mine"
    (tmp_path / "attnx-other").write_text("a file", "utf-8")
    assert ran("other", "--directory", tmp_path).exit_code == 2
    assert (tmp_path / "attnx-other").read_text("utf-8") == "a file"


@pytest.mark.parametrize("to", ["absent", ".", "attnx-demo"])
def test_a_link_is_not_followed(to: str, tmp_path: Path) -> None:
    link = tmp_path / "attnx-demo"
    link.symlink_to(to, target_is_directory=True)
    done = ran("demo", "--directory", tmp_path)
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert f"{link} is there already; remove it" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["attnx-demo"]
    assert link.is_symlink()


def test_all_files_are_written_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = Path.write_text

    def write_text(self: Path, *args: Any, **options: Any) -> int:
        if self.name == "_backend.py":
            raise OSError(28, os.strerror(28))
        return full(self, *args, **options)

    monkeypatch.setattr(Path, "write_text", write_text)
    done = ran("demo", "--directory", tmp_path)
    assert done.exit_code == 2
    assert "attnx-demo: No space left on device" in done.stderr
    assert not list(tmp_path.iterdir())
