"""What a program around a call relies on: repeats, threads, the route, and addresses past 2**31."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from attnx.masks import Lengths
from attnx_conformance._marshal import Arguments
from attnx_conformance.plain import numpy_dtype

from ._kit import Answer, Array, Kit, moved
from ._probe import Probe

__all__ = ["PROBES"]

THREADS, ROUNDS = 8, 3


def _repeats_to_the_bit(kit: Kit) -> None:
    """The same call gives the same bits, gradients too, over several tiles and tokens."""
    q, k, v = kit.inputs(Lq=300, Lk=300, B=2)
    d = kit.cotangents(q, v)
    for what, more in (("a call", {}), ("a call with gradients", d)):
        first = kit.call(q, k, v, causal=True, **more)
        for _ in range(3):
            kit.identical(kit.call(q, k, v, causal=True, **more), first, f"{what} repeated")


def _at_once(work: Callable[[int], Any]) -> list[Any]:
    """`work(0)` to `work(7)`, each in a thread of its own, started together."""
    start = threading.Barrier(THREADS)

    def one(n: int) -> Any:
        start.wait()
        return work(n)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(one, range(THREADS)))


def _threads_get_their_own_answers(kit: Kit) -> None:
    """Eight calls at once on different inputs are eight calls one after the other."""
    options: dict[str, Any] = {"causal": True} if kit.able(causal=True) else {}
    calls = []
    for _ in range(THREADS):
        q, k, v = kit.inputs(B=1)
        calls.append((q, k, v, kit.cotangents(q, v)))

    def work(n: int) -> list[Answer]:
        q, k, v, d = calls[n]
        return [kit.call(q, k, v, **options, **d) for _ in range(ROUNDS)]

    for n, answers in enumerate(_at_once(work)):
        q, k, v, d = calls[n]
        for answer in answers:
            kit.right(answer, q, k, v, what=f"thread {n} of {THREADS}", **options, **d)


def _threads_share_inputs_unharmed(kit: Kit) -> None:
    """Eight calls at once on the same keys read them, and leave them as they were."""
    options: dict[str, Any] = {"causal": True} if kit.able(causal=True) else {}
    queries = [kit.inputs(B=1)[0] for _ in range(THREADS)]
    q, k, v = kit.inputs(B=1)
    shared, given = kit.arguments(q, k, v, **options)
    before = shared.snapshot(kit.lane)
    own = [kit.arguments(query, k, v, **options)[0].q for query in queries]

    def work(n: int) -> list[Answer]:
        args = Arguments(**{**vars(shared), "q": own[n]})
        return [kit.forward(args, given, kit.has.lse) for _ in range(ROUNDS)]

    for n, answers in enumerate(_at_once(work)):
        for answer in answers:
            kit.right(answer, queries[n], k, v, what=f"thread {n} of {THREADS}", **options)
    after = shared.snapshot(kit.lane)
    for name, old in before.items():
        kit.require(
            old.tobytes() == after[name].tobytes(), f"{name} was written to under threads (S1.4)"
        )


def _the_route_is_its_own(kit: Kit) -> None:
    """A call really enters the subject: nothing falls back unseen (S8.3)."""
    q, k, v = kit.inputs()
    d = kit.cotangents(q, v)
    with kit.subject.watched() as witness:
        if witness is None:
            kit.inapplicable("a plain function is its own route")
        runs: list[tuple[str, dict[str, Any]]] = [("a plain call", {})]
        lengths = {"mask": Lengths(kit.L - 3)}
        runs += [("a call with lengths", lengths)] if kit.able(**lengths) else []
        runs += [("a call with gradients", d)] if d else []
        for what, options in runs:
            before = sum(witness.calls.values())
            kit.call(q, k, v, **options)
            kit.require(
                sum(witness.calls.values()) > before,
                f"{what} never reached {kit.subject.name} (S8.3)",
            )


# Addresses past 2**31 elements, of which only a few pages are ever touched

STRIDE = 2**27 + 64
ROWS = 17  # the last row stands STRIDE * 16 > 2**31 elements behind the first


def _span(dtype: Any) -> Array:
    """Memory of `ROWS` far rows that is mapped, and not there before it is written to."""
    item = np.dtype(dtype).itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    block = mmap.mmap(-1, (ROWS - 1) * STRIDE * item + mmap.PAGESIZE * 4, flags=flags)
    return np.frombuffer(block, dtype=dtype)


def _far(array: Array, span: Array, first: int) -> Array:
    """A copy of an array (1, 1, L, D) whose rows stand `STRIDE` elements apart."""
    item = span.itemsize
    view = np.lib.stride_tricks.as_strided(
        span[first:], array.shape, (item, item, STRIDE * item, item)
    )
    view[...] = array
    return view


def _strides_past_31_bits(kit: Kit) -> None:
    """Rows of one fused buffer of q, k and v, 2**27 elements apart, and a mask alike."""
    if not hasattr(mmap, "MAP_PRIVATE"):
        kit.inapplicable("this system maps no private memory")
    q, k, v = kit.draw(1, 1, ROWS, 8), kit.draw(1, 1, ROWS, 8), kit.draw(1, 1, ROWS, 5)
    options: dict[str, Any] = {}
    if "dense" in kit.has.masks:
        options["mask"] = (kit.rng.random((ROWS, ROWS)) < 0.6) | np.eye(ROWS, dtype=bool)
    args, given = kit.arguments(q, k, v, **options)
    if not hasattr(args.q, "strides") and not hasattr(args.q, "stride"):
        kit.inapplicable(f"arrays of {kit.lane.name} have no strides")
    try:
        span = _span(numpy_dtype(kit.dtype))
        lines = _span(bool) if options else None
    except (OSError, ValueError) as error:
        kit.inapplicable(f"no address space for rows so far apart: {error}")
    far = [_far(x, span, 8 * n) for n, x in enumerate((q, k, v))]
    adopted = [_adopted(kit, moved(x, kit.layout), x) for x in far]
    if lines is not None:
        mask = _far(options["mask"][None, None], lines, 0)[0, 0]
        given["mask"] = _adopted(kit, mask, mask)
    moved_args = Arguments(**{**vars(args), **dict(zip("qkv", adopted, strict=True))})
    kit.right(kit.forward(moved_args, given, kit.has.lse), q, k, v, what="far rows", **options)
    d = {name: x for name, x in kit.cotangents(q, v).items() if name == "d_out"}
    if d and "vjp" in kit.subject.ways:
        moved_args = Arguments(
            **{**vars(moved_args), "d_out": kit.arguments(q, k, v, **d)[0].d_out}
        )
        made, grads = kit.vjp(moved_args, given)
        answer = {"out": made[0]} | {f"d{n}": x for n, x in grads.items() if x is not None}
        kit.right(kit.back(answer), q, k, v, what="far rows", **options, **d)


def _adopted(kit: Kit, view: Array, far: Array) -> Any:
    """The subject's array over the same memory."""
    try:
        made = kit.lane.adopt(view)
    except (TypeError, ValueError, BufferError, RuntimeError) as error:
        kit.inapplicable(f"{kit.lane.name} takes no view of NumPy's memory: {error}")
    if not np.may_share_memory(kit.numpy(made), far):
        kit.inapplicable(f"{kit.lane.name} copies what it is given")
    return made


PROBES = (
    Probe("repeats-to-the-bit", ("S4.1",), "system", _repeats_to_the_bit,
          needs=("deterministic",), ids=("O1",)),
    Probe("threads-own-answers", ("S1.4",), "system", _threads_get_their_own_answers),
    Probe("threads-share-inputs", ("S1.4",), "system", _threads_share_inputs_unharmed),
    Probe("route-is-its-own", ("S8.3",), "system", _the_route_is_its_own, ids=("O3",)),
    Probe("strides-past-31-bits", ("S1.4",), "system", _strides_past_31_bits,
          ids=("K2", "K3", "K4"), dtypes=("float16", "float32")),
)  # fmt: skip
