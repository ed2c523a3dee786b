"""The workloads, by name: what people run, and what the performance goals are about."""

from __future__ import annotations

from .workload import Workload

__all__ = ["GROUPS", "WORKLOADS", "find"]

BASE = Workload("", "")
PLAIN = ("forward-2k", "heads-128")
"""The neighbours of other head sizes."""


def _workload(name: str, title: str, **changes: object) -> Workload:
    return BASE.with_(name=name, title=title, **changes)


GROUPS: dict[str, tuple[Workload, ...]] = {
    "prefill": (
        _workload("forward", "forward, N 4096", quick=True),
        _workload("causal", "causal, N 4096", causal="top_left", quick=True),
        _workload("forward-1k", "forward, N 1024", Lq=1024, Lk=1024),
        _workload("causal-1k", "causal, N 1024", Lq=1024, Lk=1024, causal="top_left"),
        _workload("forward-256", "forward, N 256", Lq=256, Lk=256, quick=True),
        _workload("forward-128", "forward, N 128", Lq=128, Lk=128),
        _workload("ragged", "forward, N 4095", Lq=4095, Lk=4095,
                  beside=("forward",)),
        _workload("chunk", "512 queries behind 3584 keys, causal", Lq=512,
                  causal="bottom_right"),
    ),
    "gradients": (
        _workload("backward", "forward and backward, N 4096", gradient=True, quick=True),
        _workload("causal-backward", "causal, forward and backward, N 4096", causal="top_left",
                  gradient=True),
        _workload("backward-512", "forward and backward, N 512", Lq=512, Lk=512, gradient=True),
        _workload("causal-backward-8k", "causal, forward and backward, N 8192", Lq=8192, Lk=8192,
                  causal="top_left", gradient=True),
        _workload("window-backward-8k", "window 512, forward and backward, N 8192", Lq=8192,
                  Lk=8192, causal="top_left", window=511, gradient=True),
    ),
    "masks": (
        _workload("window-8k", "window 512, N 8192", Lq=8192, Lk=8192, causal="top_left",
                  window=511, quick=True),
        _workload("window-16k", "window 512, N 16384", Lq=16384, Lk=16384, causal="top_left",
                  window=511),
        _workload("packed-16k", "16 ragged documents, N 16384", Lq=16384, Lk=16384, documents=16),
        _workload("padding", "half of each sequence is padding, B 4, N 2048", B=4, Lq=2048,
                  Lk=2048, valid=0.5),
        _workload("softcap", "softcap, N 4096", softcap=30.0),
        _workload("softcap-causal", "softcap, causal, N 4096", softcap=30.0, causal="top_left"),
        _workload("bias", "bias of each head, N 2048", Lq=2048, Lk=2048, bias=True),
    ),
    "decode": (
        _workload("decode", "1 query, 8192 keys, 32 heads, D 128", Hq=32, Hk=32, Lq=1, Lk=8192,
                  D=128, Dv=128),
        _workload("decode-gqa", "1 query, 8192 keys, heads 32 over 8, D 128", Hq=32, Lq=1,
                  Lk=8192, D=128, Dv=128, quick=True),
        _workload("prefill-gqa", "causal, N 2048, heads 32 over 8", Hq=32, Lq=2048, Lk=2048,
                  causal="top_left"),
    ),
    "numbers": (
        _workload("float16", "float16, N 2048", Lq=2048, Lk=2048, dtype="float16"),
        _workload("bfloat16", "bfloat16, N 2048", Lq=2048, Lk=2048, dtype="bfloat16"),
        _workload("float16-backward", "float16, forward and backward, N 2048", Lq=2048, Lk=2048,
                  dtype="float16", gradient=True),
        _workload("float64", "float64, N 2048", Lq=2048, Lk=2048, dtype="float64"),
        _workload("logits-10", "logits ten times as large, N 2048", Lq=2048, Lk=2048,
                  logits=10.0, beside=("forward-2k",)),
        _workload("logits-100", "logits a hundred times as large, N 2048", Lq=2048, Lk=2048,
                  logits=100.0, beside=("forward-2k",)),
        _workload("logits-100-backward", "the same with gradients", Lq=2048, Lk=2048,
                  logits=100.0, gradient=True, beside=("backward-2k",)),
    ),
    "dropout": (
        _workload("dropout", "dropout 0.1, N 2048", Lq=2048, Lk=2048, dropout=0.1,
                  beside=("forward-2k",)),
        _workload("dropout-backward", "dropout 0.1, forward and backward, N 2048", Lq=2048,
                  Lk=2048, dropout=0.1, gradient=True, beside=("backward-2k",)),
    ),
    "sizes": (
        _workload("forward-2k", "forward, N 2048", Lq=2048, Lk=2048),
        _workload("backward-2k", "forward and backward, N 2048", Lq=2048, Lk=2048, gradient=True),
        _workload("values", "Dv 128 beside D 64, N 2048", Lq=2048, Lk=2048, Dv=128,
                  beside=PLAIN),
        _workload("heads-128", "D 128, N 2048", Lq=2048, Lk=2048, D=128, Dv=128),
        _workload("heads-96", "D 96, N 2048", Lq=2048, Lk=2048, D=96, Dv=96,
                  beside=PLAIN),
        _workload("heads-80", "D 80, N 2048", Lq=2048, Lk=2048, D=80, Dv=80,
                  beside=PLAIN),
        _workload("heads-72", "D 72, N 2048", Lq=2048, Lk=2048, D=72, Dv=72,
                  beside=PLAIN),
        _workload("lse", "lse returned, N 2048", Lq=2048, Lk=2048, need_lse=True,
                  beside=("forward-2k",)),
    ),
    "long": (
        _workload("long", "causal, one head, N 32768", Hq=1, Hk=1, Lq=32768, Lk=32768,
                  causal="top_left"),
        _workload("long-backward", "causal, one head, forward and backward, N 32768", Hq=1, Hk=1,
                  Lq=32768, Lk=32768, causal="top_left", gradient=True),
    ),
}  # fmt: skip
"""The workloads by what they have in common, in the order in which they are run."""

WORKLOADS: tuple[Workload, ...] = tuple(w for group in GROUPS.values() for w in group)


def find(name: str) -> Workload:
    """The workload of that name.

    Raises:
        KeyError: there is none.
    """
    for workload in WORKLOADS:
        if workload.name == name:
            return workload
    raise KeyError(name)
