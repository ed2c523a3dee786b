"""The checks of a cache's calls: shapes always, lengths and counts wherever they can be read.

A cache is written in place where a framework can, so whatever is wrong must be told before. What
cannot be read (under a transform, or on a device) is clamped instead, or shows as NaN.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnx._checks import FLOATING, SHAPES, check_integer
from attnx._dispatch import lane_of
from attnx.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from attnx.masks import And, Causal, Dense, Mask, Not, Or, Window
from attnx.plugin import Alibi, Reason

if TYPE_CHECKING:
    from attnx.cache import KVCache
    from attnx.plugin import Lane

__all__ = [
    "both",
    "check_counts",
    "check_indices",
    "check_prefill",
    "check_queries",
    "check_room",
    "check_sizes",
    "check_tokens",
    "check_truncation",
    "picked",
    "placed",
    "poisoned",
    "readable",
    "select",
    "sliceable",
    "within",
]

LOST = -(1 << 30)
"""The length of a sequence that there never was: below 0 however many tokens come."""

NOT_PIECEWISE = ("mask", "bias", "dropout", "return_lse", "chunk")


def check_sizes(
    lane: Lane, batch: tuple[int, ...], heads: int, capacity: int, D: int, Dv: int | None,
    like: Any, window: int | None, layout: str,
) -> None:  # fmt: skip
    """The arguments of `KVCache.empty`."""
    if lane.dtype_name(like) not in FLOATING:
        raise ArgumentTypeError(
            f"like: expected one of {', '.join(FLOATING)}, got {lane.dtype_name(like)}"
        )
    if layout not in SHAPES:
        raise ArgumentError(f"layout: expected 'bhsd' or 'bshd', got {layout!r}")
    sizes = {"heads": heads, "capacity": capacity, "D": D, "Dv": Dv, "window": window}
    for name, size in (*(("batch", n) for n in batch), *sizes.items()):
        if size is None and name in ("Dv", "window"):
            continue
        check_integer(name, size, 0 if name == "batch" else 1)
    if window is not None and capacity < window:
        raise ArgumentError(
            f"capacity: expected at least the window, {window}, got {capacity}; to append n tokens "
            "at once it takes window + n - 1"
        )


def _axis(cache: KVCache) -> int:
    return -2 if cache.layout == "bhsd" else -3


def _check_array(lane: Lane, cache: KVCache, name: str, array: Any, held: Any, axes: str) -> int:
    """One array of tokens against the slots: all but the heads of q and the tokens is equal."""
    if not lane.owns(array) or isinstance(array, lane.refused_types):
        raise ArgumentTypeError(
            f"{name}: expected a {lane.name} array like the cache's, got {type(array).__name__}"
        )
    if array.dtype != held.dtype:
        raise ArgumentTypeError(
            f"{name}: expected the cache's dtype {lane.dtype_name(held)}, got "
            f"{lane.dtype_name(array)}; nothing is cast silently, so convert it first"
        )
    axis = _axis(cache)
    free = {held.ndim + axis} | ({held.ndim - 5 - axis} if name == "q" else set())
    fits = array.ndim == held.ndim and all(
        n in free or a == b for n, (a, b) in enumerate(zip(array.shape, held.shape, strict=True))
    )
    if not fits:
        raise ArgumentError(
            f"{name}: expected {axes} beside slots of {tuple(held.shape)} in layout "
            f"{cache.layout!r}, got {tuple(array.shape)}"
        )
    return int(array.shape[axis])


def check_tokens(lane: Lane, cache: KVCache, k: Any, v: Any) -> int:
    """How many tokens came: n."""
    middle = "Hk, n" if cache.layout == "bhsd" else "n, Hk"
    n = _check_array(lane, cache, "k", k, cache.k, f"(*B, {middle}, D)")
    m = _check_array(lane, cache, "v", v, cache.v, f"(*B, {middle}, Dv)")
    if n != m:
        raise ArgumentError(f"v: expected as many tokens as k, {n}, got {m}")
    return n


def check_queries(lane: Lane, cache: KVCache, q: Any, causal: Any, options: dict[str, Any]) -> int:
    """How many queries came: n."""
    middle = "Hq, n" if cache.layout == "bhsd" else "n, Hq"
    n = _check_array(lane, cache, "q", q, cache.k, f"(*B, {middle}, D)")
    if "layout" in options:
        raise ArgumentError(f"layout: a cache has its own, {cache.layout!r}; leave it out")
    named = isinstance(causal, str) and causal == "bottom_right"
    if not named and (causal is not False or cache.window is not None):
        raise ArgumentError(
            "causal: expected 'bottom_right', the last query standing at the last token"
            + (", " if cache.window is not None else ", or False, ")
            + f"got {causal!r}"
        )
    if cache.window is None:
        return n
    bias = options.get("bias")
    if isinstance(bias, Alibi) or tuple(getattr(bias, "shape", ()))[-1:] not in ((), (1,)):
        raise ArgumentError(
            "bias: in a rolling cache slots are no positions, so a bias over keys has no meaning; "
            "use a cache without a window, and the mask Window"
        )
    _check_window(cache, n, "q")
    return n


def _check_window(cache: KVCache, n: int, name: str) -> None:
    if cache.window is not None and cache.capacity < cache.window + n - 1:
        raise ArgumentError(
            f"{name}: expected at most capacity - window + 1 = "
            f"{cache.capacity - cache.window + 1} tokens at once, got {n}; the first of them would "
            "miss keys that the last ones overwrite, so make the capacity window + n - 1 = "
            f"{cache.window + n - 1}, or take fewer at a time (prefill)"
        )


def check_room(
    lane: Lane, cache: KVCache, n: int, counts: Any, *, at_once: int | None = None
) -> int | None:
    """Whether n more tokens, or as many as counts say, find room.

    Returns:
        Where they all stand, if that is known to be one place for all sequences.
    """
    if cache.window is not None:
        _check_window(cache, n if at_once is None else at_once, "k")
    least, needed, known = 0, n, n > cache.capacity and counts is None
    if readable(lane, cache, counts) and 0 not in cache.lengths.shape:
        least, needed = lane.extremes(cache.lengths + (n if counts is None else counts))
        known = True
    if cache.window is None and known and needed > cache.capacity:
        raise ArgumentError(
            f"k: expected room for the new tokens within the capacity {cache.capacity}, got a "
            f"sequence that would have {needed}; make a cache of greater capacity"
        )
    return needed - n if known and least == needed and counts is None else None


def readable(lane: Lane, cache: KVCache, counts: Any) -> bool:
    """Whether it can be told what room there is."""
    return lane.readable(cache.lengths) and (counts is None or lane.readable(counts))


def sliceable(lane: Lane, cache: KVCache) -> bool:
    """Whether it is known how many slots are written, and keys of any number cost no program."""
    return lane.any_shape and lane.readable(cache.lengths) and 0 not in cache.lengths.shape


def check_counts(lane: Lane, cache: KVCache, counts: Any, n: int) -> Any:
    """counts as integers (*B) within [0, n]."""
    counts = _per_sequence(lane, cache, "counts", counts)
    if not lane.readable(counts):
        return within(lane, counts, n)
    if 0 not in counts.shape:
        low, high = lane.extremes(counts)
        if low < 0 or high > n:
            raise ArgumentError(
                f"counts: expected integers within [0, n={n}], got {low if low < 0 else high}"
            )
    return counts


def within(lane: Lane, counts: Any, n: int) -> Any:
    """Counts clamped to [0, n]."""
    xp = lane.xp
    return xp.minimum(xp.maximum(counts, xp.zeros_like(counts)), xp.full_like(counts, n))


def _per_sequence(lane: Lane, cache: KVCache, name: str, given: Any) -> Any:
    found = _integers(lane, cache, name, given)
    if tuple(found.shape) != tuple(cache.lengths.shape):
        raise ArgumentError(
            f"{name}: expected integers of shape *B = {tuple(cache.lengths.shape)}, one a "
            f"sequence, got shape {tuple(found.shape)}"
        )
    return found


def _integers(lane: Lane, cache: KVCache, name: str, given: Any) -> Any:
    if isinstance(given, (tuple, list)):
        return lane.integers(_listed(name, given), cache.k)
    if not lane.owns(given) or not lane.dtype_name(given).startswith(("int", "uint")):
        got = lane.dtype_name(given) if lane.owns(given) else type(given).__name__
        raise ArgumentTypeError(
            f"{name}: expected integers, one a sequence, as a list or an array of {lane.name}, "
            f"got {got}"
        )
    return lane.integers(given, cache.k)


def _listed(name: str, given: Any) -> tuple[Any, ...]:
    """Nested tuples of Python integers, which an array would make of fractions and texts too."""
    return tuple(
        [
            _listed(f"{name}[{n}]", x)
            if isinstance(x, (tuple, list))
            else check_integer(f"{name}[{n}]", x)
            for n, x in enumerate(given)
        ]
    )


def check_indices(lane: Lane, cache: KVCache, indices: Any) -> Any:
    """Which sequences to keep."""
    index = _integers(lane, cache, "indices", indices)
    batch = tuple(cache.lengths.shape)
    if len(batch) != 1 or index.ndim != 1:
        raise ArgumentError(
            "indices: expected integers of one axis, for a cache with one batch axis, got shape "
            f"{tuple(index.shape)} beside *B = {batch}"
        )
    if lane.readable(index) and index.shape[0]:
        low, high = lane.extremes(index)
        if low < 0 or high >= batch[0]:
            wrong = low if low < 0 else high
            raise ArgumentError(f"indices: expected sequences within [0, {batch[0]}), got {wrong}")
    return index


def picked(lane: Lane, cache: KVCache, index: Any) -> Any:
    """The lengths of these sequences; namespaces wrap and clamp what is outside, so it is told."""
    lengths = lane.xp.take(cache.lengths, index, axis=0)
    if lane.readable(index):
        return lengths
    outside = (index < 0) | (index >= cache.lengths.shape[0])
    return select(cache, outside, lane.xp.full_like(lengths, LOST), lengths)


def check_truncation(lane: Lane, cache: KVCache, lengths: Any) -> Any:
    """The new lengths."""
    if cache.window is not None:
        reason = Reason("truncate", "a rolling cache", "caches without a window", "use one")
        raise UnsupportedError(f"truncate: {reason}", reasons=(reason,))
    new = _per_sequence(lane, cache, "lengths", lengths)
    xp = lane.xp
    if lane.readable(new) and lane.readable(cache.lengths):
        if bool(xp.any(new < 0)) or bool(xp.any(new > cache.lengths)):
            raise ArgumentError(
                "lengths: expected integers within [0, the sequence's length], got "
                f"{lane.to_numpy(new).tolist()} beside {lane.to_numpy(cache.lengths).tolist()}"
            )
        return new
    return xp.minimum(xp.maximum(new, xp.zeros_like(new)), cache.lengths)


def check_prefill(
    lane: Lane, cache: KVCache, q: Any, k: Any, v: Any, chunk: Any, options: dict[str, Any]
) -> int:
    """How many tokens came: n."""
    if check_integer("chunk", chunk) < 1:
        raise ArgumentError(f"chunk: expected how many tokens at a time, at least 1, got {chunk}")
    for name in NOT_PIECEWISE:
        if name in options:
            raise ArgumentError(
                f"{name}: KVCache.prefill has no such option, for it counts rows or keys of one "
                "call; append and attend to each chunk"
            )
    n = check_tokens(lane, cache, k, v)
    middle = "Hq, n" if cache.layout == "bhsd" else "n, Hq"
    m = _check_array(lane, cache, "q", q, cache.k, f"(*B, {middle}, D)")
    if n != m:
        raise ArgumentError(f"q: expected as many tokens as k, {n}, got {m}")
    return n


def both(shown: Any, mask: Any) -> Any:
    """The cache's own mask and the caller's."""
    if mask is None:
        return shown
    return shown & (mask if isinstance(mask, Mask) else Dense(mask))


def placed(mask: Any, q_pos: Any, kv_pos: Any) -> Any:
    """A caller's mask in a rolling cache: by positions, or by slots where it is an array."""
    match mask:
        case And() | Or():
            return type(mask)([placed(part, q_pos, kv_pos) for part in mask.parts])
        case Not():
            return Not(placed(mask.part, q_pos, kv_pos))
        case Causal(align="bottom_right"):
            return Causal(q_pos=q_pos, kv_pos=kv_pos)
        case Window(align="bottom_right"):
            return Window(mask.left, mask.right, q_pos=q_pos, kv_pos=kv_pos)
    if not isinstance(mask, Mask) or isinstance(mask, Dense):
        return mask
    raise ArgumentError(
        f"mask: {mask!r}: in a rolling cache slots are no positions; expected Causal or Window "
        "aligned to 'bottom_right', or booleans over the slots made from key_positions()"
    )


def select(cache: KVCache, condition: Any, one: Any, other: Any) -> Any:
    """One where the condition holds, else the other, which may be an integer."""
    xp = lane_of(cache.k, "k").xp
    if isinstance(other, int):
        other = xp.full_like(one, other)
    return xp.where(condition, one, other)


def poisoned(cache: KVCache, answer: Any) -> Any:
    """NaN for sequences that nobody could read to be wrong.

    They had more tokens than there was room for, or came from an index without a sequence.
    """
    xp = lane_of(cache.k, "k").xp
    axes = (1,) * (answer.ndim - cache.lengths.ndim)
    lost = cache.lengths < 0
    if cache.window is None:
        lost = lost | (cache.lengths > cache.capacity)
    lost = xp.reshape(lost, (*cache.lengths.shape, *axes))
    return xp.where(lost, xp.full_like(answer, float("nan")), answer)
