r"""Tokens as text that can be read, and that cannot mislead.

A token may be a newline, a space, a half of a character, or a character that turns the direction
of all that follows it. Such characters are written out, in the way of Python's own escapes, so that
what is shown is one line, is valid XML, and stays in its place.
"""

from __future__ import annotations

import unicodedata
from typing import Any

from attnx.errors import ArgumentError, ArgumentTypeError

__all__ = ["check_tokens", "readable", "short"]

SPACE = "␣"
EMPTY = "(empty)"
NAMED = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
DIRECTIONS = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
LONGEST = 16
"""Letters of a label in a picture."""


def readable(token: str) -> str:
    r"""A token as one line of text.

    Example:
        >>> readable(" the"), readable("\n"), readable("")
        ('␣the', '\\n', '(empty)')
    """
    if not token:
        return EMPTY
    inner = token.strip(" ")
    start = len(token) - len(token.lstrip(" "))
    ends = (start, 0) if not inner else (start, len(token) - start - len(inner))
    return SPACE * ends[0] + "".join(map(_letter, inner)) + SPACE * ends[1]


def _letter(letter: str) -> str:
    code = ord(letter)
    odd = unicodedata.category(letter) in ("Cc", "Cs", "Zl", "Zp")
    never = code & 0xFFFE == 0xFFFE or 0xFDD0 <= code <= 0xFDEF
    if not (odd or never or letter in DIRECTIONS):
        return letter
    if letter in NAMED:
        return NAMED[letter]
    return (
        f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"
    )


def short(label: str) -> str:
    """A label of at most `LONGEST` letters."""
    return label if len(label) <= LONGEST else label[: LONGEST - 1] + "…"


def check_tokens(name: str, tokens: Any, axis: str, length: int) -> tuple[str, ...] | None:
    """Tokens as readable labels, one for each position."""
    if tokens is None:
        return None
    if isinstance(tokens, str) or not hasattr(tokens, "__iter__"):
        raise ArgumentTypeError(
            f"{name}: expected a sequence of strings, one for each token, got "
            f"{type(tokens).__name__}; write {name}=text.split() or the tokenizer's own tokens"
        )
    found = list(tokens)
    for place, token in enumerate(found):
        if not isinstance(token, str):
            raise ArgumentTypeError(
                f"{name}[{place}]: expected a string, got {type(token).__name__}"
            )
    if len(found) != length:
        hint = "; name the keys with key_tokens=" if name == "tokens" else ""
        raise ArgumentError(
            f"{name}: expected one for each position, {axis} = {length}, got {len(found)}{hint}"
        )
    return tuple(map(readable, found))
