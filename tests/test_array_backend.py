"""ArrayBackend makes any array-API library a right backend: proven with `array_api_strict`.

The library allows what the standard says and nothing more, and it stands here as a stranger's
plugin would: a lane of a few lines, registered by hand.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import array_api_strict as xp
import numpy as np
import pytest

import attnx
from attnx.plugin import ArrayBackend, BackendSpec, Lane, hookimpl
from attnx_conformance import bounds, judge, reference
from attnx_conformance.cases import CASES, Case
from attnx_conformance.runner import run

LONG = re.compile(r"long|[1-9]\d\d|1025|2049|correlated|^many-(?!heads)")
QUICK = [case for case in CASES if not LONG.search(case.name)]


class StrictLane(Lane):
    """All that is needed to compute; a test may also silence the host's warnings."""

    name = "strict"
    xp = xp
    array_types = (type(xp.zeros(1)),)

    def to_numpy(self, array: Any) -> Any:
        return np.array(np.from_dlpack(array))

    def from_numpy(self, array: Any, like: Any = None) -> Any:
        return xp.asarray(array, copy=True)


class QuietLane(StrictLane):
    def quiet(self) -> Any:
        return np.errstate(all="ignore")


class Plugin:
    """A plugin object with one backend."""

    def __init__(self, lane: Lane, backend: ArrayBackend) -> None:
        self.lane, self.backend = lane, backend

    @hookimpl
    def attnx_backends(self) -> list[BackendSpec]:
        kind = self.lane.array_types[0]
        return [
            BackendSpec(
                name=self.backend.name,
                array_types=(f"{kind.__module__}.{kind.__name__}",),
                load=lambda: self.backend,
                lane=lambda: self.lane,
            )
        ]


class SmallTiles(ArrayBackend):
    """Tiles so small that every case has many."""

    def block_sizes(self, call: Any) -> tuple[int, int]:
        return 8, 5


def registered(backend: ArrayBackend) -> Iterator[ArrayBackend]:
    attnx.register(Plugin(backend.lane, backend), backend.name)
    yield backend
    attnx.unregister(backend.name)


@pytest.fixture
def strict() -> Iterator[ArrayBackend]:
    yield from registered(ArrayBackend("strict", QuietLane()))


@pytest.fixture
def small() -> Iterator[ArrayBackend]:
    yield from registered(SmallTiles("strict", QuietLane()))


@pytest.fixture
def loud() -> Iterator[ArrayBackend]:
    yield from registered(SmallTiles("strict", StrictLane()))


def passes(case: Case, dtype: str, **options: Any) -> None:
    outcome = run(case, "strict", dtype, **options)
    assert outcome.ok, outcome.detail


@pytest.mark.parametrize("case", QUICK[::3], ids=lambda case: case.name)
def test_a_case_of_the_suite_holds(case: Case, strict: ArrayBackend) -> None:
    if "float32" in case.dtypes:
        passes(case, "float32")
    else:
        passes(case, "float64")


@pytest.mark.parametrize(
    "case", [case for case in QUICK if case.profile in ("masks", "numerics")][::8],
    ids=lambda case: case.name,
)  # fmt: skip
def test_a_case_of_the_suite_holds_in_small_tiles(case: Case, small: ArrayBackend) -> None:
    if "float64" in case.dtypes:
        passes(case, "float64", layout="bshd")


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_holds_in_both_dtypes(case: Case, dtype: str, strict: ArrayBackend) -> None:
    if dtype in case.dtypes:
        passes(case, dtype)


def random(shape: tuple[int, ...], seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_finite_inputs_give_no_warning_even_with_empty_rows(loud: ArrayBackend) -> None:
    """Warnings are errors here, and this lane silences none."""
    for name in (
        "lengths-with-zero",
        "prefix-model",
        "sinks-empty-causal",
        "bias-and-mask",
        "cross",
    ):
        case = next(case for case in CASES if case.name.startswith(name))
        inputs = case.inputs("float32")
        q, k, v, d_out = (np.nan_to_num(x) for x in (inputs.q, inputs.k, inputs.v, inputs.d_out))
        mask = inputs.mask
        if mask is not None:
            mask = attnx.masks.map_leaves(
                mask, lambda _, __, leaf: leaf if isinstance(leaf, int) else xp.asarray(leaf)
            )
        given = {"bias": inputs.bias, "sinks": inputs.sinks}
        options = {n: None if x is None else xp.asarray(x) for n, x in given.items()}
        options |= {"mask": mask, **case.options}
        arrays = [xp.asarray(x) for x in (q, k, v)]
        _, pullback = attnx.attention_vjp(*arrays, **options)
        pullback(xp.asarray(d_out))
        attnx.attention_weights(*arrays[:2], **options)


def test_hidden_scores_of_any_size_do_not_overflow(loud: ArrayBackend) -> None:
    q, k, v = random((1, 2, 5, 4)), random((1, 2, 7, 4), 1), random((1, 2, 7, 3), 2)
    k[:, :, 5:] = 1e20
    arrays = [xp.asarray(x) for x in (q, k, v)]
    out, pullback = attnx.attention_vjp(*arrays, mask=attnx.Lengths(5))
    grads = pullback(xp.ones_like(out))
    expected = reference(q, k, v, mask=attnx.Lengths(5), d_out=np.ones((1, 2, 5, 3)))
    limits = bounds(expected, "float32")
    for name, array in (("out", out), ("dq", grads.q), ("dk", grads.k), ("dv", grads.v)):
        verdict = judge(np.from_dlpack(array), getattr(expected, name), getattr(limits, name))
        assert verdict.ok, f"{name} {verdict.detail}"


@pytest.mark.parametrize("level", [-1e9, 1e6, float(np.finfo(np.float32).min)])
def test_a_row_of_huge_equal_biases_is_like_a_row_of_zeros(
    level: float, small: ArrayBackend
) -> None:
    """S3.4: it is live. What lse cannot hold beside the bias must not go missing from P."""
    q, k = np.zeros((1, 1, 5, 4), np.float32), random((1, 1, 10, 4), 1)
    v, d_out = random((1, 1, 10, 3), 2), random((1, 1, 5, 3), 3)

    def gradients(bias: Any) -> list[Any]:
        arrays = [xp.asarray(x) for x in (q, k, v)]
        _, pullback = attnx.attention_vjp(*arrays, bias=xp.asarray(bias))
        weights = attnx.attention_weights(*arrays[:2], bias=xp.asarray(bias))
        return [np.from_dlpack(x) for x in (*pullback(xp.asarray(d_out))[:4], weights)]

    plain = gradients(np.zeros((1, 1, 5, 10), np.float32))
    shifted = gradients(np.full((1, 1, 5, 10), level, np.float32))
    for got, expected in zip(shifted, plain, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_a_huge_sink_beside_huge_scores_keeps_its_share(small: ArrayBackend) -> None:
    q, k = np.zeros((1, 1, 3, 4), np.float32), random((1, 1, 4, 4), 1)
    v, d_out = random((1, 1, 4, 3), 2), random((1, 1, 3, 3), 3)
    got = []
    for level in (0.0, -1e9):
        arrays = [xp.asarray(x) for x in (q, k, v)]
        bias = xp.asarray(np.full((3, 4), level, np.float32))
        sinks = xp.asarray(np.array([level], np.float32))
        _, pullback = attnx.attention_vjp(*arrays, bias=bias, sinks=sinks)
        got.append(np.from_dlpack(pullback(xp.asarray(d_out)).sinks))
    np.testing.assert_allclose(got[1], got[0], rtol=1e-5)


def test_an_empty_row_gives_its_whole_d_lse_to_a_sink_of_minus_infinity(
    small: ArrayBackend,
) -> None:
    arrays = [xp.asarray(random((1, 1, 3, 4), n)) for n in range(3)]
    (_, lse), pullback = attnx.attention_vjp(
        *arrays, mask=attnx.Lengths(0), sinks=xp.asarray([-np.inf], dtype=xp.float32),
        return_lse=True,
    )  # fmt: skip
    assert np.all(np.from_dlpack(lse) == -np.inf)
    d_lse = np.array([[[1.0, 2.0, 3.0]]], np.float32)
    grads = pullback(xp.zeros((1, 1, 3, 4), dtype=xp.float32), xp.asarray(d_lse))
    assert np.from_dlpack(grads.sinks).tolist() == [6.0]


@pytest.mark.parametrize("lengths", [(0, 5, 7), (3, 0, 4), (3, 5, 0), (0, 0, 0)])
def test_nothing_to_attend_to_gives_zeros_of_the_right_shape(
    lengths: tuple[int, int, int], strict: ArrayBackend
) -> None:
    B, Lq, Lk = lengths
    q, k, v = random((B, 4, Lq, 6)), random((B, 2, Lk, 6)), random((B, 2, Lk, 3))
    bias = xp.asarray(random((1, 4, 1, Lk)))
    out, pullback = attnx.attention_vjp(*(xp.asarray(x) for x in (q, k, v)), bias=bias)
    grads = pullback(xp.ones_like(out))
    assert out.shape == (B, 4, Lq, 3)
    for grad, x in zip(grads, (q, k, v, bias), strict=False):
        assert tuple(grad.shape) == tuple(x.shape)
        assert not np.any(np.from_dlpack(grad))
    weights = attnx.attention_weights(xp.asarray(q), xp.asarray(k), bias=bias)
    assert weights.shape == (B, 4, Lq, Lk)


@pytest.mark.parametrize("axes", [a for n in range(5) for a in combinations(range(4), n)])
def test_the_gradient_of_a_bias_has_its_shape_whatever_it_was_broadcast_along(
    axes: tuple[int, ...], small: ArrayBackend
) -> None:
    full = (2, 4, 9, 7)
    shape = tuple(1 if axis in axes else n for axis, n in enumerate(full))
    q, k, v = random((2, 4, 9, 5)), random((2, 2, 7, 5), 1), random((2, 2, 7, 3), 2)
    bias, d_out = random(shape, 3), random((2, 4, 9, 3), 4)
    options = {"causal": "bottom_right", "softcap": 3.0}
    _, pullback = attnx.attention_vjp(
        *(xp.asarray(x) for x in (q, k, v)), bias=xp.asarray(bias), **options
    )
    got = np.from_dlpack(pullback(xp.asarray(d_out)).bias)
    expected = reference(q, k, v, bias=bias, d_out=d_out, **options)
    verdict = judge(got, expected.dbias, bounds(expected, "float32").dbias)
    assert verdict.ok, verdict.detail


def test_it_is_listed_and_chosen_for_its_own_arrays(strict: ArrayBackend) -> None:
    assert attnx.get_backend("strict") is strict
    x = xp.ones((2, 3), dtype=xp.float32)
    plan = attnx.plan(x, x, x)
    assert (plan.backend, plan.route) == ("strict", "array tiles")


def test_a_foreign_caller_reaches_it_and_gets_its_own_arrays_back(strict: ArrayBackend) -> None:
    q, k, v = random((1, 2, 5, 4)), random((1, 2, 7, 4), 1), random((1, 2, 7, 3), 2)
    out = attnx.attention(q, k, v, mask=attnx.Lengths(np.array([5])), backend="strict")
    assert type(out) is np.ndarray
    expected = reference(q, k, v, mask=attnx.Lengths(np.array([5])))
    assert judge(out, expected.out, bounds(expected, "float32").out).ok


class Watched(SmallTiles):
    """What a lazy framework hears of: looks at values, and what each tile made."""

    def __init__(self, name: str, lane: Lane) -> None:
        super().__init__(name, lane)
        self.looks, self.tiles = 0, list[tuple[Any, ...]]()

    def finite(self, *arrays: Any) -> bool:
        self.looks += 1
        return super().finite(*arrays)

    def settle(self, call: Any, *arrays: Any) -> None:
        self.tiles.append(arrays)


@pytest.fixture
def watched() -> Iterator[ArrayBackend]:
    yield from registered(Watched("strict", QuietLane()))


@pytest.mark.parametrize(
    ("options", "looks"),
    [({}, 0), ({"causal": True}, 1), ({"causal": True, "assume_finite": True}, 0)],
    ids=["nothing hidden", "causal", "vouched for"],
)
def test_values_are_looked_at_where_something_is_hidden(
    options: dict[str, Any], looks: int, watched: Watched
) -> None:
    q = xp.asarray(random((1, 2, 9, 4)))
    attnx.attention(q, q, q, **options)
    assert watched.looks == looks


def test_each_tile_is_settled_with_the_sums_it_added_to(watched: Watched) -> None:
    q, k = xp.asarray(random((1, 2, 16, 4))), xp.asarray(random((1, 2, 10, 4)))
    out, pullback = attnx.attention_vjp(q, k, k)
    assert [[tuple(x.shape) for x in made] for made in watched.tiles] == [
        [(1, 2, 8, 4), *[(1, 2, 8, 1)] * 3]
    ] * 4
    watched.tiles.clear()
    pullback(out)
    assert [[tuple(x.shape) for x in made] for made in watched.tiles] == [
        [(1, 2, 8, 4), (1, 2, 5, 4), (1, 2, 5, 4)]
    ] * 4
