"""One function as a backend: what it gets, what is done for it, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.wrapped import CALLS, EMPTY_ROW, EVERY, HALF, SINKS, close, kernels, made

import attnx
from attnx import plugin
from attnx.errors import ArgumentError, ArgumentTypeError, PluginError, UnsupportedError
from attnx_conformance import check

LN2 = float(np.log(2.0))


@pytest.mark.parametrize("variant", [{}, {"layout": "bshd"}, {"lse_base": 2}], ids=str)
@pytest.mark.parametrize("options", CALLS.values(), ids=list(CALLS))
def test_a_function_and_its_backward_say_what_the_library_says(
    make: Any, rng: Any, options: dict[str, Any], variant: dict[str, Any]
) -> None:
    """out, lse and every gradient, whatever the function's layout and base."""
    kernel, backward = kernels("numpy")
    unit = LN2 if "lse_base" in variant else 1.0

    def turned(x: Any) -> Any:
        return x if x is None or "layout" not in variant else x.swapaxes(1, 2)

    def fn(q: Any, k: Any, v: Any, **given: Any) -> Any:
        answer = kernel(turned(q), turned(k), turned(v), **given)
        return (turned(answer[0]), turned(answer[1] / np.float32(unit)))

    def back(*arrays: Any, **given: Any) -> Any:
        q, k, v, out, lse, d_out, d_lse = map(turned, arrays)
        grads = backward(q, k, v, out, lse * np.float32(unit), d_out, d_lse / unit, **given)
        return (*map(turned, grads[:3]), *grads[3:])

    def only_out(*arrays: Any, return_lse: bool = False, **given: Any) -> Any:
        return fn(*arrays, **given, return_lse=True)[slice(None) if return_lse else 0]

    mine = plugin.from_function(only_out, name="mine", supports=EVERY, backward=back, **variant)
    q, k, v = make(Lq=5, Lk=9)
    d_out, d_lse = (rng.standard_normal(s, dtype=np.float32) for s in ((2, 4, 5, 5), (2, 4, 5)))
    close(*(attnx.attention(q, k, v, **options, backend=b) for b in (mine, "numpy")))
    answers = [
        attnx.attention_vjp(q, k, v, **options, return_lse=True, backend=b) for b in (mine, "numpy")
    ]
    for got, expected in zip(*(answer for answer, _ in answers), strict=True):
        close(got, expected)
    for got, expected in zip(*(pull(d_out, d_lse) for _, pull in answers), strict=True):
        assert (got is None) == (expected is None)
        if got is not None:
            assert got.shape == expected.shape
            close(got, expected)


def test_the_suite_finds_the_backend_right() -> None:
    """A backend object is registered for as long as it is examined, and really does the work."""
    cases = ("causal-bottom-right-wide", "gradient-group-decode", "bias-one-head")
    report = check(made(), cases=cases)
    assert {result.verdict for result in report.results} <= {"passed", "refused"}
    assert report.footer["route"]["calls"]["apply"] > 0
    assert "mine" not in [info.name for info in attnx.backends()]


def test_it_is_registered_by_a_spec() -> None:
    """And then found by its name, with the route in what `explain` says."""

    class Plugin:
        @plugin.hookimpl
        def attnx_backends(self) -> list[plugin.BackendSpec]:
            return [plugin.BackendSpec("wrapped", load=made, framework="numpy")]

    q = np.ones((1, 2, 3, 4), np.float32)
    attnx.register(Plugin(), "wrapped-plugin")
    try:
        assert attnx.attention(q, q, q, backend="wrapped").shape == q.shape
        assert attnx.explain(q, q, q, backend="wrapped").route == "function my_kernel"
        told = attnx.explain(q, q, q, backend="wrapped", gradient=True).route
        assert told == "function my_kernel, backward my_backward"
    finally:
        attnx.unregister("wrapped-plugin")


def test_axes_without_length_never_reach_it() -> None:
    """B, Lq or Lk of 0 have an answer that needs no function (S1.2)."""

    def never(q: Any, k: Any, v: Any, *, scale: float, return_lse: bool = False) -> Any:
        raise AssertionError("called")

    mine = plugin.from_function(never, name="mine", supports=("scale", "lse"))
    for shape, keys in (((0, 2, 3, 4), 3), ((1, 2, 0, 4), 3), ((1, 2, 3, 4), 0)):
        q, k = np.ones(shape, np.float32), np.ones((shape[0], 2, keys, 4), np.float32)
        out, lse = attnx.attention(q, k, k, return_lse=True, backend=mine)
        assert out.shape == shape
        assert not out.any()
        assert (lse == -np.inf).all()


def test_a_scale_that_it_does_not_take_is_refused_in_the_suite_too() -> None:
    """Alike where the function is examined and where the backend is."""
    kernel, _ = kernels("numpy")

    def fixed(q: Any, k: Any, v: Any) -> Any:
        return kernel(q, k, v, scale=q.shape[-1] ** -0.5)

    mine = plugin.from_function(fixed, name="mine", supports="gqa")
    said = {r.case: r.verdict for r in check(mine, cases=("scale-one", "self")).results}
    assert said == {"scale-one": "refused", "self": "passed"}
    alone = check(fixed, supports="gqa", cases=("scale-one", "self"))
    assert {r.verdict for r in alone.results} == {"not-applicable", "passed"}


def test_the_gradient_of_a_bias_is_rounded_after_it_is_summed() -> None:
    """The sum of many rounded numbers would be another one: here 505.75."""
    ones = np.ones((1, 1, 4095, 1), np.float32)

    def kernel(q: Any, k: Any, v: Any, *, bias: Any = None, return_lse: bool = False) -> Any:
        return (v[:, :, :1] + 0 * q, 0 * q[..., 0].astype("f4")) if return_lse else v + 0 * q

    mine = plugin.from_function(
        kernel, name="mine", supports=("bias", "lse"), dtypes="float16",
        backward=lambda q, k, v, *rest, bias=None: (q, k, v, np.float32(0.1234567) * ones),
    )  # fmt: skip
    q, k = ones.astype("f2"), np.ones((1, 1, 1, 1), np.float16)
    out, pull = attnx.attention_vjp(q, k, k, bias=k, backend=mine)
    assert pull(out).bias == 505.5


def test_what_nobody_sees_may_hold_anything(make: Any) -> None:
    """Keys that no row sees, and rows that see no key, come to the function as zeros (S4.1)."""
    q, k, v = make(Lq=5, Lk=9)
    mask = EMPTY_ROW & (np.arange(9) != 4)
    want, _ = attnx.attention_vjp(q, k, v, mask=mask, backend="numpy")
    k[:, :, 4] = v[:, :, 4] = q[:, :, 2] = np.nan
    got, pull = attnx.attention_vjp(q, k, v, mask=mask, backend=made())
    close(got, want)
    d_out = np.ones_like(got)
    d_out[:, :, 2] = np.nan
    grads = pull(d_out)
    assert all(np.isfinite(x).all() for x in (grads.q, grads.k, grads.v))
    assert not grads.k[:, :, 4].any()


def test_weights_come_from_the_function(make: Any) -> None:
    """P is what it does to one-hot values, D keys at a time (S2.5)."""
    q, k, _ = make(Lq=5, Lk=19)
    mask = np.arange(19) % 4 > 0
    args = {"mask": np.broadcast_to(mask, (5, 19)), "sinks": SINKS}
    close(*(attnx.attention_weights(q, k, **args, backend=b) for b in (made(), "numpy")))


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "mask": ({"supports": "causal"}, {"mask": HALF}, "mask=dense (has causal)"),
    "grouped heads": ({"supports": "mask"}, {}, "grouped heads=given (has none)"),
    "scale": ({"supports": "gqa"}, {"scale": 0.3}, "scale=given (has 1/sqrt(D))"),
    "lse": ({"supports": "gqa"}, {"return_lse": True}, "return_lse=given (has none)"),
    "head size": ({"max_head_size": 4}, {}, "head size=D=8, Dv=5 (has at most 4)"),
}


@pytest.mark.parametrize(("declared", "options", "told"), REFUSED.values(), ids=list(REFUSED))
def test_what_is_not_declared_is_refused(
    make: Any, declared: dict[str, Any], options: dict[str, Any], told: str
) -> None:
    """Before the function is called, with the reason (S8.2)."""

    def never(q: Any, k: Any, v: Any, **options: Any) -> Any:
        raise AssertionError("called")

    mine = plugin.from_function(never, name="mine", **declared)
    with pytest.raises(UnsupportedError) as error:
        attnx.attention(*make(Lq=5, Lk=9), **options, backend=mine)
    assert told in str(error.value)


# What comes back, and what is said ----------------------------------------------------------------


WRONG: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "shape": (lambda q, k, v: q[..., :1], {}, "out: expected shape (2, 4, 6, 8), got (2, 4, 6, 1)"),
    "dtype": (lambda q, k, v: q.astype("f2"), {}, "out: expected float32 or float64, got float16"),
    "kind": (lambda q, k, v: [1], {}, "out: expected an array of numpy, got list"),
    "no pair": (
        lambda q, k, v, return_lse=False: q, {"return_lse": True},
        "return_lse=True: expected a pair (out, lse), got ndarray",
    ),
    "lse": (
        lambda q, k, v, return_lse=False: (q, q), {"return_lse": True},
        "lse: expected shape (2, 4, 6), got (2, 4, 6, 8)",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("fn", "options", "told"), WRONG.values(), ids=list(WRONG))
def test_a_wrong_result_is_told_with_the_name(
    make: Any, fn: Callable[..., Any], options: dict[str, Any], told: str
) -> None:
    """Shape, dtype and number of results, before anybody builds on them."""
    fn.__name__ = "careless"
    supports = ("gqa", "lse") if options else ("gqa",)
    mine = plugin.from_function(fn, name="mine", supports=supports)
    q, k, v = make(Dv=8)
    with pytest.raises(PluginError) as error:
        attnx.attention(q, k, v, **options, backend=mine)
    assert str(error.value) == f"function careless of backend 'mine': {told}"


@pytest.mark.parametrize(
    ("grads", "told"),
    [
        (lambda q, k, v: (q, k), "backward: expected (dq, dk, dv), got 2"),
        (lambda q, k, v: (q, q, v), "dk: expected shape (2, 2, 6, 8), got (2, 4, 6, 8)"),
    ],
    ids=["too few", "shape"],
)
def test_wrong_gradients_are_told(make: Any, grads: Any, told: str) -> None:
    """The gradient that is wrong, by its name."""
    kernel, _ = kernels("numpy")
    mine = plugin.from_function(
        kernel, name="mine", supports=("lse", "scale", "gqa"),
        backward=lambda q, k, v, *rest, scale: grads(q, k, v),
    )  # fmt: skip
    out, pull = attnx.attention_vjp(*make(), backend=mine)
    with pytest.raises(PluginError) as error:
        pull(out)
    assert told in str(error.value)


def test_a_wider_result_is_rounded_once(make: Any) -> None:
    """float64 for float32 inputs, and float32 for float16's."""

    def kernel(q: Any, k: Any, v: Any) -> Any:
        return np.full((*q.shape[:-1], v.shape[-1]), 1 / 3, np.float64)

    mine = plugin.from_function(kernel, name="mine", supports="gqa", dtypes=("float32", "float16"))
    for dtype in ("float32", "float16"):
        out = attnx.attention(*make(dtype=dtype), backend=mine)
        assert out.dtype == dtype
        assert (out == np.float64(1 / 3).astype(dtype)).all()


UNMADE: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "word": ({"supports": "masks"}, ArgumentError, "supports: unknown masks; known: alibi, bias,"),
    "call": ({"supports": "sinks"}, ArgumentError, r"called as fn\(q, k, v, sinks=\.\.\.\)"),
    "layout": ({"layout": "sbhd"}, ArgumentError, "layout: expected one of 'bhsd', 'bshd'"),
    "base": ({"lse_base": 10}, ArgumentError, "lse_base: expected one of 'e', 2, got 10"),
    "isolation": ({"isolation": "none"}, ArgumentError, "isolation: expected one of 'full', 'uns"),
    "dtype": ({"dtypes": "int8"}, ArgumentError, "dtypes: expected one of 'float16', 'bfloat16'"),
    "gradients": ({"supports": "gradients"}, ArgumentError, "numpy has no differentiation of its"),
    "lse": ({"backward": lambda *a: a}, ArgumentError, 'backward: it starts from lse; add "lse"'),
    "backward": ({"backward": 3}, ArgumentTypeError, "backward: expected a function, got int"),
    "name": ({"name": 3}, ArgumentTypeError, "name: expected a text, got int"),
    "no name": ({"name": ""}, ArgumentError, "name: expected the backend's name"),
    "size": ({"max_head_size": "8"}, ArgumentTypeError, "max_head_size: expected an integer"),
    "capabilities": ({"capabilities": {}}, ArgumentTypeError, "capabilities: expected Capab"),
    "twice": (
        {"supports": "causal", "capabilities": plugin.Capabilities(frozenset({"float32"}))},
        ArgumentError, "supports: expected it in capabilities, which are given",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("given", "error", "told"), UNMADE.values(), ids=list(UNMADE))
def test_what_contradicts_itself_is_no_backend(
    given: dict[str, Any], error: type[Exception], told: str
) -> None:
    """It is an error when the backend is made, and not in some later call."""
    with pytest.raises(error, match=told):
        plugin.from_function(lambda q, k, v, causal=False: q, **{"name": "mine", **given})


def test_an_option_that_does_not_always_come_needs_a_default() -> None:
    """A plain call comes without a mask; a scale always comes."""

    def fn(q: Any, k: Any, v: Any, scale: float, mask: Any) -> Any:
        return q

    with pytest.raises(ArgumentError, match=r"as fn\(q, k, v, scale=\.\.\.\), .* argument: 'mask'"):
        plugin.from_function(fn, name="mine", supports=("mask", "scale"))


def test_a_whole_declaration_stands_for_the_words(make: Any) -> None:
    """`capabilities` say the same, and more: here that windows alone are taken, as arrays."""
    kernel, _ = kernels("numpy")
    declared = plugin.Capabilities(
        frozenset({"float32"}), masks=frozenset({"window"}), gradient=False, deterministic=True
    )
    mine = plugin.from_function(kernel, name="mine", capabilities=declared)
    q, k, v = make()
    window = attnx.Window(1, 1)
    close(*(attnx.attention(q, k, v, mask=window, backend=b) for b in (mine, "numpy")))
    with pytest.raises(UnsupportedError, match="mask=causal"):
        attnx.attention(q, k, v, causal=True, backend=mine)


def test_dropout_alibi_and_mask_objects_come_as_they_are(make: Any) -> None:
    """And positions stay what they were where causal alignment cuts rows or keys off."""
    seen: list[dict[str, Any]] = []

    def kernel(q: Any, k: Any, v: Any, **options: Any) -> Any:
        seen.append(options)
        shape = (*q.shape[:-1], v.shape[-1])
        return np.zeros(shape, np.float32)

    q, k, v = make(Lq=9, Lk=5)
    drop = attnx.Dropout(0.5, np.array([7, 1], np.uint32), (0, 0, 3, 8))
    mine = plugin.from_function(
        kernel, name="mine", supports=("causal", "dropout", "alibi", "gqa", "mask")
    )
    slopes = attnx.Alibi([1.0] * 4, "top_left")
    attnx.attention(q, k, v, causal="bottom_right", bias=slopes, dropout=drop, backend=mine)
    (got,) = seen
    assert got["causal"] is True  # 5 of the 9 rows are left
    assert got["dropout"] == attnx.Dropout(0.5, 7 + (1 << 32), (0, 0, 7, 8))
    assert got["bias"].q_pos.tolist() == [4, 5, 6, 7, 8]
    objects = plugin.from_function(kernel, name="mine", supports=("mask_objects", "gqa"))
    mask = attnx.Lengths(np.array([4, 2]))
    attnx.attention(q, k, v, causal="bottom_right", mask=mask, backend=objects)
    assert seen[1]["causal"] == "bottom_right"
    assert seen[1]["mask"].kv.tolist() == [4, 2]
