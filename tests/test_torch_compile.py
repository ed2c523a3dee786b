"""`torch.compile` and `torch.export`: one graph, no more programs than SDPA, the eager answer."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.proxy_tensor import make_fx

import attnx
from attnx import Causal, Dropout, Lengths, Predicate, Prefix, Segments, Window
from attnx._traced import state
from attnx.masks import Not

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
]

LENGTHS = (5, 6, 9)


def inputs(L: int = 6, *, recorded: bool = False, heads: int = 2) -> tuple[torch.Tensor, ...]:
    random = torch.Generator().manual_seed(L)
    made = [torch.randn(2, h, L, 8, generator=random) for h in (4, heads, heads)]
    return tuple(x.requires_grad_(recorded) for x in made)


def compiled(fn: Callable[..., Any], **options: Any) -> tuple[Callable[..., Any], Any]:
    """The function in one graph, and the counter of its programs."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(fn, fullgraph=True, backend=counter, **options), counter


def close(got: Any, wanted: Any) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def outputs_and_gradients(fn: Callable[..., Any], arrays: tuple[Any, ...]) -> Any:
    out = fn(*arrays)
    made = out if isinstance(out, tuple) else (out,)
    leaves = [x for x in arrays if x.requires_grad]
    return made, torch.autograd.grad(sum(y.square().sum() for y in made), leaves)


CALLS: dict[str, Callable[..., Any]] = {
    "plain": lambda q, k, v: attnx.attention(q, k, v),
    "causal": lambda q, k, v: attnx.attention(q, k, v, causal=True),
    "lengths": lambda q, k, v: attnx.attention(
        q, k, v, mask=Causal() & Lengths(torch.tensor([3, 5])), return_lse=True
    ),
    "either": lambda q, k, v: attnx.attention(q, k, v, mask=Not(Window(1, 1)) | Window(0, 0)),
    "predicate": lambda q, k, v: attnx.attention(
        q, k, v, mask=Predicate(lambda b, h, i, j: (i - j) % 2 == 0)
    ),
    "softcap": lambda q, k, v: attnx.attention(q, k, v, softcap=3.0, scale=-0.3),
    "bshd": lambda q, k, v: attnx.attention(
        *(x.transpose(1, 2) for x in (q, k, v)), layout="bshd", mask=Window(2, 0)
    ),
    "merge": lambda q, k, v: attnx.merge(
        [
            attnx.attention(q, x, y, return_lse=True)
            for x, y in ((k[:, :, :3], v[:, :, :3]), (k[:, :, 3:], v[:, :, 3:]))
        ]
    ),
    "numpy": lambda q, k, v: attnx.attention(q, k, v, causal=True, backend="numpy"),
    "dropout": lambda q, k, v: attnx.attention(q, k, v, dropout=Dropout(0.5, 7), causal=True),
}


SWEPT = ("either", "bshd", "predicate", "softcap", "merge", "numpy")


@pytest.mark.parametrize("dynamic", [pytest.param(None, marks=pytest.mark.sweep), True])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.sweep if n in SWEPT else ()) for n in CALLS]
)
def test_one_graph_and_no_more_programs_than_sdpa(name: str, dynamic: bool | None) -> None:
    """Outputs and gradients at four lengths: one program, or two where the first is not dynamic."""
    made, counter = compiled(CALLS[name], dynamic=dynamic)
    seen = []
    for L in LENGTHS:
        arrays = inputs(L, recorded=True)
        close(outputs_and_gradients(made, arrays), outputs_and_gradients(CALLS[name], arrays))
        seen.append(counter.frame_count)
    assert seen[0 if dynamic else 1] == seen[-1]
    assert dynamic or seen[0] == 1


def test_static_shapes_take_a_program_each_as_sdpa_does() -> None:
    plain, counter = compiled(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), dynamic=False
    )
    ours, own = compiled(CALLS["causal"], dynamic=False)
    for L in LENGTHS:
        close(ours(*inputs(L, heads=4)), plain(*inputs(L, heads=4)))
    assert counter.frame_count == own.frame_count == len(LENGTHS)


@pytest.mark.parametrize("inside", [pytest.param("grad", marks=pytest.mark.sweep), None])
def test_integers_of_a_mask_and_of_dropout_may_be_symbols(inside: str | None) -> None:
    """Arguments, and what is made of sizes: one program for all, in the operation and the formula.

    The formula leaves dropout out, whose blocks of 8 keys PyTorch tells apart where there is one.
    """

    def call(q: Any, k: Any, v: Any, n: int) -> Any:
        seen = Lengths(n) & Window(n - 1, 0) | Prefix(q.shape[2] // 2)
        if inside is None:
            drop = Dropout(0.3, n, (0, n, q.shape[2], 0))
            return attnx.attention(q, k, v, mask=seen, dropout=drop)
        return torch.func.grad(lambda x: attnx.attention(x, k, v, mask=seen).square().sum())(q)

    made, counter = compiled(call, dynamic=True)
    programs = []
    for L, n in ((5, 3), (6, 4), (9, 7)):
        close(made(*inputs(L), n), call(*inputs(L), n))
        programs.append(counter.frame_count)
    assert programs[0] == programs[-1]


def test_floats_may_be_symbols() -> None:
    """A scale and a softcap from arguments and from sizes; a sign that changes is told apart."""

    def call(q: Any, k: Any, v: Any, x: float) -> Any:
        plain = attnx.attention(q, k, v, scale=q.shape[-1] ** -0.5)
        return plain, attnx.attention(q, k, v, scale=x, softcap=q.shape[2] / 2)

    made, _ = compiled(call, dynamic=True)
    for x in (0.5, -0.5):
        close(made(*inputs(), x), call(*inputs(), x))
    for x in (float("nan"), float("inf")):
        with pytest.raises(torch._dynamo.exc.Unsupported, match="scale: expected a finite number"):
            made(*inputs(), x)


def test_bias_sinks_and_a_mask_as_arguments() -> None:
    """Masks and tensors that come from outside are inputs of the program, not constants of it."""

    def call(q: Any, k: Any, v: Any, bias: Any, sinks: Any, mask: Any) -> Any:
        return attnx.attention(q, k, v, bias=bias, sinks=sinks, mask=mask)

    made, counter = compiled(call)
    for seed, ends in ((0, [6, 2]), (1, [0, 6])):
        random = torch.Generator().manual_seed(seed)
        bias = torch.randn(1, 4, 1, 6, generator=random).requires_grad_()
        sinks = torch.randn(4, generator=random).requires_grad_()
        ids = torch.tensor([0, 0, 1, 1, 1, -1])
        mask = Lengths(torch.tensor(ends)) & Segments(ids, ids)
        arrays = (*inputs(recorded=True), bias, sinks)
        close(
            *(outputs_and_gradients(lambda *a, f=f, m=mask: f(*a, m), arrays) for f in (made, call))
        )
    assert counter.frame_count == 1


def test_use_backend_around_compiles_once_a_name() -> None:
    made, counter = compiled(lambda q, k, v: attnx.attention(q, k, v))
    wanted, seen = attnx.attention(*inputs()), []
    for name in (None, "numpy", "torch", "numpy", None, "torch"):
        with attnx.use_backend(name):
            close(made(*inputs()), wanted)
        seen.append(counter.frame_count)
    assert seen == [1, 2, 3, 3, 3, 3]


def test_use_backend_and_backend_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The work is done where the block says, and the block is left when it ends."""
    asked: list[str] = []
    numpy = attnx.get_backend("numpy")
    forward = numpy.forward
    monkeypatch.setattr(
        numpy, "forward", lambda q, *rest: (asked.append("numpy"), forward(q, *rest))[1]
    )

    def call(q: Any, k: Any, v: Any) -> Any:
        with attnx.use_backend("numpy"):
            first = attnx.attention(q, k, v)
        return first, attnx.attention(q, k, v, backend="numpy"), attnx.attention(q, k, v)

    made, counter = compiled(call)
    for out in made(*inputs()):
        close(out, attnx.attention(*inputs()))
    assert asked == ["numpy", "numpy"]
    assert counter.frame_count == 1
    assert state.override is None


@pytest.mark.parametrize("name", [pytest.param("plain", marks=pytest.mark.sweep), "either"])
@pytest.mark.parametrize(
    "transform", ["grad", *(pytest.param(t, marks=pytest.mark.sweep) for t in ("vmap", "jvp"))]
)
def test_torch_func_inside_a_program(name: str, transform: str) -> None:
    call, (q, k, v) = CALLS[name], inputs()
    wrapped = {
        "grad": lambda q: torch.func.grad(lambda x: call(x, k, v).square().sum())(q),
        "vmap": lambda q: torch.func.vmap(lambda x: call(x, k, v))(q[None]),
        "jvp": lambda q: torch.func.jvp(lambda x: call(x, k, v), (q,), (q,))[1],
    }[transform]
    close(compiled(wrapped)[0](q), wrapped(q))


class Model(torch.nn.Module):
    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, q: Any, k: Any, v: Any) -> Any:
        return self.call(q, k, v)


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "not strict"])
@pytest.mark.parametrize("name", ["causal", "bshd"])
def test_export_with_any_length(name: str, strict: bool) -> None:
    length = torch.export.Dim("L", min=3, max=64)
    program = torch.export.export(
        Model(CALLS[name]), inputs(), strict=strict, dynamic_shapes=(({2: length},) * 3)
    )
    for L in (6, 9):
        close(program.module()(*inputs(L)), CALLS[name](*inputs(L)))


@pytest.mark.parametrize("mode", [pytest.param("real", marks=pytest.mark.sweep), "symbolic"])
@pytest.mark.parametrize("name", ["causal", "bshd"])
def test_make_fx(name: str, mode: str) -> None:
    close(make_fx(CALLS[name], tracing_mode=mode)(*inputs())(*inputs()), CALLS[name](*inputs()))


def test_autocast_and_checkpoint_inside() -> None:
    from torch.utils.checkpoint import checkpoint

    def call(q: Any, k: Any, v: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return checkpoint(CALLS["bshd"], q, k, v, use_reentrant=False).float()

    arrays = inputs(recorded=True)
    got, wanted = (outputs_and_gradients(f, arrays) for f in (compiled(call)[0], call))
    torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2)


def test_the_operations_are_well_made() -> None:
    """PyTorch's own check of schema, autograd, shapes and dispatch, with symbols for sizes."""
    from attnx_torch._compile import _attend

    window = (*inputs(recorded=True), None, None, [], [2, 0], [])
    torch.library.opcheck(
        _attend, (*window, "Window[# # top_left - -]", None, None, ";raise;stay", "01")
    )
    bias, sinks = torch.randn(1, 4, 6, 6).requires_grad_(), torch.randn(4).requires_grad_()
    rest = (bias, sinks, [torch.tensor([3, 6])], [], [], "Lengths[* -]", 0.3, 2.0)
    torch.library.opcheck(_attend, (*inputs(recorded=True), *rest, "numpy;raise;stay", "01"))


def test_refusals_are_told_in_the_compilers_error() -> None:
    """Whole, the program cannot be made; in parts, the call raises what it raises eagerly."""
    for backend, said in (("cupy", "backend 'cupy'"), ("nobody", "no backend 'nobody'")):
        made, _ = compiled(lambda q, k, v, b=backend: attnx.attention(q, k, v, backend=b))
        with pytest.raises(torch._dynamo.exc.Unsupported, match=re.escape(said)):
            made(*inputs())
    made, _ = compiled(lambda q, k, v: attnx.attention(q, k[..., :3], v))
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"k: expected .* head size D of q"):
        made(*inputs())
    for other in (attnx.attention_vjp, lambda q, k, v: attnx.attention_weights(q, k)):
        made, _ = compiled(other)
        with pytest.raises(torch._dynamo.exc.Unsupported, match="call them outside it"):
            made(*inputs())


FIRST = """
{imports}
import torch._dynamo
def call(q, n):
    return attnx.attention(q, q, q, mask=attnx.Causal() & attnx.Lengths(n))
q, n = torch.randn(2, 3, 5, 4), torch.tensor([5, 2])
made = torch.compile(call, fullgraph=True, backend="aot_eager")(q, n)
assert torch.equal(made, call(q, n))
"""


@pytest.mark.parametrize(
    "imports",
    ["import attnx, torch", pytest.param("import torch, attnx", marks=pytest.mark.sweep)],
    ids=["attnx first", "torch first"],
)
def test_the_first_call_of_a_process(imports: str) -> None:
    """Nothing has been called, no lane made: the compiler still knows what to read."""
    code = FIRST.format(imports=imports.replace(", ", "; import "))
    subprocess.run([sys.executable, "-c", code], check=True)
