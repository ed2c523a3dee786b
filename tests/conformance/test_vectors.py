"""Portable vectors: what is exported is enough to compute and to judge, away from the suite."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import attnx
from attnx.errors import ArgumentError
from attnx_conformance import vectors
from attnx_conformance.cases import CASES, find
from attnx_conformance.results import Result


def first(what: Callable[[Any], bool]) -> str:
    return next(case.name for case in CASES if what(case))


PICKED = tuple(
    dict.fromkeys((
        CASES[0].name,
        first(lambda c: c.make.shape.batch is None),
        first(lambda c: c.make.sinks and c.make.mask is not None),
        first(lambda c: c.make.bias is not None and c.make.bias_dtype is not None),
        first(lambda c: c.options.get("softcap") is not None),
        first(lambda c: c.options.get("causal") == "bottom_right"),
        first(lambda c: c.make.shape.Lk == 0),
        first(lambda c: "isolation" in c.needs),
        first(lambda c: c.profile == "numerics"),
        first(lambda c: c.profile == "gradients"),
        "dropout-everything-wide",
        "dropout-seed-in-words",
    ))
)  # fmt: skip


def compute(arrays: dict[str, Any], entry: dict[str, Any]) -> dict[str, Any]:
    """What a stranger would do, from the file and its entry in the manifest alone."""
    options = {name: arrays[name] for name in ("bias", "sinks") if name in arrays}
    drop = entry["options"]["dropout"]
    if drop is not None:
        low, high = drop["seed"]
        options["dropout"] = attnx.Dropout(drop["p"], high << 32 | low, tuple(drop["offset"]))
    (out, lse), pullback = attnx.attention_vjp(
        arrays["q"], arrays["k"], arrays["v"], mask=arrays["mask"], layout=entry["layout"],
        scale=entry["options"]["scale"], softcap=entry["options"]["softcap"], return_lse=True,
        backend="numpy", **options,
    )  # fmt: skip
    d_lse = arrays.get("d_lse", np.zeros_like(lse))
    grads = pullback(arrays["d_out"], d_lse)._asdict()
    made = {"out": out, "lse": lse} | {f"d{name}": grad for name, grad in grads.items()}
    return {name: made[name] for name in entry["results"]}


def computed(folder: Path, results: Path) -> Path:
    """A folder of right results for an export."""
    results.mkdir()
    for entry in json.loads((folder / "manifest.json").read_text("utf-8"))["cases"]:
        made = compute(load_file(folder / entry["file"]), entry)
        save_file(
            {name: np.array(x, order="C") for name, x in made.items()}, results / entry["file"]
        )
    return results


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vectors")
    vectors.export(folder, [find(name) for name in PICKED], seed=3)
    return folder


@pytest.fixture
def one(tmp_path: Path) -> tuple[Path, Path, str]:
    """An export of one bfloat16 case, right results for it, and the name of its file."""
    case = find(PICKED[0])
    manifest = vectors.export(tmp_path / "vectors", [case], ["bfloat16"])
    entry = json.loads(manifest.read_text("utf-8"))["cases"][0]
    return manifest.parent, computed(manifest.parent, tmp_path / "mine"), entry["file"]


def only(results: tuple[Result, ...]) -> Result:
    (result,) = results
    return result


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    arrays = load_file(path)
    change(arrays)
    save_file(arrays, path)


def test_results_computed_from_the_files_alone_pass(exported: Path, tmp_path: Path) -> None:
    """Nothing but the files and the manifest is needed, in any dtype and kind of case."""
    results = vectors.verify(exported, computed(exported, tmp_path / "mine"), subject="mine")
    assert {result.verdict for result in results} == {"passed"}, [
        (r.case, r.dtype, r.detail) for r in results if r.verdict != "passed"
    ]
    assert {result.case for result in results} == set(PICKED)
    assert {result.dtype for result in results} == {"float16", "bfloat16", "float32", "float64"}
    assert {result.subject for result in results} == {"mine"}
    assert {result.seed for result in results} == {3}
    assert all("out" in result.ratios and not result.detail for result in results)


def test_the_other_layout_is_exported_too(tmp_path: Path) -> None:
    """Operands and results have their heads and sequence swapped; the mask has not."""
    case = find(PICKED[0])
    vectors.export(tmp_path / "vectors", [case], ["float32"], layout="bshd")
    result = only(
        vectors.verify(tmp_path / "vectors", computed(tmp_path / "vectors", tmp_path / "mine"))
    )
    assert (result.verdict, result.layout, result.subject) == ("passed", "bshd", "mine")
    arrays = load_file(tmp_path / "vectors" / f"{case.name}.float32.safetensors")
    shape = case.make.shape
    assert arrays["q"].shape == (*shape.batch, shape.Lq, shape.Hq, shape.D)
    assert arrays["mask"].shape == (*shape.batch, shape.Hq, shape.Lq, shape.Lk)


def test_the_manifest_describes_every_file(exported: Path) -> None:
    """Shapes and dtypes are said before a file is opened, and each file has its checksum."""
    about = json.loads((exported / "manifest.json").read_text("utf-8"))
    assert about["attnx_vectors"] == 1
    for entry in about["cases"]:
        arrays = load_file(exported / entry["file"])
        case = find(entry["name"])
        assert entry["clauses"] == list(case.clauses)
        low = entry["dtype"] in ("float16", "bfloat16")
        assert entry["profile"] == ("low-precision" if low else case.profile)
        assert (
            hashlib.sha256((exported / entry["file"]).read_bytes()).hexdigest() == entry["sha256"]
        )
        for name, said in entry["inputs"].items():
            assert arrays[name].dtype.name == said["dtype"]
            assert list(arrays[name].shape) == said["shape"]
        for name, said in entry["results"].items():
            assert list(arrays[f"expected.{name}"].shape) == said["shape"]
            assert arrays[f"expected.{name}"].dtype == np.float64
    text = (exported / "README.txt").read_text("utf-8")
    assert len(text.splitlines()) <= 60
    assert "attnx conformance verify" in text


@pytest.mark.parametrize(
    ("pick", "spelling"),
    [
        (
            lambda c: c.options.get("causal") == "bottom_right" and c.make.mask is None,
            "bottom_right",
        ),
        (lambda c: c.options.get("causal") == "top_left" and c.make.mask is None, "top_left"),
        (lambda c: isinstance(c.make.mask, type(None)) and not c.options, "none"),
        (lambda c: c.name.startswith("window-"), "array"),
    ],
    ids=["bottom_right", "top_left", "none", "array"],
)
def test_the_mask_is_also_told_in_words(
    tmp_path: Path, pick: Callable[[Any], bool], spelling: str
) -> None:
    """A kernel with a causal branch of its own can be sent through it."""
    path = vectors.export(tmp_path, [find(first(pick))], ["float32"])
    entry = json.loads(path.read_text("utf-8"))["cases"][0]
    assert entry["options"]["mask"] == spelling


def test_a_dropout_is_told_in_small_numbers(exported: Path) -> None:
    """Every number fits a double: the seed as two words, p as the threshold that it stands for."""
    about = json.loads((exported / "manifest.json").read_text("utf-8"))
    told = {entry["name"]: entry["options"]["dropout"] for entry in about["cases"]}
    assert told["dropout-everything-wide"] == {
        "p": 0.2, "threshold": 13107, "seed": [11, 0], "offset": [1, 2, 3, 8],
    }  # fmt: skip
    assert told["dropout-seed-in-words"]["seed"] == [0xFFFFFFFE, 0x80000001]
    assert told[PICKED[0]] is None


def test_a_limit_is_never_stored_tighter_than_it_is(exported: Path) -> None:
    """float32 limits are rounded up, and 0 stays 0."""
    from attnx_conformance.expectation import expectation

    for name in PICKED:
        case = find(name)
        stored = load_file(exported / f"{name}.float32.safetensors")["limit.out"]
        limit = expectation(case, "float32", "bhsd", 3, "float32").limit("out").limit
        assert (stored >= limit).all()
        assert ((stored == 0) == (limit == 0)).all()
        assert (stored <= limit * (1 + 2.0**-22) + 1e-44).all()


@pytest.mark.parametrize("result", ["out", "lse", "dq", "dk", "dv"])
def test_one_wrong_value_is_found_where_it_is(one: tuple[Path, Path, str], result: str) -> None:
    """The verdict names the result and the index."""
    folder, mine, file = one

    def spoil(arrays: dict[str, Any]) -> None:
        arrays[result][(1, *(0,) * (arrays[result].ndim - 2), 2)] += 3

    rewrite(mine / file, spoil)
    verdict = only(vectors.verify(folder, mine))
    index = ", ".join(["1", *["0"] * (load_file(mine / file)[result].ndim - 2), "2"])
    assert verdict.verdict == "failed"
    assert verdict.detail.startswith(f"{result} at ({index}): got ")
    assert verdict.ratios[result] > 1


def test_an_error_within_the_bound_but_worse_than_a_plain_kernel_fails(
    one: tuple[Path, Path, str],
) -> None:
    """A scale error of 2 % hides under the bound of bfloat16, and condition (c) finds it."""
    folder, mine, file = one
    expected = load_file(folder / file)
    truth, limit = expected["expected.out"], expected["limit.out"].astype(np.float64)
    spoilt = (truth + 0.9 * limit * np.sign(truth)).astype(ml_dtypes.bfloat16)
    inside = np.abs(spoilt.astype(np.float64) - truth) <= limit
    assert inside.mean() > 0.9

    def spoil(arrays: dict[str, Any]) -> None:
        arrays["out"][inside] = spoilt[inside]

    rewrite(mine / file, spoil)
    verdict = only(vectors.verify(folder, mine))
    assert verdict.verdict == "failed"
    assert "out RMS error" in verdict.detail
    assert verdict.ratios["out"] <= 1


def test_a_result_that_is_not_handed_in_does_not_count(one: tuple[Path, Path, str]) -> None:
    """A kernel without gradients passes, and what is missing is said."""
    folder, mine, file = one

    def forward_only(arrays: dict[str, Any]) -> None:
        for name in list(arrays):
            if name not in ("out", "lse"):
                del arrays[name]

    rewrite(mine / file, forward_only)
    verdict = only(vectors.verify(folder, mine))
    assert (verdict.verdict, verdict.detail) == ("passed", "not handed in: dq, dk, dv")


def test_a_case_without_a_file_does_not_apply(tmp_path: Path) -> None:
    """The others are judged, in the order of the manifest."""
    vectors.export(tmp_path / "vectors", [find(name) for name in PICKED[:3]], ["float32"])
    mine = computed(tmp_path / "vectors", tmp_path / "mine")
    gone = f"{PICKED[1]}.float32.safetensors"
    (mine / gone).unlink()
    results = vectors.verify(tmp_path / "vectors", mine)
    assert [result.verdict for result in results] == ["passed", "not-applicable", "passed"]
    assert results[1].detail == f"no {gone} in {mine}"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda a: a.update(out=a["out"][:1].copy()), "out is bfloat16 (1, "),
        (lambda a: a.update(out=a["out"].astype(np.float32)), "out is float32 "),
        (lambda a: a.update(lse=a["lse"].astype(np.float64)), "lse is float64 "),
        (lambda a: a.update(output=a.pop("out")), "no result is called output: expected out and"),
        (lambda a: a.pop("out"), "no out: expected out and any of lse, dq, dk, dv"),
    ],
    ids=["shape", "dtype", "lse-dtype", "name", "no-out"],
)
def test_what_does_not_fit_is_told_what_was_expected(
    one: tuple[Path, Path, str], change: Callable[[dict[str, Any]], None], said: str
) -> None:
    """A wrong name, shape or dtype is a failure that says the right one."""
    folder, mine, file = one
    rewrite(mine / file, change)
    verdict = only(vectors.verify(folder, mine))
    assert verdict.verdict == "failed"
    assert said in verdict.detail
    assert "expected" in verdict.detail


@pytest.mark.parametrize("kind", ["truncated", "empty", "text", "folder"])
def test_a_file_that_cannot_be_read_is_a_crash_in_one_line(
    one: tuple[Path, Path, str], kind: str
) -> None:
    """The rest of the run goes on."""
    folder, mine, file = one
    whole = (mine / file).read_bytes()
    (mine / file).unlink()
    if kind == "folder":
        (mine / file).mkdir()
    else:
        broken = {"truncated": whole[:-10], "empty": b"", "text": b"out = 3\n" * 9}
        (mine / file).write_bytes(broken[kind])
    verdict = only(vectors.verify(folder, mine))
    assert verdict.verdict == "crashed"
    assert verdict.detail.startswith(f"{mine / file}: ")
    assert "\n" not in verdict.detail


def test_an_export_that_changed_judges_nobody(one: tuple[Path, Path, str]) -> None:
    """A changed or missing file of the export is refused, as is a manifest of another version."""
    folder, mine, file = one
    rewrite(folder / file, lambda arrays: arrays["limit.out"].fill(9))
    with pytest.raises(ArgumentError, match=r"is not what was exported \(sha256 differs\)"):
        vectors.verify(folder, mine)
    (folder / file).unlink()
    with pytest.raises(ArgumentError, match="named by the manifest, but missing"):
        vectors.verify(folder, mine)
    manifest = folder / "manifest.json"
    about = json.loads(manifest.read_text("utf-8"))
    manifest.write_text(json.dumps({**about, "attnx_vectors": 7}), "utf-8")
    with pytest.raises(ArgumentError, match="expected vectors of version 1, got 7"):
        vectors.verify(folder, mine)
    manifest.write_text("{", "utf-8")
    with pytest.raises(ArgumentError, match="expected the manifest of an export"):
        vectors.verify(folder, mine)


def test_a_manifest_cannot_point_outside_its_folder(one: tuple[Path, Path, str]) -> None:
    """Its names are file names, never paths."""
    folder, mine, file = one
    manifest = folder / "manifest.json"
    text = manifest.read_text("utf-8").replace(f'"{file}"', f'"../vectors/{file}"')
    manifest.write_text(text, "utf-8")
    with pytest.raises(ArgumentError, match="is no file name"):
        vectors.verify(folder, mine)


def test_results_under_other_names_are_not_taken_for_none(one: tuple[Path, Path, str]) -> None:
    """A folder in which no name fits is a mistake, and so is none at all."""
    folder, mine, file = one
    (mine / file).rename(mine / "case1.safetensors")
    with pytest.raises(ArgumentError, match=r"no file bears the name of a case .*; it holds case1"):
        vectors.verify(folder, mine)
    (mine / "case1.safetensors").unlink()
    with pytest.raises(ArgumentError, match=r"no file bears the name of a case .*; it is empty"):
        vectors.verify(folder, mine)
    with pytest.raises(ArgumentError, match="expected a folder with one file for each case"):
        vectors.verify(folder, mine / "nowhere")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"dtypes": ["float8"]}, "dtype: expected one of float16, bfloat16, .* got 'float8'"),
        ({"layout": "sbhd"}, "layout: expected one of bhsd, bshd, got 'sbhd'"),
        ({"cases": []}, "no case makes sense"),
    ],
    ids=["dtype", "layout", "nothing"],
)
def test_an_export_of_nothing_known_is_refused(
    tmp_path: Path, asked: dict[str, Any], said: str
) -> None:
    """Nothing is written then."""
    with pytest.raises(ArgumentError, match=said):
        vectors.export(tmp_path / "vectors", **asked)
    assert not (tmp_path / "vectors").exists()
