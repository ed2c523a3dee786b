"""A blocked attention kernel in Pallas, made a backend by `from_function`.

The kernels are written as for an accelerator: a program for each block of queries, an online
softmax over tiles of keys, causal tiles that nobody sees left out, grouped heads by index maps, and
a backward that computes the scores again. Here they run in Pallas's interpreter, on any machine; on
a device, set `INTERPRET = False` and choose tiles that its memory holds.

Run it, which checks the backend by a sample of the conformance suite:

    pip install 'attnx[jax,conformance]'
    python pallas_attention.py
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from attnx import plugin

SUPPORTS = (
    "causal", "mask", "bias", "scale", "softcap", "sinks", "lse", "gqa", "compile", "vmap",
)  # fmt: skip
DTYPES = ("float32", "bfloat16", "float16")
INTERPRET = True
TILE = 32


class Shape(NamedTuple):
    """What a kernel is compiled for: sizes before padding, and options that are numbers."""

    B: int
    Hq: int
    Hk: int
    Lq: int
    Lk: int
    D: int
    Dv: int
    scale: float
    softcap: float | None
    offset: int | None  # query i sees keys j <= i + offset; None without causal

    @property
    def rows(self) -> int:
        """Blocks of queries."""
        return pl.cdiv(self.Lq, TILE)

    @property
    def keys(self) -> int:
        """Tiles of keys."""
        return pl.cdiv(self.Lk, TILE)

    def last_tile(self, block: Any) -> Any:
        """The end of the tiles that a block of queries sees."""
        if self.offset is None:
            return self.keys
        return jnp.clip(pl.cdiv((block + 1) * TILE + self.offset, TILE), 0, self.keys)

    def first_block(self, tile: Any) -> Any:
        """The first block of queries that sees a tile of keys."""
        if self.offset is None:
            return 0
        return jnp.clip((tile * TILE - self.offset) // TILE, 0, self.rows)


def scores(shape: Shape, q: Any, k: Any, bias: Any, mask: Any, block: Any, tile: Any) -> Any:
    """Scores of a tile, the derivative of the softcap there, and which pairs are visible."""
    s = jnp.dot(q, k.T, precision="highest") * shape.scale
    slope = None
    if shape.softcap is not None:
        bent = jnp.tanh(s / shape.softcap)
        s, slope = shape.softcap * bent, 1 - bent * bent
    s = s if bias is None else s + bias
    i = block * TILE + jax.lax.broadcasted_iota(jnp.int32, s.shape, 0)
    j = tile * TILE + jax.lax.broadcasted_iota(jnp.int32, s.shape, 1)
    shown = (i < shape.Lq) & (j < shape.Lk)
    shown = shown if shape.offset is None else shown & (j <= i + shape.offset)
    shown = shown if mask is None else shown & mask
    return s, slope, shown


def part(ref: Any, rows: Any, keys: Any) -> Any:
    """A tile of a mask or a bias, or None without one; of float32 if it is of numbers."""
    if ref is None:
        return None
    found = ref[0, 0, pl.ds(rows * TILE, TILE), pl.ds(keys * TILE, TILE)]
    return found if found.dtype == jnp.bool_ else found.astype(jnp.float32)


def strip(ref: Any, at: Any) -> Any:
    """TILE rows of q, k, v or a cotangent, in float32."""
    return ref[0, 0, pl.ds(at * TILE, TILE), :].astype(jnp.float32)


def forward_kernel(shape: Shape, refs: dict[str, Any]) -> None:
    """One block of queries: out and lse."""
    block = pl.program_id(2)
    q = strip(refs["q"], 0)

    def step(tile: Any, carried: Any) -> Any:
        top, total, sums = carried
        tiles = (part(refs.get(name), 0, tile) for name in ("bias", "mask"))
        s, _, shown = scores(shape, q, strip(refs["k"], tile), *tiles, block, tile)
        s = jnp.where(shown, s, -jnp.inf)
        new = jnp.maximum(top, s.max(axis=1, keepdims=True))
        shift = jnp.where(new == -jnp.inf, 0.0, new)
        p, kept = jnp.exp(s - shift), jnp.exp(top - shift)
        sums = sums * kept + jnp.dot(p, strip(refs["v"], tile), precision="highest")
        return new, total * kept + p.sum(axis=1, keepdims=True), sums

    start = (
        jnp.full((TILE, 1), -jnp.inf, jnp.float32), jnp.zeros((TILE, 1), jnp.float32),
        jnp.zeros((TILE, shape.Dv), jnp.float32),
    )  # fmt: skip
    if "sinks" in refs:  # a logit that every row has met
        sink = refs["sinks"][0].astype(jnp.float32)
        start = (jnp.full((TILE, 1), sink), jnp.ones((TILE, 1), jnp.float32), start[2])
    top, total, sums = jax.lax.fori_loop(0, shape.last_tile(block), step, start)
    safe = jnp.where(total == 0, 1.0, total)
    refs["out"][0, 0] = (sums / safe).astype(refs["out"].dtype)
    refs["lse"][0, 0] = (top + jnp.log(safe))[:, 0]


def again(shape: Shape, refs: dict[str, Any], tile: Any, block: Any, at: tuple[Any, Any]) -> Any:
    """P, ds and d(q k) of a tile, computed again; `at` is where it stands in the blocks."""
    q, d_out = strip(refs["q"], at[0]), strip(refs["d_out"], at[0])
    k, v = strip(refs["k"], at[1]), strip(refs["v"], at[1])
    tiles = (part(refs.get(name), *at) for name in ("bias", "mask"))
    s, slope, shown = scores(shape, q, k, *tiles, block, tile)
    rows = pl.ds(at[0] * TILE, TILE)
    p = jnp.where(shown, jnp.exp(s - refs["lse"][0, 0, rows][:, None]), 0.0)
    ds = p * (jnp.dot(d_out, v.T, precision="highest") - refs["flow"][0, 0, rows][:, None])
    return p, ds, (ds if slope is None else ds * slope) * shape.scale


def dq_kernel(shape: Shape, refs: dict[str, Any]) -> None:
    """One block of queries: dq, and ds where the bias wants it."""
    block = pl.program_id(2)
    if "dbias" in refs:
        refs["dbias"][0, 0] = jnp.zeros(refs["dbias"].shape[2:], jnp.float32)

    def step(tile: Any, dq: Any) -> Any:
        _, ds, d_raw = again(shape, refs, tile, block, (0, tile))
        if "dbias" in refs:
            refs["dbias"][0, 0, :, pl.ds(tile * TILE, TILE)] = ds
        return dq + jnp.dot(d_raw, strip(refs["k"], tile), precision="highest")

    start = jnp.zeros((TILE, shape.D), jnp.float32)
    refs["dq"][0, 0] = jax.lax.fori_loop(0, shape.last_tile(block), step, start)


def dkv_kernel(shape: Shape, refs: dict[str, Any]) -> None:
    """One tile of keys against all queries of one head: its share of dk and dv."""
    tile = pl.program_id(2)

    def step(block: Any, sums: Any) -> Any:
        p, _, d_raw = again(shape, refs, tile, block, (block, 0))
        dk = sums[0] + jnp.dot(d_raw.T, strip(refs["q"], block), precision="highest")
        return dk, sums[1] + jnp.dot(p.T, strip(refs["d_out"], block), precision="highest")

    start = tuple(jnp.zeros((TILE, n), jnp.float32) for n in (shape.D, shape.Dv))
    made = jax.lax.fori_loop(shape.first_block(tile), shape.rows, step, start)
    refs["dk"][0, 0], refs["dv"][0, 0] = made


def launch(
    kernel: Any, shape: Shape, arrays: dict[str, Any], made: dict[str, Any], *, along: str
) -> Any:
    """Run a kernel for each entry, query head and block along queries or keys.

    Of what lies along that axis, a program gets one block; of all else, the whole.
    """

    def spec(array: Any) -> Any:
        if array.kind == "head":
            return pl.BlockSpec((1,), lambda b, h, n: (h,))
        mine = {"q": {"q": 2}, "k": {"k": 2}, "grid": {"q": 2, "k": 3}}[array.kind].get(along)
        block = [TILE if axis == mine else n for axis, n in enumerate(array.shape)]
        block[:2] = [1, 1]
        entries, heads = array.shape[:2]
        group = shape.Hq // heads  # of a mask alike for all heads, all of them

        def at(b: Any, h: Any, n: Any) -> Any:
            found = [b if entries > 1 else 0, h // group, *[0] * (len(block) - 2)]
            if mine is not None:
                found[mine] = n
            return tuple(found)

        return pl.BlockSpec(tuple(block), at)

    names = [*arrays, *made]

    def body(*refs: Any) -> None:
        kernel(shape, dict(zip(names, refs, strict=True)))

    found = pl.pallas_call(
        body,
        grid=(shape.B, shape.Hq, shape.rows if along == "q" else shape.keys),
        in_specs=[spec(a) for a in arrays.values()],
        out_specs=[spec(a) for a in made.values()],
        out_shape=[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in made.values()],
        interpret=INTERPRET,
    )(*(a.array for a in arrays.values()))
    return dict(zip(made, found, strict=True))


class Along(NamedTuple):
    """An array or its shape, padded to whole tiles, and along which axes it is cut.

    Attributes:
        kind: "q" (B, H, Lq, ...), "k" (B, H, Lk, ...), "grid" (B, H, Lq, Lk) or "head" (Hq,).
        shape: padded.
        dtype: its own.
        array: padded, or None for a result.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: Any
    array: Any = None


def padded(array: Any, kind: str, shape: Shape) -> Along:
    """An array of whole tiles; a mask or a bias is first spread over queries and keys."""
    if kind == "grid":
        array = jnp.broadcast_to(array, (*array.shape[:2], shape.Lq, shape.Lk))
    axes = {"q": (2,), "k": (2,), "grid": (2, 3), "head": ()}[kind]
    widths = [(0, -n % TILE if axis in axes else 0) for axis, n in enumerate(array.shape)]
    array = jnp.pad(array, widths) if widths else array
    return Along(kind, array.shape, array.dtype, array)


def operands(shape: Shape, q: Any, k: Any, v: Any, options: dict[str, Any]) -> dict[str, Along]:
    """What all kernels read."""
    kinds = {"mask": "grid", "bias": "grid", "sinks": "head"}
    given = {"q": (q, "q"), "k": (k, "k"), "v": (v, "k")}
    given |= {n: (options[n], kind) for n, kind in kinds.items() if options.get(n) is not None}
    return {name: padded(array, kind, shape) for name, (array, kind) in given.items()}


def shape_of(q: Any, k: Any, v: Any, scale: float, softcap: Any, causal: Any) -> Shape:
    """The sizes of a call; causal is False, True, "top_left" or "bottom_right"."""
    (B, Hq, Lq, D), (_, Hk, Lk, _) = q.shape, k.shape
    offset = {False: None, "bottom_right": Lk - Lq}.get(causal, 0)
    return Shape(B, Hq, Hk, Lq, Lk, D, v.shape[3], scale, softcap, offset)


@partial(jax.jit, static_argnames=("scale", "softcap", "causal", "return_lse"))
def pallas_attention(
    q: Any, k: Any, v: Any, *, scale: float, causal: Any = False, softcap: float | None = None,
    return_lse: bool = False, **arrays: Any,
) -> Any:  # fmt: skip
    """out, or (out, lse), in the calling convention of `attnx.plugin.from_function`."""
    shape = shape_of(q, k, v, scale, softcap, causal)
    rows = (shape.B, shape.Hq, shape.rows * TILE)
    made = {"out": Along("q", (*rows, shape.Dv), q.dtype), "lse": Along("q", rows, jnp.float32)}
    given = operands(shape, q, k, v, arrays)
    found = launch(forward_kernel, shape, given, made, along="q")
    out, lse = (found[name][:, :, : shape.Lq] for name in ("out", "lse"))
    return (out, lse) if return_lse else out


@partial(jax.jit, static_argnames=("scale", "softcap", "causal"))
def pallas_backward(
    q: Any, k: Any, v: Any, out: Any, lse: Any, d_out: Any, d_lse: Any, *, scale: float,
    causal: Any = False, softcap: float | None = None, **arrays: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """(dq, dk, dv), then dbias and dsinks where there is a bias and where there are sinks."""
    shape = shape_of(q, k, v, scale, softcap, causal)
    flow = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    flow = flow if d_lse is None else flow - d_lse
    given = operands(shape, q, k, v, arrays)
    sinks = arrays.get("sinks")
    given.pop("sinks", None)
    given |= {n: padded(x, "q", shape) for n, x in (("d_out", d_out), ("lse", lse), ("flow", flow))}
    Lq, Lk = shape.rows * TILE, shape.keys * TILE
    heads = (shape.B, shape.Hq)
    made = {"dq": Along("q", (*heads, Lq, shape.D), jnp.float32)}
    if "bias" in given:
        made["dbias"] = Along("grid", (*heads, Lq, Lk), jnp.float32)
    rows = launch(dq_kernel, shape, given, made, along="q")
    made = {
        n: Along("k", (*heads, Lk, d), jnp.float32) for n, d in (("dk", shape.D), ("dv", shape.Dv))
    }
    keys = launch(dkv_kernel, shape, given, made, along="k")
    grouped = (shape.B, shape.Hk, shape.Hq // shape.Hk, shape.Lk, -1)
    dk, dv = (keys[n][:, :, : shape.Lk].reshape(grouped).sum(axis=2) for n in ("dk", "dv"))
    found = [rows["dq"][:, :, : shape.Lq], dk, dv]
    if "bias" in given:
        found.append(rows["dbias"][:, :, : shape.Lq, : shape.Lk])
    if sinks is not None:
        p_sink = jnp.exp(sinks.astype(jnp.float32)[:, None] - lse)
        found.append(-jnp.sum(p_sink * flow, axis=(0, 2)))
    return tuple(found)


def load() -> plugin.Backend:
    """The backend; `BackendSpec("pallas", load=load, framework="jax")` registers it."""
    return plugin.from_function(
        pallas_attention, name="pallas", framework="jax", supports=SUPPORTS, dtypes=DTYPES,
        backward=pallas_backward,
    )  # fmt: skip


if __name__ == "__main__":
    from attnx_conformance import check

    report = check(load(), dtypes="float32", profiles=("forward", "gradients"), level="quick")
    print(f"{len(report.results)} trials, all right")
