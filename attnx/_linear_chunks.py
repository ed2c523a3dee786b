"""The recurrence of linear attention, in chunks: what a loop over steps would give, by products.

Within a chunk of n steps the pairs are weighed as in attention, without the softmax. What came
before reaches a chunk through the state alone. All chunks are computed at once, and their states
joined by a scan of logarithmic depth and linear work, so that a compiler sees a program whose size
grows with log L. What is left over after the last whole chunk is one shorter chunk.

Axes are (B, Hk, g, L, D), with g = Hq / Hk query heads a key head; k and v have g = 1, and a state
(B, Hk, g or 1, D, Dv) has the g of the decay. Only operations that a framework differentiates
stand here. `backward` is the same gradient written out, for frameworks that have none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from attnx._linear_decay import Factors, Steady, Varying, reduce_to, running_sum

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attnx._lane import Lane

__all__ = [
    "Grads",
    "Inputs",
    "backward",
    "backward_all",
    "forward",
    "forward_all",
    "step",
]


class Inputs(NamedTuple):
    """Mapped arrays in the dtype of the sums.

    Attributes:
        q: (B, Hk, g, Lq, D).
        k: (B, Hk, 1, Lk, D).
        v: (B, Hk, 1, Lk, Dv).
        decay: None for 1.
        state: (B, Hk, g or 1, D, Dv), before the first step.
        spoilt: (B, Hk, 1, Lk, Dv), NaN from a value on that is no number and stands in v as 0, else
            0; None where all are numbers.
    """

    q: Any
    k: Any
    v: Any
    decay: Steady | Varying | None
    state: Any
    spoilt: Any = None


class Grads(NamedTuple):
    """Gradients of `Inputs`, each in its shape; `decay` is that of the log decays, or None."""

    q: Any
    k: Any
    v: Any
    decay: Any
    state: Any


class _Chunks(NamedTuple):
    """Steps in N chunks of n: q, k and v are (B, Hk, g or 1, N, n, D or Dv)."""

    q: Any
    k: Any
    v: Any
    factors: Factors | None
    decay: Steady | Varying | None
    state: Any


def forward(lane: Lane, x: Inputs, chunk: int) -> tuple[Any, Any]:
    """The causal answer (B, Hk, g, L, Dv), and the state after the last step."""
    xp, state, outs = lane.xp, x.state, []
    for start, N, n in _parts(x.q.shape[3], chunk):
        part = _cut(lane, x._replace(state=state), start, N, n)
        before, state = _states(lane, part)
        outs.append(_out(xp, part, before))
    if not outs:
        return xp.matmul(x.q, state), state + xp.zeros_like(state)
    return (outs[0] if len(outs) == 1 else xp.concat(outs, axis=3)), state


def backward(lane: Lane, x: Inputs, d_out: Any, d_state: Any, chunk: int) -> Grads:
    """The gradients of `forward`, for cotangents of its answer and of its last state."""
    xp, state, parts = lane.xp, x.state, []
    for start, N, n in _parts(x.q.shape[3], chunk):
        part = _cut(lane, x._replace(state=state), start, N, n)
        before, state = _states(lane, part)
        parts.append((part, before, d_out[:, :, :, start : start + N * n, :]))
    if not parts:
        d_state = d_state + xp.zeros_like(d_state)
        none = _joined(xp, x.decay, [None if x.decay is None else xp.zeros_like(x.decay.log)])
        return Grads(xp.zeros_like(x.q), xp.zeros_like(x.k), xp.zeros_like(x.v), none, d_state)
    found: list[Grads] = []
    for part, before, d in reversed(parts):
        found.insert(0, _backward(lane, part, before, d, d_state))
        d_state = found[0].state
    dq, dk, dv = (xp.concat([grads[a] for grads in found], axis=3) for a in range(3))
    return Grads(dq, dk, dv, _joined(xp, x.decay, [grads.decay for grads in found]), d_state)


def step(lane: Lane, x: Inputs) -> tuple[Any, Any]:
    """`forward` for one step, without chunks."""
    xp, state = lane.xp, x.state
    if x.decay is not None:
        state = xp.exp(x.decay.log)[..., None] * state
    state = state + xp.matmul(xp.matrix_transpose(x.k), x.v)
    return xp.matmul(x.q, state), state


def forward_all(lane: Lane, x: Inputs) -> tuple[Any, Any]:
    """Every query sees every key: the answer, and the state that holds all keys."""
    xp = lane.xp
    state = x.state + xp.matmul(xp.matrix_transpose(x.k), x.v)
    return xp.matmul(x.q, state), state


def backward_all(lane: Lane, x: Inputs, d_out: Any, d_state: Any) -> Grads:
    """The gradients of `forward_all`."""
    xp = lane.xp
    state = forward_all(lane, x)[1]
    d = xp.matmul(xp.matrix_transpose(x.q), d_out)
    d_state = d_state + reduce_to(xp, d, state.shape)
    dq = xp.matmul(d_out, xp.matrix_transpose(state))
    dk = xp.matmul(x.v, xp.matrix_transpose(d_state))
    return Grads(dq, dk, xp.matmul(x.k, d_state), None, d_state)


def _parts(L: int, chunk: int) -> Iterator[tuple[int, int, int]]:
    """Start, number and length of chunks: the whole ones together, then what is left over."""
    if L == 0:
        return
    n = min(L, chunk)
    N = L // n
    yield 0, N, n
    if N * n < L:
        yield N * n, 1, L - N * n


def _cut(lane: Lane, x: Inputs, start: int, N: int, n: int) -> _Chunks:
    stop = start + N * n

    def chunks(array: Any) -> Any:
        B, H, g, _, d = array.shape
        return lane.xp.reshape(array[:, :, :, start:stop, :], (B, H, g, N, n, d))

    decay = None if x.decay is None else x.decay.part(start, stop)
    factors = None if decay is None else decay.factors(lane, N, n)
    return _Chunks(chunks(x.q), chunks(x.k), chunks(x.v), factors, decay, x.state)


def _times(x: Any, factor: Any) -> Any:
    """Rows (…, n, d) times a factor (…, n)."""
    return x * factor[..., None]


def _weights(xp: Any, x: _Chunks) -> Any:
    """What step i takes of step j <= i of its chunk, (B, Hk, g, N, n, n)."""
    scores = xp.matmul(x.q, xp.matrix_transpose(x.k))
    return xp.tril(scores if x.factors is None else scores * x.factors.weights)


def _out(xp: Any, x: _Chunks, before: Any) -> Any:
    q = x.q if x.factors is None else _times(x.q, x.factors.into)
    out = xp.matmul(_weights(xp, x), x.v) + xp.matmul(q, before)
    B, H, g, N, n, Dv = out.shape
    return xp.reshape(out, (B, H, g, N * n, Dv))


def _states(lane: Lane, x: _Chunks) -> tuple[Any, Any]:
    """The states before each chunk, (B, Hk, g or 1, N, D, Dv), and the one after the last."""
    xp, gate = lane.xp, _gate(lane.xp, x)
    k = x.k if x.factors is None else _times(x.k, x.factors.onto)
    added = xp.matmul(xp.matrix_transpose(k), x.v)
    start = x.state[:, :, :, None, ...]
    first = start if gate is None else gate[:, :, :, :1, ...] * start
    items = xp.concat([first + added[:, :, :, :1, ...], added[:, :, :, 1:, ...]], axis=3)
    before = xp.concat([start, _scan(lane, gate, items)[:, :, :, :-1, ...]], axis=3)
    kept = before[:, :, :, -1, ...]
    if gate is not None:
        kept = gate[:, :, :, -1, ...] * kept
    return before, kept + added[:, :, :, -1, ...]  # of its own: a view would keep all states alive


def _gate(xp: Any, x: _Chunks) -> Any:
    """What each chunk keeps of the state before it, (B or 1, Hk or 1, g or 1, N, 1, 1)."""
    if x.factors is None:
        return None
    gate = x.factors.gate
    return xp.broadcast_to(gate, (*gate.shape[:3], x.q.shape[3]))[..., None, None]


def _scan(lane: Lane, gate: Any, x: Any) -> Any:
    """y_0 = x_0, y_m = gate_m y_(m-1) + x_m along axis 3; gate_0 may be anything."""
    M, size = x.shape[3], 1
    if gate is None:
        return running_sum(lane.xp, x, axis=3)
    while size < M:
        size *= 2
    if size > M:  # a power of 2: else a compiler would make a program for each number of chunks
        gate, x = (
            lane.xp.concat([y, _zeros(lane, y, (*y.shape[:3], size - M, *y.shape[4:]))], axis=3)
            for y in (gate, x)
        )
    return _halved(lane.xp, gate, x, size)[:, :, :, :M, ...]


def _zeros(lane: Lane, like: Any, shape: tuple[int, ...]) -> Any:
    return lane.full(shape, 0.0, like.dtype, like=like)


def _halved(xp: Any, gate: Any, x: Any, size: int) -> Any:
    """`_scan` of a power of 2: pairs first, then what lies between them."""
    if size == 1:
        return x
    even, odd = x[:, :, :, 0::2, ...], x[:, :, :, 1::2, ...]
    keep, keep_odd = gate[:, :, :, 0::2, ...], gate[:, :, :, 1::2, ...]
    odd = _halved(xp, keep * keep_odd, keep_odd * even + odd, size // 2)
    rest = keep[:, :, :, 1:, ...] * odd[:, :, :, :-1, ...] + even[:, :, :, 1:, ...]
    even = xp.concat([even[:, :, :, :1, ...], rest], axis=3)
    return xp.reshape(xp.stack([even, odd], axis=4), x.shape)


def _backward(lane: Lane, x: _Chunks, before: Any, d_out: Any, d_state: Any) -> Grads:
    """The gradients of one `_states` and `_out`."""
    xp, f = lane.xp, x.factors
    turn = xp.matrix_transpose
    d_out = xp.reshape(d_out, (*x.q.shape[:-1], d_out.shape[-1]))
    weights = _weights(xp, x)
    d_weights = xp.tril(xp.matmul(d_out, turn(x.v)))
    d_scores = d_weights if f is None else d_weights * f.weights
    q = x.q if f is None else _times(x.q, f.into)
    k = x.k if f is None else _times(x.k, f.onto)

    d_before = reduce_to(xp, xp.matmul(turn(q), d_out), before.shape)
    d_start, d_added = _flow(lane, x, d_before, d_state)
    dq, dk = xp.matmul(d_out, turn(before)), xp.matmul(x.v, turn(d_added))
    dv = reduce_to(xp, xp.matmul(turn(weights), d_out), x.v.shape)
    dv = dv + reduce_to(xp, xp.matmul(k, d_added), x.v.shape)

    d_decay = None
    if f is not None and x.decay is not None and x.decay.learnt:
        d_gate = f.gate * xp.sum(d_added * before, axis=(-2, -1))
        d_into, d_onto = xp.sum(q * dq, axis=-1), xp.sum(k * dk, axis=-1)
        exponents = Factors(d_weights * weights, d_into, d_onto, d_gate)
        d_decay = x.decay.gradient(lane, exponents)
    if f is not None:
        dq, dk = _times(dq, f.into), _times(dk, f.onto)
    dq = dq + xp.matmul(d_scores, x.k)
    dk = reduce_to(xp, dk, x.k.shape) + reduce_to(xp, xp.matmul(turn(d_scores), x.q), x.k.shape)
    dq, dk, dv = (_flat(xp, grad) for grad in (dq, dk, dv))
    return Grads(dq, dk, dv, d_decay, d_start)


def _flow(lane: Lane, x: _Chunks, d_before: Any, d_state: Any) -> tuple[Any, Any]:
    """Gradients of the first state, and of the states after each chunk: the scan, backwards."""
    xp, gate = lane.xp, _gate(lane.xp, x)
    items = xp.concat([d_before[:, :, :, 1:, ...], d_state[:, :, :, None, ...]], axis=3)
    reach = gate
    if gate is not None:  # the state after chunk m reaches the next through gate m + 1
        reach = xp.concat([gate[:, :, :, 1:, ...], gate[:, :, :, :1, ...]], axis=3)
        reach = xp.flip(reach, axis=3)
    flow = xp.flip(_scan(lane, reach, xp.flip(items, axis=3)), axis=3)
    first = flow[:, :, :, :1, ...]
    first = d_before[:, :, :, :1, ...] + (first if gate is None else gate[:, :, :, :1, ...] * first)
    return first[:, :, :, 0, ...], flow


def _flat(xp: Any, x: Any) -> Any:
    B, H, g, N, n, d = x.shape
    return xp.reshape(x, (B, H, g, N * n, d))


def _joined(xp: Any, decay: Steady | Varying | None, grads: list[Any]) -> Any:
    """The gradient of all log decays from those of the parts."""
    if decay is None or not decay.learnt:
        return None
    if len(grads) == 1:
        return grads[0]
    return xp.concat(grads, axis=3) if isinstance(decay, Varying) else grads[0] + grads[1]
