"""`attnx show`: in the terminal, as a page, as a picture, and what it refuses."""

from __future__ import annotations

import base64
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

import attnx
from attnx.cli._app import app
from attnx.cli._files import read_sample


def _show(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["show", *map(str, arguments)])


def _data(path: Path) -> dict[str, Any]:
    (text,) = re.findall(r'id="data">(.*)</script>', path.read_text("utf-8"))
    return dict(json.loads(text))


def _weights(data: dict[str, Any]) -> Any:
    sides = [stop - start for start, stop in (data["rows"], data["columns"])]
    flat = np.frombuffer(base64.b64decode(data["weights"]), "<f4")
    return flat.reshape(len(data["heads"]), *sides)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    shapes = {"q": (2, 4, 5, 8), "k": (2, 2, 7, 8), "v": (2, 2, 7, 6)}
    arrays = {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    path = tmp_path / "given.npz"
    np.savez(path, **arrays, lengths=np.array([7, 4]))
    return path


def test_help_has_an_example() -> None:
    done = _show("--help")
    assert done.exit_code == 0
    assert "attnx show --head 0,3 --entry 2 --out attention.html" in done.stdout


def test_the_terminal_names_the_strongest_keys() -> None:
    """Without a file: the shipped sample, by its own words."""
    done = _show("--entry", 1, "--head", 3)
    assert done.exit_code == 0, done.output
    for words in (
        "7 sentences, entry 1",
        "head 3 of 12",
        "0 [CLS] 0.",
        "2 rained",
        "│    5 │",
        "414 of 529 pairs hidden.",
    ):
        assert words in done.stdout
    assert "Other heads: --head" in done.stdout


def test_the_terminal_says_what_sees_nothing(tmp_path: Path) -> None:
    x = np.ones((3, 4), np.float32)
    np.savez(tmp_path / "x.npz", q=x, k=x, v=x, lengths=np.array(0))
    done = _show(tmp_path / "x.npz")
    assert done.exit_code == 0, done.output
    assert done.stdout.count("nothing") == 3
    assert "Queries that see no key (their output is 0): 0, 1, 2." in done.stdout
    assert "Other heads" not in done.stdout


def test_the_sample_has_its_tokens() -> None:
    """A list for each sentence, padded as the arrays are."""
    inputs = read_sample()
    tokens, lengths = inputs.about["tokens"], inputs.arrays["lengths"]
    assert [len(entry) for entry in tokens] == [23] * 7
    for entry, length in zip(tokens, lengths, strict=True):
        assert (entry[0], entry[length - 1]) == ("[CLS]", "[SEP]")
        assert set(entry[length:]) <= {"[PAD]"}


@pytest.mark.parametrize("backend", [None, "torch"])
def test_a_page_of_a_file(backend: str | None, file: Path, tmp_path: Path) -> None:
    """The call of `attnx compare`: lengths, causal, scale, softcap, a part of it, by a backend."""
    out, words = tmp_path / "made" / "page.html", tmp_path / "words.txt"
    words.write_bytes("a\r\n<b>\n\nשלום\n d".encode())
    done = _show(
        file, "--causal", "bottom_right", "--scale", -0.5, "--softcap", 3, "--entry", 1,
        "--head", "3,1", "--rows", "1,5", "--columns", "0:6", "--tokens", words, "--out", out,
        *(["--backend", backend] if backend else []),
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "heads 3, 1, 4 queries x 6 keys" in done.stdout
    data = _data(out)
    assert data["queries"] == ["<b>", "(empty)", "שלום", "␣d"]
    assert data["keys"] is None
    arrays = dict(np.load(file))
    whole = attnx.attention_weights(
        arrays["q"], arrays["k"], mask=attnx.Lengths([7, 4]), causal="bottom_right", scale=-0.5,
        softcap=3.0,
    )  # fmt: skip
    np.testing.assert_allclose(_weights(data), whole[1, [3, 1], 1:5, :6], atol=1e-6)


def test_a_picture_that_fails_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = _show("--out", tmp_path / "a.png")
    assert done.exit_code == 2, done.output
    assert "pip install 'attnx[viz]'" in done.stderr
    assert not (tmp_path / "a.png").exists()


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_picture_of_the_sample(suffix: str, tmp_path: Path) -> None:
    out = tmp_path / f"a.{suffix}"
    done = _show("--rows", "0,5", "--columns", "0,6", "--head", 0, "--out", out)
    assert done.exit_code == 0, done.output
    assert out.read_bytes().startswith(b"\x89PNG" if suffix == "png" else b"<?xml")


def test_a_files_metadata_may_hold_its_tokens(tmp_path: Path) -> None:
    """A list for each batch entry; --tokens comes first."""
    x = np.ones((2, 1, 3, 4), np.float32)
    path, out = tmp_path / "x.safetensors", tmp_path / "x.html"
    tokens = [["a", "b", "c"], ["d", "e", "f"]]
    save_file({"q": x, "k": x, "v": x}, path, metadata={"about": json.dumps({"tokens": tokens})})
    assert _show(path, "--entry", 1, "--out", out).exit_code == 0
    assert _data(out)["keys"] == ["d", "e", "f"]
    (tmp_path / "t.json").write_text('["x", "\\n", "z"]')
    assert _show(path, "--tokens", tmp_path / "t.json", "--out", out).exit_code == 0
    assert _data(out)["queries"] == ["x", "\\n", "z"]
    assert "x.safetensors, entry 0" in out.read_text("utf-8")
    save_file({"q": x, "k": x, "v": x}, path, metadata={"about": json.dumps({"tokens": ["a"]})})
    assert "one list for each of 2 batch entries" in _show(path).stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--out", "a.pdf"), "--out: expected a name that ends in .png, .svg, .html, got a.pdf"),
        (("--head", "12"), "the shipped sample: heads: expected an index within [0, Hq=12)"),
        (("--head", "a"), "--head: expected integers >= 0 with commas, got 'a'"),
        (("--entry", "7"), "entry: expected an index within [0, B=7), got 7"),
        (("--rows", "3"), "--rows: expected START,STOP, got '3'"),
        (("--rows", "3,99"), "rows: expected a pair (start, stop)"),
        (("--causal=middle",), "--causal: expected nothing, top_left or bottom_right"),
        (("--layout", "bsdh"), "layout"),
        (("--backend", "nunpy"), "nunpy"),
        (("--tokens", "absent.txt"), "--tokens: absent.txt: cannot be read: No such file"),
        (("absent.npz",), "absent.npz: cannot be read"),
    ],
)
def test_wrong_use_is_one_line(arguments: tuple[str, ...], words: str) -> None:
    """Status 2, and nothing is written."""
    done = _show(*arguments)
    assert done.exit_code == 2, done.output
    assert done.stderr.startswith("attnx: ")
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("t.txt", b"a\nb", "tokens: expected one for each position, Lq = 23, got 2"),
        ("t.txt", b"\xff\xfe", "not readable as UTF-8"),
        ("t.json", b"[1", "not readable as UTF-8 or JSON"),
        ("u.json", b"{}", "expected a list of strings"),
        ("v.json", b"[1]", "tokens[0]: expected a string, got int"),
    ],
    ids=["too few", "no text", "no JSON", "no list", "no strings"],
)
def test_tokens_that_are_none_are_refused(
    name: str, content: bytes, words: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    done = _show("--tokens", tmp_path / name)
    assert done.exit_code == 2, done.output
    assert words in done.stderr
