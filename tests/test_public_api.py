"""The public API is what `tests/data/public_api.txt` lists: nothing joins or leaves it unseen."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


def load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


api = load(ROOT / "scripts" / "public_api.py")
LISTED = api.LISTED.read_text("utf-8").splitlines()


def test_the_public_api_is_the_one_that_is_listed() -> None:
    changed = api.difference()
    if changed:
        pytest.fail(
            "the public API changed ('-' was promised, '+' is new):\n"
            + "\n".join(changed)
            + f"\nIf docs/stability.md allows it and it is meant, run `{api.COMMAND}`, and tell it "
            "in CHANGELOG.md.",
            pytrace=False,
        )


def test_a_changed_default_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The list is compared with the code: one letter of a signature is a difference."""
    line = next(x for x in LISTED if x.startswith("attnx.rope("))
    text = "\n".join(LISTED).replace(line, line.replace("layout='bhsd'", "layout='bshd'"))
    (tmp_path / "listed.txt").write_text(text + "\n", "utf-8")
    monkeypatch.setattr(api, "LISTED", tmp_path / "listed.txt")
    assert {"-attnx.rope(", "+attnx.rope("} <= {told[:12] for told in api.difference()}


HEAVY = ("attnx.compat.", "attnx.integrations.")
LIGHT = [name for name in api.modules() if not name.startswith(HEAVY)]


@pytest.mark.parametrize("name", LIGHT)
def test_what_is_listed_is_what_python_sees(name: str) -> None:
    """The list is read from sources; the module that runs has the same names and parameters."""
    module = importlib.import_module(name)
    assert sorted(getattr(module, "__all__", ())) == sorted(api.exported(name))
    for public in api.exported(name):
        full, value = f"{name}.{public}", getattr(module, public)
        (told,) = [line for line in LISTED if line.startswith((f"{full}(", f"{full}: "))][:1]
        if inspect.isfunction(value) and told.startswith(f"{full}("):
            assert parameters(value) == parameters(stub(told)), full


def parameters(function: Callable[..., Any]) -> list[tuple[Any, ...]]:
    found = inspect.signature(function).parameters.values()
    return [(p.name, p.kind, p.default is p.empty) for p in found]


def stub(line: str) -> Callable[..., Any]:
    """A function with a listed signature; its defaults are all None."""
    tree = ast.parse(f"lambda {line[line.index('(') + 1 : -1]}: 0", mode="eval")
    assert isinstance(tree.body, ast.Lambda)
    given, nothing = tree.body.args, ast.Constant(None)
    given.defaults = [nothing for _ in given.defaults]
    given.kw_defaults = [default and nothing for default in given.kw_defaults]
    made: Callable[..., Any] = eval(compile(ast.fix_missing_locations(tree), line, "eval"))
    return made


def test_the_list_imports_no_framework(python: Any) -> None:
    """It is made in a second, and is the same where a framework is missing."""
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'scripts')!r}); import public_api\n"
        "assert public_api.lines()\n"
        "print(*{name.split('.')[0] for name in sys.modules})"
    )
    loaded = set(python(code).split())
    assert not loaded & {"torch", "jax", "cupy", "transformers", "flax", "onnx"}
