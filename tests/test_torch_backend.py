"""The PyTorch backend: every route gives one answer, and autograd the gradients of the spec."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import attnx
from attnx._call import Options, prepare
from attnx.masks import Lengths, Segments, Starts, Window
from attnx_conformance import bounds, judge, reference
from attnx_conformance.cases import CASES, Case
from attnx_conformance.runner import run
from attnx_torch import _parts, _scores, _sdpa, _tiles
from attnx_torch._lane import LANE

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32,
          "float64": torch.float64}  # fmt: skip
BACKEND: Any = attnx.get_backend("torch")

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny kernels: a pool of threads only waits for itself."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def inputs(
    Lq: int = 9, Lk: int | None = None, *, B: int = 2, Hq: int = 4, Hk: int = 2, D: int = 8,
    Dv: int | None = None, dtype: torch.dtype = torch.float32, seed: int = 0,
) -> Tensors:  # fmt: skip
    rng = torch.Generator().manual_seed(seed)
    Lk = Lq if Lk is None else Lk
    shapes = (B, Hq, Lq, D), (B, Hk, Lk, D), (B, Hk, Lk, Dv or D)
    q, k, v = (torch.randn(shape, generator=rng).to(dtype) for shape in shapes)
    return q, k, v


def leaves(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [x.detach().clone().requires_grad_() for x in tensors]


def holds(name: str, got: torch.Tensor, expected: Any, limits: Any) -> None:
    judgement = judge(LANE.to_numpy(got), getattr(expected, name), getattr(limits, name))
    assert judgement.ok, f"{name}: {judgement.detail}"


def oracle(q: Any, k: Any, v: Any, **options: Any) -> tuple[Any, Any]:
    """The expected values and their bounds."""
    dtype = str(q.dtype)[6:]
    given = {n: LANE.to_numpy(x) if torch.is_tensor(x) else x for n, x in options.items()}
    expected = reference(*(LANE.to_numpy(x) for x in (q, k, v)), **given)
    return expected, bounds(expected, dtype)


# Conformance -------------------------------------------------------------------------------------


SMALL_CASES = [c for c in CASES if "float32" in c.dtypes and c.scores < 4_000][::3]


@pytest.fixture
def tiny_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles alone, of a few rows and keys, shifted or not as large ones would be."""
    monkeypatch.setattr(type(BACKEND), "sdpa_parts", lambda *_: None)
    monkeypatch.setattr(type(BACKEND), "block_sizes", lambda *_: (4, 3))
    monkeypatch.setattr(_scores, "WIDEST", 6)
    monkeypatch.setattr(_scores, "SMALL", 1)


@pytest.mark.usefixtures("tiny_tiles")
@pytest.mark.parametrize("case", SMALL_CASES, ids=lambda case: case.name)
def test_a_case_cut_into_tiny_tiles(case: Case) -> None:
    """The suite runs every case as it comes; here each meets the edges of many tiles."""
    outcome = run(case, "torch", "float32", gradients="framework")
    assert outcome.ok, outcome.detail


@pytest.fixture
def tiny_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """SDPA over parts of a few rows, as a long masked call has parts of many."""
    monkeypatch.setattr(_sdpa, "DENSE", 0)
    for name, value in {
        "ROWS": 3,
        "KEYS": 1,
        "MASKED": 64,
        "TABLE": 64,
        "SPARSE": 1e9,
        "HELD": 2,
    }.items():
        monkeypatch.setattr(_parts, name, value)


@pytest.mark.usefixtures("tiny_parts")
def test_parts_hold_what_is_visible_and_little_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window's follow the diagonal, a document's stand alone, and what scatters has none."""

    def parts(**options: Any) -> Any:
        q, k, v = inputs(12, 12)
        ready = prepare(LANE, q, k, v, Options(**options))
        return BACKEND.sdpa_parts(ready.q, ready.k, ready.v, ready.call)

    monkeypatch.setattr(_parts, "TABLE", 1 << 20)
    window = parts(mask=Window(2, 0))
    assert [(p.i0, p.i1, p.j0, p.j1) for p in window] == [
        (0, 3, 0, 3), (3, 6, 1, 6), (6, 9, 4, 9), (9, 12, 7, 12),
    ]  # fmt: skip
    assert all(p.masked for p in window)
    ids = torch.tensor([0] * 6 + [1] * 6)
    documents = parts(mask=Segments(ids, ids))
    assert documents == [_parts.Part(0, 6, 0, 6), _parts.Part(6, 12, 6, 12)]
    ids = torch.tensor([0] * 4 + [1] * 6 + [2] * 2)
    assert [p[:4] for p in parts(mask=Segments(ids, ids))] == [
        (0, 4, 0, 4), (4, 10, 4, 10), (10, 12, 10, 12),
    ]  # fmt: skip
    assert parts(mask=Lengths(5)) == [_parts.Part(0, 12, 0, 5)]
    assert parts(mask=Lengths(0)) == [_parts.Part(0, 12, 0, 0)]
    monkeypatch.setattr(_parts, "SPARSE", 1.5)
    assert parts(mask=Lengths(2) | Starts(11)) is None


# Routes ------------------------------------------------------------------------------------------

ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("plain", {}),
    ("causal", {"causal": True}),
    ("causal-negative-scale", {"causal": True, "scale": -0.4}),
    ("causal-zero-scale", {"causal": True, "scale": 0.0}),
    ("dense-with-an-empty-row", {"mask": torch.arange(9 * 9).reshape(9, 9) % 5 > 1}),
    ("window", {"mask": Window(3, 0)}),
    ("lengths", {"mask": Lengths((4, 0))}),
    ("equal-lengths", {"mask": Lengths(5)}),
    ("documents", {"mask": Segments([0, 0, 0, 0, 1, 2, 2, 2, 2], [0, 0, 0, 0, 1, 2, 2, 2, 2])}),
    ("window-and-bias", {"mask": Window(2, 1), "bias": torch.linspace(-2, 2, 81).reshape(9, 9)}),
    ("bias", {"bias": torch.linspace(-2, 2, 81).reshape(9, 9)}),
    ("bias-minus-inf", {"bias": torch.zeros(9, 9).index_fill(0, torch.tensor(3), -math.inf)}),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [o for _, o in ROUTES], ids=[name for name, _ in ROUTES])
def test_all_routes_agree(
    options: dict[str, Any], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SDPA, tiles and the careful array tiles give the oracle's answer."""
    q, k, v = inputs(dtype=DTYPES[dtype])
    options = {n: x.to(q.dtype) if n == "bias" else x for n, x in options.items()}
    expected, limits = oracle(q, k, v, **options)
    answers = [attnx.attention(q, k, v, **options)]
    answers.append(attnx.attention(q, k, v, return_lse=True, **options)[0])
    monkeypatch.setattr(_tiles, "forward", lambda *_: None)
    answers.append(attnx.attention(q, k, v, return_lse=True, **options)[0])
    for out in answers:
        holds("out", out, expected, limits)


@pytest.mark.usefixtures("tiny_parts")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [o for _, o in ROUTES], ids=[name for name, _ in ROUTES])
def test_parts_give_the_right_answer_and_gradients(options: dict[str, Any], dtype: str) -> None:
    q, k, v = leaves(*inputs(dtype=DTYPES[dtype]))
    options = {n: x.to(q.dtype) if n == "bias" else x for n, x in options.items()}
    out = attnx.attention(q, k, v, **options)
    d_out = torch.randn(out.shape).to(out.dtype)
    expected, limits = oracle(q, k, v, d_out=d_out, **options)
    holds("out", out, expected, limits)
    holds("out", attnx.attention(q.detach(), k.detach(), v.detach(), **options), expected, limits)
    out.backward(d_out)
    for name, x in {"dq": q, "dk": k, "dv": v}.items():
        assert x.grad is not None
        holds(name, x.grad, expected, limits)


@pytest.mark.parametrize("options", [{}, {"mask": Lengths((1500, 40))}], ids=["full", "lengths"])
def test_decoding_reads_its_cache_once(options: dict[str, Any]) -> None:
    """A few queries over a long cache go by tiles, which look at the answer alone."""
    q, k, v = inputs(1, 1600, Hq=6)
    ready = prepare(LANE, q, k, v, Options(**options))
    assert not BACKEND.sdpa_parts(ready.q, ready.k, ready.v, ready.call)
    shown = {"mask": Lengths(np.array((1500, 40)))} if options else {}
    expected, limits = oracle(q, k, v, **shown)
    holds("out", attnx.attention(q, k, v, **options), expected, limits)
    if options:
        v[1, :, 40:], k[1, :, 40:] = math.nan, math.inf
        holds("out", attnx.attention(q, k, v, **options), expected, limits)


def test_callers_in_eight_threads_do_not_disturb_each_other() -> None:
    q, k, v = leaves(*inputs(200, Hq=2, Hk=2, D=16))

    def work(_: int) -> list[torch.Tensor]:
        out = attnx.attention(q, k, v, mask=Window(20, 3), softcap=4.0)
        return [out, *torch.autograd.grad(out.square().sum(), (q, k, v))]

    first = work(0)
    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(work, range(16)):
            assert all(torch.equal(a, b) for a, b in zip(first, found, strict=True))


def test_sdpa_is_asked_only_for_what_it_gets_right() -> None:
    q, k, v = inputs()

    def served(
        v: torch.Tensor = v, q: torch.Tensor = q, k: torch.Tensor = k, **options: Any
    ) -> bool:
        ready = prepare(LANE, q, k, v, Options(**options))
        return bool(BACKEND.sdpa_parts(ready.q, ready.k, ready.v, ready.call))

    assert served()
    assert served(causal=True)
    assert served(mask=Lengths(4))
    assert served(causal=True, scale=-1.0, assume_finite=True)
    assert served(bias=torch.zeros(9, 9))
    assert not served(inputs(Dv=5)[2])
    assert not served(softcap=2.0)
    assert not served(sinks=torch.zeros(4))
    assert not served(return_lse=True)
    assert not served(bias=torch.zeros(9, 9).requires_grad_())
    assert not served(bias=torch.full((9, 9), math.inf))
    assert not served(v, q[:, :, :0])
    k[0, 0, 3, 1] = math.nan
    assert not served()
    assert served(assume_finite=True)


def test_explain_names_the_route() -> None:
    q, k, v = inputs()

    def route(**options: Any) -> str:
        return str(attnx.explain(q, k, v, **options).route)

    assert route() == "sdpa; array tiles where a value is not finite"
    assert route(causal=True, assume_finite=True) == "sdpa"
    assert route(softcap=2.0).startswith("tiles; ")
    assert route(mask=Lengths(3)).startswith("sdpa over the keys that each block of queries sees")
    assert route(causal=True, scale=-1.0).startswith(
        "sdpa over the keys that each block of queries sees"
    )


def test_a_nan_in_one_value_of_64_reaches_only_the_rows_that_see_it() -> None:
    q, k, v = inputs(64, B=1, Hq=1, Hk=1, D=16)
    v[0, 0, 40, 3] = math.nan
    assert F.scaled_dot_product_attention(q, k, v, is_causal=True)[0, 0, :, 3].isnan().all()
    for gradient in (False, True):
        out = attnx.attention(q.requires_grad_(gradient), k, v, causal=True)
        hit = torch.zeros(64, 16, dtype=torch.bool)
        hit[40:, 3] = True
        assert torch.equal(out[0, 0].isnan(), hit)


def test_a_nan_in_a_cotangent_reaches_only_the_keys_of_its_row() -> None:
    q, k, v = leaves(*inputs(64, B=1, Hq=1, Hk=1))
    d_out = torch.ones(1, 1, 64, 8)
    d_out[0, 0, 20, 2] = math.nan
    dq, dk, dv = torch.autograd.grad(attnx.attention(q, k, v, causal=True), (q, k, v), d_out)
    assert dq[0, 0].isnan().any(-1).nonzero().flatten().tolist() == [20]
    assert dk[0, 0].isnan().any(-1).nonzero().flatten().tolist() == list(range(21))
    assert dv[0, 0, :, 2].isnan().nonzero().flatten().tolist() == list(range(21))


def test_a_query_that_is_nan_is_never_an_answer_of_zero() -> None:
    q, k, v = inputs(3, 1)
    q[0, 1, 2] = math.nan
    out = attnx.attention(q, k, v)
    assert out[0, 1, 2].isnan().all()
    assert out.isnan().sum() == 8


# Gradients ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"mask": Window(2, 1)}, {"softcap": 1.5}],
    ids=["plain", "causal", "window", "softcap"],
)
def test_backward_with_bias_sinks_and_lse(dtype: str, options: dict[str, Any]) -> None:
    q, k, v = leaves(*inputs(Dv=5, dtype=DTYPES[dtype]))
    bias, sinks = leaves(torch.randn(2, 1, 9, 1).to(q.dtype), torch.randn(4).to(q.dtype))
    out, lse = attnx.attention(q, k, v, bias=bias, sinks=sinks, return_lse=True, **options)
    d_out, d_lse = torch.randn(out.shape).to(out.dtype), torch.randn(lse.shape).to(lse.dtype)
    torch.autograd.backward((out, lse), (d_out, d_lse))
    expected, limits = oracle(q, k, v, bias=bias, sinks=sinks, d_out=d_out, d_lse=d_lse, **options)
    holds("out", out, expected, limits)
    holds("lse", lse, expected, limits)
    for name, x in {"dq": q, "dk": k, "dv": v, "dbias": bias, "dsinks": sinks}.items():
        assert x.grad is not None
        assert x.grad.dtype is x.dtype
        holds(name, x.grad, expected, limits)


@pytest.mark.parametrize("wanted", ["q", "k", "v", "bias", "sinks", "qv"])
def test_any_subset_may_require_a_gradient(wanted: str) -> None:
    q, k, v = inputs()
    given = {"q": q, "k": k, "v": v, "bias": torch.randn(9, 9), "sinks": torch.randn(4)}
    names = [wanted] if wanted in given else list(wanted)
    for without in ({}, {"sinks": None}, {"sinks": None, "bias": None}):
        options = {**given, **without}
        asked = [n for n in names if options[n] is not None]
        for n in asked:
            options[n] = options[n].clone().requires_grad_()
        out = attnx.attention(**options, causal=True)
        assert out.requires_grad == bool(asked)
        if not asked:
            continue
        grads = torch.autograd.grad(out.square().sum(), [options[n] for n in asked])
        made, pullback = attnx.attention_vjp(**options, causal=True)
        pulled = pullback(2 * made)
        for n, grad in zip(asked, grads, strict=True):
            torch.testing.assert_close(grad, getattr(pulled, n), rtol=1e-4, atol=1e-5)


def test_without_grad_nothing_is_recorded() -> None:
    q, k, v = leaves(*inputs())
    with torch.no_grad():
        assert not attnx.attention(q, k, v).requires_grad
        assert not attnx.attention(q, k, v, softcap=1.0).requires_grad
    with torch.inference_mode():
        assert attnx.attention(q, k, v, causal=True).is_inference()
    assert attnx.attention(q, k, v).requires_grad


@pytest.mark.parametrize("options", [{"causal": True}, {"softcap": 2.0}], ids=["causal", "softcap"])
def test_strides_of_inputs_and_cotangents_do_not_matter(options: dict[str, Any]) -> None:
    q, k, v = leaves(*inputs(Hq=2))
    straight = attnx.attention(q, k, v, **options)
    d_out = torch.randn(9, 2, 8, 2).permute(3, 1, 0, 2)
    wanted = torch.autograd.grad(straight, (q, k, v), d_out.contiguous())
    views = [x.detach().transpose(-1, -2).contiguous().transpose(-1, -2) for x in (q, k, v)]
    views = [x.requires_grad_() for x in views]
    got = torch.autograd.grad(attnx.attention(*views, **options), views, d_out)
    one = torch.ones(()).expand(2, 2, 9, 8)
    summed = torch.autograd.grad(attnx.attention(*views, **options).sum(), views)
    alike = torch.autograd.grad(attnx.attention(*views, **options), views, one)
    for a, b in [*zip(wanted, got, strict=True), *zip(summed, alike, strict=True)]:
        torch.testing.assert_close(a, b)


def test_expanded_inputs_get_summed_gradients() -> None:
    q, k, v = inputs(Hq=4)
    shared = k[:1, :1].clone().requires_grad_()
    keys = shared.expand(2, 2, 9, 8)
    grad = torch.autograd.grad(attnx.attention(q, keys, v, causal=True).sum(), shared)[0]
    full = keys.detach().clone().requires_grad_()
    whole = torch.autograd.grad(attnx.attention(q, full, v, causal=True).sum(), full)[0]
    torch.testing.assert_close(grad, whole.sum((0, 1), keepdim=True))


@pytest.mark.parametrize(
    "options",
    [{"causal": True}, {"softcap": 2.0}, {"mask": Lengths(5)}],
    ids=["causal", "softcap", "lengths"],
)
@pytest.mark.parametrize("which", ["q", "k", "v", "out", "mask", "bias"])
def test_writing_in_place_before_the_backward_is_told(which: str, options: dict[str, Any]) -> None:
    q, k, v = leaves(*inputs())
    arrays: dict[str, Any] = {"q": q * 1, "k": k * 1, "v": v * 1}
    if which == "mask":
        options = {**options, "mask": torch.ones(9, 9, dtype=torch.bool)}
    if which == "bias":
        options = {**options, "bias": torch.zeros(9, 9)}
    arrays["out"] = attnx.attention(**arrays, **options)
    (options if which in options else arrays)[which].fill_(1)
    written = arrays["out"] if which != "out" else arrays["out"] * 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        written.sum().backward()


def test_the_graph_is_kept_exactly_as_long_as_autograd_says() -> None:
    q, k, v = leaves(*inputs())
    loss = attnx.attention(q, k, v, causal=True).square().sum()
    first = torch.autograd.grad(loss, q, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(loss, q)[0], first)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


@pytest.mark.parametrize("options", [{"causal": True}, {"softcap": 2.0}], ids=["causal", "softcap"])
def test_checkpointing_and_offloading(options: dict[str, Any]) -> None:
    q, k, v = leaves(*inputs())

    def attend(*arrays: torch.Tensor) -> torch.Tensor:
        return attnx.attention(*arrays, **options)

    wanted = torch.autograd.grad(attend(q, k, v).square().sum(), (q, k, v))
    again = checkpoint(attend, q, k, v, use_reentrant=False)
    with torch.autograd.graph.save_on_cpu():
        offloaded = attend(q, k, v)
    for out in (again, offloaded):
        for a, b in zip(wanted, torch.autograd.grad(out.square().sum(), (q, k, v)), strict=True):
            assert torch.equal(a, b)


# What it refuses ---------------------------------------------------------------------------------
