"""The NumPy backend: threads and BLAS, forks, bits, memory, dtypes and floating-point settings."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import threadpoolctl

import attnx
from attnx import Causal, Lengths, Predicate, Segments, Window
from attnx_conformance.cases import CASES, DTYPES, HEAVY, Case
from attnx_conformance.oracle import Reference
from attnx_conformance.runner import run
from attnx_numpy import _backward, _forward, _pieces, _small, _threads

Make = Callable[..., tuple[Any, Any, Any]]
Agree = Callable[..., Reference]
Python = Callable[..., str]
f32 = np.float32
LQ, LK = 300, 600
BIG = {"B": (1,), "Hq": 2, "Hk": 1, "Lq": LQ, "Lk": LK, "D": 16, "Dv": 8}
"""Several tiles in each direction, and more than one thread."""


def blas_threads() -> list[int]:
    return [
        library["num_threads"]
        for library in threadpoolctl.threadpool_info()
        if library["user_api"] == "blas"
    ]


def gradients(q: Any, k: Any, v: Any, **options: Any) -> list[Any]:
    (out, lse), pullback = attnx.attention_vjp(q, k, v, return_lse=True, **options)
    return [out, lse, *[g for g in pullback(out, lse) if g is not None]]


TILED: dict[str, dict[str, Any]] = {
    "plain": {}, "causal": {"causal": "bottom_right"}, "top left": {"causal": "top_left"},
    "window": {"mask": Window(40, 7, "bottom_right")}, "lengths": {"mask": Lengths(531, 233)},
    "segments": {"mask": Segments(np.arange(LQ) // 45, np.arange(LK) // 90)},
    "softcap": {"softcap": 1.5, "causal": "top_left"},
    "bias": {"bias": np.linspace(-3, 3, LK, dtype=f32)[None]},
    "hiding bias": {"bias": np.where(np.arange(LK) % 7 == 0, -np.inf, 0).astype(f32)[None]},
    "bias of heads": {"bias": np.linspace(-3, 3, 2 * LQ, dtype=f32).reshape(1, 2, LQ, 1)},
    "sinks": {"sinks": np.array([3, -40], f32), "mask": Window(5, 0, "top_left")},
    "predicate": {"mask": Predicate(lambda b, h, i, j: (i * 7 + j * 3 + h) % 5 != 0)},
    "dense": {"mask": np.random.default_rng(3).random((1, 1, LQ, LK)) < 0.5},
    "far apart": {"scale": 400.0}, "negative": {"scale": -1.0, "causal": "bottom_right"},
}  # fmt: skip


@pytest.mark.parametrize("name", TILED)
def test_many_tiles_give_the_right_answer(name: str, make: Make, agree: Agree) -> None:
    """S5.4, forward and backward, across the edges of tiles."""
    agree(*make(**BIG), **TILED[name])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_other_dtypes_give_the_right_answer_over_many_tiles(
    dtype: str, make: Make, agree: Agree
) -> None:
    """S5.2: half types are kept in float32 between their ends, float64 stays float64."""
    q, k, v = make(**BIG, dtype=dtype)
    agree(q, k, v, causal="bottom_right", bias=np.ones((1, LK), q.dtype))


def test_several_heads_of_a_group_share_a_strip(make: Make, agree: Agree) -> None:
    """A decode step: short queries, many heads a group, long keys."""
    for Lq in (1, 3):
        q, k, v = make(B=(2,), Hq=8, Hk=2, Lq=Lq, Lk=1100, D=16, Dv=8)
        agree(q, k, v)
        agree(q, k, v, causal="bottom_right", mask=Lengths([1000, 17]), sinks=np.ones(8, f32))


def test_a_nan_over_many_tiles_reaches_only_who_sees_it(make: Make, agree: Agree) -> None:
    """S4.1 and S4.2, in the blocked kernel."""
    q, k, v = make(**BIG)
    k[0, 0, 550], v[0, 0, 120, 3] = np.nan, np.inf
    out = agree(q, k, v, causal="top_left").out
    assert out is not None
    assert np.isfinite(out[:, :, :120]).all()
    clean = attnx.attention(q, np.nan_to_num(k), v, causal="top_left")
    assert np.array_equal(attnx.attention(q, k, v, causal="top_left"), clean, equal_nan=True)


# Threads ----------------------------------------------------------------------------------------


def test_eight_callers_at_once_get_their_own_right_answers_and_the_blas_its_threads_back(
    make: Make,
) -> None:
    """Saved and restored counts may not interleave."""
    before = blas_threads()
    inputs = [make(**BIG) for _ in range(8)]
    expected = [gradients(*given, causal="bottom_right") for given in inputs]
    found: dict[int, list[Any]] = {}
    barrier = threading.Barrier(8)

    def work(n: int) -> None:
        barrier.wait()
        for _ in range(3):
            found[n] = gradients(*inputs[n], causal="bottom_right")

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert blas_threads() == before
    for n, wanted in enumerate(expected):
        for one, other in zip(found[n], wanted, strict=True):
            assert np.array_equal(one, other)


def test_the_blas_gets_its_threads_back_after_an_exception(make: Make) -> None:
    """And the exception is the caller's own, whichever worker met it."""
    before = blas_threads()

    def fails(b: Any, h: Any, i: Any, j: Any) -> Any:
        if i.max() > 200:
            raise KeyError("mine")
        return i >= j

    for _ in range(3):
        with pytest.raises(KeyError, match="mine"):
            attnx.attention(*make(**BIG), mask=Predicate(fails))
        assert blas_threads() == before
    assert np.isfinite(attnx.attention(*make(**BIG))).all()


def test_a_call_inside_a_predicate_does_not_wait_for_itself(make: Make) -> None:
    """Workers that are busy are not waited for."""
    q, k, v = make(**BIG)

    def nested(b: Any, h: Any, i: Any, j: Any) -> Any:
        attnx.attention(q, k, v)
        return i >= j

    before = blas_threads()
    small = make(B=(1,), Hq=1, Hk=1, Lq=300, Lk=300)
    assert np.isfinite(attnx.attention(*small, mask=Predicate(nested))).all()
    assert blas_threads() == before


def test_work_is_handed_out_once_and_in_order() -> None:
    done: list[int] = []
    lock = threading.Lock()

    def job(item: int, scratch: Any) -> None:
        with lock:
            done.append(item)

    for count in (1, 2, 5):
        done.clear()
        _threads.run(job, range(100), count)
        assert sorted(done) == list(range(100))
    done.clear()
    _threads.run(job, range(100), 1)
    assert done == list(range(100))
    _threads.run(job, [], 4)


def test_the_first_failure_stops_the_rest() -> None:
    done: list[int] = []

    def job(item: int, scratch: Any) -> None:
        if item == 3:
            raise OSError(item)
        done.append(item)

    for count in (1, 4):
        done.clear()
        with pytest.raises(OSError, match="3"):
            _threads.run(job, range(100_000), count)
        assert len(done) < 100_000


FORK = """
import os, sys, warnings
import numpy as np
import attnx
rng = np.random.default_rng(0)
q, k, v = rng.standard_normal((3, 1, 2, 700, 16)).astype(np.float32)
expected = attnx.attention(q, k, v, causal=True)
pid = os.fork()
if pid == 0:
    code = 1
    try:
        same = np.array_equal(attnx.attention(q, k, v, causal=True), expected)
        out, pullback = attnx.attention_vjp(q, k, v)
        code = 0 if same and np.isfinite(pullback(out).k).all() else 2
    finally:
        os._exit(code)
_, status = os.waitpid(pid, 0)
again = attnx.attention(q, k, v, causal=True)
print(os.waitstatus_to_exitcode(status), np.array_equal(again, expected))
"""


@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="this system has no fork")
def test_a_fork_with_a_live_pool_computes_in_parent_and_child(python: Python) -> None:
    """The pool's threads do not exist in the child, which must not wait for them."""
    code = FORK.replace("pid = os.fork()", "warnings.simplefilter('ignore')\npid = os.fork()")
    assert python(code, ATTNX_PLUGINS="numpy") == "0 True\n"


# Bits -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "causal", "window", "bias", "sinks", "softcap"])
def test_the_same_call_gives_the_same_bits(name: str, make: Make) -> None:
    """Declared: `deterministic`, whatever the threads do."""
    assert attnx.get_backend("numpy").capabilities.deterministic
    q, k, v = make(**BIG)
    first = gradients(q, k, v, **TILED[name])
    for _ in range(4):
        for one, other in zip(gradients(q, k, v, **TILED[name]), first, strict=True):
            assert np.array_equal(one, other)


# Memory -----------------------------------------------------------------------------------------

MEMORY = """
import resource
import numpy as np
import attnx
N = 8192
rng = np.random.default_rng(0)
q, k, v = rng.standard_normal((3, 1, 1, N, 64)).astype(np.float32)
short = [x[:, :, :1024] for x in (q, k, v)]
def run(q, k, v, **options):
    out, pullback = attnx.attention_vjp(q, k, v, **options)
    return pullback(out)
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
options = OPTIONS
for given in options(1024):
    run(*short, **given)
before = peak()
for given in options(N):
    run(q, k, v, **given)
print(peak() - before)
"""


def test_memory_grows_with_the_length_and_not_with_its_square(python: Python) -> None:
    """Forward and backward at 8192 tokens; the score matrix alone would take 256 MB."""
    options = (
        "lambda n: [{'causal': True, 'softcap': 5.0, 'sinks': np.zeros(1, np.float32)},\n"
        "    {'mask': attnx.Window(512, 0)},\n"
        "    {'mask': attnx.Segments(np.arange(n) // 500, np.arange(n) // 500)}]"
    )
    grown = float(python(MEMORY.replace("OPTIONS", options), ATTNX_PLUGINS="numpy"))
    assert grown < 100


# Floating-point settings --------------------------------------------------------------------------


def awkward(make: Make, **shape: Any) -> list[tuple[Any, Any, Any, dict[str, Any]]]:
    """Calls whose arithmetic overflows, underflows, divides by 0 or meets NaN on its way."""
    q, k, v = make(**shape)
    Lq, Lk = q.shape[-2], k.shape[-2]
    nan = k.copy()
    nan[..., Lk // 2, :] = np.nan
    return [
        (q * 100, k * 100, v, {}), (q, k, v, {"scale": 1e-30}), (q, k, v, {"softcap": 1e-3}),
        (q, k, v, {"mask": Lengths(0)}), (q, nan, v, {"causal": "top_left"}),
        (q, k * np.inf, v, {}),
        (q, k, v, {"bias": np.full((Lq, Lk), -np.inf, f32)}),
        (q, k, v, {"bias": np.full((Lq, Lk), np.inf, f32)}),
        (q, k, v, {"bias": np.full((Lq, 1), np.finfo(f32).min)}),
        (q, k, v, {"sinks": np.full(q.shape[1], -np.inf, f32)}),
        (q, k, v, {"sinks": np.full(q.shape[1], 1000, f32)}),
        (q, nan, v, {"assume_finite": True}),
    ]  # fmt: skip


@pytest.mark.parametrize("shape", [{}, BIG], ids=["small", "tiled"])
def test_no_call_warns_and_the_callers_settings_neither_matter_nor_change(
    shape: dict[str, Any], make: Make
) -> None:
    """NaN, inf, underflow and overflow are answers (S5.3); with `errstate(all="raise")` too."""
    for q, k, v, options in awkward(make, **shape):
        with np.errstate(all="ignore"):
            expected = gradients(q, k, v, **options)
        with np.errstate(all="raise"):
            before = np.geterr()
            found = gradients(q, k, v, **options)
            attnx.attention_weights(q, k, **options)
            assert np.geterr() == before
        for one, other in zip(found, expected, strict=True):
            assert np.array_equal(one, other, equal_nan=True)


def test_merging_does_not_warn_either() -> None:
    parts = [(np.full((2, 3), x, f32), np.full(2, lse, f32)) for x, lse in (
        (np.inf, -3e38), (1, 3e38), (np.nan, -np.inf), (-np.inf, np.inf), (np.nan, np.nan),
    )]  # fmt: skip
    with np.errstate(all="raise"):
        for one in parts:
            for other in parts:
                attnx.merge([one, other])


def test_half_inputs_do_not_overflow_on_the_way(make: Make, agree: Agree) -> None:
    """S5.3: float16 inputs of 300 at D = 64 have scores of 5,760,000."""
    q = np.full((1, 1, 4, 64), 300, np.float16)
    v = np.arange(20, dtype=np.float16).reshape(1, 1, 4, 5)
    agree(q, q, v, scale=1.0)
    agree(-q, q, v, scale=1.0)
    k = q.copy()
    k[:, :, ::2] *= -1
    agree(q, k, v, scale=1.0, causal=True)


@pytest.mark.parametrize("value", [-180000.0, -1e9, -1e30, 1e30])
def test_rows_of_extreme_scores_are_live(value: float, make: Make, agree: Agree) -> None:
    """S3.4, S5.3: `finfo.min` and -1e9 are ordinary finite biases."""
    q, k, v = make(B=(1,), Hq=1, Hk=1)
    bias = np.zeros((6, 6), f32)
    bias[1], bias[2, 3:] = value, value
    agree(q, k, v, bias=bias)
    bias[3] = np.finfo(f32).min
    out, lse = attnx.attention(q, k, v, bias=bias, return_lse=True)
    assert np.isfinite(out).all()
    assert np.isfinite(lse).all()


def test_its_predicate_gets_numpy_arrays(make: Make) -> None:
    seen: list[type] = []

    def fn(*index: Any) -> Any:
        seen.extend(map(type, index))
        return index[2] >= index[3]

    q, k, v = make()
    out = attnx.attention(q, k, v, mask=Predicate(fn))
    assert set(seen) == {np.ndarray}
    np.testing.assert_allclose(out, attnx.attention(q, k, v, mask=Causal()), rtol=1e-6)


def test_its_lane_names_dtypes_and_copies_what_it_hands_over() -> None:
    lane = attnx.get_backend("numpy").lane
    x = np.ones(3, f32)
    assert lane.dtype_name(x) == "float32"
    assert lane.dtype_name(x.astype(">f8")) == "float64 (swapped bytes)"
    assert lane.to_numpy(x) is x
    for copied in (lane.from_numpy(x), lane.own(x)):
        assert np.array_equal(copied, x)
        assert not np.shares_memory(copied, x)
    assert lane.adopt(x) is x
    assert not lane.traced(x)
    assert lane.readable(x)
    assert lane.vjp is None


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_values_are_moderate_up_to_their_bounds(dtype: Any) -> None:
    """S5.3: without a shift, no product may overflow or lose digits."""
    known = [
        ([1, -1, 0.0, -0.0], True), ([0.0], True), ([], True), ([2.0**-40, -(2.0**-40)], True),
        ([2.0**-41, 1], False), ([-(2.0**-41)], False), ([2.0**20], False), ([-(2.0**20)], False),
        ([np.nan, 1], False), ([np.inf], False), ([1, -np.inf], False), ([1e-40], False),
    ]  # fmt: skip
    for values, wanted in known:
        assert _forward._moderate(np.array(values, dtype)[:, None]) == wanted, values


# Small calls -------------------------------------------------------------------------------------

LIGHT = [
    case for case in CASES
    if case.scores <= HEAVY and "float32" in case.dtypes and zlib.crc32(case.name.encode()) % 8 == 1
]  # fmt: skip


@pytest.mark.parametrize("case", LIGHT, ids=lambda case: case.name)
def test_a_small_call_is_right_in_tiles_too(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite's small cases take the one piece; what is beyond it has tiles of the same edges."""
    monkeypatch.setattr(_small, "HEAD", 0)
    monkeypatch.setattr(_small, "FEW", 0)
    outcome = run(case, "numpy", "float32")
    assert outcome.ok, outcome.detail


@pytest.mark.parametrize("case", LIGHT, ids=lambda case: case.name)
def test_a_small_call_is_right_a_piece_a_thread(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each key head is a piece, as in a call of many scores; the suite's own are one piece."""
    monkeypatch.setattr(_pieces, "SCORES", -1)
    monkeypatch.setattr(_pieces, "PIECE", 1)
    monkeypatch.setattr(_threads, "threads", lambda: 3)
    outcome = run(case, "numpy", "float32")
    assert outcome.ok, outcome.detail


def test_pieces_give_the_same_bits_whatever_finishes_first(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their sums over a bias and sinks that they share are taken in the pieces' order."""
    monkeypatch.setattr(_pieces, "SCORES", -1)
    monkeypatch.setattr(_pieces, "PIECE", 1)
    q, k, v = make(B=(3,), Lq=5, Lk=7)
    bias = np.random.default_rng(3).standard_normal((1, 4, 1, 7)).astype(f32)
    options = {"bias": bias, "sinks": np.ones(4, f32)}

    def run(order: Any, job: Any, items: list[Any], count: int) -> None:
        for item in order(items):
            job(item, _threads.Scratch())

    orders: list[Any] = [list, lambda items: items[::-1], lambda items: items[3:] + items[:3]]
    found = []
    for order in orders:
        monkeypatch.setattr(_threads, "run", partial(run, order))
        found.append(gradients(q, k, v, **options))
    assert len(found[0]) == 7
    for other in found[1:]:
        assert all(map(np.array_equal, other, found[0]))


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_call_is_right_in_tiles(
    case: Case, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_small, "HEAD", 0)
    monkeypatch.setattr(_small, "FEW", 0)
    outcome = run(case, "numpy", dtype) if dtype in case.dtypes else None
    assert outcome is None or outcome.ok, outcome


def test_a_large_scale_of_small_products_does_not_overflow(make: Make) -> None:
    """S5.3, also where nobody looked at the size of q."""
    q, k, v = make()
    given = q * f32(2.0**110), k * f32(2.0**-20), v
    out = attnx.attention(*given, scale=2.0**20, assume_finite=True)
    wanted = attnx.attention(*(x.astype(np.float64) for x in given), scale=2.0**20)
    np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kernel", [_forward, _backward], ids=["forward", "backward"])
def test_a_small_call_is_one_piece(
    kernel: Any, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = make()
    name = kernel.__name__.rpartition("_")[2]
    blocked = mock.Mock(side_effect=getattr(kernel, name))
    monkeypatch.setattr(kernel, name, blocked)
    gradients(q, k, v, mask=Lengths(3), softcap=2.0)
    k[..., 3:, :] = np.nan
    gradients(q, k, v, mask=Lengths(3), softcap=2.0)
    assert blocked.call_count == 0
    q[...] = np.nan
    gradients(q, k, v, mask=Lengths(3), softcap=2.0)
    assert blocked.call_count == 1
