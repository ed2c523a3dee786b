"""How options are spelled, and how figures look."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest
from rich.console import Console

from attnx.cli._options import causal_value, integers
from attnx.cli._records import number, plain
from attnx.cli._request import Request
from attnx.cli._runner import Row
from attnx.cli._tables import bytes_text, print_comparison, seconds_text
from attnx.errors import ArgumentError
from attnx.plugin import Reason


def test_causal_is_a_flag_or_an_alignment() -> None:
    """What the option says becomes what the API takes."""
    assert causal_value(None) is False
    assert causal_value("square") is True
    assert causal_value("bottom_right") == "bottom_right"
    with pytest.raises(ArgumentError, match="--causal: expected nothing, top_left or bottom_right"):
        causal_value("left")


def test_integers_are_separated_by_commas() -> None:
    """Blanks do not matter; `none` stands for None where it may."""
    assert integers("--q", "1, 8,128 ,64") == (1, 8, 128, 64)
    assert integers("--window", "7,none", unlimited=True) == (7, None)
    for wrong in ("", "1,,2", "-1,2", "1.5", "none"):
        with pytest.raises(ArgumentError, match="--q: expected integers >= 0"):
            integers("--q", wrong)


def test_json_holds_no_infinity() -> None:
    """JSON has neither infinity nor NaN, so they travel as words."""
    assert number(math.inf) == "inf"
    assert number(math.nan) == "nan"
    assert number(0.5) == 0.5
    assert number(None) is None


def test_plain_reaches_into_records() -> None:
    """Named tuples become objects and sets become sorted lists."""
    found = plain({"a": (Reason("x", "1", "2"),), "b": frozenset({"z", "y"}), "c": 1})
    assert found == {
        "a": [{"option": "x", "got": "1", "supported": "2", "hint": ""}],
        "b": ["y", "z"],
        "c": 1,
    }


def test_figures_have_three_digits_and_a_unit() -> None:
    """Times from microseconds to seconds, sizes in MB."""
    assert seconds_text(1.2345) == "1.23 s"
    assert seconds_text(0.0123456) == "12.3 ms"
    assert seconds_text(0.0000456) == "45.6 µs"
    assert seconds_text(None) == "-"
    assert bytes_text(1_234_567) == "1.2 MB"
    assert bytes_text(None) == "-"


@pytest.mark.parametrize("width", [84, 140])
def test_a_narrow_terminal_clips_no_cell(width: int) -> None:
    """Two whole tables on 84 columns, one on 140; names, figures and reasons all stand."""
    arrays = {name: np.zeros((1, 1, 2, 4), np.float32) for name in "qkv"}
    ran = Row("numpy", "2.4.6", "agrees", "blocked tiles")
    ran.errors = dict.fromkeys(("out", "lse", "dq", "dk", "dv", "dbias", "dsinks"), 12345.6)
    ran.errors["lse"] = 0.0123
    ran.forward_s, ran.forward_backward_s, ran.peak_bytes = 1.234e-3, 4.56e-3, 3_400_000
    other = Row("cupy", None, "unavailable", why="no device [here]")
    text = io.StringIO()
    screen = Console(file=text, width=width)
    print_comparison(screen, "title [x]", Request(arrays), [ran, other])
    printed = text.getvalue()
    assert "…" not in printed
    for words in ("title [x]", "numpy", "0.012", "1e+04", "1.23 ms", "4.56 ms", "3.4 MB", "agrees"):
        assert words in printed
    assert "cupy: unavailable: no device [here]" in printed
    assert printed.count("backend ") == (2 if width == 84 else 1)
