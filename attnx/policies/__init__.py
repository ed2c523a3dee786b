"""Policies: who computes where nobody was asked for by name.

A policy is a plugin with one hook, `attnx_rank`, that is asked once a class of calls and never on
the path of a call. Two ship: `prefer` says an order, `fastest` measures one. Either is registered
like any plugin, or chosen at run time without a line of code by `ATTNX_POLICY`. What is asked for
by `backend=`, `use_backend`, `set_default_backend` or `ATTNX_BACKEND` is above every policy.

The core never imports this package; the synthetic calls that `fastest` measures need NumPy.
"""

from __future__ import annotations

from attnx.errors import ArgumentError
from attnx.policies._fastest import fastest
from attnx.policies._prefer import prefer
from attnx.policies._store import Measured

__all__ = ["Measured", "fastest", "named", "prefer"]


def named(text: str) -> prefer | fastest:
    """The policy that a setting names, as `ATTNX_POLICY` does.

    Args:
        text: `"prefer:NAME,NAME"`, `"fastest"` or `"fastest:NAME,NAME"`.

    Raises:
        ArgumentError: anything else.

    Example:
        >>> from attnx import policies
        >>> policies.named("prefer:torch,numpy")
        prefer('torch', 'numpy')
    """
    word, colon, rest = text.strip().partition(":")
    names = [name.strip() for name in rest.split(",") if name.strip()]
    if word.strip() == "fastest" and bool(colon) == bool(names):
        return fastest(*names)
    if word.strip() == "prefer" and names:
        return prefer(*names)
    raise ArgumentError(
        f"ATTNX_POLICY: expected 'fastest', 'fastest:NAME,NAME' or 'prefer:NAME,NAME', got {text!r}"
    )
