"""What `attnx compare` reads, and how it refuses everything else."""

from __future__ import annotations

import pickle
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from attnx.cli._app import app
from attnx.cli._files import read_file, read_sample
from attnx.errors import ArgumentError

Q = np.arange(24, dtype=np.float32).reshape(1, 2, 3, 4)


def test_the_sample_is_real_padded_and_says_where_it_came_from() -> None:
    """The shipped sample has unequal lengths, one layout, and its origin and licence."""
    sample = read_sample()
    q, lengths = sample.arrays["q"], sample.arrays["lengths"]
    assert q.shape == (7, 12, 23, 32)
    assert q.dtype == np.float32
    assert lengths.max() == 23
    assert len(set(lengths.tolist())) == 7
    assert sample.about["model_licence"] == "Apache-2.0"
    assert sample.about["model"] == "sentence-transformers/all-MiniLM-L6-v2"
    assert len(sample.about["sentences"]) == 7


def test_the_sample_is_under_a_megabyte() -> None:
    """It ships in every wheel, so it stays small."""
    import attnx.cli

    (file,) = (Path(attnx.cli.__file__).parent / "data").glob("*.safetensors")
    assert file.stat().st_size < 1_000_000


def test_npz_round_trip_with_options_and_foreign_byte_order(tmp_path: Path) -> None:
    """Every known array is read, big-endian ones in the machine's order."""
    lengths = np.array([2])
    np.savez(tmp_path / "a.npz", q=Q.astype(">f4"), k=Q, v=Q, lengths=lengths)
    arrays = read_file(tmp_path / "a.npz").arrays
    assert arrays["q"].dtype.isnative
    np.testing.assert_array_equal(arrays["q"], Q)
    np.testing.assert_array_equal(arrays["lengths"], lengths)


def test_safetensors_holds_bfloat16(tmp_path: Path) -> None:
    """bfloat16 comes through as the ml_dtypes type, bit for bit."""
    half = Q.astype(ml_dtypes.bfloat16)
    save_file({"q": half, "k": half, "v": half}, tmp_path / "a.safetensors")
    found = read_file(tmp_path / "a.safetensors").arrays["q"]
    assert found.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(found.view(np.uint16), half.view(np.uint16))


def _npz(path: Path, **arrays: object) -> None:
    np.savez(path, **{"q": Q, "k": Q, "v": Q, **arrays})  # type: ignore[arg-type]


def bad_files(folder: Path) -> dict[str, tuple[Path, str]]:
    """One file of each unreadable kind, with words its error must hold."""
    good, kept = folder / "good.npz", folder / "good.safetensors"
    _npz(good)
    save_file({"q": Q, "k": Q, "v": Q}, kept)
    made: dict[str, tuple[Path, str]] = {}

    def add(kind: str, suffix: str, content: bytes, words: str) -> None:
        path = folder / f"{kind}{suffix}"
        path.write_bytes(content)
        made[kind] = (path, words)

    add("truncated-npz", ".npz", good.read_bytes()[:300], "not a readable .npz file")
    flipped = bytearray(good.read_bytes())
    flipped[100:160] = b"x" * 60
    add("corrupt-npz", ".npz", bytes(flipped), "not a readable .npz file")
    add("empty-npz", ".npz", b"", "the file is empty")
    add("pickled-npz", ".npz", pickle.dumps({"q": Q}), "a pickle is never loaded")
    add("text-npz", ".npz", b"hello", "no zip archive")
    add("truncated-st", ".safetensors", kept.read_bytes()[:-9], "not a readable .safetensors")
    add("garbage-st", ".safetensors", b"\xff" * 64, "not a readable .safetensors")
    add("pickled-st", ".safetensors", pickle.dumps({"q": Q}), "not a readable .safetensors")
    add("other-suffix", ".pt", b"x", "expected a .npz or .safetensors file")

    _npz(folder / "object.npz", q=np.array([{}], dtype=object))
    made["object"] = (folder / "object.npz", "allow_pickle=False")
    _npz(folder / "bfloat16.npz", q=Q.astype(ml_dtypes.bfloat16))
    made["bfloat16-npz"] = (folder / "bfloat16.npz", "write a .safetensors file")
    _npz(folder / "unknown.npz", foo=Q, bar=Q)
    made["unknown"] = (folder / "unknown.npz", "unknown arrays bar, foo; expected q, k, v")
    np.savez(folder / "missing.npz", q=Q)
    made["missing"] = (folder / "missing.npz", "no array named k, v; the file holds q")
    with (folder / "single.npz").open("wb") as handle:
        np.save(handle, Q)
    made["single-npy"] = (folder / "single.npz", "a single .npy array")
    (folder / "folder.npz").mkdir()
    made["directory"] = (folder / "folder.npz", "got a directory")
    made["absent"] = (folder / "absent.npz", "No such file or directory")
    made["absent-st"] = (folder / "absent.safetensors", "No such file or directory")
    return made


BAD_KINDS = (
    *("truncated-npz", "corrupt-npz", "empty-npz", "pickled-npz", "text-npz", "truncated-st"),
    *("garbage-st", "pickled-st", "other-suffix", "object", "bfloat16-npz", "unknown", "missing"),
    *("single-npy", "directory", "absent", "absent-st"),
)


@pytest.mark.parametrize("kind", BAD_KINDS)
def test_a_bad_file_is_one_error_that_names_it(kind: str, tmp_path: Path) -> None:
    """Whatever the reader raised, the caller sees ArgumentError in one line, with the path."""
    made = bad_files(tmp_path)
    assert sorted(made) == sorted(BAD_KINDS)
    path, words = made[kind]
    with pytest.raises(ArgumentError) as caught:
        read_file(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", BAD_KINDS)
def test_a_bad_file_is_one_line_and_status_2(kind: str, tmp_path: Path) -> None:
    """Every kind of unreadable file: no traceback, one line on stderr, nothing on stdout."""
    path, words = bad_files(tmp_path)[kind]
    done = CliRunner().invoke(app, ["compare", str(path)])
    assert done.exit_code == 2
    assert done.stderr.startswith(f"attnx: {path}: ")
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""
