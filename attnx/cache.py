"""A cache of keys and values for decoding: preallocated, with a length of its own per sequence.

A record of arrays and two static facts, so that frameworks can see through it: a pytree in JAX and
PyTorch, an argument and a result of one compiled program that serves all steps, a carry of a loop.
Nothing about it changes shape while it fills up.

What can go wrong in a cache is where tokens stand. Here a token's position is how many tokens of
its sequence came before it, whatever slot holds it, and query i of n stands where token i of the
last n stands. So attending after appending is causal attention over all tokens so far.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from attnx import _cache_checks as checks
from attnx._attention import attention
from attnx._dispatch import lane_of
from attnx.masks import Lengths, Window
from attnx.parts import prefill
from attnx.plugin import RECORDS

if TYPE_CHECKING:
    from attnx.plugin import Lane

__all__ = ["KVCache"]


@dataclass(frozen=True, eq=False, slots=True)
class KVCache:
    """Keys and values of the tokens so far, in slots that were allocated before.

    `KVCache.empty` makes one; `append`, `reorder` and `truncate` give a new record. NumPy, PyTorch
    and CuPy write into the slots that are there, so the record before is used up (PyTorch writes
    into a copy while it records a gradient of slots or tokens, or under `torch.func`). JAX's
    arrays never change: donate the cache to `jax.jit` for the same effect.

    Attributes:
        k: the keys, `(*B, Hk, capacity, D)`, or `(*B, capacity, Hk, D)` in the layout "bshd".
        v: the values, alike, with Dv.
        lengths: how many tokens each sequence had so far, integers `(*B)`.
        window: None; or how many tokens a query sees, its own among them, the slots being used
            again and again (a rolling cache).
        layout: `"bhsd"` or `"bshd"`.

    Example:
        >>> import numpy as np, attnx
        >>> x = np.random.default_rng(0).standard_normal((1, 2, 5, 4))
        >>> cache = attnx.KVCache.empty(1, 2, capacity=8, D=4, like=x)
        >>> steps = []
        >>> for i in range(5):
        ...     token = x[:, :, i : i + 1]
        ...     cache = cache.append(token, token)
        ...     steps.append(cache.attend(token))
        >>> whole = attnx.attention(x, x, x, causal=True)
        >>> bool(np.allclose(np.concatenate(steps, axis=2), whole))
        True
    """

    k: Any
    v: Any
    lengths: Any
    window: int | None = None
    layout: str = "bhsd"

    _array_fields: ClassVar[tuple[str, ...]] = ("k", "v", "lengths")
    _static_fields: ClassVar[tuple[str, ...]] = ("window", "layout")

    @classmethod
    def empty(
        cls,
        batch: int | tuple[int, ...],
        heads: int,
        capacity: int,
        D: int,
        Dv: int | None = None,
        *,
        like: Any,
        window: int | None = None,
        layout: str = "bhsd",
        fill: float = 0.0,
    ) -> KVCache:
        """A cache without tokens.

        Args:
            batch: how many sequences, or the batch axes *B.
            heads: Hk, the heads of keys and values.
            capacity: how many tokens a sequence can have; beside a window, how many are held.
            D: head size of the keys.
            Dv: head size of the values; D when absent.
            like: an array of the framework, dtype and device that the cache is to have.
            window: as in the class; the capacity is at least that.
            layout: as in the class.
            fill: what slots hold before they are written. It reaches no result, NaN included.

        Raises:
            ArgumentError: sizes below 1, an unknown layout, or a capacity below the window.
            ArgumentTypeError: `like` is no floating array, or a size no integer.

        Example:
            >>> import numpy as np, attnx
            >>> attnx.KVCache.empty(2, 4, 16, 8, like=np.float32([0])).k.shape
            (2, 4, 16, 8)
        """
        lane = lane_of(like, "like")
        B = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
        checks.check_sizes(lane, B, heads, capacity, D, Dv, like, window, layout)
        middle = (heads, capacity) if layout == "bhsd" else (capacity, heads)
        k = lane.full((*B, *middle, D), fill, like.dtype, like)
        v = lane.full((*B, *middle, D if Dv is None else Dv), fill, like.dtype, like)
        lengths = lane.integers(lane.full(B, 0, lane.xp.int32, like), like)
        return cls(k, v, lengths, None if window is None else int(window), layout)

    @property
    def capacity(self) -> int:
        """How many slots there are."""
        return int(self.k.shape[-2 if self.layout == "bhsd" else -3])

    def positions(self, n: int) -> Any:
        """Where the next n tokens will stand, integers `(*B, n)`: for rotary embeddings, say.

        A key is rotated to its position before it is appended, and keeps it.

        Example:
            >>> import numpy as np, attnx
            >>> attnx.KVCache.empty(1, 2, 8, 4, like=np.zeros(1)).positions(3)
            array([[0, 1, 2]])
        """
        return self.lengths[..., None] + lane_of(self.k, "k").arange(0, n, self.k)

    def key_positions(self) -> Any:
        """The position of the token in each slot, integers `(*B, capacity)`; -1 where none is.

        Example:
            >>> import numpy as np, attnx
            >>> x = np.zeros((1, 2, 3, 4))
            >>> cache = attnx.KVCache.empty(1, 2, 4, 4, like=x, window=2)
            >>> cache.append(x, x).append(x, x).key_positions()
            array([[4, 5, 2, 3]])
        """
        slots = lane_of(self.k, "k").arange(0, self.capacity, self.k)
        last = self.lengths[..., None] - 1
        return checks.select(self, last >= slots, last - (last - slots) % self.capacity, -1)

    # Writing -------------------------------------------------------------------------------------

    def append(self, k: Any, v: Any, counts: Any = None) -> KVCache:
        """The cache with the keys and values of n more tokens.

        Args:
            k: the keys in the cache's layout, `(*B, Hk, n, D)` or `(*B, n, Hk, D)`.
            v: the values, alike, with Dv.
            counts: integers `(*B)`: how many of the n are real, the first ones; None for all.

        Returns:
            The new record; the old one is used up, see the class.

        Raises:
            ArgumentError: shapes that do not fit; more tokens than there is room for, before
                anything is written. Where lengths cannot be read (under a transform, or on another
                device than the host), tokens beyond the capacity are not written, and `attend`
                gives NaN for their sequences. Beside a window, n tokens at once need a capacity of
                at least window + n - 1.
            ArgumentTypeError: another framework or dtype than the cache's.

        Example:
            >>> import numpy as np, attnx
            >>> x = np.zeros((2, 2, 3, 4))
            >>> cache = attnx.KVCache.empty(2, 2, 8, 4, like=x)
            >>> cache.append(x, x, counts=[3, 1]).lengths
            array([3, 1])
        """
        lane = lane_of(self.k, "k")
        n = checks.check_tokens(lane, self, k, v)
        given = None if counts is None else checks.check_counts(lane, self, counts, n)
        start = checks.check_room(lane, self, n, given)
        if n == 0:
            return self
        rows, real = self._slots(lane, n, given, start)
        k, v = (
            self._written(lane, self.k, k, rows, real),
            self._written(lane, self.v, v, rows, real),
        )
        lengths = self.lengths + (n if given is None else given)
        return KVCache(k, v, lengths, self.window, self.layout)

    def _slots(self, lane: Lane, n: int, given: Any, start: int | None) -> tuple[Any, Any]:
        """Which slots the next n tokens take, and which of the tokens are real, as `Lane.write`."""
        if start is not None and lane.any_shape:
            first = start % self.capacity
            if first + n <= self.capacity:
                return slice(first, first + n), None
        steps = lane.arange(0, n, self.k)
        at = lane.xp.reshape(self.lengths, (-1, 1)) + steps
        real = None if given is None else steps < lane.xp.reshape(given, (-1, 1))
        if self.window is None and not checks.readable(lane, self, given):
            fits = at < self.capacity
            real = fits if real is None else real & fits
        return at % self.capacity, real

    def _written(self, lane: Lane, buffer: Any, new: Any, rows: Any, real: Any) -> Any:
        axis = 2 if self.layout == "bhsd" else 1
        if buffer.ndim == 4:
            return lane.write(buffer, new, rows, real, axis)
        xp, batch = lane.xp, math.prod(self.lengths.shape)
        flat, tokens = (xp.reshape(x, (batch, *x.shape[-3:])) for x in (buffer, new))
        return xp.reshape(lane.write(flat, tokens, rows, real, axis), tuple(buffer.shape))

    def reorder(self, indices: Any) -> KVCache:
        """The cache with sequence `indices[b]` in place of sequence b, as beam search asks for.

        Args:
            indices: integers of one axis; there may be more or fewer than sequences. Where they
                cannot be read, `attend` gives NaN for one outside, or PyTorch raises.

        Raises:
            ArgumentError: a cache with other than one batch axis, or indices outside it.
            ArgumentTypeError: indices that are no integers.

        Example:
            >>> import numpy as np, attnx
            >>> x = np.zeros((2, 2, 3, 4))
            >>> cache = attnx.KVCache.empty(2, 2, 8, 4, like=x).append(x, x, counts=[3, 1])
            >>> cache.reorder([1, 1, 0]).lengths
            array([1, 1, 3])
        """
        lane = lane_of(self.k, "k")
        index = checks.check_indices(lane, self, indices)
        k, v = (lane.xp.take(x, index, axis=0) for x in (self.k, self.v))
        return replace(self, k=k, v=v, lengths=checks.picked(lane, self, index))

    def truncate(self, lengths: Any) -> KVCache:
        """The cache with the first tokens of each sequence alone, as speculative decoding asks for.

        Args:
            lengths: integers `(*B)`, each at most the sequence's length. Where they cannot be
                read, they are clamped to that.

        Raises:
            ArgumentError: lengths outside [0, the sequence's length].
            UnsupportedError: a rolling cache, which has overwritten what would be seen again.

        Example:
            >>> import numpy as np, attnx
            >>> x = np.zeros((2, 2, 3, 4))
            >>> cache = attnx.KVCache.empty(2, 2, 8, 4, like=x).append(x, x)
            >>> cache.truncate([2, 0]).lengths
            array([2, 0])
        """
        lane = lane_of(self.k, "k")
        return replace(self, lengths=checks.check_truncation(lane, self, lengths))

    # Reading -------------------------------------------------------------------------------------

    def attend(
        self,
        q: Any,
        *,
        counts: Any = None,
        mask: Any = None,
        causal: bool | str = "bottom_right",
        chunk: int | None = None,
        return_lse: bool = False,
        **options: Any,
    ) -> Any:
        """Attention of the last n tokens over all tokens so far (or over the window).

        Query i of n stands at position length - n + i of its sequence and sees the keys up to
        there. With counts, the first counts[b] queries are real and stand where the last
        counts[b] tokens stand; the others see nothing and give 0.

        Args:
            q: the queries in the cache's layout, `(*B, Hq, n, D)` or `(*B, n, Hq, D)`.
            counts: as in `append`.
            mask: as in `attention`, in addition: its keys are the slots, `(*B, Hq, n, capacity)`.
                Without a window token p stands in slot p. In a rolling cache it does not, so there
                only `Causal` and `Window` aligned to "bottom_right", and booleans over slots
                (see `key_positions`), have a meaning.
            causal: "bottom_right"; or False for queries that see every token.
            chunk: how many queries at a time, as in `prefill`; None for all at once.
            return_lse: as in `attention`.
            **options: bias, scale, softcap, sinks, dropout, assume_finite and backend, as in
                `attention`.

        Returns:
            out, or (out, lse), as of `attention`.

        Raises:
            ArgumentError: as in `attention`; options that have no meaning here.
            ArgumentTypeError: as in `attention`.
            UnsupportedError: as in `attention`.

        Example:
            >>> import numpy as np, attnx
            >>> x = np.ones((1, 2, 3, 4))
            >>> cache = attnx.KVCache.empty(1, 2, 8, 4, like=x).append(x, x)
            >>> cache.attend(np.ones((1, 6, 3, 4))).shape
            (1, 6, 3, 4)
        """
        lane = lane_of(self.k, "k")
        n = checks.check_queries(lane, self, q, causal, options)
        given = None if counts is None else checks.check_counts(lane, self, counts, n)
        k, v = self.k, self.v
        if self.window is not None:
            shown, causal = self._rolling(lane, n, given, mask), False
        elif mask is None and options.get("bias") is None and checks.sliceable(lane, self):
            k, v, shown, causal = self._written_slots(lane, n, given, causal)
        else:
            shown = checks.both(Lengths(self.lengths, given), mask)
        options |= {"mask": shown, "causal": causal, "layout": self.layout}
        if chunk is None:
            found = attention(q, k, v, return_lse=return_lse, **options)
        else:
            found = prefill(q, k, v, chunk=chunk, return_lse=return_lse, **options)
        if lane.readable(self.lengths):
            return found
        if return_lse:
            return tuple(checks.poisoned(self, x) for x in found)
        return checks.poisoned(self, found)

    def _written_slots(
        self, lane: Lane, n: int, counts: Any, causal: bool | str
    ) -> tuple[Any, Any, Any, bool | str]:
        """Keys, values, mask and causal with no slots but those that some sequence has written."""
        low, high = lane.extremes(self.lengths)
        at = (..., slice(0, high), *(slice(None),) * (1 if self.layout == "bhsd" else 2))
        if low < high or counts is not None:
            return self.k[at], self.v[at], Lengths(self.lengths, counts), causal
        # The last token sees all of them, so one query needs no mask at all.
        return self.k[at], self.v[at], None, False if n == 1 else causal

    def _rolling(self, lane: Lane, n: int, counts: Any, mask: Any) -> Any:
        """What the queries see of slots that are used again: by positions, not by slots."""
        last = self.lengths - (n if counts is None else counts)
        q_pos = last[..., None] + lane.arange(0, n, self.k)
        held = self.key_positions()
        # An empty slot stands behind every query.
        kv_pos = checks.select(self, held >= 0, held, self.lengths[..., None] + self.capacity)
        shown: Any = Window(int(self.window or 1) - 1, 0, q_pos=q_pos, kv_pos=kv_pos)
        if counts is not None:
            shown = Lengths(self.capacity, counts) & shown
        return shown if mask is None else checks.both(shown, checks.placed(mask, q_pos, kv_pos))

    def prefill(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        chunk: int,
        counts: Any = None,
        **options: Any,
    ) -> tuple[Any, KVCache]:
        """Append and attend, some tokens after others; so a rolling cache takes a long prompt.

        Args:
            q: as in `attend`.
            k: as in `append`, with as many tokens as q.
            v: as in `append`.
            chunk: how many tokens at a time.
            counts: as in `append`.
            **options: those of `attend` that do not count rows or keys: all but mask, bias,
                dropout and return_lse.

        Returns:
            (out, cache): out as of `attend` for all of the tokens.

        Raises:
            ArgumentError: as in `append` and `attend`; an option that this method lacks.
            ArgumentTypeError: as in `append` and `attend`.
            UnsupportedError: as in `attention`.

        Example:
            >>> import numpy as np, attnx
            >>> x = np.ones((1, 2, 30, 4))
            >>> cache = attnx.KVCache.empty(1, 2, 12, 4, like=x, window=8)
            >>> out, cache = cache.prefill(x, x, x, chunk=5)
            >>> out.shape, cache.lengths
            ((1, 2, 30, 4), array([30]))
        """
        lane = lane_of(self.k, "k")
        n = checks.check_prefill(lane, self, q, k, v, chunk, options)
        given = None if counts is None else checks.check_counts(lane, self, counts, n)
        checks.check_room(lane, self, n, given, at_once=min(n, chunk))
        axis = -2 if self.layout == "bhsd" else -3
        cache, found = self, []
        for start in range(0, n, chunk) if n else (0,):
            stop = min(start + chunk, n)
            at = (..., slice(start, stop), *(slice(None),) * (-axis - 1))
            real = None if given is None else checks.within(lane, given - start, stop - start)
            cache = cache.append(k[at], v[at], real)
            found.append(cache.attend(q[at], counts=real, **options))
        return lane.xp.concat(found, axis=axis), cache


RECORDS.append(KVCache)
