"""Where measurements are kept: one small file a class of calls, below a folder for this machine.

A file is written whole under another name and then renamed, so that a reader sees an old file or a
new one and never half of one, and writers need no lock: the last one wins, with a file that is
whole. Whatever a file holds is checked as a stranger's would be. One that cannot be used is told of
in `doctor`, once, and written anew; where nothing can be written, memory has to do.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from attnx._registry import Record, registry
from attnx.plugin import CallClass
from attnx.policies._machine import machine

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["Measured", "Store", "Stored", "default_folder"]

FORMAT = 1
LARGEST = 1 << 16
"""Bytes; a file of ours has a few hundred."""

FOLDER, FILE = re.compile(r"[0-9a-f]{16}"), re.compile(r"[0-9a-f]{16}-\d+-\d+\.json")
NEW = ".new-"
"""How the names of our folders, of our files, and of files that are being written look."""

TEXTS = "framework", "device", "dtype", "layout"
"""Fields of a class that are always text, whoever wrote the file."""


class Measured(NamedTuple):
    """What is known of one backend for a class of calls.

    Attributes:
        version: of the frameworks and the distribution that were measured.
        seconds: a call's, one for each length; empty where it failed.
        failure: why it failed, or "".
    """

    version: str
    seconds: tuple[float, ...] = ()
    failure: str = ""

    @property
    def mean(self) -> float:
        """The geometric mean over the lengths; infinite where it failed."""
        if not self.seconds:
            return math.inf
        return math.exp(sum(map(math.log, self.seconds)) / len(self.seconds))


class Stored(NamedTuple):
    """One file: what was measured, for which class and lengths; or why it cannot be used."""

    path: Path
    call: dict[str, Any]
    lengths: tuple[int, ...]
    backends: dict[str, Measured]
    fault: str = ""


def default_folder() -> Path | None:
    """The user's cache folder for attnx, or None where the user has none."""
    import platformdirs

    folder = platformdirs.user_cache_path("attnx", appauthor=False)
    return folder / "fastest" if folder.is_absolute() else None


class Store:
    """Measurements of this machine, in memory and in a folder.

    Args:
        folder: where; None for the user's cache folder, found when it is first needed.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._memory: dict[Path, dict[str, Measured]] = {}

    @property
    def folder(self) -> Path:
        """The folder of all machines."""
        if self._folder is None:
            self._folder = default_folder() or Path(os.devnull)
        return self._folder

    def load(self, call: CallClass, lengths: tuple[int, ...]) -> dict[str, Measured]:
        """What is known of a class of calls, by backend."""
        path = self._path(call, lengths)
        if not self._memory.get(path):
            self._memory[path] = self._read(path, _described(call), lengths)
        return self._memory[path]

    def any_head_size(self, call: CallClass, lengths: tuple[int, ...]) -> list[dict[str, Measured]]:
        """What is known of a class with any head sizes, for a compiler that does not tell them."""
        path = self._path(call, lengths)
        pattern = f"{path.name.split('-')[0]}-*-*.json"
        found = {kept for kept in list(self._memory) if kept.match(pattern)}
        with suppress(OSError):
            found |= set(path.parent.glob(pattern))
        wanted = _described(call)
        every = []
        for each in sorted(found):
            D, Dv = each.stem.split("-")[1:]
            if D.isdecimal() and Dv.isdecimal():
                sized = {**wanted, "D": int(D), "Dv": int(Dv)}
                every.append(self._memory.get(each) or self._read(each, sized, lengths))
        return [known for known in every if known]

    def save(
        self, call: CallClass, lengths: tuple[int, ...], measured: Mapping[str, Measured]
    ) -> None:
        """Keep measurements beside those of other backends of the class."""
        path, described = self._path(call, lengths), _described(call)
        merged = {**self._read(path, described, lengths), **measured}
        self._memory[path] = merged
        record = {
            "format": FORMAT,
            "machine": machine(),
            "call": described,
            "lengths": list(lengths),
            "backends": {name: _as_json(kept) for name, kept in sorted(merged.items())},
        }
        try:
            _write(path, json.dumps(record, indent=1))
        except OSError as error:
            why = f"{path.parent} cannot be written: {error.strerror or error}"
            _tell(f"{why}; measurements live as long as the process", "make it writable")

    def everything(self) -> Iterator[Stored]:
        """Every file of this machine, those that cannot be used with the reason."""
        for path in sorted((self.folder / _digest(machine())).glob("*.json")):
            try:
                yield parse(path, _text_of(path))
            except (OSError, ValueError, RecursionError) as error:
                yield Stored(path, {}, (), {}, str(error))

    def clear(self) -> int:
        """Remove the files of every machine, and nobody else's; how many there were.

        Raises:
            OSError: one cannot be removed.
        """
        count = 0
        for folder in sorted(self.folder.glob("*")):
            if not FOLDER.fullmatch(folder.name) or folder.is_symlink() or not folder.is_dir():
                continue
            for path in sorted(folder.iterdir()):
                ours = FILE.fullmatch(path.name) is not None
                if ours or path.name.startswith(NEW):
                    path.unlink(missing_ok=True)
                    count += ours
            with suppress(OSError):  # somebody else's file is in it
                folder.rmdir()
        self._memory.clear()
        return count

    def _path(self, call: CallClass, lengths: tuple[int, ...]) -> Path:
        described = _described(call) | {"D": 0, "Dv": 0}
        name = f"{_digest([described, list(lengths)])}-{call.D}-{call.Dv}.json"
        return self.folder / _digest(machine()) / name

    def _read(
        self, path: Path, described: dict[str, Any], lengths: tuple[int, ...]
    ) -> dict[str, Measured]:
        """A file's measurements; none where there is no file, or one that cannot be used."""
        try:
            stored = parse(path, _text_of(path))
            if (stored.call, stored.lengths) != (described, lengths):
                raise ValueError("it is of other calls")
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except (OSError, ValueError, RecursionError) as error:
            _tell(f"{path} cannot be used: {error}", "nothing: it is measured and written anew")
            return {}
        return stored.backends


def parse(path: Path, text: str) -> Stored:
    """A file's text as measurements of this machine.

    Raises:
        ValueError: it is no such thing.
    """
    record = json.loads(text)
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise ValueError("it is no file of measurements")
    if record.get("machine") != machine():
        raise ValueError("it is of another machine or another attnx")
    call, lengths, backends = (record.get(name) for name in ("call", "lengths", "backends"))
    if not (
        isinstance(call, dict)
        and call.keys() == set(CallClass._fields)
        and all(isinstance(call[name], str) for name in TEXTS)
        and isinstance(backends, dict)
        and isinstance(lengths, list)
        and all(type(length) is int for length in lengths)
    ):
        raise ValueError("it lacks a part")
    found = {name: _measured(kept, len(lengths)) for name, kept in backends.items()}
    return Stored(path, call, tuple(lengths), found)


def _measured(kept: Any, count: int) -> Measured:
    if not isinstance(kept, dict):
        raise ValueError("a measurement is not an object")
    version, seconds, failure = kept.get("version"), kept.get("seconds"), kept.get("failure", "")
    if not (isinstance(version, str) and isinstance(failure, str) and isinstance(seconds, list)):
        raise ValueError("a measurement lacks a part")
    good = all(type(each) is float and 0 < each < math.inf for each in seconds)
    if not good or len(seconds) != (0 if failure else count):
        raise ValueError("a measurement is not one")
    return Measured(version, tuple(seconds), failure)


def _as_json(kept: Measured) -> dict[str, Any]:
    return kept._asdict() | {"seconds": list(kept.seconds)}


def _described(call: CallClass) -> dict[str, Any]:
    """A class as JSON gives it back; whether a transform looks makes no difference to a time."""
    described = call._replace(traced=False)._asdict()
    if call.bias is not None:
        described["bias"] = [call.bias[0], list(call.bias[1])]
    return described


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _text_of(path: Path) -> str:
    """A regular file's text.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no regular file, too large, or no text.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):  # to open a pipe would be to wait for its writer
        raise ValueError("it is no regular file")
    if status.st_size > LARGEST:
        raise ValueError(f"it has {status.st_size} bytes")
    return path.read_text(encoding="utf-8")


def _write(path: Path, text: str) -> None:
    """A whole file or none.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, made = tempfile.mkstemp(prefix=NEW, dir=path.parent)
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(made, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(made)
        raise


def _tell(detail: str, remedy: str) -> None:
    """A line of `doctor`, once a process."""
    registry.note(Record("fastest", "warning", detail, remedy))
