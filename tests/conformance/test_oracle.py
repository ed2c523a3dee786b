"""The oracle against witnesses that share no code with it.

Fifty-digit arithmetic, complex-step differentiation, a loop over every element, and PyTorch's own
attention: if the oracle is wrong, one of them must say so.
"""

from __future__ import annotations

import ast
import itertools
from pathlib import Path
from typing import Any

import mpmath
import numpy as np
import pytest
import torch

import attnx_conformance
from attnx.masks import Causal, Dense, Lengths, Predicate, Prefix, Segments, Starts, Window
from attnx_conformance.oracle import Reference, reference

N, HQ, HK, L, D, DV = 2, 6, 2, 5, 4, 3


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def inputs(rng: np.random.Generator, Lq: int = L, Lk: int = L) -> dict[str, Any]:
    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape)

    return {
        "q": draw(N, HQ, Lq, D),
        "k": draw(N, HK, Lk, D),
        "v": draw(N, HK, Lk, DV),
        "d_out": draw(N, HQ, Lq, DV),
        "d_lse": draw(N, HQ, Lq),
    }


def swap(array: np.ndarray) -> np.ndarray:
    return np.swapaxes(array, 1, 2)


# Fifty digits


def test_outputs_agree_with_fifty_digits(rng: np.random.Generator) -> None:
    """out, lse and weights carry at least 13 right digits, with every option at once."""
    data = inputs(rng)
    visible = rng.random((N, HQ, L, L)) < 0.6
    visible[0, 0, 2] = False
    bias, sinks = rng.standard_normal((1, HQ, L, L)), rng.standard_normal(HQ)
    got = reference(
        data["q"],
        data["k"],
        data["v"],
        mask=visible,
        bias=bias,
        sinks=sinks,
        softcap=1.5,
        scale=-0.7,
    )
    with mpmath.workdps(50):
        for b, h, i in itertools.product(range(N), range(HQ), range(L)):
            keys = [j for j in range(L) if visible[b, h, i, j]]
            scores = []
            for j in keys:
                dot = mpmath.fdot(
                    map(float, data["q"][b, h, i]), map(float, data["k"][b, h // 3, j])
                )
                capped = mpmath.mpf("1.5") * mpmath.tanh(mpmath.mpf(-0.7) * dot / mpmath.mpf("1.5"))
                scores.append(capped + mpmath.mpf(float(bias[0, h, i, j])))
            lse = mpmath.log(mpmath.fsum(map(mpmath.exp, [*scores, mpmath.mpf(float(sinks[h]))])))
            P = [mpmath.exp(s - lse) for s in scores]
            assert abs(got.lse[b, h, i] - lse) < 1e-13
            for d in range(DV):
                expected = mpmath.fsum(
                    p * mpmath.mpf(float(data["v"][b, h // 3, j, d]))
                    for p, j in zip(P, keys, strict=True)
                )
                assert abs(got.out[b, h, i, d] - expected) < 1e-13
            for p, j in zip(P, keys, strict=True):
                assert abs(got.weights[b, h, i, j] - p) < 1e-13


# Complex steps


def complex_loss(data: dict[str, Any], visible: np.ndarray, softcap: float | None) -> complex:
    """sum(out * d_out) + sum(lse * d_lse), analytic in every input, written as loops."""
    total = 0j
    for b, h, i in itertools.product(range(N), range(HQ), range(data["q"].shape[2])):
        keys = np.flatnonzero(visible[b, h, i])
        weights, values = [], []
        if "sinks" in data:
            weights.append(np.exp(data["sinks"][h]))
            values.append(np.zeros(DV))
        for j in keys:
            s = np.sum(data["q"][b, h, i] * data["k"][b, h // (HQ // HK), j]) / np.sqrt(D)
            if softcap is not None:
                s = softcap * np.tanh(s / softcap)
            if "bias" in data:
                s = s + np.broadcast_to(data["bias"], visible.shape)[b, h, i, j]
            weights.append(np.exp(s))
            values.append(data["v"][b, h // (HQ // HK), j])
        if not weights:
            continue
        norm = sum(weights)
        out = sum(w * x for w, x in zip(weights, values, strict=True)) / norm
        total += np.sum(out * data["d_out"][b, h, i]) + np.log(norm) * data["d_lse"][b, h, i]
    return total


@pytest.mark.parametrize("softcap", [None, 1.2])
@pytest.mark.parametrize("bias_shape", [None, (L, L), (N, 1, 1, L), (1, HQ, L, 1), (1, 1, 1, 1)])
def test_gradients_agree_with_complex_steps(
    rng: np.random.Generator, softcap: float | None, bias_shape: tuple[int, ...] | None
) -> None:
    """Every gradient equals the derivative by complex steps, which has no truncation error."""
    data = inputs(rng)
    visible = rng.random((N, HQ, L, L)) < 0.6
    visible[1, :, 3] = False
    data["sinks"] = rng.standard_normal(HQ)
    if bias_shape is not None:
        data["bias"] = rng.standard_normal(bias_shape)
    got = reference(
        **{name: data.get(name) for name in ("q", "k", "v", "bias", "sinks", "d_out", "d_lse")},
        mask=visible,
        softcap=softcap,
    )
    step = 1e-30
    for name in ("q", "k", "v", "bias", "sinks"):
        if name not in data:
            continue
        expected, flat = np.empty(data[name].shape), data[name].astype(complex)
        for index in list(np.ndindex(flat.shape))[:: 1 + flat.size // 24]:
            shifted = flat.copy()
            shifted[index] += 1j * step
            derivative = complex_loss({**data, name: shifted}, visible, softcap).imag / step
            expected[index] = getattr(got, f"d{name}")[index]
            assert derivative == pytest.approx(expected[index], rel=1e-11, abs=1e-13), (name, index)


# PyTorch


@pytest.mark.parametrize(("causal", "masked"), [(False, False), (True, False), (False, True)])
def test_outputs_and_gradients_agree_with_torch(
    rng: np.random.Generator, causal: bool, masked: bool
) -> None:
    """PyTorch's float64 attention agrees on grouping, causality, masks and gradients."""
    data = inputs(rng)
    mask = rng.random((N, 1, L, L)) < 0.7
    mask[..., 0] = True
    got = reference(
        data["q"], data["k"], data["v"], causal=causal, mask=mask if masked else None,
        d_out=data["d_out"],
    )  # fmt: skip
    q, k, v = (torch.tensor(data[name], requires_grad=True) for name in "qkv")
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal, attn_mask=torch.tensor(mask) if masked else None,
            enable_gqa=True,
        )  # fmt: skip
    out.backward(torch.tensor(data["d_out"]))
    pairs = [(out, got.out), (q.grad, got.dq), (k.grad, got.dk), (v.grad, got.dv)]
    for theirs, ours in pairs:
        np.testing.assert_allclose(theirs.detach().numpy(), ours, rtol=1e-12, atol=1e-13)


# Visibility, a pair at a time


ids_q, ids_k = np.array([0, 0, 1, -1, 2]), np.array([0, 1, 1, 2, -1, -1, 0])
kv, starts = np.array([3, 7]), np.array([0, 2])
VISIBLE = [
    (None, "top_left", lambda b, h, i, j: j <= i),
    (None, "bottom_right", lambda b, h, i, j: j <= i + 2),
    (Causal("top_left"), False, lambda b, h, i, j: j <= i),
    (Causal("bottom_right"), False, lambda b, h, i, j: j <= i + 2),
    (Lengths(kv), False, lambda b, h, i, j: j < kv[b]),
    (Lengths(4, np.array([0, 5])), False, lambda b, h, i, j: j < 4 and i < (0, 5)[b]),
    (Starts(starts), False, lambda b, h, i, j: j >= starts[b]),
    (Prefix(3), "top_left", lambda b, h, i, j: j < 3 and j <= i),
    (Causal("top_left") | Prefix(3), False, lambda b, h, i, j: j < 3 or j <= i),
    (Segments(ids_q, ids_k), False, lambda b, h, i, j: ids_q[i] == ids_k[j] and ids_q[i] >= 0),
    (Window(1, 0, "top_left"), False, lambda b, h, i, j: i - 1 <= j <= i),
    (Window(None, 1, "bottom_right"), False, lambda b, h, i, j: j <= i + 3),
    (Window(0, None, "bottom_right"), False, lambda b, h, i, j: j >= i + 2),
    (~Starts(starts), False, lambda b, h, i, j: j < starts[b]),
    (~Causal("top_left") & Lengths(6), False, lambda b, h, i, j: i < j < 6),
    (Predicate(lambda b, h, i, j: (i + j + h + b) % 2 == 0), False,
     lambda b, h, i, j: (i + j + h + b) % 2 == 0),
    # Lengths in the same chain move the corner of the alignment, Starts do not (S3.5).
    (Lengths(kv), "bottom_right", lambda b, h, i, j: j < kv[b] and j <= i + kv[b] - 5),
    (Lengths(kv, np.array([2, 5])) & Causal("bottom_right"), False,
     lambda b, h, i, j: j < kv[b] and i < (2, 5)[b] and j <= i + kv[b] - (2, 5)[b]),
    (Starts(starts) & Causal("bottom_right"), False,
     lambda b, h, i, j: starts[b] <= j <= i + 2),
    (Causal(q_pos=np.array([4, 0, 6, 2, 2])), False, lambda b, h, i, j: j <= (4, 0, 6, 2, 2)[i]),
    (Window(1, 1, q_pos=np.arange(5), kv_pos=np.arange(7)[::-1].copy()), False,
     lambda b, h, i, j: i - 1 <= 6 - j <= i + 1),
    (Dense(np.arange(35).reshape(5, 7) % 3 == 0), False, lambda b, h, i, j: (7 * i + j) % 3 == 0),
]  # fmt: skip


@pytest.mark.parametrize(("mask", "causal", "rule"), VISIBLE)
def test_visibility_is_the_rule_of_each_pair(
    rng: np.random.Generator, mask: Any, causal: bool | str, rule: Any
) -> None:
    """Each mask shows exactly the pairs that its sentence in the specification names."""
    data = inputs(rng, 5, 7)
    got = reference(data["q"], data["k"], mask=mask, causal=causal).visible
    for index in np.ndindex(got.shape):
        assert got[index] == bool(rule(*index)), index


@pytest.mark.parametrize(
    "mask",
    [
        Lengths(3) & Lengths(4) & Causal("bottom_right"),
        (Lengths(3) | Prefix(1)) & Causal("bottom_right"),
        ~Lengths(3) & Causal("bottom_right"),
        Causal(),
        Window(1, 1),
    ],
)
def test_an_alignment_that_cannot_be_told_is_an_error(rng: np.random.Generator, mask: Any) -> None:
    """The oracle does not guess where S3.5 asks for an error."""
    data = inputs(rng, 5, 7)
    with pytest.raises(ValueError, match=r"S3\.5"):
        reference(data["q"], data["k"], mask=mask)


# Layout, rank and emptiness


def test_layouts_and_ranks_agree(rng: np.random.Generator) -> None:
    """bshd, two batch axes, no batch axis and one head give the same numbers, rearranged."""
    data = inputs(rng)
    base = reference(**data, causal=True)
    flipped = reference(**{name: swap(array) for name, array in data.items()},
                        causal=True, layout="bshd")  # fmt: skip
    split = reference(**{name: array[None] for name, array in data.items()}, causal=True)
    single = reference(**{name: array[1] for name, array in data.items()}, causal=True)
    head = {name: data[name][1, 0] for name in ("q", "k", "v", "d_out", "d_lse")}
    flat = reference(**head, causal=True)
    for name in ("out", "lse", "dq", "dk", "dv"):
        expected = getattr(base, name)
        np.testing.assert_array_equal(swap(getattr(flipped, name)), expected)
        np.testing.assert_array_equal(getattr(split, name)[0], expected)
        np.testing.assert_allclose(getattr(single, name), expected[1], rtol=1e-13)
    np.testing.assert_array_equal(flipped.weights, base.weights)
    np.testing.assert_allclose(flat.out, base.out[1, 0], rtol=1e-13)
    assert flat.lse.shape == (L,)
    assert flat.weights.shape == (L, L)
    assert single.weights.shape == (HQ, L, L)


@pytest.mark.parametrize("shape", [(0, 4, 5), (2, 0, 5), (2, 4, 0), (0, 0, 0)])
def test_sizes_of_zero(shape: tuple[int, int, int]) -> None:
    """B, Lq and Lk of 0 give empty results, or rows that see nothing."""
    B, Lq, Lk = shape
    q, k, v = np.ones((B, 4, Lq, 3)), np.ones((B, 2, Lk, 3)), np.ones((B, 2, Lk, 2))
    bias = np.zeros((1, 4, 1, 1))
    got = reference(q, k, v, bias=bias, d_out=np.ones((B, 4, Lq, 2)), d_lse=np.ones((B, 4, Lq)))
    assert got.out.shape == (B, 4, Lq, 2)
    assert not got.out.any() or Lk
    assert got.dk.shape == k.shape
    assert got.dbias.shape == bias.shape
    if not Lk:
        assert np.isneginf(got.lse).all()
        assert not got.dq.any()


def test_a_row_that_sees_nothing_ignores_what_it_holds(rng: np.random.Generator) -> None:
    """NaN in q, d_out and d_lse of an empty row changes nothing (S3.7); a sink takes its d_lse."""
    data = inputs(rng)
    mask = np.ones((L, L), dtype=bool)
    mask[2] = False
    clean = {name: array.copy() for name, array in data.items()}
    for name in ("q", "d_out"):
        data[name][:, :, 2] = np.nan
        clean[name][:, :, 2] = 0.0
    sinks = rng.standard_normal(HQ)
    same(reference(**data, mask=mask, sinks=sinks), reference(**clean, mask=mask, sinks=sinks))
    with_sinks = reference(**clean, mask=mask, sinks=sinks)
    np.testing.assert_array_equal(with_sinks.lse[:, :, 2], np.broadcast_to(sinks, (N, HQ)))
    data["d_lse"][:, :, 2] = np.nan
    got = reference(**data, mask=mask)
    clean["d_lse"][:, :, 2] = 0.0
    same(got, reference(**clean, mask=mask))
    assert not got.out[:, :, 2].any()
    assert not got.dq[:, :, 2].any()
    assert np.isneginf(got.lse[:, :, 2]).all()


def test_unseen_keys_may_hold_anything(rng: np.random.Generator) -> None:
    """NaN in a key that its group never sees changes nothing, and its gradient is 0 (S4.1)."""
    data = inputs(rng)
    mask = rng.random((N, HQ, L, L)) < 0.8
    mask[1, 3:, :, 4] = False  # the second group of heads, one batch entry
    clean = {name: array.copy() for name, array in data.items()}
    for name in "kv":
        data[name][1, 1, 4] = np.nan
        clean[name][1, 1, 4] = 0.0
    got = reference(**data, mask=mask)
    same(got, reference(**clean, mask=mask))
    assert not got.dk[1, 1, 4].any()
    assert not got.dv[1, 1, 4].any()


def test_live_non_finite_values_reach_their_rows_alone(rng: np.random.Generator) -> None:
    """NaN in v_jd reaches out[i, d] of rows that see j; in k_j or q_i, whole rows (S4.2, S4.3)."""
    data = inputs(rng)
    clean = reference(**data, causal=True)
    v = data["v"].copy()
    v[0, 0, 3, 1] = np.nan
    got = reference(**{**data, "v": v}, causal=True)
    bad = np.isnan(got.out)
    assert bad[0, :3, 3:, 1].all()
    assert bad.sum() == 3 * 2
    assert np.isfinite(got.dv).all()
    assert np.isnan(got.dq).sum() == 3 * 2 * D
    np.testing.assert_array_equal(got.out[~bad], clean.out[~bad])
    k = data["k"].copy()
    k[0, 0, 3, 1] = np.nan
    got = reference(**{**data, "k": k}, causal=True)
    assert np.isnan(got.out).sum() == 3 * 2 * DV
    assert np.isfinite(got.dq[0, :3, :3]).all()
    q = data["q"].copy()
    q[0, 0, 3, 1] = np.inf
    got = reference(**{**data, "q": q}, causal=True)
    assert np.isnan(got.out).sum() == DV
    assert np.isnan(got.dk[0, 0, :4]).all()
    assert np.isfinite(got.dk[0, 0, 4]).all()


def same(got: Reference, expected: Reference) -> None:
    """Every result is the same, to the bit."""
    for name in ("out", "lse", "weights", "dq", "dk", "dv", "dsinks"):
        if getattr(expected, name) is not None:
            np.testing.assert_array_equal(getattr(got, name), getattr(expected, name), name)


def test_the_oracle_imports_nothing_of_attnx() -> None:
    """A fault in attnx must not be able to move the expected answer too."""
    folder = Path(attnx_conformance.__file__).parent
    pending, seen = ["oracle", "tolerance"], set[str]()
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        for node in ast.walk(ast.parse((folder / f"{name}.py").read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                pending.append(node.module or "__init__")
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [node.module] if isinstance(node, ast.ImportFrom) else []
                names += [alias.name for alias in node.names if isinstance(node, ast.Import)]
                for imported in names:
                    root = str(imported).split(".")[0]
                    assert root in {"__future__", "collections", "dataclasses", "math", "numpy",
                                    "typing"}, (name, imported)  # fmt: skip
    assert "_visibility" in seen
