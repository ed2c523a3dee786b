"""Linear attention: by chunks, by steps and by the formula it is one function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from attnx import LinearState, linear_attention, linear_attention_step, linear_attention_vjp
from attnx_conformance.relatives import LinearReference, elu_features, linear_reference
from attnx_conformance.tolerance import judge

Array = np.ndarray[Any, Any]
Make = Callable[..., tuple[Array, Array, Array]]
Decays = Callable[..., dict[str, Any]]
Maps = Callable[[str], tuple[dict[str, Any], dict[str, Any]]]
DTYPES = ["float16", "bfloat16", "float32", "float64"]
DECAYS = ["none", "number", "heads", "steps"]
NAMES = ["identity", "elu", "elu, undivided", "a function"]
same = np.testing.assert_array_equal


def within(got: Any, expected: LinearReference) -> None:
    verdict = judge(got, expected.out, expected.bound)
    assert verdict.ok, verdict.detail


# By chunks, by steps, by the formula ------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 2, 3, 8, 16, 37, 64])
@pytest.mark.parametrize("kind", DECAYS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_any_chunk_gives_the_recurrence(
    kind: str, dtype: str, chunk: int, make: Make, decays: Decays
) -> None:
    """Shorter last chunks and a single chunk included; float64 leaves no room for a wrong term."""
    q, k, v = make(Lq=37, Lk=37, dtype=dtype)
    given = decays(kind, q)
    out, state = linear_attention(q, k, v, chunk=chunk, return_state=True, **given)
    expected = linear_reference(q, k, v, dtype=dtype, **given)
    within(out, expected)
    wanted = expected.S[:, ::2] if state.S.shape[1] == 2 else expected.S
    limit = expected.state_bound.limit.reshape(expected.S.shape)[:, :: 4 // state.S.shape[1]]
    assert np.all(np.abs(state.S - wanted) <= limit)
    assert state.z is None


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", DECAYS)
def test_features_and_divisors(
    kind: str, name: str, make: Make, decays: Decays, maps: Maps
) -> None:
    q, k, v = make(Lq=11, Lk=11, dtype="float64")
    ours, theirs = maps(name)
    given = decays(kind, q)
    out = linear_attention(q, k, v, chunk=4, **given, **ours)
    within(out, linear_reference(q, k, v, **given, **theirs))


@pytest.mark.parametrize("name", ["identity", "elu"])
@pytest.mark.parametrize("kind", DECAYS)
def test_steps_give_what_the_sequence_gives(
    kind: str, name: str, make: Make, decays: Decays, maps: Maps
) -> None:
    """Token by token, from a state that a prompt left or from none."""
    q, k, v = make(Lq=9, Lk=9, dtype="float64")
    given, ours = decays(kind, q), maps(name)[0]
    whole, last = linear_attention(q, k, v, chunk=4, return_state=True, **given, **ours)
    for prompt in (0, 5):
        state, outs = None, []
        if prompt:
            part = [x[..., :prompt, :] for x in (q, k, v)]
            cut = given | ({"decay": given["decay"][..., :prompt]} if kind == "steps" else {})
            out, state = linear_attention(*part, chunk=2, return_state=True, **cut, **ours)
            outs.append(out)
        for t in range(prompt, 9):
            now = [x[..., t : t + 1, :] for x in (q, k, v)]
            cut = given | ({"decay": given["decay"][..., t : t + 1]} if kind == "steps" else {})
            out, state = linear_attention_step(*now, state, **cut, **ours)
            outs.append(out)
        np.testing.assert_allclose(np.concatenate(outs, axis=-2), whole, rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(state.S, last.S, rtol=1e-12, atol=1e-13)
        assert (state.z is None) == (last.z is None)


@pytest.mark.parametrize("cut", [0, 1, 7, 12, 13])
def test_a_state_carries_all_that_a_sequence_was(cut: int, make: Make, decays: Decays) -> None:
    """Two calls are one, wherever the sequence is cut, at its ends too."""
    q, k, v = make(Lq=13, Lk=13, dtype="float64")
    options: dict[str, Any] = {"feature_map": "elu", "return_state": True}
    decay = decays("steps", q)["decay"]
    whole, last = linear_attention(q, k, v, decay=decay, chunk=5, **options)
    first, state = linear_attention(
        *(x[..., :cut, :] for x in (q, k, v)), decay=decay[..., :cut], chunk=3, **options
    )
    second, end = linear_attention(
        *(x[..., cut:, :] for x in (q, k, v)), decay=decay[..., cut:], chunk=4, state=state,
        **options,
    )  # fmt: skip
    both = np.concatenate([first, second], axis=-2)
    np.testing.assert_allclose(both, whole, rtol=1e-12, atol=1e-13)
    for one, other in zip(end, last, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-13)


def test_without_decay_it_is_attention_without_the_softmax(make: Make) -> None:
    q, k, v = make(Hk=4, Lq=10, Lk=10, dtype="float64")
    scores = q @ np.swapaxes(k, -1, -2)
    out = linear_attention(q, k, v, chunk=4)
    np.testing.assert_allclose(out, np.tril(scores) @ v, rtol=1e-12, atol=1e-12)
    out = linear_attention(q, k[..., :7, :], v[..., :7, :], causal=False)
    np.testing.assert_allclose(out, scores[..., :7] @ v[..., :7, :], rtol=1e-12, atol=1e-12)
    phi, keys = elu_features(q), elu_features(k)
    p = phi @ np.swapaxes(keys, -1, -2)
    out = linear_attention(q, k, v, causal=False, feature_map="elu")
    np.testing.assert_allclose(out, p @ v / p.sum(-1, keepdims=True), rtol=1e-12, atol=1e-12)


def test_keys_for_all_queries_may_come_in_parts(make: Make) -> None:
    q, k, v = make(Lq=3, Lk=10, dtype="float64")
    options: dict[str, Any] = {"causal": False, "feature_map": "elu"}
    _, state = linear_attention(q, k[..., :6, :], v[..., :6, :], return_state=True, **options)
    assert state.S.shape == (2, 2, 8, 5)
    out = linear_attention(q, k[..., 6:, :], v[..., 6:, :], state=state, **options)
    np.testing.assert_allclose(out, linear_attention(q, k, v, **options), rtol=1e-12)


@pytest.mark.parametrize("kind", DECAYS)
def test_a_later_token_changes_nothing_before_it(kind: str, make: Make, decays: Decays) -> None:
    """To the bit, within its chunk and beyond."""
    q, k, v = make(Lq=12, Lk=12)
    given = decays(kind, q)
    out = linear_attention(q, k, v, chunk=5, **given)
    for t in (1, 4, 5, 11):
        other = [np.concatenate([x[..., :t, :], -7 * x[..., t:, :]], axis=-2) for x in (q, k, v)]
        again = linear_attention(*other, chunk=5, **given)
        same(again[..., :t, :], out[..., :t, :])
        assert not np.array_equal(again[..., t, :], out[..., t, :])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("chunk", [1, 5, 64])
@pytest.mark.parametrize("kind", DECAYS)
def test_what_is_no_number_spoils_no_earlier_step(
    kind: str, chunk: int, bad: float, make: Make, decays: Decays
) -> None:
    """Padding at the end may hold anything; from there on nothing is a number."""
    given = make(Lq=12, Lk=12)
    options = {"feature_map": "elu", "chunk": chunk, **decays(kind, given[0])}
    out = linear_attention(*given, **options)
    for n, operand in enumerate(given):
        spoilt = operand.copy()
        spoilt[..., 7, :] = bad
        again, state = linear_attention(
            *given[:n], spoilt, *given[n + 1 :], return_state=True, **options
        )
        same(again[..., :7, :], out[..., :7, :])
        assert not np.isfinite(again[..., 7, :]).any() or (n == 0 and bad == np.inf)
        assert np.isfinite(again[..., 8:, :]).all() == (n == 0)
        assert np.isfinite(state.S).all() == (n == 0)


def test_a_step_may_forget_everything(make: Make, decays: Decays) -> None:
    """log_decay=-inf starts a sequence anew: packed sequences are those sequences."""
    q, k, v = make(Lq=11, Lk=11, dtype="float64")
    log = np.log(decays("steps", q)["decay"])
    log[..., [3, 4, 8]] = -np.inf
    for chunk in (1, 2, 4, 11):
        (out, end), pullback = linear_attention_vjp(
            q, k, v, log_decay=log, chunk=chunk, return_state=True
        )
        for a, b in ((0, 3), (3, 4), (4, 8), (8, 11)):
            alone, last = linear_attention(
                *(x[..., a:b, :] for x in (q, k, v)), log_decay=log[..., a:b], return_state=True
            )
            np.testing.assert_allclose(out[..., a:b, :], alone, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(end.S, last.S, rtol=1e-12, atol=1e-12)
        grads = pullback(np.ones_like(out), end)
        assert all(np.all(np.isfinite(x)) for x in (grads.q, grads.k, grads.v, grads.decay))
        same(grads.decay[..., [3, 4, 8]], 0)


@pytest.mark.parametrize("decay", [1e-38, 1e-3, 1 - 2.0**-24, 1.0])
def test_no_decay_overflows_or_vanishes_too_early(decay: float, make: Make) -> None:
    q, k, v = make(Lq=70, Lk=70)
    varying = np.full(q.shape[:-1], decay, np.float32)
    for given in (decay, varying[0, :, 0], varying):
        expected = linear_reference(q, k, v, decay=varying, dtype="float32")
        within(linear_attention(q, k, v, decay=given), expected)
    forgets = linear_attention(q, k, v, log_decay=-np.inf)
    within(forgets, linear_reference(q, k, v, decay=1e-300, dtype="float32"))


# Shapes and dtypes ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", DECAYS)
def test_query_heads_of_a_group_are_consecutive(kind: str, make: Make, decays: Decays) -> None:
    """S1.3; the decay is the query head's, and so is the state then."""
    q, k, v = make(Hq=6, Hk=2, dtype="float64")
    given = decays(kind, q)
    out, state = linear_attention(q, k, v, chunk=4, return_state=True, **given)
    assert state.S.shape == (2, 6 if kind in ("heads", "steps") else 2, 8, 5)
    for h in range(6):
        own = dict(given)
        if kind in ("heads", "steps"):
            own["decay"] = given["decay"][[h]] if kind == "heads" else given["decay"][:, [h]]
        alone = linear_attention(q[:, [h]], k[:, [h // 3]], v[:, [h // 3]], chunk=4, **own)
        np.testing.assert_allclose(out[:, [h]], alone, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("B", [(), (2,), (2, 3)], ids=str)
def test_batch_axes_and_layouts(B: tuple[int, ...], make: Make, decays: Decays) -> None:
    """S1.1: decays a step have the axes of lse, states have theirs in either layout."""
    q, k, v = make(B=B, dtype="float64")
    decay = decays("steps", q)["decay"]
    options: dict[str, Any] = {"feature_map": "elu", "return_state": True, "chunk": 4}
    out, state = linear_attention(q, k, v, decay=decay, **options)
    within(out, linear_reference(q, k, v, decay=decay, features=elu_features, normalize=True))
    assert (state.S.shape, state.z.shape) == ((*B, 4, 8, 5), (*B, 4, 8))
    swapped = [np.swapaxes(x, -3, -2) for x in (q, k, v)]
    (other, end), pullback = linear_attention_vjp(
        *swapped, decay=np.swapaxes(decay, -2, -1), layout="bshd", state=state, **options
    )
    (again, last), straight = linear_attention_vjp(q, k, v, decay=decay, state=state, **options)
    same(np.swapaxes(other, -3, -2), again)
    same(end.S, last.S)
    d = np.ones_like(out)
    grads, expected = pullback(np.swapaxes(d, -3, -2), last), straight(d, last)
    same(np.swapaxes(grads.k, -3, -2), expected.k)
    same(np.swapaxes(grads.decay, -2, -1), expected.decay)
    same(grads.state.z, expected.state.z)


def test_two_axes_are_one_head_without_a_batch(make: Make, decays: Decays) -> None:
    q, k, v = make(Hq=1, Hk=1, B=(1,), dtype="float64")
    decay = decays("steps", q)["decay"]
    flat = (q[0, 0], k[0, 0], v[0, 0])
    out, state = linear_attention(*flat, decay=decay[0, 0], feature_map="elu", return_state=True)
    whole, last = linear_attention(q, k, v, decay=decay, feature_map="elu", return_state=True)
    same(out, whole[0, 0])
    same(state.S, last.S[0, 0])
    same(state.z, last.z[0, 0])
    for one in (decay[0, 0], decay[0, :, 0]):
        _, pullback = linear_attention_vjp(*flat, decay=one, state=LinearState(state.S))
        grads = pullback(out)
        assert (grads.q.shape, grads.decay.shape) == (flat[0].shape, one.shape)
        assert grads.state.S.shape == state.S.shape


@pytest.mark.parametrize("kind", DECAYS)
@pytest.mark.parametrize(
    "sizes", [{"Lq": 0, "Lk": 0}, {"Lq": 1, "Lk": 1}, {"B": (0,)}, {"D": 1, "Dv": 1}], ids=str
)
def test_sizes_of_0_and_1_are_legal(
    sizes: dict[str, Any], kind: str, make: Make, decays: Decays
) -> None:
    """S1.2: nothing to see leaves the state as it is, and its gradient is the cotangent."""
    q, k, v = make(**sizes, dtype="float64")
    given = decays(kind, q)
    (out, state), pullback = linear_attention_vjp(q, k, v, return_state=True, **given)
    within(out, linear_reference(q, k, v, **given))
    grads = pullback(out, state)
    assert [x.shape for x in grads[:3]] == [x.shape for x in (q, k, v)]
    start = LinearState(np.ones_like(state.S))
    (out, end), pullback = linear_attention_vjp(q, k, v, return_state=True, state=start, **given)
    grad = pullback(None, end).state.S
    assert not np.shares_memory(end.S, start.S)
    assert not np.shares_memory(grad, end.S)
    if out.shape[-2] == 0:
        same(end.S, start.S)
        same(grad, end.S)


def test_queries_that_see_no_key_get_0(make: Make) -> None:
    """As in attention (S3.7), and so where every feature is 0."""
    q, k, v = make(Lk=0)
    out, pullback = linear_attention_vjp(q, k, v, causal=False, feature_map="elu")
    same(out, 0)
    same(pullback(np.ones_like(out)).q, 0)
    q, k, v = make()
    out, pullback = linear_attention_vjp(0 * q, k, v, normalize=True)
    same(out, 0)
    same(pullback(np.ones_like(out)).k, 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_out_in_the_dtype_of_v_and_sums_in_float32_at_least(
    dtype: str, make: Make, decays: Decays
) -> None:
    """S5.1, S5.2: the bound has no room for sums in half precision."""
    q, k, v = make(Lq=150, Lk=150, dtype=dtype)
    given = decays("steps", q, low=0.9)
    (out, state), pullback = linear_attention_vjp(
        q, k, v, feature_map="elu", return_state=True, **given
    )
    expected = linear_reference(
        q, k, v, features=elu_features, normalize=True, dtype=dtype, **given
    )
    within(out, expected)
    wide = "float64" if dtype == "float64" else "float32"
    assert (out.dtype, state.S.dtype, state.z.dtype) == (q.dtype, wide, wide)
    grads = pullback(out, state)
    assert all(x.dtype == q.dtype for x in grads[:3])
    assert grads.decay.dtype == given["decay"].dtype


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", DECAYS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("L", [1, 63, 64, 65, 200])
def test_every_combination(
    dtype: str, kind: str, name: str, L: int, make: Make, decays: Decays, maps: Maps
) -> None:
    q, k, v = make(Lq=L, Lk=L, dtype=dtype)
    ours, theirs = maps(name)
    for low in (0.01, 0.99):
        given = decays(kind, q, low)
        expected = linear_reference(q, k, v, dtype=dtype, **given, **theirs)
        for chunk in (1, 16, 64, 200):
            within(linear_attention(q, k, v, chunk=chunk, **given, **ours), expected)
