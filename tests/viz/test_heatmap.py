"""The weights of a picture: those of the whole call, what is told of them, and what is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import attnx
from attnx import Causal, Dense, Lengths, Predicate, Prefix, Segments, Starts, Window, errors, viz
from attnx_conformance.oracle import reference

Make = Callable[..., tuple[Any, Any, Any]]
f32 = np.float32


# Which weights ------------------------------------------------------------------------------------

MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"causal": "bottom_right"},
    "top left": {"causal": "top_left", "mask": Starts([[0, 2, 1], [5, 0, 0]])},
    "lengths": {
        "causal": "bottom_right",
        "mask": Lengths([[7, 3, 0], [5, 1, 7]], [[6, 6, 2], [5, 6, 3]]),
    },
    "window": {"mask": Window(2, 1, "bottom_right") | Prefix(1)},
    "segments": {"mask": Segments([0, 0, 1, -1, 1, 1], [0, 0, 1, 1, 2, 1, 1])},
    "positions": {"mask": Causal(q_pos=[3, 1, 6, 0, 2, -1], kv_pos=[0, 1, 2, 3, 4, 5, 6])},
    "predicate": {"mask": ~Predicate(lambda b, h, i, j: (b + 2 * h + i + j) % 3 == 0)},
    "formula": {"scale": -0.7, "softcap": 2.0, "causal": "bottom_right"},
}


def native(framework: str) -> Callable[[Any], Any]:
    return torch.from_numpy if framework == "torch" else np.asarray


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("name", MASKS)
def test_a_part_of_the_call_is_what_the_whole_call_has_there(
    name: str, framework: str, make: Make
) -> None:
    """Heads, entry, rows and columns are cut out of P, not computed as if they stood alone."""
    q, k, _ = make(B=(2, 3), Lk=7)
    options = MASKS[name]
    whole = attnx.attention_weights(q, k, **options)
    sight = reference(q, k, k, **options).visible
    give = native(framework)
    seen = viz.heatmap(
        give(q), give(k), heads=[3, 0], entry=4, rows=(1, 6), columns=(2, 7), **options
    )
    np.testing.assert_allclose(seen.weights, whole[1, 1, [3, 0], 1:6, 2:7], atol=1e-6)
    assert (seen.visible == sight[1, 1, [3, 0], 1:6, 2:7]).all()
    assert (seen.empty == ~sight[1, 1, [3, 0], 1:6].any(axis=-1)).all()


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_arrays_of_a_part_are_cut_with_it(framework: str, make: Make) -> None:
    """Bias, dense mask and sinks, full and broadcast; -inf in a bias hides (S3.4)."""
    q, k, _ = make(B=(2,), Lk=7)
    rng = np.random.default_rng(1)
    give = native(framework)
    for shape in ((2, 4, 6, 7), (1, 4, 1, 7), (6, 7)):
        bias = rng.standard_normal(shape).astype(f32)
        bias[..., rng.random(bias.shape[-1]) < 0.4] = -np.inf
        mask = rng.random((2, 4, 6, 1)) < 0.8
        sinks = rng.standard_normal(4).astype(f32)
        options = {"bias": bias, "mask": mask, "sinks": sinks}
        sight = reference(q, k, k, **options).visible
        whole = attnx.attention_weights(q, k, **options)
        mine = {name: give(x) for name, x in options.items()} | {"mask": Dense(give(mask))}
        seen = viz.heatmap(give(q), give(k), heads=2, entry=1, rows=(2, 5), **mine)
        np.testing.assert_allclose(seen.weights[0], whole[1, 2, 2:5], atol=1e-6)
        assert (seen.visible[0] == sight[1, 2, 2:5]).all()


def test_layout_ranks_and_dtypes(make: Make) -> None:
    """Both layouts, 2-D inputs, half precision; gradients are not in the way."""
    q, k, _ = make(layout="bshd")
    seen = viz.heatmap(q, k, layout="bshd", heads=1)
    expected = attnx.attention_weights(q, k, layout="bshd")
    assert np.array_equal(seen.weights[0], expected[0, 1])
    x = torch.from_numpy(q[0, :, 0]).to(torch.bfloat16).requires_grad_()
    flat = viz.heatmap(x, x, causal=True)
    assert flat.weights.dtype == f32
    assert flat.weights.shape == (1, 6, 6)
    assert (flat.visible[0] == np.tri(6, dtype=bool)).all()
    wide = viz.heatmap(q[0, :, 0].astype(np.float64), q[0, :, 0].astype(np.float64))
    assert wide.weights.dtype == np.float64


def test_the_backend_is_the_callers_choice(marked: Callable[..., Any], make: Make) -> None:
    """A named backend computes or refuses; nobody else steps in (S8.3)."""
    marked("plain", 7.0, masks=frozenset())
    q, k, _ = make()
    assert viz.heatmap(q, k, backend="torch").weights.shape == (4, 6, 6)
    with pytest.raises(errors.UnknownBackend, match="nunpy"):
        viz.heatmap(q, k, backend="nunpy")
    with pytest.raises(errors.UnsupportedError, match="'plain' cannot do this call"):
        viz.heatmap(q, k, backend="plain", causal=True)


def test_a_long_sequence_costs_what_is_shown() -> None:
    """Of 100 000 tokens a few rows can be seen; all of P would be 40 GB."""
    q = np.random.default_rng(0).standard_normal((1, 100_000, 4)).astype(f32)
    seen = viz.heatmap(q, q, causal=True, rows=(99_000, 99_004), columns=(98_998, 99_006))
    assert (seen.visible[0] == (np.arange(8) <= np.arange(2, 6)[:, None])).all()
    np.testing.assert_allclose(
        seen.weights[0, 0],
        attnx.attention_weights(q[:, 99_000:99_001], q[:, :99_001])[0, 0, 98_998:].tolist()
        + [0] * 5,
        rtol=1e-5,
    )


def test_weights_may_come_from_anywhere(make: Make) -> None:
    """P itself, of a model's own attention, with or without visibility."""
    P = np.array([[[0.5, 0.5, 0.0], [0.0, 0.0, 0.0]]], f32)
    assert viz.heatmap(weights=P).visible.all()
    assert not viz.heatmap(weights=P).empty.any()
    seen = viz.heatmap(
        weights=torch.from_numpy(P)[None], visible=np.array([[1, 1, 0], [0, 0, 0]]) > 0
    )
    assert seen.empty.tolist() == [[False, True]]
    assert seen.notes == (
        "4 of 6 pairs hidden", "Queries that see no key (their output is 0): 1",
    )  # fmt: skip
    assert viz.heatmap(weights=P[0], columns=(1, 3), rows=(0, 1)).weights.tolist() == [[[0.5, 0]]]


# What is told -------------------------------------------------------------------------------------


def test_what_is_no_number_and_what_sees_nothing_is_told(make: Make) -> None:
    """NaN weights are counted and kept; an empty row is named, by head where heads differ."""
    q, k, _ = make(Hq=2, Hk=2)
    q[0, 0, 2] = np.nan
    seen = viz.heatmap(q, k, mask=Lengths([6, 6], [5, 6]), causal=True)
    assert seen.notes[1] == "Queries that see no key (their output is 0): 5"
    assert seen.notes[2] == "3 weights are NaN or infinite"
    assert np.isnan(seen.weights[0, 2, :3]).all()
    assert seen.most == 1.0
    hidden = Predicate(lambda b, h, i, j: (i < 1) | (h > 0) & (j >= 0))
    noted = viz.heatmap(k, k, mask=hidden).notes[1]
    assert noted == "Queries that see no key (their output is 0): head 0: 1, 2, 3, 4, 5"
    many = viz.heatmap(weights=np.zeros((20, 1)), visible=np.zeros((20, 1), bool))
    assert many.notes[1].endswith("0, 1, 2, 3, 4, 5, 6, 7 and 12 more")
    assert many.most == 1.0


@pytest.mark.parametrize(
    ("token", "label"),
    [
        (" the", "␣the"), ("  ", "␣␣"), ("", "(empty)"), ("a b ", "a b␣"), ("\n", "\\n"),
        ("\x00", "\\x00"), ("\ud800", "\\ud800"), ("a\u202eb", "a\\u202eb"), ("\uffff", "\\uffff"),
        ("\ufeff", "\\ufeff"), ("\xa0", "\\xa0"), ("\u200d", "\\u200d"), ("a\xadb", "a\\xadb"),
        ("\ufe0f", "\\ufe0f"), ("❤\ufe0f", "❤\ufe0f"), ("1\ufe0f", "1\ufe0f"),
        ("❤\ufe0f\U000e0101", "❤\ufe0f\\U000e0101"), ("b\u200dd", "b\\u200dd"),
        ("\u3164", "\\u3164"), ("\u06dd", "\u06dd"), ("\U000e0041", "\\U000e0041"),
        ("\U0001ffff", "\\U0001ffff"), ("שלום", "שלום"), ("👩‍🚀", "👩‍🚀"), ("<&\"'", "<&\"'"),
    ],
)  # fmt: skip
def test_a_token_is_one_line_that_stays_in_its_place(token: str, label: str) -> None:
    """What cannot be seen, or would turn its surroundings, is written out."""
    assert viz.heatmap(weights=np.ones((1, 1)), tokens=[token]).queries == (label,)


def test_tokens_name_keys_too_where_there_are_as_many() -> None:
    square, wide = np.ones((2, 2)), np.ones((2, 3))
    assert viz.heatmap(weights=square, tokens=["a", "b"]).keys == ("a", "b")
    assert viz.heatmap(weights=square, tokens=["a", "b"], key_tokens=["c", "d"]).keys[0] == "c"
    seen = viz.heatmap(weights=wide, tokens=["a", "b"], rows=(1, 2))
    assert (seen.queries, seen.keys) == (("b",), None)


# Refusing -----------------------------------------------------------------------------------------

X = np.ones((2, 2, 3, 4), f32)
P = np.full((3, 3), 0.5)


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        ({}, errors.ArgumentTypeError, "q: expected q and k, or weights="),
        ({"q": X}, errors.ArgumentTypeError, "q: expected q and k, or weights="),
        ({"q": X, "k": X, "visible": P > 0}, errors.ArgumentError, "write mask="),
        ({"weights": P, "causal": True}, errors.ArgumentError, "leave out causal"),
        ({"weights": P, "q": X}, errors.ArgumentError, "leave out q"),
        ({"weights": [[1.0]]}, errors.ArgumentTypeError, "weights: expected an array"),
        ({"weights": P[0]}, errors.ArgumentError, r"\(\*B, Hq, Lq, Lk\) or \(Lq, Lk\)"),
        ({"weights": P > 0}, errors.ArgumentError, "got bool"),
        ({"weights": P, "visible": P}, errors.ArgumentTypeError, "True = visible"),
        (
            {"weights": P, "visible": P[:2] > 0},
            errors.ArgumentError,
            r"visible: expected \(Lq, Lk\)",
        ),
        (
            {"weights": P, "visible": P > 1},
            errors.ArgumentError,
            "0 where visible is False, got 0.5",
        ),
        ({"q": X, "k": X, "heads": 2}, errors.ArgumentError, r"heads: .* \[0, Hq=2\), got 2"),
        ({"q": X, "k": X, "heads": [-1]}, errors.ArgumentError, r"heads: .* got -1"),
        ({"q": X, "k": X, "heads": [0, 0]}, errors.ArgumentError, "different heads"),
        ({"q": X, "k": X, "heads": []}, errors.ArgumentError, "different heads"),
        ({"q": X, "k": X, "heads": "0"}, errors.ArgumentTypeError, "heads: expected an index"),
        ({"q": X, "k": X, "entry": 2}, errors.ArgumentError, r"entry: .* \[0, B=2\), got 2"),
        ({"q": X, "k": X, "entry": True}, errors.ArgumentTypeError, "entry"),
        ({"q": X, "k": X, "rows": (2, 2)}, errors.ArgumentError, r"rows: .* <= Lq=3, got \(2, 2\)"),
        ({"q": X, "k": X, "columns": 2}, errors.ArgumentTypeError, r"columns: .* \(start, stop\)"),
        ({"q": X, "k": X[:, :, :0]}, errors.ArgumentError, "columns: there is nothing to show"),
        ({"q": X, "k": X, "tokens": "abc"}, errors.ArgumentTypeError, "tokens: .* got str"),
        (
            {"q": X, "k": X, "tokens": [1, 2, 3]},
            errors.ArgumentTypeError,
            r"tokens\[0\]: .* got int",
        ),
        ({"q": X, "k": X, "tokens": ["a"]}, errors.ArgumentError, "Lq = 3, got 1; name the keys"),
        ({"q": X, "k": X, "key_tokens": ["a"]}, errors.ArgumentError, "Lk = 3, got 1$"),
        ({"q": X, "k": X, "path": "x.pdf"}, errors.ArgumentError, ".png, .svg, .html, got x.pdf"),
        ({"q": X, "k": X, "dropout": None}, TypeError, "unexpected keyword arguments dropout"),
        ({"q": X, "k": X[:, :, :2], "causal": True}, errors.ArgumentError, "bottom_right"),
    ],
)
def test_wrong_use_is_refused(given: dict[str, Any], kind: type, words: str) -> None:
    """S8.1: the argument, what was expected, what came, and what to write instead."""
    with pytest.raises(kind, match=words):
        viz.heatmap(**given)


def test_what_cannot_be_seen_is_refused_before_it_is_computed() -> None:
    """N² pairs of a long sequence are no picture; the error says what to ask for."""
    q = np.broadcast_to(f32(1), (64, 30_000, 4))
    with pytest.raises(errors.ArgumentError, match=r"rows: 30000 .*, as in rows=\(0, 512\)"):
        viz.heatmap(q, q)
    with pytest.raises(errors.ArgumentError, match=r"columns: .*, as in columns=\(0, 512\)"):
        viz.heatmap(q, q, rows=(0, 512))
    with pytest.raises(errors.ArgumentError, match=r"choose 4 heads, as in heads=range\(4\)"):
        viz.heatmap(q, q, rows=(0, 1024), columns=(0, 1024))
    with pytest.raises(errors.ArgumentError, match=r"heads: 300 .*, as in heads=range\(256\)"):
        viz.heatmap(weights=np.ones((300, 2, 2)))


def test_a_transform_has_no_values_to_draw() -> None:
    with pytest.raises(errors.ArgumentTypeError, match="draw outside"):
        torch.vmap(lambda q: viz.heatmap(q, q))(torch.ones(2, 3, 4))


DRAWN: dict[str, Callable[[viz.Heatmap], Any]] = {
    "png matplotlib": lambda seen: seen.save("x.png"),
    "figure matplotlib": lambda seen: seen.figure(),
    "page jinja2": lambda seen: seen.html(),
    "scaling matplotlib": lambda _: viz.scaling("x.svg", dims=[2]),
}


@pytest.mark.parametrize("name", DRAWN)
def test_a_missing_library_is_named_with_the_remedy(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An AttnxError and a ModuleNotFoundError, with the line that installs it."""
    library = name.split()[1]
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(errors.MissingExtra, match=r"pip install 'attnx\[viz\]'") as caught:
        DRAWN[name](viz.heatmap(weights=P))
    assert caught.value.name == library


def test_numbers_alone_need_no_library(python: Callable[..., str]) -> None:
    """matplotlib and jinja2 are imported when something is drawn."""
    code = (
        "import sys, numpy as np\nfrom attnx import viz\nx = np.ones((3, 4))\n"
        "viz.heatmap(x, x), viz.scaling(dims=[4])\n"
        "print([m for m in ('matplotlib', 'jinja2', 'torch') if m in sys.modules])"
    )
    assert python(code).strip() == "[]"
