"""PyTorch: its fused attention, the formula in its operations, and FlexAttention."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import attnx
from attnx_bench.implementation import Implementation, NotApplicable, Ready
from attnx_bench.workload import Arrays, Workload

from ._shared import Array, dense, named, refuse, refuse_scores, spelled, to_bshd

__all__ = ["IMPLEMENTATIONS", "ready", "tensor"]

Forward = Callable[[Any, Any, Any], tuple[Any, Any]]
"""(q, k, v) to (out, lse or None)."""


def tensor(array: Array | None) -> Any:
    """A tensor of a NumPy array, bfloat16 included; None stays None."""
    return None if array is None else attnx.get_backend("torch").lane.from_numpy(array)


def ready(
    workload: Workload, arrays: Arrays, forward: Forward, how: str, *, bshd: bool = False,
    compared: bool = True,
) -> Ready:  # fmt: skip
    """Time `forward` without recording, or together with autograd's gradients of q, k and v."""
    import torch

    given = (arrays.q, arrays.k, arrays.v, arrays.d_out)
    q, k, v, d_out = (tensor(to_bshd(array) if bshd else array) for array in given)
    lane: Any = attnx.get_backend("torch").lane
    if workload.gradient:
        for leaf in (q, k, v):
            leaf.requires_grad_()

    def once() -> tuple[Any, ...]:
        with torch.no_grad():
            return forward(q, k, v)

    def both() -> tuple[Any, ...]:
        out, lse = forward(q, k, v)
        return out, lse, *torch.autograd.grad(out, (q, k, v), d_out)

    def run() -> tuple[Any, ...]:
        made = both() if workload.gradient else once()
        lane.wait(*(one for one in made if one is not None))
        return made

    def results(made: tuple[Any, ...]) -> dict[str, Any]:
        found = (None if one is None else lane.to_numpy(one.detach()) for one in made)
        return named(found, bshd=bshd)

    return Ready(run, results, how, compared)


# The fused attention ---------------------------------------------------------------------------


def make_sdpa(workload: Workload, arrays: Arrays) -> Ready:
    """`F.scaled_dot_product_attention`, by its own flag where that says the mask."""
    import torch.nn.functional as F

    refuse(workload, softcap="has no softcap", need_lse="returns no lse")
    if workload.Dv != workload.D:
        refuse_scores(workload)  # no fused kernel takes the call, so it holds all scores
    causal, mask, bias = spelled(workload, arrays, apart=False)
    added, grouped = tensor(mask if bias is None else bias), workload.Hq != workload.Hk

    def forward(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=added, dropout_p=workload.dropout, is_causal=causal,
            enable_gqa=grouped,
        )  # fmt: skip
        return out, None

    how = "is_causal" if causal else "no mask" if added is None else "attn_mask"
    how += ", dropout of its own" if workload.dropout else ""
    return ready(workload, arrays, forward, how, compared=not workload.dropout)


# The formula -----------------------------------------------------------------------------------


EAGER = "matmul, softmax, matmul"


def make_eager(workload: Workload, arrays: Arrays) -> Ready:
    """Matmul, softmax in at least float32, matmul, as models' eager code has it."""
    import torch

    refuse_scores(workload)
    wide = torch.float64 if workload.dtype == "float64" else torch.float32
    shown, bias = tensor(dense(workload)), tensor(arrays.bias)
    group = workload.Hq // workload.Hk

    def forward(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        if group > 1:
            k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = torch.matmul(q, k.transpose(-1, -2)) * workload.scale
        if workload.softcap is not None:
            scores = workload.softcap * torch.tanh(scores / workload.softcap)
        if bias is not None:
            scores = scores + bias
        if shown is not None:
            scores = scores.masked_fill(~shown, -torch.inf)
        weights = torch.softmax(scores, dim=-1, dtype=wide).to(q.dtype)
        if workload.dropout:
            weights = torch.dropout(weights, workload.dropout, True)
        lse = torch.logsumexp(scores.to(wide), dim=-1) if workload.need_lse else None
        return torch.matmul(weights, v), lse

    how = "matmul, softmax, dropout of its own, matmul" if workload.dropout else EAGER
    return ready(workload, arrays, forward, how, compared=not workload.dropout)


# FlexAttention ---------------------------------------------------------------------------------


def make_flex(workload: Workload, arrays: Arrays) -> Ready:
    """FlexAttention compiled for the host, where it has neither gradients nor lse (torch 2.13)."""
    import torch

    refuse(workload, gradient="no gradients on a CPU", need_lse="returns no lse on a CPU",
           dropout="has no dropout")  # fmt: skip
    if workload.dtype == "float64":
        raise NotApplicable("no float64 on a CPU")
    if not _compiler():
        raise NotApplicable("needs a C++ compiler")
    attend = compiled()
    options = {
        "score_mod": _score_mod(workload, tensor(arrays.bias)),
        "block_mask": _block_mask(workload),
        "enable_gqa": workload.Hq != workload.Hk,
    }

    def forward(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        return attend(q, k, v, **options), None

    torch.compiler.reset()  # a process may only recompile so often, and then it falls back
    return ready(workload, arrays, forward, "torch.compile")


def compiled() -> Any:
    """The compiled function; by itself, FlexAttention holds all scores and warns."""
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def _compiler() -> bool:
    names = (os.environ.get("CXX"), "g++", "clang++")
    return any(name and shutil.which(name) for name in names)


def _block_mask(workload: Workload) -> Any:
    """The blocks that hold visible pairs, or None where all do."""
    from torch.nn.attention.flex_attention import and_masks, create_block_mask

    parts = list(_mask_mods(workload))
    if not parts:
        return None
    B = None if workload.lengths is None else workload.B
    return create_block_mask(and_masks(*parts), B, None, workload.Lq, workload.Lk, device="cpu")


def _mask_mods(workload: Workload) -> Iterator[Any]:
    """One function of indices for each thing that hides."""
    offset = 0 if workload.causal != "bottom_right" else workload.Lk - workload.Lq
    if workload.causal is not False:
        yield lambda b, h, i, j: j <= i + offset
    if (window := workload.window) is not None:
        yield lambda b, h, i, j: j >= i + offset - window
    if workload.segments is not None:
        of_keys = tensor(workload.segments)
        of_queries = tensor(workload.segments[-workload.Lq :])
        yield lambda b, h, i, j: of_queries[i] == of_keys[j]
    if workload.lengths is not None:
        lengths = tensor(workload.lengths)
        yield lambda b, h, i, j: j < lengths[b]


def _score_mod(workload: Workload, bias: Any) -> Any:
    """What happens to a score, or None where nothing does."""
    import torch

    cap = workload.softcap
    if cap is None and bias is None:
        return None

    def score_mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        if cap is not None:
            score = cap * torch.tanh(score / cap)
        return score if bias is None else score + bias[0, h, i, j]

    return score_mod


IMPLEMENTATIONS = (
    Implementation("torch SDPA", make_sdpa, ("torch",)),
    Implementation("torch eager", make_eager, ("torch",)),
    Implementation("torch flex", make_flex, ("torch",), named=True),
)
