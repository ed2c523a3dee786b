"""One framework's arrays, another's backend: named by the caller, right, and never shared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import array_api_strict as strict
import numpy as np
import pytest

import attnx
from attnx import Causal, Dense, Lengths, Predicate, Prefix, Segments, Starts, Window
from attnx.errors import ArgumentTypeError, UnsupportedError
from attnx_conformance.oracle import Reference, reference

Make = Callable[..., tuple[Any, Any, Any]]
Agree = Callable[..., Reference]
LoopMaker = Callable[..., Any]
Loop = type(strict.zeros(1))
f32 = np.float32

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {}, "causal": {"causal": True}, "lengths": {"mask": Lengths([2, 5], 4)},
    "arrays in a tree": {
        "mask": (Causal() | Prefix(np.array([1, 2]))) & ~Starts(np.array([6, 5], np.int8))
    },
    "segments": {"mask": Segments(np.arange(6) // 2, [0, 0, 1, 1, 2, -1])},
    "positions": {"mask": Window(2, 1, q_pos=np.arange(6), kv_pos=np.arange(6)[::-1])},
    "dense": {"mask": Dense(np.tri(6, dtype=bool)[None, None, ::-1])},
    "predicate": {"mask": Predicate(lambda b, h, i, j: (i + j + b + h) % 2 == 0)},
    "bias": {"bias": np.linspace(-1, 1, 36, dtype=f32).reshape(1, 1, 6, 6)[..., ::-1]},
    "hiding bias": {"bias": np.where(np.tri(6) > 0, 0, -np.inf).astype(f32)},
    "sinks": {"sinks": np.array([0.5, -1, 2, 0], f32)}, "softcap": {"softcap": 2.0, "scale": -0.7},
    "bshd": {"layout": "bshd", "causal": True},
}  # fmt: skip


@pytest.fixture
def there(loop: LoopMaker) -> Any:
    return loop()


@pytest.mark.parametrize("name", OPTIONS)
def test_naming_another_frameworks_backend_gives_the_right_answer(
    name: str, there: Any, make: Make, agree: Agree
) -> None:
    """Forward, lse and every gradient; masks, bias and sinks travel too."""
    options = OPTIONS[name]
    shape = {"Hq": 6, "Hk": 6} if "layout" in options else {}
    agree(*make(**shape), backend="loop", **options)
    assert "adopt" in there.lane.log
    assert "wait" in there.lane.log


@pytest.mark.parametrize("name", OPTIONS)
def test_its_arrays_may_be_computed_here_as_well(name: str, there: Any, make: Make) -> None:
    """S1.5: the result is in the caller's framework, whoever computed it."""
    options = dict(OPTIONS[name])
    q, k, v = make(**({"Hq": 6, "Hk": 6} if "layout" in options else {}))
    expected = reference(q, k, v, d_out=np.ones_like(q[..., :5]), **options)
    moved = {
        key: strict.asarray(value.copy()) if isinstance(value, np.ndarray) else value
        for key, value in options.items()
    }
    if "mask" in moved:
        moved["mask"] = attnx.masks.map_leaves(
            moved["mask"],
            lambda node, field, leaf: (
                strict.asarray(leaf.copy()) if isinstance(leaf, np.ndarray) else leaf
            ),
        )
    arrays = [strict.asarray(array) for array in (q, k, v)]
    for backend in ("numpy", None):
        (out, lse), pullback = attnx.attention_vjp(
            *arrays, return_lse=True, backend=backend, **moved
        )
        assert type(out) is type(lse) is Loop
        grads = pullback(strict.ones_like(out))
        assert all(type(g) is Loop for g in grads if g is not None)
        for got, wanted in ((out, expected.out), (lse, expected.lse), (grads.q, expected.dq)):
            np.testing.assert_allclose(np.from_dlpack(got), wanted, rtol=1e-4, atol=1e-5)


def test_nothing_leaves_its_framework_unasked(there: Any, make: Make) -> None:
    q, k, v = make()
    assert attnx.explain(q, k, v).choice == "numpy"
    attnx.attention(q, k, v)
    assert there.lane.log == []
    arrays = [strict.asarray(array) for array in (q, k, v)]
    said = attnx.explain(*arrays)
    assert (said.choice, said.exchange) == ("loop", None)
    assert type(attnx.attention(*arrays)) is Loop
    assert there.lane.log == []


def test_the_explanation_says_how_arrays_travel(there: Any, make: Make) -> None:
    said = attnx.explain(*make(), backend="loop")
    assert (said.choice, said.route) == ("loop", "array tiles")
    assert said.exchange == "numpy to loop and back, DLPack where memory can be shared"
    (row,) = [c for c in said.candidates if c.name == "loop"]
    assert row.note == f"{said.route}; {said.exchange}"
    with attnx.use_backend("loop"):
        assert attnx.explain(*make()).choice == "loop"


def test_a_result_is_the_callers_own(there: Any, make: Make) -> None:
    """Writable, in memory that no other framework can reach, and the inputs untouched."""
    q, k, v = make()
    before = [array.copy() for array in (q, k, v)]
    (out, lse), pullback = attnx.attention_vjp(q, k, v, return_lse=True, backend="loop")
    results = [out, lse, *pullback(out, lse)[:3]]
    results.append(attnx.attention_weights(q, k, backend="loop"))
    for result in results:
        assert type(result) is np.ndarray
        assert result.flags.writeable
        assert result.flags.owndata or result.base.flags.owndata
        result += 1
    for array, kept in zip((q, k, v), before, strict=True):
        assert np.array_equal(array, kept)


def test_any_strides_and_read_only_arrays_may_travel(
    there: Any, make: Make, agree: Agree, rng: np.random.Generator
) -> None:
    """S1.4."""
    q, k, v = make()
    for array in (q, k, v):
        array.flags.writeable = False
    agree(q, k, v, backend="loop")
    agree(q[:, :, ::-1], k[..., ::-1], v[::-1], backend="loop")
    agree(np.asfortranarray(q), np.asfortranarray(k), v.swapaxes(-1, -2).copy().swapaxes(-1, -2),
          backend="loop")  # fmt: skip
    still = np.broadcast_to(rng.standard_normal(8).astype(f32), k.shape)
    agree(q, still, v, backend="loop", bias=np.broadcast_to(f32(0.5), (6, 6)))


def test_weights_and_merging_cross_over(there: Any, make: Make) -> None:
    q, k, v = make()
    here = attnx.attention_weights(q, k, causal=True)
    over = attnx.attention_weights(q, k, causal=True, backend="loop")
    np.testing.assert_allclose(over, here, rtol=1e-5, atol=1e-6)
    moved = [strict.asarray(array) for array in (q, k, v)]
    out, lse = attnx.merge([attnx.attention(*moved, return_lse=True)] * 2)
    assert type(out) is type(lse) is Loop
    np.testing.assert_allclose(np.from_dlpack(out), attnx.attention(q, k, v), rtol=1e-5, atol=1e-6)


def test_what_the_other_side_cannot_do_is_refused(there: Any, make: Make) -> None:
    q, k, v = make(dtype="float16")
    with pytest.raises(UnsupportedError, match="backend 'loop' cannot do this call: dtype=float16"):
        attnx.attention(q, k, v, backend="loop")
    with attnx.use_backend("loop", fallback="allow"):
        assert attnx.attention(q, k, v).dtype == np.float16
    assert there.lane.log == []


# Byte order -------------------------------------------------------------------------------------


def swapped(array: Any) -> Any:
    """The same numbers in the byte order that is not the machine's."""
    return array.astype(array.dtype.newbyteorder("S"))


BACKENDS = [None, "numpy", "loop"]
REFUSED = {
    "q, k and v": lambda q, k, v: attnx.attention(swapped(q), swapped(k), swapped(v)),
    "k": lambda q, k, v: attnx.attention(q, swapped(k), v),
    "weights": lambda q, k, v: attnx.attention_weights(swapped(q), k),
    "plan": lambda q, k, v: attnx.plan(q, k, v)(swapped(q), swapped(k), swapped(v)),
    "bias": lambda q, k, v: attnx.attention(q, k, v, bias=swapped(np.ones((6, 6), f32))),
    "sinks": lambda q, k, v: attnx.attention(q, k, v, sinks=swapped(np.ones(4, f32))),
    "cotangent": lambda q, k, v: attnx.attention_vjp(q, k, v)[1](swapped(np.ones_like(q[..., :5]))),
    "merge": lambda q, k, v: attnx.merge([(swapped(v), swapped(v[..., 0]))]),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", REFUSED)
def test_numbers_in_another_byte_order_are_refused(
    name: str, backend: str | None, there: Any, make: Make
) -> None:
    """S5.1: nothing is cast silently, nor read as other numbers by a plan for the machine's own."""
    q, k, v = make()
    attnx.attention(q, k, v, backend=backend)
    with (
        attnx.use_backend(backend or "numpy"),
        pytest.raises(ArgumentTypeError, match=r"expected .*, got float32 \(swapped bytes\)"),
    ):
        REFUSED[name](q, k, v)


@pytest.mark.parametrize("kind", ["i2", "u4", "i8", "u8"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_integers_of_a_mask_mean_the_same_in_any_byte_order(
    backend: str | None, kind: str, there: Any, make: Make
) -> None:
    """S3.6: they are converted by value to the framework's index type, whatever they were."""
    q, k, v = make()
    counts, ids = np.array([2, 5], kind), np.array([0, 0, 1, 1, 2, 2], kind)

    def found(form: Callable[[Any], Any]) -> Any:
        mask = Lengths(form(counts)) & Starts(form(counts // 2)) & (
            Segments(form(ids), form(ids)) | Window(1, 1, q_pos=form(ids), kv_pos=form(ids))
        )  # fmt: skip
        (out, _), pullback = attnx.attention_vjp(
            q, k, v, mask=mask, return_lse=True, backend=backend
        )
        return out, *pullback(out)[:3]

    for got, expected in zip(found(swapped), found(np.asarray), strict=True):
        assert np.array_equal(got, expected)


# Devices ----------------------------------------------------------------------------------------


def test_a_move_between_devices_must_be_allowed(loop: LoopMaker, make: Make, agree: Agree) -> None:
    """Design section 3: `use_backend(..., transfer=True)`."""
    there = loop("cuda:0")
    q, k, v = make()
    with pytest.raises(UnsupportedError) as caught:
        attnx.attention(q, k, v, backend="loop")
    assert str(caught.value.reasons[0]) == (
        "device=cpu (has cuda); use_backend(..., transfer=True) lets arrays move between devices"
    )
    assert there.lane.log == []
    with attnx.use_backend("loop", transfer=True):
        assert attnx.explain(q, k, v).exchange == "moved from cpu to cuda:0 and back"
        agree(q, k, v, causal=True, mask=Lengths(np.array([3, 6])), sinks=np.zeros(4, f32))
    assert {"from_numpy", "to_numpy"} <= set(there.lane.log)
    assert "adopt" not in there.lane.log
    with pytest.raises(UnsupportedError):
        attnx.attention(q, k, v, backend="loop")


def test_arrays_on_a_device_the_named_backend_lacks_do_not_move_unasked(
    loop: LoopMaker, make: Make
) -> None:
    there = loop("cuda:0")
    moved = [strict.asarray(array) for array in make()]
    assert type(attnx.attention(*moved)) is Loop
    with pytest.raises(UnsupportedError, match=r"device=cuda:0 \(has cpu\)"):
        attnx.attention(*moved, backend="numpy")
    with attnx.use_backend("numpy", transfer=True):
        assert type(attnx.attention(*moved)) is Loop
    assert there.lane.log == ["to_numpy"] * 3 + ["from_numpy"]


def test_a_backend_without_a_device_is_refused_with_that_reason(
    loop: LoopMaker, make: Make
) -> None:
    there = loop()
    there.devices = lambda: ()
    with pytest.raises(UnsupportedError, match=r"device=cpu \(has no device here\)"):
        attnx.attention(*make(), backend="loop")
    (info,) = [info for info in attnx.backends() if info.name == "loop"]
    assert (info.status, info.reason) == ("unavailable", "installed, but no device here")
    moved = [strict.asarray(array) for array in make()]
    with pytest.raises(UnsupportedError, match="no device here"):
        attnx.attention(*moved)


# Gradients and traces ---------------------------------------------------------------------------


def test_a_recorded_gradient_is_never_detached_silently(there: Any, make: Make) -> None:
    """A lane without a bridge refuses, and says what to do."""
    there.lane.wants_gradient = lambda *arrays: any(a is not None for a in arrays)
    moved = [strict.asarray(array) for array in make()]
    with pytest.raises(UnsupportedError) as caught:
        attnx.attention(*moved, backend="numpy")
    assert str(caught.value.reasons[0]) == (
        "gradient=recorded by loop (has attention_vjp through numpy); the lane of loop carries no "
        "gradient to another framework: use attention_vjp, or detach q, k, v, bias and sinks"
    )
    assert caught.value.alternatives[:1] == ("loop",)
    assert type(attnx.attention(*moved)) is Loop
    out, pullback = attnx.attention_vjp(*moved, backend="numpy")
    assert type(pullback(out).q) is Loop
    with pytest.raises(UnsupportedError, match="attention_weights has no gradient"):
        attnx.attention_weights(*moved[:2])


def test_a_trace_is_never_read(there: Any, make: Make) -> None:
    there.lane.traced = lambda array: True
    moved = [strict.asarray(array) for array in make()]
    with pytest.raises(
        UnsupportedError, match=r"tracing=by loop \(has concrete arrays through numpy\)"
    ):
        attnx.attention(*moved, backend="numpy")
    assert type(attnx.attention(*moved)) is Loop
