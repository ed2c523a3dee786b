"""A blocked attention kernel in Triton, made a PyTorch backend by `from_function`.

The forward kernel takes a block of queries a program, an online softmax in base 2 over tiles of
keys, and leaves out causal tiles that nobody sees; grouped heads share their keys, head sizes are
padded to powers of 2, and the tails of both axes are masked. The backward computes the scores again
from lse: a kernel for dq (and for the gradient of the bias), and one for dk and dv.

Without a GPU it runs in Triton's interpreter, slowly. Run it, which checks the backend by a sample
of the conformance suite:

    pip install 'attnx[torch,conformance]' 'triton==3.9.0'
    TRITON_INTERPRET=1 python triton_attention.py
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from attnx import plugin

SUPPORTS = ("causal", "mask", "bias", "scale", "sinks", "lse", "gqa")
DTYPES = ("float32", "float16")
ROWS = KEYS = 32
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def tile_scores(
    q, k, bias_at, bias_i, bias_j, mask_at, mask_i, mask_j, i, j, Lq, Lk, offset, scale,
    CAUSAL: tl.constexpr, BIAS: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Scores of a tile, to the base e; -inf where a pair is hidden."""
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    shown = (i[:, None] < Lq) & (j[None, :] < Lk)
    if BIAS:
        at = bias_at + i[:, None] * bias_i + j[None, :] * bias_j
        s += tl.load(at, mask=shown, other=0.0).to(tl.float32)
    if MASK:
        at = mask_at + i[:, None] * mask_i + j[None, :] * mask_j
        shown = shown & (tl.load(at, mask=shown, other=0) != 0)
    if CAUSAL:
        shown = shown & (j[None, :] <= i[:, None] + offset)
    return tl.where(shown, s, float("-inf"))


@triton.jit
def rows_of(at, n, d, stride, N, D):
    """A tile of rows (n, d), in float32; 0 beyond the tails."""
    inside = (n[:, None] < N) & (d[None, :] < D)
    return tl.load(at + n[:, None] * stride + d[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def forward_kernel(
    q, k, v, bias, mask, sinks, out, lse, scale, Hq, G, Lq, Lk, D, Dv, offset,
    bias_b, bias_h, bias_i, bias_j, mask_b, mask_h, mask_i, mask_j,
    CAUSAL: tl.constexpr, BIAS: tl.constexpr, MASK: tl.constexpr, SINKS: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WD: tl.constexpr, WV: tl.constexpr,
):  # fmt: skip
    """One block of queries of one head."""
    block, bh = tl.program_id(0), tl.program_id(1)
    b, h = bh // Hq, bh % Hq
    shared = b * (Hq // G) + h // G
    i = block * ROWS + tl.arange(0, ROWS)
    d, e = tl.arange(0, WD), tl.arange(0, WV)
    rows = rows_of(q + bh * Lq * D, i, d, D, Lq, D)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    if SINKS:  # a logit that every row has met
        top = tl.zeros((ROWS,), tl.float32) + tl.load(sinks + h).to(tl.float32)
        total += 1.0
    sums = tl.zeros((ROWS, WV), tl.float32)
    end = Lk
    if CAUSAL:
        end = tl.minimum(Lk, tl.maximum(0, (block + 1) * ROWS + offset))
    for j0 in range(0, end, KEYS):
        j = j0 + tl.arange(0, KEYS)
        s = tile_scores(
            rows, rows_of(k + shared * Lk * D, j, d, D, Lk, D),
            bias + b * bias_b + h * bias_h, bias_i, bias_j,
            mask + b * mask_b + h * mask_h, mask_i, mask_j,
            i, j, Lq, Lk, offset, scale, CAUSAL, BIAS, MASK,
        )  # fmt: skip
        new = tl.maximum(top, tl.max(s, 1))
        shift = tl.where(new == float("-inf"), 0.0, new)
        p = tl.exp2((s - shift[:, None]) * LOG2E)
        kept = tl.exp2((top - shift) * LOG2E)
        values = rows_of(v + shared * Lk * Dv, j, e, Dv, Lk, Dv)
        sums = sums * kept[:, None] + tl.dot(p, values, input_precision="ieee")
        total = total * kept + tl.sum(p, 1)
        top = new
    safe = tl.where(total == 0, 1.0, total)
    at = out + bh * Lq * Dv + i[:, None] * Dv + e[None, :]
    tl.store(at, sums / safe[:, None], mask=(i[:, None] < Lq) & (e[None, :] < Dv))
    tl.store(lse + bh * Lq + i, top * LOG2E + tl.log2(safe), mask=i < Lq)


@triton.jit
def gradient_tile(
    rows, keys, values, d_rows, lse, flow, bias_at, bias_i, bias_j, mask_at, mask_i, mask_j,
    i, j, Lq, Lk, offset, scale, CAUSAL: tl.constexpr, BIAS: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """P and ds of a tile, computed again; lse is to the base 2."""
    s = tile_scores(
        rows, keys, bias_at, bias_i, bias_j, mask_at, mask_i, mask_j,
        i, j, Lq, Lk, offset, scale, CAUSAL, BIAS, MASK,
    )  # fmt: skip
    p = tl.exp2(s * LOG2E - lse[:, None])
    ds = p * (tl.dot(d_rows, tl.trans(values), input_precision="ieee") - flow[:, None])
    return p, ds


@triton.jit
def dq_kernel(
    q, k, v, bias, mask, d_out, lse, flow, dq, dbias, scale, Hq, G, Lq, Lk, D, Dv, offset,
    bias_b, bias_h, bias_i, bias_j, mask_b, mask_h, mask_i, mask_j,
    CAUSAL: tl.constexpr, BIAS: tl.constexpr, MASK: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WD: tl.constexpr, WV: tl.constexpr,
):  # fmt: skip
    """One block of queries of one head: dq, and ds where there is a bias."""
    block, bh = tl.program_id(0), tl.program_id(1)
    b, h = bh // Hq, bh % Hq
    shared = b * (Hq // G) + h // G
    i = block * ROWS + tl.arange(0, ROWS)
    d, e = tl.arange(0, WD), tl.arange(0, WV)
    rows = rows_of(q + bh * Lq * D, i, d, D, Lq, D)
    d_rows = rows_of(d_out + bh * Lq * Dv, i, e, Dv, Lq, Dv)
    norm = tl.load(lse + bh * Lq + i, mask=i < Lq, other=0.0)
    delta = tl.load(flow + bh * Lq + i, mask=i < Lq, other=0.0)
    sums = tl.zeros((ROWS, WD), tl.float32)
    end = Lk
    if CAUSAL:
        end = tl.minimum(Lk, tl.maximum(0, (block + 1) * ROWS + offset))
    for j0 in range(0, end, KEYS):
        j = j0 + tl.arange(0, KEYS)
        keys = rows_of(k + shared * Lk * D, j, d, D, Lk, D)
        _, ds = gradient_tile(
            rows, keys, rows_of(v + shared * Lk * Dv, j, e, Dv, Lk, Dv), d_rows, norm, delta,
            bias + b * bias_b + h * bias_h, bias_i, bias_j,
            mask + b * mask_b + h * mask_h, mask_i, mask_j,
            i, j, Lq, Lk, offset, scale, CAUSAL, BIAS, MASK,
        )  # fmt: skip
        if BIAS:
            at = dbias + bh * Lq * Lk + i[:, None] * Lk + j[None, :]
            tl.store(at, ds, mask=(i[:, None] < Lq) & (j[None, :] < Lk))
        sums += tl.dot(ds, keys, input_precision="ieee")
    at = dq + bh * Lq * D + i[:, None] * D + d[None, :]
    tl.store(at, sums * scale, mask=(i[:, None] < Lq) & (d[None, :] < D))


@triton.jit
def dkv_kernel(
    q, k, v, bias, mask, d_out, lse, flow, dk, dv, scale, Hq, G, Lq, Lk, D, Dv, offset,
    bias_b, bias_h, bias_i, bias_j, mask_b, mask_h, mask_i, mask_j,
    CAUSAL: tl.constexpr, BIAS: tl.constexpr, MASK: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WD: tl.constexpr, WV: tl.constexpr,
):  # fmt: skip
    """One tile of keys of one key head: its dk and dv, from all query heads of its group."""
    tile, bh = tl.program_id(0), tl.program_id(1)
    Hk = Hq // G
    b, shared = bh // Hk, bh % Hk
    j = tile * KEYS + tl.arange(0, KEYS)
    d, e = tl.arange(0, WD), tl.arange(0, WV)
    keys = rows_of(k + bh * Lk * D, j, d, D, Lk, D)
    values = rows_of(v + bh * Lk * Dv, j, e, Dv, Lk, Dv)
    sum_k = tl.zeros((KEYS, WD), tl.float32)
    sum_v = tl.zeros((KEYS, WV), tl.float32)
    start = 0
    if CAUSAL:
        start = tl.maximum(0, tile * KEYS - offset) // ROWS * ROWS
    for g in range(G):
        h = shared * G + g
        head = b * Hq + h
        for i0 in range(start, Lq, ROWS):
            i = i0 + tl.arange(0, ROWS)
            rows = rows_of(q + head * Lq * D, i, d, D, Lq, D)
            d_rows = rows_of(d_out + head * Lq * Dv, i, e, Dv, Lq, Dv)
            norm = tl.load(lse + head * Lq + i, mask=i < Lq, other=0.0)
            delta = tl.load(flow + head * Lq + i, mask=i < Lq, other=0.0)
            p, ds = gradient_tile(
                rows, keys, values, d_rows, norm, delta,
                bias + b * bias_b + h * bias_h, bias_i, bias_j,
                mask + b * mask_b + h * mask_h, mask_i, mask_j,
                i, j, Lq, Lk, offset, scale, CAUSAL, BIAS, MASK,
            )  # fmt: skip
            sum_v += tl.dot(tl.trans(p), d_rows, input_precision="ieee")
            sum_k += tl.dot(tl.trans(ds), rows, input_precision="ieee")
    at = dk + bh * Lk * D + j[:, None] * D + d[None, :]
    tl.store(at, sum_k * scale, mask=(j[:, None] < Lk) & (d[None, :] < D))
    at = dv + bh * Lk * Dv + j[:, None] * Dv + e[None, :]
    tl.store(at, sum_v, mask=(j[:, None] < Lk) & (e[None, :] < Dv))


def described(q: Any, k: Any, v: Any, scale: float, causal: Any, bias: Any, mask: Any) -> Any:
    """The numbers that all three kernels take last, and their switches."""
    (_, Hq, Lq, D), (_, Hk, Lk, _), Dv = q.shape, k.shape, v.shape[3]
    offset = Lk - Lq if causal == "bottom_right" else 0
    strides = (*_strides(bias), *_strides(mask))
    switches = {
        "CAUSAL": causal is not False, "BIAS": bias is not None, "MASK": mask is not None,
        "ROWS": ROWS, "KEYS": KEYS, "WD": _width(D), "WV": _width(Dv),
    }  # fmt: skip
    return (scale, Hq, Hq // Hk, Lq, Lk, D, Dv, offset, *strides), switches


def _width(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


def _strides(array: Any) -> tuple[int, ...]:
    """Of a mask or a bias, 0 along an axis of 1."""
    if array is None:
        return (0, 0, 0, 0)
    return tuple(0 if n == 1 else s for n, s in zip(array.shape, array.stride(), strict=True))


def _bytes(mask: Any) -> Any:
    return None if mask is None else mask.to(torch.int8)


def triton_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, causal: Any = False,
    mask: Any = None, bias: Any = None, sinks: Any = None, return_lse: bool = False,
) -> Any:  # fmt: skip
    """out, or (out, lse) with lse to the base 2."""
    q, k, v, mask = q.contiguous(), k.contiguous(), v.contiguous(), _bytes(mask)
    numbers, switches = described(q, k, v, scale, causal, bias, mask)
    B, Hq, Lq, _ = q.shape
    out = q.new_empty((B, Hq, Lq, v.shape[3]))
    lse = q.new_empty((B, Hq, Lq), dtype=torch.float32)
    given = (x if x is not None else q for x in (bias, mask, sinks))
    forward_kernel[(triton.cdiv(Lq, ROWS), B * Hq)](
        q, k, v, *given, out, lse, *numbers, **switches, SINKS=sinks is not None
    )
    return (out, lse) if return_lse else out


def triton_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    d_out: torch.Tensor, d_lse: Any, *, scale: float, causal: Any = False, mask: Any = None,
    bias: Any = None, sinks: Any = None,
) -> tuple[Any, ...]:  # fmt: skip
    """(dq, dk, dv), then dbias and dsinks where they are given; lse is to the base 2."""
    q, k, v, mask = q.contiguous(), k.contiguous(), v.contiguous(), _bytes(mask)
    d_out, lse = d_out.contiguous(), lse.contiguous()
    numbers, switches = described(q, k, v, scale, causal, bias, mask)
    (B, Hq, Lq, _), (_, Hk, Lk, _) = q.shape, k.shape
    flow = (d_out.float() * out.float()).sum(dim=-1)
    if d_lse is not None:
        flow = flow - d_lse / math.log(2)  # of the natural lse
    dq, dk, dv = (torch.empty_like(x, dtype=torch.float32) for x in (q, k, v))
    dbias = q.new_zeros((B, Hq, Lq, Lk), dtype=torch.float32) if bias is not None else None
    given = (q, k, v, *(x if x is not None else q for x in (bias, mask)), d_out, lse, flow)
    rows, keys = triton.cdiv(Lq, ROWS), triton.cdiv(Lk, KEYS)
    dq_kernel[(rows, B * Hq)](*given, dq, dq if dbias is None else dbias, *numbers, **switches)
    dkv_kernel[(keys, B * Hk)](*given, dk, dv, *numbers, **switches)
    found = [dq, dk, dv] if dbias is None else [dq, dk, dv, dbias]
    if sinks is not None:
        p_sink = torch.exp(sinks.float()[:, None] - lse * math.log(2))
        found.append(-(p_sink * flow).sum(dim=(0, 2)))
    return tuple(found)


def load() -> plugin.Backend:
    """The backend; `BackendSpec("triton", load=load, framework="torch")` registers it."""
    return plugin.from_function(
        triton_attention, name="triton", framework="torch", supports=SUPPORTS, dtypes=DTYPES,
        backward=triton_backward, lse_base=2,
        devices=("cuda", "cpu") if triton.knobs.runtime.interpret else "cuda",
    )  # fmt: skip


if __name__ == "__main__":
    from attnx_conformance import check

    report = check(load(), dtypes="float32", profiles=("forward", "gradients"), level="quick")
    print(f"{len(report.results)} trials, all right")
