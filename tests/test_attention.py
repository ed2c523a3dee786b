"""`attention`: the fast path gives what the long way gives, and leaves every wrong call to it."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest

import attnx
from attnx import _attention, plugin
from attnx._call import Options, prepare
from attnx.errors import ArgumentError, AttnxError, UnknownBackend

Make = Callable[..., tuple[Any, Any, Any]]
Marked = Callable[..., Any]
Recorded = list[plugin.Call]


@pytest.fixture
def recorder(marked: Marked) -> Any:
    """A backend that keeps every call it got."""
    return marked("recorder", 1.0, dtypes=frozenset({"float16", "float32", "float64"}))


def fast(q: Any, k: Any, v: Any, **options: Any) -> bool:
    """Whether a call is answered without the long way."""
    with mock.patch.object(_attention, "_long_way") as long_way:
        attnx.attention(q, k, v, **options)
    return not long_way.called


GRID = list(
    itertools.product(
        (False, True, "top_left", "bottom_right"), (None, 1.0, -0.5, 0.0), (False, True),
        (False, True), (None, "recorder"),
    )
)  # fmt: skip


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_backend_gets_the_same_record_either_way(dtype: str, recorder: Any, make: Make) -> None:
    """Every field in its place, for every option that the fast path knows."""
    with attnx.use_backend("recorder"):
        for shape in ({}, {"Hk": 4}, {"Lk": 9}, {"Dv": 8}):
            q, k, v = make(dtype=dtype, **shape)
            for causal, scale, lse, finite, backend in GRID:
                if causal is True and "Lk" in shape:
                    continue
                options = {"causal": causal, "scale": scale, "return_lse": lse}
                options |= {"assume_finite": finite, "backend": backend}
                first = attnx.attention(q, k, v, **options)
                assert fast(q, k, v, **options)
                again = attnx.attention(q, k, v, **options)
                long, quick = recorder.calls[-3], recorder.calls[-1]
                assert type(quick) is plugin.Call
                assert quick == long
                assert list(map(type, quick)) == list(map(type, long))
                assert isinstance(first, tuple) == isinstance(again, tuple) == lse
                del options["backend"]
                ready = prepare(recorder.lane, q, k, v, Options(**options))
                assert quick == ready.call


def test_the_answers_are_the_same_bits(make: Make) -> None:
    """Against a call that cannot be quick: the same options spelled by a mask object."""
    for shape in ({}, {"Hk": 4}, {"Lk": 9}, {"B": (1,), "Lq": 1}):
        q, k, v = make(**shape)
        for causal, scale in itertools.product(
            (False, "top_left", "bottom_right"), (None, 1.0, -2.0, 0.0)
        ):
            mask = attnx.Causal(causal) if causal else None
            number = None if scale is None else np.float64(scale)
            for _ in range(2):
                out, lse = attnx.attention(q, k, v, causal=causal, scale=scale, return_lse=True)
            assert fast(q, k, v, causal=causal, scale=scale, return_lse=True)
            assert not fast(q, k, v, causal=causal, scale=np.float64(1), return_lse=True)
            slow = attnx.attention(q, k, v, mask=mask, scale=number, return_lse=True)
            assert np.array_equal(out, slow[0])
            assert np.array_equal(lse, slow[1])


def _strided(x: Any) -> Any:
    return np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2)[..., ::-1]


AWKWARD: dict[str, Callable[[Any, Any, Any], tuple[Any, Any, Any]]] = {
    "strided": lambda q, k, v: (_strided(q), _strided(k), _strided(v)),
    "nan in v": lambda q, k, v: (q, k, np.where(np.arange(v.shape[2])[:, None] == 2, np.nan, v)),
    "inf in k": lambda q, k, v: (q, np.where(np.arange(k.shape[2])[:, None] == 1, np.inf, k), v),
    "nan in q": lambda q, k, v: (np.where(np.arange(q.shape[2])[:, None] == 0, np.nan, q), k, v),
    "far apart": lambda q, k, v: (q * 1e4, k * 1e4, v),
    "no keys": lambda q, k, v: (q, k[:, :, :0], v[:, :, :0]),
    "no queries": lambda q, k, v: (q[:, :, :0], k, v),
}


@pytest.mark.parametrize("name", AWKWARD)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_a_shortcut_gives_what_the_record_of_the_call_gives(
    name: str, dtype: str, backend: str, make: Make
) -> None:
    """Every backend's `direct` on the values and strides that need a closer look."""
    q, k, v = AWKWARD[name](*make(Lk=9, dtype=dtype, Hk=4))
    lane = attnx.get_backend(backend).lane
    arrays = [lane.from_numpy(x.astype(dtype)) for x in (q, k, v)]
    if name == "strided":
        arrays = [lane.adopt(x) if backend == "numpy" else lane.from_numpy(x) for x in (q, k, v)]
    for scale, finite in itertools.product((None, 0.5, -2.0, 1e30), (False, True)):
        if finite and ("nan" in name or "inf" in name):
            continue
        options = {"scale": scale, "assume_finite": finite}
        attnx.attention(*arrays, **options)
        assert fast(*arrays, **options)
        got = lane.to_numpy(attnx.attention(*arrays, **options))
        number = None if scale is None else np.float64(scale)
        record = lane.to_numpy(attnx.attention(*arrays, scale=number, assume_finite=finite))
        np.testing.assert_array_equal(got, record)


def test_a_plan_serves_other_sizes_of_its_class(recorder: Any, make: Make) -> None:
    with attnx.use_backend("recorder"):
        attnx.attention(*make(Lq=1, Lk=5), causal="bottom_right")
        for shape in ({"Lk": 6}, {"Lk": 7, "B": (5,)}, {"Lk": 9, "Hq": 6}, {"Lk": 9, "B": (0,)}):
            q, k, v = make(**({"Lq": 1} | shape))
            assert fast(q, k, v, causal="bottom_right")
            attnx.attention(q, k, v, causal="bottom_right")
            call = recorder.calls[-1]
            assert (call.B, call.Hq, call.Lk) == (q.shape[0], q.shape[1], k.shape[2])


f32 = np.float32
q0, k0, v0 = (np.ones(shape, f32) for shape in [(2, 4, 6, 8), (2, 2, 6, 8), (2, 2, 6, 5)])
WRONG: dict[str, tuple[tuple[Any, Any, Any], dict[str, Any]]] = {
    "batch of k": ((q0, k0[:1], v0), {}), "batch of v": ((q0, k0, v0[:1]), {}),
    "batches swapped": ((q0[:1], k0, v0), {}), "heads of v": ((q0, k0, v0[:, :1]), {}),
    "keys": ((q0, k0, v0[:, :, :5]), {}), "D": ((q0, k0[..., :7], v0), {}),
    "group": ((q0[:, :3], k0, v0), {}), "no heads of k": ((q0, k0[:, :0], v0[:, :0]), {}),
    "no heads of q": ((q0[:, :0], k0, v0), {}), "no heads": ((q0[:, :0], k0[:, :0], v0[:, :0]), {}),
    "D of 0": ((q0[..., :0], k0[..., :0], v0), {}), "Dv of 0": ((q0, k0, v0[..., :0]), {}),
    "rank of k": ((q0, k0[0], v0), {}), "rank": ((q0[0, 0, 0], k0, v0), {}),
    "dtype of k": ((q0, k0.astype("f8"), v0), {}), "dtype of v": ((q0, k0, v0.astype("f2")), {}),
    "integers": ((q0.astype(int), k0.astype(int), v0.astype(int)), {}),
    "swapped bytes": ((q0.astype(">f4"), k0.astype(">f4"), v0.astype(">f4")), {}),
    "list": ((q0, k0.tolist(), v0), {}), "None": ((q0, k0, None), {}),
    "masked array": ((q0, np.ma.array(k0), v0), {}),
    "masked q": ((np.ma.array(q0), k0, v0), {}),
    "not square": ((q0, k0[:, :, :4], v0[:, :, :4]), {"causal": True}),
    "nan": ((q0, k0, v0), {"scale": math.nan}), "inf": ((q0, k0, v0), {"scale": math.inf}),
    "minus inf": ((q0, k0, v0), {"scale": -math.inf}), "bool": ((q0, k0, v0), {"scale": True}),
    "array": ((q0, k0, v0), {"scale": np.ones(1)}), "causal 1": ((q0, k0, v0), {"causal": 1}),
    "causal 0": ((q0, k0, v0), {"causal": 0}), "causal list": ((q0, k0, v0), {"causal": []}),
    "lse 0": ((q0, k0, v0), {"return_lse": 0}), "finite 1": ((q0, k0, v0), {"assume_finite": 1}),
    "backend": ((q0, k0, v0), {"backend": "nobody"}), "backends": ((q0, k0, v0), {"backend": []}),
    "backend set": ((q0, k0, v0), {"backend": {"numpy"}}),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_after_a_right_one_still_raises(name: str) -> None:
    """Shapes and values are checked on every call, never on a miss alone."""
    arrays, options = WRONG[name]
    grouped, same = (q0, k0, v0), (q0[:, :2], k0, v0)
    for good in (
        {},
        {"causal": True},
        {"scale": 1.0},
        {"return_lse": True},
        {"assume_finite": True},
    ):
        for given in (grouped, same):
            attnx.attention(*given, **good)
            assert fast(*given, **good)
    for _ in range(2):
        with pytest.raises(AttnxError):
            attnx.attention(*arrays, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"mask": np.ones((6, 6), bool)}, {"mask": attnx.Lengths(3)}, {"softcap": 2.0},
        {"bias": np.zeros((6, 6), f32)}, {"sinks": np.zeros(4, f32)}, {"layout": "bshd"},
        {"scale": np.float32(2)}, {"scale": 2}, {"backend": ["numpy"]},
        {"backend": attnx.get_backend("numpy")},
    ],
    ids=lambda options: next(iter(options)) + type(next(iter(options.values()))).__name__,
)  # fmt: skip
def test_what_the_fast_path_does_not_know_is_never_remembered(options: dict[str, Any]) -> None:
    """A plan of a call with a mask must not answer a call without one."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal(q0.shape, dtype=f32)
    before = attnx.attention(q, k0, v0, backend="numpy")
    kept = len(_attention._plain)
    for _ in range(2):
        attnx.attention(q, k0, v0, **options)
    assert len(_attention._plain) == kept
    assert np.array_equal(attnx.attention(q, k0, v0, backend="numpy"), before)


def test_other_ranks_and_subclasses_of_k_and_v_go_the_long_way(make: Make, tmp_path: Any) -> None:
    q, k, v = make()
    attnx.attention(q, k, v)
    assert not fast(q[0], k[0], v[0])
    mapped = np.memmap(tmp_path / "k", f32, "w+", shape=k.shape)
    attnx.attention(q, mapped, v)
    assert not fast(q, mapped, v)


def test_a_choice_is_part_of_the_key(marked: Marked, make: Make) -> None:
    q, k, v = make()
    marked("a", 2.0)
    attnx.attention(q, k, v)
    with attnx.use_backend("a"):
        assert not fast(q, k, v)
        assert attnx.attention(q, k, v).flat[0] == 2.0
        assert fast(q, k, v)
    with attnx.use_backend("a", fallback="warn"):
        assert not fast(q, k, v)
    attnx.set_default_backend("a")
    assert attnx.attention(q, k, v).flat[0] == attnx.attention(q, k, v).flat[0] == 2.0
    attnx.set_default_backend(None)
    assert attnx.attention(q, k, v).flat[0] != 2.0


def test_registering_and_taking_out_forgets_every_plan(marked: Marked, make: Make) -> None:
    q, k, v = make()
    marked("brief", 2.0)
    for _ in range(2):
        attnx.attention(q, k, v)
        attnx.attention(q, k, v, backend="brief")
    assert fast(q, k, v, backend="brief")
    attnx.unregister("brief")
    assert not fast(q, k, v)
    assert not fast(q, k, v, backend="brief")
    with pytest.raises(UnknownBackend):
        attnx.attention(q, k, v, backend="brief")
    marked("brief", 3.0)
    for _ in range(2):
        assert attnx.attention(q, k, v, backend="brief").flat[0] == 3.0


def test_threads_that_register_and_call_never_meet_a_wrong_plan(
    marked: Marked, make: Make, plug: Callable[..., None]
) -> None:
    q, k, v = make()
    marked("a", 2.0)
    wrong: list[Any] = []
    done = threading.Event()

    def call() -> None:
        while not done.is_set():
            if attnx.attention(q, k, v, backend="a").flat[0] != 2.0:
                wrong.append("a")
            if attnx.attention(q, k, v, backend="numpy").flat[0] == 2.0:
                wrong.append("numpy")

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for n in range(20):
        plug(f"other {n}", attnx_rank=lambda call, candidates: None)
    done.set()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_message_is_the_long_ways() -> None:
    attnx.attention(q0, k0, v0)
    with pytest.raises(ArgumentError, match=r"^k: expected the batch axes of q, "):
        attnx.attention(q0, k0[:1], v0)
