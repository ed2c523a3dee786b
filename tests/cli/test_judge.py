"""The judging of results in pieces gives what judging the whole gives."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from attnx.cli import _judge
from attnx.cli._judge import check_size, judge_all
from attnx.cli._request import Options, Request
from attnx.errors import ArgumentError
from attnx_conformance.oracle import reference

RESULTS = ("out", "lse", "dq", "dk", "dv", "dbias", "dsinks")


def _request(case: str, layout: str) -> Request:
    rng = np.random.default_rng(3)
    B, Hq, Hk, Lq, Lk, D, Dv = 3, 4, 2, 5, 7, 8, 6

    def make(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(np.float32)

    arrays = {"q": make(B, Hq, Lq, D), "k": make(B, Hk, Lk, D), "v": make(B, Hk, Lk, Dv)}
    if layout == "bshd":
        arrays = {n: np.ascontiguousarray(np.swapaxes(a, 1, 2)) for n, a in arrays.items()}
    arrays["lengths"] = np.array([7, 3, 5])
    if case == "full bias":
        arrays["bias"] = make(B, Hq, 1, Lk)
    elif case == "head bias":
        arrays["bias"] = make(1, Hq, Lq, Lk)
    elif case == "flat bias":
        arrays["bias"] = make(Lq, Lk)
    elif case == "sinks":
        arrays["sinks"] = make(Hq)
    elif case == "mask":
        arrays["mask"] = rng.random((B, 1, 1, Lk)) > 0.2
    return Request(arrays, Options(causal="bottom_right", layout=layout, softcap=5.0))


def _exact(request: Request) -> dict[str, Any]:
    (q, k, v), options = request.call()
    found = reference(q, k, v, d_out=request.d_out(), **options)
    arrays = {name: getattr(found, name) for name in RESULTS if getattr(found, name) is not None}
    return {name: np.asarray(a, dtype=np.float32) for name, a in arrays.items()}


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("case", ["none", "full bias", "head bias", "flat bias", "sinks", "mask"])
def test_pieces_agree_with_the_whole(
    case: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut by batch and by head, the same right results are right and the same fault is seen."""
    request = _request(case, layout)
    right = _exact(request)
    wrong = {name: array.copy() for name, array in right.items()}
    for array in wrong.values():
        array[(-1,) * array.ndim] += 1.0
    results = {"right": right, "wrong": wrong}
    whole = judge_all(request, results, {})
    monkeypatch.setattr(_judge, "PIECE", 1)
    pieces = judge_all(request, results, {})
    for verdicts in (whole, pieces):
        assert set(verdicts["right"]) == set(right)
        assert all(found.ratio <= 1 for found in verdicts["right"].values())
        assert all(found.ratio > 1 for found in verdicts["wrong"].values())


def test_a_cut_call_is_really_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a bias each piece is one batch entry and one key head."""
    monkeypatch.setattr(_judge, "PIECE", 1)
    pieces = list(_judge._pieces(_request("none", "bhsd")))
    assert [(piece.batch, piece.group) for piece in pieces] == [
        ((b,), h) for b in range(3) for h in range(2)
    ]
    assert {(p.batch, p.group) for p in _judge._pieces(_request("flat bias", "bhsd"))} == {
        (None, None)
    }


@pytest.mark.parametrize("fault", ["shape", "dtype", "nan"])
def test_a_wrong_form_is_infinitely_wrong(fault: str) -> None:
    """A result of another shape or dtype, or with a NaN, cannot pass for lack of a number."""
    request = _request("none", "bhsd")
    results = _exact(request)
    if fault == "shape":
        results["dk"] = results["dk"][:, :1]
    elif fault == "dtype":
        results["dk"] = results["dk"].astype(np.float64)
    else:
        results["dk"][0, 0, 0, 0] = np.nan
    verdict = judge_all(request, {"x": results}, {})["x"]
    assert verdict["dk"].ratio == math.inf
    assert all(found.ratio <= 1 for name, found in verdict.items() if name != "dk")


def test_a_reference_beyond_memory_is_refused_before_it_is_made() -> None:
    """The cost of the reference is known from the shapes, and the message says it."""
    thin = np.broadcast_to(np.float32(0), (1 << 20, 4))
    with pytest.raises(ArgumentError, match="GiB, more than half of this machine's memory"):
        check_size(Request({"q": thin, "k": thin, "v": thin}))
