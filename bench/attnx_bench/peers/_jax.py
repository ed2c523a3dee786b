"""JAX: its own attention function and the formula, both under `jax.jit`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attnx
from attnx_bench.implementation import Implementation, NotApplicable, Ready
from attnx_bench.workload import Arrays, Workload

from ._shared import (
    dense,
    named,
    refuse,
    refuse_float64,
    refuse_scores,
    spelled,
    square_frame,
    to_bshd,
)

__all__ = ["IMPLEMENTATIONS", "native", "ready"]

Forward = Callable[[Any, Any, Any, dict[str, Any]], tuple[Any, Any]]
"""(q, k, v, extra) to (out, lse or None)."""


def native(arrays: dict[str, Any]) -> dict[str, Any]:
    """JAX arrays of the NumPy ones that are given."""
    lane = attnx.get_backend("jax").lane
    return {name: lane.from_numpy(a) for name, a in arrays.items() if a is not None}


def ready(
    workload: Workload,
    arrays: Arrays,
    forward: Forward,
    extra: dict[str, Any],
    how: str,
    *,
    bshd: bool = False,
) -> Ready:
    """Compile `forward`, with `jax.vjp` of it where gradients are asked for, as one program.

    Masks and biases go in as arguments (`extra`): as constants they would be folded into the
    program, which compiles for minutes and serves one mask.
    """
    import jax

    given = (arrays.q, arrays.k, arrays.v, arrays.d_out)
    lane: Any = attnx.get_backend("jax").lane
    q, k, v, d_out = (lane.from_numpy(to_bshd(array) if bshd else array) for array in given)

    def both(q: Any, k: Any, v: Any, d_out: Any, extra: dict[str, Any]) -> tuple[Any, ...]:
        def of_operands(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
            return forward(q, k, v, extra)

        out, pull, lse = jax.vjp(of_operands, q, k, v, has_aux=True)
        return out, lse, *pull(d_out)

    program = jax.jit(both if workload.gradient else forward)
    operands = (q, k, v, d_out, extra) if workload.gradient else (q, k, v, extra)

    def run() -> Any:
        made = program(*operands)
        lane.wait(made)
        return made

    def results(made: tuple[Any, ...]) -> dict[str, Any]:
        found = (None if one is None else lane.to_numpy(one) for one in made)
        return named(found, bshd=bshd)

    return Ready(run, results, how)


# jax.nn ----------------------------------------------------------------------------------------


def make_nn(workload: Workload, arrays: Arrays) -> Ready:
    """`jax.nn.dot_product_attention` in its own layout, by its own options where they serve."""
    import jax

    refuse(workload, softcap="has no softcap", dropout="has no dropout")
    refuse_float64(workload)
    if workload.Dv != workload.D:
        raise NotApplicable("takes v of k's shape only")
    refuse_scores(workload)
    options, extra = _nn_options(workload, arrays)

    def forward(q: Any, k: Any, v: Any, extra: dict[str, Any]) -> tuple[Any, Any]:
        made = jax.nn.dot_product_attention(q, k, v, **options, **extra)
        return made if workload.need_lse else (made, None)

    if workload.need_lse:
        options["return_residual"] = True
    words = [name for name in (*options, *extra) if name != "return_residual"]
    return ready(workload, arrays, forward, extra, ", ".join(words) or "no mask", bshd=True)


def _nn_options(workload: Workload, arrays: Arrays) -> tuple[dict[str, Any], dict[str, Any]]:
    """Its static keywords and its arrays."""
    options: dict[str, Any] = {}
    if workload.documents > 1 or not square_frame(workload):
        _, mask, bias = spelled(workload, arrays, apart=True)
        return options, native({"mask": mask, "bias": bias})
    if workload.causal is not False:
        options["is_causal"] = True
    if workload.window is not None:
        ahead = workload.Lk if workload.causal is False else 0
        options["local_window_size"] = (workload.window, ahead)
    lengths = {"key_value_seq_lengths": workload.lengths, "bias": arrays.bias}
    return options, native(lengths)


# The formula -----------------------------------------------------------------------------------


def make_formula(workload: Workload, arrays: Arrays) -> Ready:
    """Einsum, softmax in at least float32, einsum."""
    import jax
    import jax.numpy as jnp

    refuse(workload, dropout="has no dropout")
    refuse_scores(workload)
    wide = jnp.float64 if workload.dtype == "float64" else jnp.float32
    extra = native({"mask": dense(workload), "bias": arrays.bias})
    group = workload.Hq // workload.Hk

    def forward(q: Any, k: Any, v: Any, extra: dict[str, Any]) -> tuple[Any, Any]:
        if group > 1:
            k, v = jnp.repeat(k, group, axis=1), jnp.repeat(v, group, axis=1)
        scores = jnp.einsum("bhqd,bhkd->bhqk", q, k).astype(wide) * workload.scale
        if workload.softcap is not None:
            scores = workload.softcap * jnp.tanh(scores / workload.softcap)
        if "bias" in extra:
            scores = scores + extra["bias"]
        if "mask" in extra:
            scores = jnp.where(extra["mask"], scores, -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        lse = jax.nn.logsumexp(scores, axis=-1) if workload.need_lse else None
        return jnp.einsum("bhqk,bhkd->bhqd", weights, v), lse

    return ready(workload, arrays, forward, extra, "einsum, softmax, einsum")


IMPLEMENTATIONS = (
    Implementation("jax.nn", make_nn, ("jax",)),
    Implementation("jax formula", make_formula, ("jax",)),
)
