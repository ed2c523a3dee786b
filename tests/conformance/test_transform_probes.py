"""The probes of the profile transforms, on functions that a transform makes wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from attnx_conformance.probes import Probe, examine_probe, find
from attnx_conformance.probes.transforms import PROBES
from attnx_conformance.subject import BackendSubject, FunctionSubject

torch = pytest.importorskip("torch")

SUPPORTS = (
    "mask", "causal", "gradients", "compile", "vmap", "forward_mode", "higher_order", "gqa",
)  # fmt: skip


def visible(q: Any, k: Any, mask: Any, causal: Any) -> Any:
    """The mask and causality as one boolean array, or None."""
    if causal:
        tri = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
        mask = tri if mask is None else mask & tri
    return mask


def formula(q: Any, k: Any, v: Any, mask: Any = None, causal: Any = False, bias: Any = 0) -> Any:
    """S2 in a few lines: every transform of PyTorch's sees through them."""
    g = q.shape[-3] // k.shape[-3]
    mask = visible(q, k, mask, causal)
    if mask is not None:
        mask = mask.expand(*q.shape[:-1], k.shape[-2])
        # What no query sees counts as 0, and a query that sees nothing too (S4.1).
        seen = mask.unflatten(-3, (-1, g)).any(-3).any(-2)[..., None]
        k, v = torch.where(seen, k, 0.0), torch.where(seen, v, 0.0)
        q = torch.where(mask.any(-1)[..., None], q, 0.0)
    k, v = k.repeat_interleave(g, -3), v.repeat_interleave(g, -3)
    s = q @ k.mT / q.shape[-1] ** 0.5 + bias
    if mask is None:
        return s.softmax(-1) @ v
    p = torch.where(mask, s, torch.finfo(s.dtype).min).softmax(-1)
    return torch.where(mask, p, 0.0) @ v


def subject(fn: Callable[..., Any] = formula, **declared: bool) -> FunctionSubject:
    made = FunctionSubject(
        fn, framework="torch", dtypes=("float32", "float64"), supports=SUPPORTS, isolation="unseen"
    )
    made.capabilities = made.capabilities._replace(**declared)
    return made


BACKENDS_ALONE = ("compiled-choice", "autocast-of-inputs", "undeclared-transforms-raise")
MISSING = ("scanned-calls",)
SLOW = ("compiled-calls", "compiled-gradients", "compiled-at-other-lengths")


@pytest.mark.parametrize(
    "probe",
    [
        pytest.param(p, id=p.name, marks=[pytest.mark.sweep] if p.name in SLOW else [])
        for p in PROBES
    ],
)
def test_a_right_function_passes(probe: Probe) -> None:
    got = examine_probe(probe, subject(), "float64")
    unasked = probe.name in BACKENDS_ALONE + MISSING
    assert got.verdict == ("not-applicable" if unasked else "passed"), got.detail


# One fault for every probe


def rewritten(q: Any, k: Any, v: Any, mask: Any = None, causal: Any = False) -> Any:
    """A compiler's pattern that takes the call for one without its mask."""
    return formula(q, k, v, None if torch.compiler.is_compiling() else mask, causal)


def detached_when_compiled(q: Any, k: Any, v: Any, mask: Any = None, causal: Any = False) -> Any:
    """The compiled backward has no gradient of v."""
    return formula(q, k, v.detach() if torch.compiler.is_compiling() else v, mask, causal)


def first_length(q: Any, k: Any, v: Any, mask: Any = None, causal: Any = False) -> Any:
    """Compiled for 16 keys, whatever comes."""
    if torch.compiler.is_compiling():
        return formula(q, k[..., :16, :], v[..., :16, :], mask, causal)
    return formula(q, k, v, mask, causal)


class _Mapped(torch.autograd.Function):
    """Its rule for vmap takes the first entry's mask for all."""

    @staticmethod
    def forward(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return formula(q, k, v, mask)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:3])
        ctx.mask = inputs[3]

    @staticmethod
    def backward(ctx: Any, d_out: Any) -> Any:
        pull = torch.func.vjp(lambda *x: formula(*x, ctx.mask), *ctx.saved_tensors)[1]
        return *pull(d_out), None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        *arrays, mask = (
            x if d is None or x is None else x.movedim(d, 0)
            for x, d in zip(inputs, in_dims, strict=True)
        )
        first = mask if mask is None or in_dims[3] is None else mask[0]
        axes = tuple(None if d is None else 0 for d in in_dims[:3])
        return torch.func.vmap(lambda *x: formula(*x, first), axes)(*arrays), 0


def first_mask(q: Any, k: Any, v: Any, mask: Any = None, causal: Any = False) -> Any:
    return _Mapped.apply(q, k, v, visible(q, k, mask, causal))


class _Saved(torch.autograd.Function):
    """The backward is right and, in its own derivative, forgets that P depends on k."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, mask: Any) -> Any:
        ctx.save_for_backward(q, k, v)
        ctx.mask = mask
        return formula(q, k, v, mask)

    @staticmethod
    def backward(ctx: Any, d_out: Any) -> Any:
        q, k, v = ctx.saved_tensors
        pull = torch.func.vjp(lambda *x: formula(*x, ctx.mask), q, k.detach(), v)[1]
        return *pull(d_out), None


def saved(q: Any, k: Any, v: Any, mask: Any = None, causal: Any = False) -> Any:
    return _Saved.apply(q, k, v, visible(q, k, mask, causal))


def still_keys(q: Any, k: Any, v: Any, mask: Any = None, causal: Any = False) -> Any:
    """Forward mode and the gradient take keys for constants."""
    return formula(q, k.detach(), v, mask, causal)


class Counter:
    """Another answer at every second call, as from a generator whose state is not restored."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, q: Any, k: Any, v: Any, mask: Any = None, causal: Any = False) -> Any:
        self.calls += 1
        return formula(q * (1 + self.calls % 2), k, v, mask, causal)


def leaking(q: Any, k: Any, v: Any, mask: Any = None, causal: Any = False) -> Any:
    """Zeros of P meet NaN."""
    return formula(q, k, v, mask, causal) + 0 * v.sum()


WRONG: list[Any] = [
    pytest.param("compiled-calls", rewritten, "a mask, compiled: out", marks=pytest.mark.sweep),
    pytest.param(
        "compiled-gradients", detached_when_compiled, "gradients through a program: dv",
        marks=pytest.mark.sweep,
    ),
    ("compiled-at-other-lengths", first_length, "compiled, 17 tokens: out"),
    ("mapped-calls", first_mask, "a mask, entry 1 of a mapped axis: out"),
    ("mapped-gradients", first_mask, "a mask, gradients of entry 1: "),
    ("functional-gradients", still_keys, "a plain call, vjp: dk"),
    ("checkpointed-gradients", Counter(), "checkpointed"),
    ("forward-mode", still_keys, "the tangent of out"),
    ("second-derivatives", saved, "the second derivative is off"),
    ("hidden-under-transforms", leaking, "poison under vjp: out"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "fn", "told"), WRONG)
def test_a_function_that_a_transform_makes_wrong_fails(name: str, fn: Any, told: str) -> None:
    got = examine_probe(find(name), subject(fn), "float64")
    assert (got.verdict, told in got.detail) == ("failed", True), got.detail


# An `Alibi` beside the arrays


def slanted(q: Any, k: Any, v: Any, causal: Any = False, bias: Any = None) -> Any:
    """The formula, with what the slopes say."""
    return formula(q, k, v, None, causal, 0 if bias is None else slant(bias.slopes, q))


def slant(slopes: Any, q: Any) -> Any:
    at = torch.arange(q.shape[-2])
    return -slopes[..., None, None] * (at[:, None] - at).abs()


class _Slanted(torch.autograd.Function):
    """Its rule for vmap takes the first entry's slopes for all."""

    @staticmethod
    def forward(q: Any, k: Any, v: Any, slopes: Any) -> Any:
        return formula(q, k, v, None, True, slant(slopes, q))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: Any, q: Any, k: Any, v: Any, slopes: Any) -> Any:
        return formula(q, k, v, None, True, slant(slopes[0], q)), 0


def first_slopes(q: Any, k: Any, v: Any, causal: Any = False, bias: Any = None) -> Any:
    return formula(q, k, v, None, causal) if bias is None else _Slanted.apply(q, k, v, bias.slopes)


def still_beside_slopes(q: Any, k: Any, v: Any, causal: Any = False, bias: Any = None) -> Any:
    """Keys are constants where there are slopes, in forward mode and in every gradient."""
    return slanted(q, k if bias is None else k.detach() + 0 * k, v, causal, bias)


@pytest.mark.parametrize(
    ("name", "fn", "told"),
    [
        ("mapped-calls", first_slopes, "an Alibi, entry 1 of a mapped axis: out"),
        ("forward-mode", still_beside_slopes, "an Alibi, forward mode: the tangent of out"),
        ("second-derivatives", still_beside_slopes, "an Alibi: the second derivative is off"),
    ],
)
def test_an_alibi_goes_through_transforms(name: str, fn: Any, told: str) -> None:
    """Right slopes pass, and a transform that is wrong beside slopes alone is told."""
    supports = ("causal", "alibi", "gradients", "vmap", "forward_mode", "higher_order", "gqa")
    for one, verdict in ((slanted, "passed"), (fn, "failed")):
        made = FunctionSubject(
            one, framework="torch", dtypes=("float32", "float64"), supports=supports
        )
        got = examine_probe(find(name), made, "float64")
        assert got.verdict == verdict, got.detail
    assert told in got.detail


# What only backends are asked


def torch_subject(monkeypatch: pytest.MonkeyPatch, **changed: Any) -> BackendSubject:
    """PyTorch's backend, with other transforms of its framework."""
    made = BackendSubject("torch")
    given = made.lane.transforms()._replace(**changed)
    monkeypatch.setattr(type(made.lane), "transforms", lambda self: given)
    return made


def test_what_is_undeclared_and_gives_a_number_fails() -> None:
    probe = find("undeclared-transforms-raise")
    made = BackendSubject("torch")
    assert examine_probe(probe, made, "float32").verdict == "not-applicable"
    for name in ("vmap", "forward_mode", "higher_order"):
        made.capabilities = BackendSubject("torch").capabilities._replace(**{name: False})
        got = examine_probe(probe, made, "float32")
        assert got.verdict == "failed"
        assert got.detail.startswith(f"{name} is not declared")


def test_a_program_that_keeps_its_first_backend_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    import attnx

    def compile(fn: Any) -> Any:
        def program(*arrays: Any) -> Any:
            with attnx.use_backend("torch"):
                return fn(*arrays)

        return program

    got = examine_probe(
        find("compiled-choice"), torch_subject(monkeypatch, compile=compile), "float32"
    )
    assert got.detail == "use_backend('numpy') around: not obeyed"


@pytest.mark.parametrize("named", ["numpy", "torch"])
def test_a_program_may_refuse_another_frameworks_backend_and_no_other(
    named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import attnx
    from attnx.errors import UnsupportedError

    real = attnx.attention

    def refusing(*arrays: Any, **options: Any) -> Any:
        chosen = attnx.explain(*arrays, **options).choice
        if chosen == named:
            raise UnsupportedError("nobody can be called out of a program")
        return real(*arrays, **options)

    monkeypatch.setattr(attnx, "attention", refusing)
    subject = torch_subject(monkeypatch, compile=lambda fn: fn)
    got = examine_probe(find("compiled-choice"), subject, "float32")
    assert got.verdict == ("passed" if named == "numpy" else "crashed")


def test_a_call_that_does_not_know_autocast_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    from contextlib import nullcontext

    made = torch_subject(monkeypatch, autocast=lambda dtype: nullcontext())
    got = examine_probe(find("autocast-of-inputs"), made, "float32")
    assert got.detail == "a plain call under autocast gave float32"


def test_every_probe_has_been_seen_to_fail() -> None:
    """A loop of the framework's is JAX's alone, and a fault there would be a fault of jit too."""
    alone = {"compiled-choice", "autocast-of-inputs", "undeclared-transforms-raise"}
    seen = {item.values[0] if hasattr(item, "values") else item[0] for item in WRONG} | alone
    assert {probe.name for probe in PROBES} - seen == {"scanned-calls"}
