"""Version 1 of the plugin contract holds: what was written for it goes on working, unchanged."""

from __future__ import annotations

import ast
import importlib
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import array_api_strict as xp
import numpy as np
import pytest

import attnx
from attnx import plugin
from attnx_conformance.cases import find
from attnx_conformance.runner import run

ROOT = Path(__file__).resolve().parents[1]
FROZEN = ROOT / "tests" / "data" / "plugin_v1"
PROMISED = (FROZEN / "contract.txt").read_text("utf-8").splitlines()
NOW = runpy.run_path(str(ROOT / "scripts" / "public_api.py"))["lines"]()

OVERRIDDEN = ("attnx.plugin.Backend.", "attnx.plugin.ArrayBackend.", "attnx.plugin.Lane.")
"""What plugins override and attnx calls: not even an argument with a default may join."""


@pytest.fixture(scope="module")
def first() -> Iterator[Any]:
    """The plugin that was written for version 1, registered as its entry point would."""
    sys.path.insert(0, str(FROZEN))
    module = importlib.import_module("attnx_first")
    attnx.register(module, "first")
    yield module
    attnx.unregister("first")
    sys.path.remove(str(FROZEN))
    for name in ("attnx_first", "attnx_first._backend"):
        sys.modules.pop(name, None)


CASES = (
    "grouped", "causal-bottom-right-wide", "window-left", "lengths", "bias-one-head",
    "gradient-ones", "lengths-poison",
)  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("case", CASES)
def test_a_plugin_of_version_1_passes_the_suite(case: str, dtype: str, first: Any) -> None:
    outcome = run(find(case), "first", dtype)
    assert outcome.ok, outcome.detail


def test_a_plugin_of_version_1_is_planned_and_asked_by_its_hooks(first: Any) -> None:
    q = xp.ones((1, 2, 3, 4))
    planned = attnx.plan(q, q, q, causal=True)
    assert (planned.backend, planned.route) == ("first", "dense, masked")
    first.PLANNED.clear()
    out, pullback = attnx.attention_vjp(q, q, q, scale=0.3)
    assert type(out) is type(q)
    assert pullback(xp.ones_like(out)).q.shape == q.shape
    assert first.PLANNED
    assert attnx.get_backend("first").version() == "1.0"


def test_a_plugin_of_version_1_is_reached_from_another_framework(first: Any) -> None:
    q = np.ones((1, 2, 3, 4), np.float32)
    out = attnx.attention(q, q, q, causal=True, backend="first")
    assert isinstance(out, np.ndarray)
    np.testing.assert_allclose(out, 1.0, rtol=1e-6)


def test_a_plugin_of_version_1_names_nothing_beyond_that_version() -> None:
    """Else the tests above would show less than they say."""
    known = {line.split("(")[0].split(":")[0].split(" = ")[0] for line in PROMISED}
    used = set()
    for path in FROZEN.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("attnx."):
                used |= {f"{node.module}.{alias.name}" for alias in node.names}
    assert used
    assert used <= known


# What may change within a version --------------------------------------------------------------


class Argument(NamedTuple):
    name: str
    kind: str
    default: str


def arguments(line: str) -> list[Argument]:
    """Those of a listed signature."""
    text = line[line.index("(") + 1 : line.rindex(")")]
    tree = ast.parse(f"lambda {text}: 0", mode="eval").body
    assert isinstance(tree, ast.Lambda)
    given = tree.args
    plain = [*given.posonlyargs, *given.args]
    defaults = ["" for _ in plain[len(given.defaults) :]] + [ast.unparse(d) for d in given.defaults]
    found = [Argument(a.arg, "by place", d) for a, d in zip(plain, defaults, strict=True)]
    found += [Argument(given.vararg.arg, "*", "")] if given.vararg else []
    found += [
        Argument(a.arg, "by name", ast.unparse(d) if d else "")
        for a, d in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]
    return found + ([Argument(given.kwarg.arg, "**", "")] if given.kwarg else [])


def head(line: str) -> str:
    """What a line is about, without its signature or its value."""
    return line.split("(")[0].split(": constant")[0]


def extends(old: str, new: str) -> bool:
    """Whether who wrote for the old line is served by the new one."""
    if old == new or ": constant" in old:
        return head(old) == head(new)
    if head(old) != head(new) or "(" not in old or old.startswith(OVERRIDDEN):
        return False
    before, after = arguments(old), arguments(new)
    if old.startswith("hook "):  # an implementation takes the arguments that it names
        return {a.name for a in before} <= {a.name for a in after}
    places = [a for a in before if a.kind == "by place"]
    joined = [a for a in after if a not in before]
    kept = [a for a in after if a.kind == "by place"][: len(places)] == places
    return kept and set(before) <= set(after) and all(a.default or a.kind == "**" for a in joined)


def test_what_version_1_promised_is_kept() -> None:
    """Additions with defaults, yes; nothing goes, and nothing changes its place or its default."""
    assert 1 in plugin.SUPPORTED_API_VERSIONS
    by_head: dict[str, list[str]] = {}
    for line in NOW:
        by_head.setdefault(head(line), []).append(line)
    broken = [
        f"promised: {old}\n     now: {'; '.join(by_head.get(head(old), ['nothing']))}"
        for old in PROMISED
        if not any(extends(old, new) for new in by_head.get(head(old), []))
    ]
    if broken:
        told = "\n".join(broken)
        pytest.fail(
            f"plugins of version 1 of the contract would break:\n{told}\nKeep it, or make a new "
            "version: docs/stability.md says how.",
            pytrace=False,
        )


@pytest.mark.parametrize(
    ("old", "new", "kept"),
    [
        ("a.f(x)", "a.f(x, y=1)", True),
        ("a.f(x)", "a.f(x, *, y=1)", True),
        ("a.f(x)", "a.f(x, y)", False),
        ("a.f(x, y=1)", "a.f(x, y=2)", False),
        ("a.f(x, y)", "a.f(y, x)", False),
        ("a.f(x, z=1)", "a.f(x, y=1, z=1)", False),
        ("a.f(x, *, y=1)", "a.f(x)", False),
        ("a.f(x)", "a.g(x)", False),
        ("hook attnx_h(a)", "hook attnx_h(b, a)", True),
        ("hook attnx_h(a)", "hook attnx_h(b)", False),
        ("attnx.plugin.Lane.f(x)", "attnx.plugin.Lane.f(x, y=1)", False),
        ("attnx.plugin.Lane.any_shape = True", "attnx.plugin.Lane.any_shape = False", False),
        ("a.N: constant = 1", "a.N: constant = 2", True),
        ("a.C: class", "a.C: class (a.B)", False),
    ],
    ids=lambda value: str(value).replace("attnx.plugin.", ""),
)  # fmt: skip
def test_what_counts_as_kept(old: str, new: str, kept: bool) -> None:
    assert extends(old, new) is kept
