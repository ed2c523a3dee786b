"""`import attnx` is cheap and brings no framework; every import keeps to its side of the house."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FRAMEWORKS = {"numpy", "ml_dtypes", "scipy", "torch", "jax", "jaxlib", "cupy", "mlx", "tensorflow"}
ROOMS = ("cli", "compat", "integrations", "policies", "viz")
"""Folders of `attnx` that the core never imports, and that may import a framework or the suite."""

CONTRACT = {"attnx.plugin", "attnx.masks", "attnx.tiling", "attnx.errors"}


def python(code: str, **environment: str) -> str:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("ATTNX_")}
    done = subprocess.run(
        [sys.executable, "-c", code], env=clean | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def imports(node: ast.AST) -> Iterator[str]:
    """The modules that a source imports when it runs, wherever in it the statement stands."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            # A relative import stays in its package; the linter bans the others.
            if child.level == 0 and child.module == "attnx":
                yield from (f"attnx.{alias.name}" for alias in child.names)
            elif child.level == 0 and child.module:
                yield child.module
        elif not is_type_checking(child):
            yield from imports(child)


def imported(path: Path) -> set[str]:
    return set(imports(ast.parse(path.read_text("utf-8"))))


def test_import_attnx_imports_no_framework_and_no_backend() -> None:
    code = "import attnx, sys; print(*{name.split('.')[0] for name in sys.modules})"
    loaded = set(python(code).split())
    assert "attnx" in loaded
    assert not loaded & FRAMEWORKS
    assert not {name for name in loaded if name.startswith("attnx_")}


def test_import_attnx_looks_for_no_plugin() -> None:
    """Nor does it import what it takes to look: that waits for the first call."""
    code = "import attnx, sys; print(*sys.modules)"
    assert not set(python(code).split()) & {"importlib.metadata", "pluggy"}


def test_import_attnx_imports_no_framework_when_a_backend_is_named() -> None:
    code = "import attnx, sys; print(*{name.split('.')[0] for name in sys.modules})"
    assert not set(python(code, ATTNX_BACKEND="torch").split()) & FRAMEWORKS


def test_a_call_on_numpy_arrays_imports_no_other_framework() -> None:
    code = (
        "import attnx, numpy as np, sys\n"
        "x = np.ones((4, 8), np.float32)\n"
        "attnx.attention(x, x, x, causal=True)\n"
        "print(*{name.split('.')[0] for name in sys.modules})\n"
    )
    assert not set(python(code).split()) & {"torch", "jax", "jaxlib", "cupy"}


@pytest.mark.parametrize("name", ["numpy", "torch", "jax", "cupy"])
def test_a_backend_imports_the_contract_and_its_own_framework(name: str) -> None:
    others = FRAMEWORKS - {"numpy", "ml_dtypes", "jaxlib", name}
    for path in sources(f"backends/attnx_{name}"):
        names = imported(path)
        ours = {n for n in names if n.split(".")[0] == "attnx"}
        assert ours <= CONTRACT, f"{path} imports {sorted(ours - CONTRACT)}"
        tops = {n.split(".")[0] for n in names}
        assert not tops & others, f"{path} imports {sorted(tops & others)}"
        foreign = {top for top in tops if top.startswith("attnx_")} - {f"attnx_{name}"}
        assert not foreign, f"{path} imports {sorted(foreign)}"


@pytest.mark.parametrize("name", ["numpy", "torch", "jax", "cupy"])
def test_importing_a_backends_package_imports_no_framework(name: str) -> None:
    code = f"import attnx_{name}, sys; print(*{{n.split('.')[0] for n in sys.modules}})"
    assert not set(python(code).split()) & (FRAMEWORKS - {"numpy", "ml_dtypes"} | {name})


def test_the_core_imports_no_array_library_and_no_backend() -> None:
    for path in sources("attnx"):
        if any(path.is_relative_to(ROOT / "attnx" / room) for room in ROOMS):
            continue
        tops = {n.split(".")[0] for n in imported(path)}
        assert not tops & FRAMEWORKS, f"{path} imports {sorted(tops & FRAMEWORKS)}"
        assert not {top for top in tops if top.startswith("attnx_")}, path


def test_the_oracle_imports_nothing_of_attnx() -> None:
    code = (
        "import attnx_conformance.oracle, attnx_conformance.tolerance, sys\n"
        "print(*{name.split('.')[0] for name in sys.modules})\n"
    )
    assert "attnx" not in python(code).split()


def test_the_suite_imports_public_names_only() -> None:
    for path in sources("conformance"):
        for name in imported(path):
            private = name.startswith("attnx.") and name.split(".")[1].startswith("_")
            assert not private, f"{path} imports {name}"


def test_no_import_error_is_swallowed() -> None:
    for path in sources("attnx", "backends", "conformance"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ExceptHandler) and node.type is not None:
                catches = "ImportError" in ast.unparse(node.type)
                silent = all(isinstance(statement, ast.Pass) for statement in node.body)
                assert not (catches and silent), f"{path}:{node.lineno}"
