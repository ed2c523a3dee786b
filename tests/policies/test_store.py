"""Measurements on disk: whole or not at all, and a stranger's file is never believed."""

from __future__ import annotations

import json
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs
import pytest

import attnx
from attnx.policies import Measured
from attnx.policies import _store as module
from attnx.policies._machine import machine, version
from attnx.policies._store import LARGEST, Store

LENGTHS = (16, 32)
x = np.ones((1, 1, 3, 4), np.float32)
KNOWN = {"a": Measured("1", (1e-3, 2e-3)), "b": Measured("2", (), "OSError: no")}


@pytest.fixture
def cls() -> Any:
    return attnx.explain(x, x, x, causal=True, bias=np.zeros((3, 3), np.float32)).call


@pytest.fixture
def file(tmp_path: Path, cls: Any) -> Path:
    """The one file of a store in `tmp_path`."""
    Store(tmp_path).save(cls, LENGTHS, KNOWN)
    (found,) = tmp_path.rglob("*.json")
    return found


def said() -> list[str]:
    return [r.detail for r in attnx.doctor() if r.subject == "fastest"]


def test_another_process_reads_what_was_kept(tmp_path: Path, file: Path, cls: Any) -> None:
    assert Store(tmp_path).load(cls, LENGTHS) == KNOWN
    assert Store(tmp_path).load(cls._replace(traced=True), LENGTHS) == KNOWN
    assert Store(tmp_path).load(cls, (16,)) == {}
    assert Store(tmp_path).load(cls._replace(dtype="float64"), LENGTHS) == {}
    assert Store(tmp_path).load(cls._replace(D=8), LENGTHS) == {}
    assert said() == []


def test_it_lies_in_the_users_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert Store().folder == platformdirs.user_cache_path("attnx", appauthor=False) / ("fastest")


def break_file(path: Path, how: str) -> None:
    text = path.read_text("utf-8")
    record = json.loads(text)
    if how == "truncated":
        path.write_text(text[: len(text) // 2], "utf-8")
    elif how == "empty":
        path.write_text("", "utf-8")
    elif how == "no text":
        path.write_bytes(b"\xff\xfe\x00")
    elif how == "nested":
        path.write_text("[" * 30_000, "utf-8")
    elif how == "large":
        path.write_text(text + " " * LARGEST, "utf-8")
    elif how == "a folder":
        path.unlink()
        path.mkdir()
    elif how == "a pipe":
        path.unlink()
        os.mkfifo(path)
    else:
        changes: dict[str, Any] = {
            "a list": [], "other format": record | {"format": 2},
            "other machine": record | {"machine": {"cpu": "another"}},
            "other call": record | {"call": record["call"] | {"dtype": "float64"}},
            "strange call": record | {"call": {"x": 1}},
            "wrong call": record | {"call": record["call"] | {"framework": 3}},
            "lengths": record | {"lengths": ["16", "32"]},
            "no number": record | {"backends": {"a": {"version": "1", "seconds": [1.0, "x"]}}},
            "zero": record | {"backends": {"a": {"version": "1", "seconds": [0.0, 1.0]}}},
            "NaN": record | {"backends": {"a": {"version": "1", "seconds": [1.0, float("nan")]}}},
            "too few": record | {"backends": {"a": {"version": "1", "seconds": [1.0]}}},
            "no version": record | {"backends": {"a": {"seconds": [1.0, 1.0]}}},
            "no object": record | {"backends": {"a": 3}},
        }  # fmt: skip
        path.write_text(json.dumps(changes[how]), "utf-8")


@pytest.mark.parametrize(
    "how",
    [
        "truncated", "empty", "no text", "nested", "large", "a pipe", "a list", "other format",
        "other machine", "other call", "strange call", "wrong call", "lengths", "no number", "zero",
        "NaN", "too few", "no version", "no object",
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_used_is_told_of_once_and_written_anew(
    how: str, tmp_path: Path, file: Path, cls: Any
) -> None:
    break_file(file, how)
    broken = Store(tmp_path)
    assert broken.load(cls, LENGTHS) == {}
    assert broken.load(cls, LENGTHS) == {}
    (line,) = said()
    assert line.startswith(f"{file} cannot be used: ")
    broken.save(cls, LENGTHS, KNOWN)
    assert Store(tmp_path).load(cls, LENGTHS) == KNOWN


@pytest.mark.parametrize("how", ["a folder", "below a file"])
def test_where_nothing_can_be_written_memory_has_to_do(
    how: str, tmp_path: Path, file: Path, cls: Any
) -> None:
    folder = tmp_path
    if how == "a folder":
        break_file(file, how)
    else:
        folder = tmp_path / "file"
        folder.write_text("", "utf-8")
    store = Store(folder)
    store.save(cls, LENGTHS, KNOWN)
    assert store.load(cls, LENGTHS) == KNOWN
    assert Store(folder).load(cls, LENGTHS) == {}
    assert [line for line in said() if "measurements live as long as the process" in line]
    assert [path.name for path in folder.rglob(".new-*")] == []


def test_a_folder_without_permission_is_no_error(
    tmp_path: Path, cls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**names: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    store = Store(tmp_path)
    store.save(cls, LENGTHS, KNOWN)
    assert store.load(cls, LENGTHS) == KNOWN
    assert "cannot be written: Permission denied" in said()[0]


def test_a_user_without_a_folder_measures_in_memory(
    monkeypatch: pytest.MonkeyPatch, cls: Any
) -> None:
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda *a, **k: Path("~/.cache"))
    store = Store()
    store.save(cls, LENGTHS, KNOWN)
    assert store.load(cls, LENGTHS) == KNOWN
    assert not Path("~").exists()


def test_a_version_is_told_without_importing_the_framework(python: Callable[..., str]) -> None:
    code = (
        "import sys, attnx\n"
        "from attnx.policies._machine import version\n"
        "attnx.backends\n"
        "from attnx._registry import registry; registry.names()\n"
        "print(version('torch').split(' ')[2], version('numpy').split(' ')[2], "
        "'torch' in sys.modules)\n"
    )
    assert python(code) == "torch numpy False\n"


def test_another_machine_has_another_file(
    tmp_path: Path, file: Path, cls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Machines that share a home do not measure for each other, nor overwrite each other."""
    other = machine() | {"cores": machine()["cores"] + 1}
    monkeypatch.setattr(module, "machine", lambda: other)
    assert Store(tmp_path).load(cls, LENGTHS) == {}
    Store(tmp_path).save(cls, LENGTHS, {"c": KNOWN["a"]})
    monkeypatch.undo()
    assert Store(tmp_path).load(cls, LENGTHS) == KNOWN
    assert said() == []


def test_readers_meet_whole_files_while_others_write(tmp_path: Path, cls: Any) -> None:
    written = threading.Event()

    def write(name: str) -> None:
        for number in range(25):
            measured = Measured(str(number), (1.0, 1.0))
            Store(tmp_path).save(cls, LENGTHS, {name: measured})
        written.set()

    threads = [threading.Thread(target=write, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    while not written.is_set():
        Store(tmp_path).load(cls, LENGTHS)
    for thread in threads:
        thread.join()
    assert said() == []
    last = Store(tmp_path).load(cls, LENGTHS)
    assert last
    assert {kept.version for kept in last.values()} <= {str(n) for n in range(25)}
    assert len(list(tmp_path.rglob("*"))) == 2  # the folder and one file, no leftovers


def test_a_writer_that_dies_leaves_the_old_file(
    tmp_path: Path, file: Path, cls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replace(*names: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        Store(tmp_path).save(cls, LENGTHS, {"a": Measured("9", (1.0, 1.0))})
    assert Store(tmp_path).load(cls, LENGTHS) == KNOWN
    assert len(list(tmp_path.rglob("*"))) == 2


def test_clear_removes_files_of_ours_and_no_others(
    tmp_path: Path, file: Path, cls: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whoever put something beside them, or a link to elsewhere, finds it again."""
    elsewhere = tmp_path_factory.mktemp("elsewhere") / file.name
    mine = file.parent / "notes.txt", file.parent / "mine.json", tmp_path / "mine" / file.name
    for path in (*mine, elsewhere):
        path.parent.mkdir(exist_ok=True)
        path.write_text("kept", "utf-8")
    (tmp_path / "empty").mkdir()
    (tmp_path / ("0" * 16)).symlink_to(elsewhere.parent, target_is_directory=True)
    left = file.parent / ".new-left"
    left.touch()
    store = Store(tmp_path)
    assert [len(kept.backends) for kept in store.everything() if not kept.fault] == [2]
    assert store.clear() == 1
    assert all(path.exists() for path in (*mine, elsewhere, tmp_path / "empty"))
    assert (left.exists(), file.exists()) == (False, False)
    assert store.load(cls, LENGTHS) == {}
    assert store.clear() == 0


def test_the_version_of_a_backend_holds_its_distribution() -> None:
    attnx.get_backend("numpy")
    assert version("numpy") == f"attnx {attnx.__version__}, numpy {np.__version__}"
