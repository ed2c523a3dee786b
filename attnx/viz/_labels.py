r"""Tokens as text that can be read, and that cannot mislead.

A token may be a newline, a space, a half of a character, one that shows nothing at all, or one that
turns the direction of all that follows it. Such characters are written out, in the way of Python's
own escapes, so that what is shown is one line, is valid XML, and stays in its place. What makes one
sign of two, as in emoji, is kept.
"""

from __future__ import annotations

import unicodedata
from typing import Any

from attnx.errors import ArgumentError, ArgumentTypeError

__all__ = ["check_tokens", "readable", "short"]

SPACE = "␣"
EMPTY = "(empty)"
NAMED = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
UNSEEN = ("Cc", "Cf", "Cs", "Zl", "Zp", "Zs")
FORMS = frozenset(map(chr, (*range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0))))
"""They choose between forms of the letter before them; beside other letters they show nothing."""
JOINERS = frozenset("\u200c\u200d")
BLANK = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0")
"""Characters that are letters or marks by their category, and show nothing."""
SIGNS = frozenset(
    "\u0600\u0601\u0602\u0603\u0604\u0605\u06dd\u070f\u0890\u0891\u08e2\U000110bd\U000110cd"
)
"""Characters that show something, though their category says that they do not."""
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
    letters = map(_letter, inner, "a" + inner, inner[1:] + "a")
    return SPACE * ends[0] + "".join(letters) + SPACE * ends[1]


def _letter(letter: str, before: str, after: str) -> str:
    """A letter between its neighbours; "a" where there is none."""
    code = ord(letter)
    if letter in JOINERS and not (before.isascii() or after.isascii()):
        return letter
    odd = unicodedata.category(letter) in UNSEEN and letter != " " and letter not in SIGNS
    never = code & 0xFFFE == 0xFFFE or 0xFDD0 <= code <= 0xFDEF
    latin = before.isalpha() and before.isascii()
    idle = letter in FORMS and (latin or before in FORMS)
    if not (odd or never or idle or letter in BLANK):
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
