"""Everything that the backend asks of CuPy exists in the installed one.

Without a card nothing of CuPy runs, so a name that it lacks would show only at a user's. Two
witnesses: the names in the sources, and those that a run over NumPy really asked for.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import array_api_compat.cupy as cupy_xp
import cupy
import numpy as np
import pytest

import attnx
from attnx_conformance.cases import find
from attnx_conformance.runner import run
from attnx_cupy._backend import CupyBackend

ROOT = Path(__file__).resolve().parents[2]

FILES = [
    *sorted((ROOT / "backends" / "attnx_cupy").glob("*.py")),
    *sorted((ROOT / "attnx" / "positions").glob("_*.py")),
    *sorted((ROOT / "attnx").glob("_linear_*.py")),
    *(ROOT / "attnx" / f"{name}.py" for name in (
        "_array_backend", "_tile_ops", "_tile_sums", "tiling", "_visibility", "_gradients", "_call",
        "_checks", "_lane", "_alibi_tile", "_cache_checks", "_pieces", "cache", "heads", "parts",
    )),
]  # fmt: skip


def chains(tree: ast.AST, is_root: Callable[[ast.AST], bool]) -> set[str]:
    """Every dotted name that starts at a root, the root left out."""
    found = set()
    for node in ast.walk(tree):
        names: list[str] = []
        while isinstance(node, ast.Attribute) and not is_root(node):
            names.insert(0, node.attr)
            node = node.value
        if names and is_root(node):
            found.add(".".join(names))
    return found


def is_cupy(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "cupy"


def is_namespace(node: ast.AST) -> bool:
    """`xp`, or anything's `.xp`."""
    if isinstance(node, ast.Name):
        return node.id == "xp"
    return isinstance(node, ast.Attribute) and node.attr == "xp"


def has(module: Any, dotted: str) -> bool:
    for name in dotted.split("."):
        if not hasattr(module, name):
            return False
        module = getattr(module, name)
    return True


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_name_in_the_source_exists_in_the_installed_cupy(path: Path) -> None:
    tree = ast.parse(path.read_text("utf-8"))
    names = chains(tree, is_cupy)
    assert {n for n in names if not has(cupy, n)} == set()
    names = {n.split(".")[0] for n in chains(tree, is_namespace)}
    assert {n for n in names if not hasattr(cupy_xp, n)} == set()


def test_the_names_are_found() -> None:
    """The search itself: a file in which it must find something of each kind."""
    lane = ast.parse((ROOT / "backends" / "attnx_cupy" / "_lane.py").read_text("utf-8"))
    assert {"ndarray", "cuda.Device", "asnumpy"} <= chains(lane, is_cupy)
    base = ast.parse((ROOT / "attnx" / "_array_backend.py").read_text("utf-8"))
    assert {"where", "isfinite", "concat"} <= chains(base, is_namespace)


WIDE = """
    bias-everything prefix-model segments-batched starts-and-lengths window-positions bool-causal
    not-predicate lengths-bottom-right bool-of-one live-value-nan-bias softcap grouped
    live-cotangent-nan lengths-two-batch-axes sinks-no-keys
"""


def test_everything_asked_of_the_namespace_in_a_run_exists_in_the_installed_cupy(
    tiled: CupyBackend,
) -> None:
    for name in WIDE.split():
        assert run(find(name), "cupy-host", "float32").ok
    recorder = tiled.lane.xp
    assert len(recorder.names) > 20
    assert {name for name in recorder.names if not hasattr(cupy_xp, name)} == set()
    for name, calls in recorder.calls.items():
        function = getattr(cupy_xp, name)
        try:
            signature = inspect.signature(function)
        except ValueError:  # a ufunc, which takes arrays alone
            assert {options for _, options in calls} == {()}, name
            continue
        for count, options in calls:
            signature.bind(*range(count), **dict.fromkeys(options))


class Probe(np.ndarray):
    """An array that notes which of its attributes Python code asks for."""

    asked: ClassVar[set[str]] = set()

    def __getattribute__(self, name: str) -> Any:
        caller = inspect.currentframe().f_back.f_globals.get("__name__", "")
        if caller.startswith("attnx"):
            Probe.asked.add(name)
        return super().__getattribute__(name)


def test_every_attribute_asked_of_an_array_in_a_run_exists_in_the_installed_cupy(
    tiled: CupyBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    numpy_lane = attnx.get_backend("numpy").lane
    monkeypatch.setattr(numpy_lane, "readable", lambda array: False)
    for name in ("bias-everything", "segments-batched", "lengths-with-zero", "bool-causal"):
        case = find(name)
        inputs = case.inputs("float32")
        mask = inputs.mask
        if isinstance(mask, np.ndarray):
            mask = mask.view(Probe)
        elif mask is not None:
            mask = attnx.masks.map_leaves(
                mask, lambda _, __, leaf: leaf.view(Probe) if isinstance(leaf, np.ndarray) else leaf
            )
        given = {"bias": inputs.bias, "sinks": inputs.sinks}
        options = {n: None if x is None else x.view(Probe) for n, x in given.items()}
        arrays = [x.view(Probe) for x in (inputs.q, inputs.k, inputs.v)]
        out, pullback = attnx.attention_vjp(
            *arrays, mask=mask, **options, **case.options, backend="cupy-host"
        )
        pullback(out)
        attnx.attention_weights(*arrays[:2], mask=mask, **options, **case.options,
                                backend="cupy-host")  # fmt: skip
    assert {"shape", "dtype"} <= Probe.asked
    asked = {name for name in Probe.asked if not name.startswith("__")}  # NumPy's own protocols
    assert {name for name in asked if not hasattr(cupy.ndarray, name)} == set()


def test_cupy_has_the_loops_that_bfloat16_needs() -> None:
    """Elsewhere its arrays are only cast, sliced and made, which CuPy does for any dtype it has."""
    assert "E->?" in cupy.isfinite.types
    assert "EE->?" in cupy.not_equal.types
