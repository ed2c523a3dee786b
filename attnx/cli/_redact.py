"""A bug report without the reporter: personal paths and the user's name are taken out of texts.

A path comes in many spellings: with either separator, doubled as in a `repr`, through a symbolic
link, in another case, as a URL. A place is looked for in each of them, the longest place first, and
then any home of anybody, because a message may have been made on another machine.
"""

from __future__ import annotations

import getpass
import os
import re
import site
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["redactor"]

SEPARATOR = r"[\\/]+"
END = r"(?![\w-]|\.\w)"
"""A path ends here: `/home/jo` is no part of `/home/joan`."""
ANY_HOME = re.compile(
    # With a drive a name may hold spaces, as far as the path goes on.
    rf"(?:[a-z]:{SEPARATOR}(?:users|documents and settings){SEPARATOR}"
    r"[^\\/'\":;,<>|)\]}\n]+(?=[\\/])|"
    rf"(?:[a-z]:)?{SEPARATOR}(?:home|users|documents and settings){SEPARATOR}"
    r"[^\\/\s'\":;,<>|)\]}]+)",
    re.IGNORECASE,
)
NOBODY = frozenset({"root", "user", "admin", "administrator", "runner", "ubuntu", "nobody", "home"})
"""Names that tell nothing, and that are words of messages."""


def redactor(
    places: Iterable[tuple[str, str]] | None = None, user: str | None = None,
    keep: Iterable[str] = (),
) -> Callable[[Any], Any]:  # fmt: skip
    r"""A function that redacts every text in a value made of lists, tuples and dicts.

    Args:
        places: paths and what stands for them; by default those of this machine.
        user: the user's name; by default that of this process.
        keep: words that are no one's name here, whatever the user is called.

    Example:
        >>> clean = redactor([("/srv/jo", "~")], user="jo")
        >>> clean({"where": r"\srv\jo\x.py and /SRV/JO/y.py, not /srv/joan"})
        {'where': '~\\x.py and ~/y.py, not /srv/joan'}
    """
    found = _spellings(_places() if places is None else places)
    rules = [(_pattern(path), found[path]) for path in sorted(found, key=len, reverse=True)]
    user = _user() if user is None else user
    known = NOBODY | {word.lower() for word in keep}
    if user and user.lower() not in known:
        name = re.compile(rf"(?<![\w-]){re.escape(user)}(?![\w-])", re.IGNORECASE)
    else:
        name = None

    def text(value: str) -> str:
        for pattern, stand_in in rules:
            value = pattern.sub(stand_in, value)
        value = ANY_HOME.sub("~", value)
        return value if name is None else name.sub("<user>", value)

    def redact(value: Any) -> Any:
        if isinstance(value, str):
            return text(value)
        if isinstance(value, dict):
            return {text(str(key)): redact(item) for key, item in value.items()}
        return [redact(item) for item in value] if isinstance(value, (list, tuple)) else value

    return redact


def _places() -> Iterator[tuple[str, str]]:
    """The places of this machine."""
    for home in (os.environ.get("HOME"), os.environ.get("USERPROFILE"), str(Path.home())):
        yield home or "", "~"
    packages = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    packages += [*getattr(site, "getsitepackages", list)(), site.getusersitepackages()]
    for path in packages:
        yield path, "<site-packages>"
    yield sysconfig.get_path("stdlib"), "<stdlib>"
    for path in (tempfile.gettempdir(), "/var/folders", "/tmp"):
        yield path, "<temp>"
    for path in (sys.prefix, sys.base_prefix, sys.exec_prefix):
        yield path, "<prefix>"
    yield str(Path.cwd()), "<cwd>"


def _spellings(places: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Each path as it may be written, and what stands for it; of two, the first."""
    found: dict[str, str] = {}
    for path, name in places:
        real = os.path.realpath(path) if path and Path(path).is_absolute() else path
        for spelled in (path, real):
            if not re.fullmatch(rf"([a-z]:)?({SEPARATOR})?", spelled, re.IGNORECASE):
                for written in (spelled, quote(spelled, safe="/:\\"), ascii(spelled)[1:-1]):
                    found.setdefault(written, name)
    return found


def _pattern(path: str) -> re.Pattern[str]:
    parts = [re.escape(part) for part in re.split(SEPARATOR, path) if part]
    start = SEPARATOR if path[:1] in ("/", "\\") else ""
    # macOS gives /tmp and /var also with /private before them.
    private = rf"(?:{SEPARATOR}private)?" if start else ""
    return re.compile(private + start + SEPARATOR.join(parts) + END, re.IGNORECASE)


def _user() -> str:
    try:
        return getpass.getuser()
    except Exception:  # no name for this user's number, as in a container
        return ""
