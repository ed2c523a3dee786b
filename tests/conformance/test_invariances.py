"""The properties of S7: what must hold between two calls, whatever the numbers are.

Both sides are computed by the backend; they may differ by the sum of their two error bounds.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

import attnx
from attnx.masks import Causal, Lengths
from attnx_conformance.judgement import Bound, judge
from attnx_conformance.oracle import Reference, reference
from attnx_conformance.plain import numpy_dtype
from attnx_conformance.tolerance import bounds

B, HQ, HK, L, D, DV = 3, 6, 2, 17, 8, 5


class Kit:
    """Calls on one backend in one dtype, from NumPy arrays to NumPy arrays."""

    def __init__(self, backend: str, dtype: str) -> None:
        self.backend, self.dtype = backend, dtype
        self.lane = attnx.get_backend(backend).lane
        self.rng = np.random.default_rng(11)

    def draw(self, *shape: int) -> np.ndarray:
        return self.rng.standard_normal(shape).astype(numpy_dtype(self.dtype))

    def inputs(self, Lq: int = L, Lk: int = L) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.draw(B, HQ, Lq, D), self.draw(B, HK, Lk, D), self.draw(B, HK, Lk, DV)

    def options(self, options: dict[str, Any]) -> dict[str, Any]:
        given = {
            name: self.lane.from_numpy(x) if isinstance(x, np.ndarray) else x
            for name, x in options.items()
        }
        return {**given, "backend": self.backend}

    def arrays(self, *arrays: np.ndarray) -> list[Any]:
        return [self.lane.from_numpy(np.ascontiguousarray(array)) for array in arrays]

    def attend(self, q: Any, k: Any, v: Any, **options: Any) -> tuple[np.ndarray, np.ndarray]:
        made = attnx.attention(*self.arrays(q, k, v), return_lse=True, **self.options(options))
        out, lse = (np.asarray(self.lane.to_numpy(x)) for x in made)
        return out, lse

    def weights(self, q: Any, k: Any, **options: Any) -> np.ndarray:
        made = attnx.attention_weights(*self.arrays(q, k), **self.options(options))
        return np.asarray(self.lane.to_numpy(made)).astype(np.float64)

    def agree(self, a: np.ndarray, b: np.ndarray, limit: np.ndarray) -> None:
        bound = Bound(2 * limit, np.zeros(limit.shape, dtype=bool))
        judgement = judge(a, b.astype(np.float64), bound)
        assert judgement.ok, judgement.detail

    def limits(self, expected: Reference) -> tuple[np.ndarray, np.ndarray]:
        made = bounds(expected, self.dtype)
        assert made.out is not None
        return made.out.limit, made.lse.limit

    def same(
        self,
        a: tuple[np.ndarray, np.ndarray],
        b: tuple[np.ndarray, np.ndarray],
        expected: Reference,
    ) -> None:
        for ours, theirs, limit in zip(a, b, self.limits(expected), strict=True):
            self.agree(ours, theirs, limit)


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(
    params=[
        pytest.param(
            name,
            marks=pytest.mark.skipif(find_spec(name) is None, reason=f"{name} is not installed"),
        )
        for name in ("numpy", "torch", "jax")
    ]
)
def kit(request: pytest.FixtureRequest, dtype: str) -> Kit:
    return Kit(request.param, dtype)


def test_rows_of_P_sum_to_one(kit: Kit) -> None:
    """P is never negative, and the rows that see something sum to 1."""
    q, k, _ = kit.inputs()
    P = kit.weights(q, k, causal=True)
    rounding = {"float32": 1e-6, "bfloat16": 2.0**-8}[kit.dtype]
    assert (P >= 0).all()
    np.testing.assert_allclose(P.sum(axis=-1), 1.0, atol=L * rounding)


def test_outputs_lie_among_the_visible_values(kit: Kit) -> None:
    """out is between the least and the greatest visible value of each column."""
    q, k, v = kit.inputs()
    out, _ = kit.attend(q, k, v, causal=True)
    limit, _ = kit.limits(reference(q, k, v, causal=True))
    values = np.repeat(v.astype(np.float64), HQ // HK, axis=1)
    low = np.minimum.accumulate(values, axis=2)
    high = np.maximum.accumulate(values, axis=2)
    assert (out.astype(np.float64) >= low - limit).all()
    assert (out.astype(np.float64) <= high + limit).all()


def test_a_constant_moves_lse_alone(kit: Kit) -> None:
    """A constant added to a row's scores changes lse by itself and out nowhere."""
    q, k, v = kit.inputs()
    bias = np.full((L, 1), 4.0).astype(q.dtype)
    expected = reference(q, k, v, bias=bias)
    out, lse = kit.attend(q, k, v, bias=bias)
    plain_out, plain_lse = kit.attend(q, k, v)
    kit.same((out, lse), (plain_out, plain_lse + 4.0), expected)


def test_keys_have_no_order(kit: Kit) -> None:
    """Permuting keys with their values, mask and bias changes nothing."""
    q, k, v = kit.inputs()
    mask, bias = kit.rng.random((L, L)) < 0.7, kit.draw(1, HQ, L, L)
    order = kit.rng.permutation(L)
    moved = kit.attend(
        q, k[:, :, order], v[:, :, order], mask=mask[:, order], bias=bias[..., order]
    )
    kit.same(
        moved, kit.attend(q, k, v, mask=mask, bias=bias), reference(q, k, v, mask=mask, bias=bias)
    )


def test_queries_are_independent(kit: Kit) -> None:
    """Permuting queries permutes rows, and a row alone is the row among the others."""
    q, k, v = kit.inputs()
    expected = reference(q, k, v)
    out, lse = kit.attend(q, k, v)
    order = kit.rng.permutation(L)
    moved = kit.attend(q[:, :, order], k, v)
    kit.same(
        (moved[0], moved[1]), (out[:, :, order], lse[:, :, order]), reference(q[:, :, order], k, v)
    )
    alone = kit.attend(q[:, :, 3:4], k, v)
    limits = [limit[:, :, 3:4] for limit in kit.limits(expected)]
    kit.agree(alone[0], out[:, :, 3:4], limits[0])
    kit.agree(alone[1], lse[:, :, 3:4], limits[1])


def test_tokens_have_no_positions(kit: Kit) -> None:
    """Without a mask, permuting tokens permutes the result."""
    q, k, v = kit.inputs()
    order = kit.rng.permutation(L)
    out, lse = kit.attend(q, k, v)
    moved = kit.attend(q[:, :, order], k[:, :, order], v[:, :, order])
    expected = reference(q[:, :, order], k[:, :, order], v[:, :, order])
    kit.same(moved, (out[:, :, order], lse[:, :, order]), expected)


def test_batch_entries_are_independent(kit: Kit) -> None:
    """A batch entry alone gives what it gives among others."""
    q, k, v = kit.inputs()
    lengths = np.array([17, 4, 9])
    out, lse = kit.attend(q, k, v, mask=Lengths((17, 4, 9)))
    alone = kit.attend(q[1:2], k[1:2], v[1:2], mask=Lengths(4))
    expected = reference(q[1:2], k[1:2], v[1:2], mask=Lengths(int(lengths[1])))
    kit.same(alone, (out[1:2], lse[1:2]), expected)


def test_a_causal_prefix_gives_a_prefix(kit: Kit) -> None:
    """The first tokens do not know whether others follow."""
    q, k, v = kit.inputs()
    out, lse = kit.attend(q, k, v, causal="top_left")
    short = [x[:, :, :10] for x in (q, k, v)]
    expected = reference(*short, causal="top_left")
    kit.same(kit.attend(*short, causal="top_left"), (out[:, :, :10], lse[:, :, :10]), expected)


def test_decoding_with_a_cache_equals_the_full_run(kit: Kit) -> None:
    """Step by step over a growing cache, and over one of fixed size with lengths."""
    q, k, v = kit.inputs()
    out, lse = kit.attend(q, k, v, causal=True)
    limits = kit.limits(reference(q, k, v, causal=True))
    for step in range(L):
        now = slice(step, step + 1)
        cache = slice(0, step + 1)
        grown = kit.attend(q[:, :, now], k[:, :, cache], v[:, :, cache], causal="bottom_right")
        fixed = kit.attend(q[:, :, now], k, v, mask=Lengths(step + 1), causal="bottom_right")
        for made in (grown, fixed):
            kit.agree(made[0], out[:, :, now], limits[0][:, :, now])
            kit.agree(made[1], lse[:, :, now], limits[1][:, :, now])


def test_grouped_heads_equal_repeated_heads(kit: Kit) -> None:
    """Sharing keys among three heads is the same as giving each a copy."""
    q, k, v = kit.inputs()
    copied = kit.attend(q, np.repeat(k, 3, axis=1), np.repeat(v, 3, axis=1), causal=True)
    kit.same(copied, kit.attend(q, k, v, causal=True), reference(q, k, v, causal=True))


def test_split_keys_merge_to_the_whole(kit: Kit) -> None:
    """Parts over disjoint keys, an empty one included, join to the whole (S2.6)."""
    q, k, v = kit.inputs()
    options: dict[str, Any] = {"backend": kit.backend, "return_lse": True}
    parts = []
    for keys in (slice(0, 6), slice(6, 6), slice(6, L)):
        parts.append(attnx.attention(*kit.arrays(q, k[:, :, keys], v[:, :, keys]), **options))
    out, lse = (np.asarray(kit.lane.to_numpy(x)) for x in attnx.merge(parts))
    kit.same((out, lse), kit.attend(q, k, v), reference(q, k, v))


def test_empty_parts_merge_to_nothing(kit: Kit) -> None:
    """Where every part is empty, out is 0 and lse is -inf (S2.6)."""
    q, k, v = kit.inputs(Lk=4)
    made = [
        attnx.attention(*kit.arrays(q, k, v), mask=Lengths(0), return_lse=True, backend=kit.backend)
        for _ in range(2)
    ]
    out, lse = (np.asarray(kit.lane.to_numpy(x)) for x in attnx.merge(made))
    assert not out.any()
    assert np.isneginf(lse).all()


@pytest.mark.parametrize("size", [4, 64, 256])
def test_the_default_scale_keeps_scores_of_unit_variance(kit: Kit, size: int) -> None:
    """Unit-variance q and k give scores of unit variance, whatever D is."""
    q, k = kit.draw(1, 1, 32, size), kit.draw(1, 1, 256, size)
    scores = np.log(kit.weights(q, k))
    assert 0.7 < scores.var(axis=-1).mean() < 1.4


def test_causal_is_its_mask_object_and_its_array(kit: Kit) -> None:
    """Three spellings of one mask agree."""
    q, k, v = kit.inputs()
    expected = reference(q, k, v, causal=True)
    base = kit.attend(q, k, v, causal=True)
    kit.same(kit.attend(q, k, v, mask=Causal()), base, expected)
    kit.same(kit.attend(q, k, v, mask=np.tri(L, dtype=bool)), base, expected)
