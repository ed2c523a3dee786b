"""The probes of what stands around the operation, and of its relatives, can fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import attnx
from attnx.masks import Window
from attnx_conformance.probes import examine_probe, find, layers, relatives
from attnx_conformance.subject import BackendSubject, FunctionSubject


def changed(name: str, change: Callable[..., Any]) -> Callable[[pytest.MonkeyPatch], None]:
    """`attnx.name`, with its answer or arguments made wrong."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        right = getattr(attnx, name)
        patch.setattr(attnx, name, lambda *given, **options: change(right, *given, **options))

    return plant


def modulo_heads(right: Any, x: Any, context: Any = None, **options: Any) -> Any:
    """Key heads are dealt out in turn."""
    w, hk = options["weights"], options["num_kv_heads"]
    order = np.arange(options["num_heads"]).reshape(hk, -1).T.ravel()

    def dealt(matrix: Any, axis: int) -> Any:
        heads = np.stack(np.split(matrix, options["num_heads"], axis=axis))[order]
        return np.concatenate(list(heads), axis=axis)

    w = w._replace(wq=dealt(w.wq, 1), bq=dealt(w.bq, 0), wo=dealt(w.wo, 0))
    return right(x, context, **{**options, "weights": w})


def without_bias(right: Any, *given: Any, **options: Any) -> Any:
    y, pullback = right(*given, **options)

    def pull(d_y: Any) -> Any:
        grads = pullback(d_y)
        return grads._replace(weights=grads.weights._replace(bk=0 * grads.weights.bk + 1))

    return y, pull


def one_late(right: Any, q: Any, k: Any, v: Any, **options: Any) -> Any:
    """Each chunk of queries stands one place too far on."""
    out = right(q, k, v, **options)
    return np.roll(out, 1, axis=2)


def forgets(right: Any, q: Any, k: Any, v: Any, **options: Any) -> Any:
    """The state between chunks is lost."""
    size = options.pop("chunk", 64)
    made = [
        right(*(x[:, :, n : n + size] for x in (q, k, v)), **options)
        for n in range(0, q.shape[2], size)
    ]
    return np.concatenate(made, axis=2)


def sloppy(right: Any, *given: Any, **options: Any) -> Any:
    out, pullback = right(*given, **options)
    return out, lambda d: (lambda g: g._replace(k=g.k[:, ::-1]))(pullback(d))


class Cache:
    """A cache that counts its window one too wide, or shows what was never written."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    @classmethod
    def empty(cls, *sizes: Any, **options: Any) -> Cache:
        return cls(attnx.KVCache.empty(*sizes, **options))

    def append(self, k: Any, v: Any) -> Cache:
        return Cache(self.cache.append(k, v))

    def attend(self, q: Any, **who: Any) -> Any:
        c = self.cache
        return attnx.attention(q, c.k, c.v, mask=Window(None, None, "top_left"), **who)


def unwritten(patch: pytest.MonkeyPatch) -> None:
    made = Cache
    right = attnx.KVCache
    patch.setattr(Cache, "empty", classmethod(lambda cls, *a, **o: made(right.empty(*a, **o))))
    patch.setattr(attnx, "KVCache", Cache)


FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "heads-of-a-layer": (
        changed("multi_head_attention", modulo_heads), "cross-attention is off by",
    ),
    "heads-pullback": (
        changed("multi_head_attention_vjp", without_bias), "the gradient of bk says",
    ),
    "rotary-positions": (
        changed("rope", lambda right, x, places, **o: right(x, places * places, **o)),
        "rope, half: scores moved by",
    ),
    "tokens-from-a-cache": (unwritten, "decoding with window None is off by"),
    "call-in-parts": (changed("prefill", one_late), "causal, queries by 4 is off by"),
    "linear-in-chunks": (changed("linear_attention", forgets), "plain, chunks of 1: out"),
    "linear-token-by-token": (
        changed("linear_attention_step",
                lambda right, q, k, v, state, **o: right(q, k, v, None, **o)),
        "plain, token by token: out",
    ),
    "linear-pullback": (
        changed("linear_attention_vjp", sloppy), "plain: the gradient of k says",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_probe_sees_its_fault(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, told = FAULTS[name]
    subject = BackendSubject("numpy")
    assert examine_probe(find(name), subject, "float64").verdict == "passed"
    plant(monkeypatch)
    got = examine_probe(find(name), subject, "float64")
    assert (got.verdict, told in got.detail) == ("failed", True), got.detail


def test_a_later_value_that_reaches_an_earlier_step_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a product of a whole chunk lets it, where a factor of 0 is all that stands between."""
    leaks = changed(
        "linear_attention", lambda right, q, k, v, **o: right(q, k, v, **o) + 0 * v.sum()
    )
    leaks(monkeypatch)
    got = examine_probe(find("linear-in-chunks"), BackendSubject("numpy"), "float64")
    assert (got.verdict, "NaN at step" in got.detail) == ("failed", True), got.detail


def test_every_probe_has_been_seen_to_fail() -> None:
    assert {p.name for p in (*layers.PROBES, *relatives.PROBES)} == set(FAULTS)


def test_a_plain_function_is_not_asked() -> None:
    subject = FunctionSubject(lambda q, k, v: v, supports=())
    for probe in (*layers.PROBES, *relatives.PROBES):
        assert examine_probe(probe, subject, "float32").verdict == "not-applicable"
