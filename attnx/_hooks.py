"""Which hooks a plugin implements, and which it seems to implement and does not.

pluggy passes over a function that is not marked, and calls one that is marked and misspelt an
error of the whole host. Here both are found in one plugin, with the nearest name that there is.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

from attnx.errors import PluginError
from attnx.plugin import hookspecs

__all__ = ["Hooks", "hook_names", "hooks_of"]


class Hooks(NamedTuple):
    """What was found in a plugin.

    Attributes:
        names: the hooks that it implements.
        complaints: what it seems to implement and does not, each with the remedy.
    """

    names: tuple[str, ...]
    complaints: tuple[tuple[str, str], ...]


def hook_names() -> list[str]:
    """Every hook of the contract."""
    return sorted(name for name in vars(hookspecs()) if name.startswith("attnx_"))


def hooks_of(plugin: Any, manager: Any) -> Hooks:
    """Look at a plugin's functions before it is registered.

    Raises:
        PluginError: a function is marked as a hook that there is not.
    """
    known = hook_names()
    found: list[str] = []
    complaints: list[tuple[str, str]] = []
    for name in dir(plugin):
        options = manager.parse_hookimpl_opts(plugin, name)
        if options is not None:
            hook = options.get("specname") or name
            if hook not in known and not options.get("optionalhook"):
                raise PluginError(f"{hook} is no hook of attnx{_near(hook, known)}")
            found.append(hook)
        elif name == "attnx_backends":
            found.append(name)  # asked by its name, marked or not
        elif name.startswith("attnx_") and inspect.isroutine(getattr(plugin, name)):
            complaints.append(_unmarked(name, known))
    if not found:
        complaints.append(
            ("it implements no hook of attnx", "mark its functions with attnx.plugin.hookimpl")
        )
    return Hooks(tuple(name for name in found if name in known), tuple(complaints))


def _unmarked(name: str, known: list[str]) -> tuple[str, str]:
    if name in known:
        detail = f"{name} is not marked as a hook, so that it is never asked"
        return detail, f"mark {name} with attnx.plugin.hookimpl"
    return f"{name} is no hook of attnx{_near(name, known)}", f"rename {name}"


def _near(name: str, known: list[str]) -> str:
    import difflib

    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]}?" if near else f"; the hooks are {', '.join(known)}"
