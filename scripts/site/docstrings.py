"""How docstrings are read for the site: what is written for `help()` becomes sections and code."""

from __future__ import annotations

import re
from typing import Any

import griffe

__all__ = ["Plain"]


PROMPTS = re.compile(r"^(?P<indent> *)>>> .*(?:\n(?P=indent)\S.*|\n(?P=indent) .*)*", re.MULTILINE)


class Plain(griffe.Extension):
    """Reads `Example:` as the section of examples, and prompts in a module's text as code."""

    def on_instance(self, *, obj: griffe.Object, **others: Any) -> None:
        """Before any docstring is parsed."""
        if obj.docstring is None:
            return
        text = obj.docstring.value
        text = re.sub(r"^( *)Example:$", r"\1Examples:", text, flags=re.MULTILINE)
        obj.docstring.value = PROMPTS.sub(_fenced, text) if obj.is_module else text

    def on_class_members(self, *, cls: griffe.Class, **others: Any) -> None:
        """A constructor by `__new__` is read as one by `__init__`."""
        made = cls.members.get("__new__")
        if made is not None and "__init__" not in cls.members:
            cls.set_member("__init__", made)


def _fenced(prompts: re.Match[str]) -> str:
    lines = prompts[0].splitlines()
    code = "\n".join(line.removeprefix(prompts["indent"]) for line in lines)
    return f"```pycon\n{code}\n```"
