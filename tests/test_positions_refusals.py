"""Positions: what is refused, and in which words (S8.1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import attnx
from attnx import positions
from attnx.errors import ArgumentError, ArgumentTypeError
from attnx.positions import (
    DynamicNtk,
    Frequencies,
    Linear,
    Llama3,
    LongRope,
    Ntk,
    Proportional,
    Yarn,
)

f32 = np.float32

x = np.ones((2, 3, 5, 8), f32)
p = np.arange(5)


def rope(x: Any = x, positions: Any = p, style: Any = "half", **options: Any) -> Any:
    return attnx.rope(x, positions, style=style, **options)


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "style": (lambda: rope(style="halves"), ArgumentError,
              "style: expected 'half' or 'interleaved', got 'halves'; did you mean 'half'"),
    "style None": (lambda: rope(style=None), ArgumentError, "style: expected .* got None$"),
    "layout": (lambda: rope(layout="bhds"), ArgumentError, "layout: .*did you mean 'bshd'"),
    "odd D": (lambda: rope(x[..., :7]), ArgumentError, "x: expected an even head size D.*got 7"),
    "odd part": (lambda: rope(rotary_dim=3), ArgumentError, "rotary_dim: expected an even number"),
    "large part": (lambda: rope(rotary_dim=10), ArgumentError, "expected at most D = 8"),
    "part 0": (lambda: rope(rotary_dim=0), ArgumentError, "rotary_dim: expected an integer >= 2"),
    "part float": (lambda: rope(rotary_dim=4.0), ArgumentTypeError, "rotary_dim: .* got float"),
    "x axes": (lambda: rope(np.ones(4)), ArgumentError, r"x: expected \(\*B, H, L, D\) or"),
    "x integers": (lambda: rope(np.ones((5, 8), int)), ArgumentTypeError, "x: expected one of"),
    "x list": (lambda: rope([[1.0]]), ArgumentTypeError, "x: expected an array of a registered"),
    "x masked": (lambda: rope(np.ma.ones((5, 8))), ArgumentTypeError, "x: MaskedArray has"),
    "positions length": (lambda: rope(positions=np.arange(4)), ArgumentError,
                         r"positions: expected \(L,\) = \(5,\) or \(\*B, L\) = \(2, 5\) beside x"),
    "other layout": (lambda: rope(positions=np.arange(3)), ArgumentError, "is it the other layout"),
    "positions batch": (lambda: rope(positions=np.zeros((3, 5), int)), ArgumentError,
                        r"positions: .* got \(3, 5\)"),
    "positions 0-D": (lambda: rope(positions=np.array(3)), ArgumentError, r"got \(\)"),
    "positions floating": (lambda: rope(positions=p * 1.0), ArgumentTypeError,
                           "positions: expected integers, got float64"),
    "positions bool": (lambda: rope(positions=p > 1), ArgumentTypeError, "got bool"),
    "positions foreign": (lambda: rope(positions=torch.arange(5)), ArgumentTypeError,
                          "positions: expected a numpy array like x, got torch.Tensor"),
    "positions int": (lambda: rope(positions=3), ArgumentTypeError, "got builtins.int"),
    "positions listed": (lambda: rope(positions=[0, 1, 2, 3, 4.5]), ArgumentTypeError,
                         r"positions\[4\]: expected an integer, got float"),
    "device": (lambda: rope(torch.ones(5, 8, device="meta"), torch.arange(5)), ArgumentError,
               "positions: expected the device of x, meta, got cpu"),
    "positions far": (lambda: rope(positions=p + 2**31), ArgumentError,
                      r"positions: expected integers within \[-2\*\*31, 2\*\*31\), got 2147483652"),
    "positions far back": (lambda: rope(positions=[-(2**70)] * 5), ArgumentError, "got -11805916"),
    "sinusoidal far": (lambda: attnx.sinusoidal(p + 2**40, 4), ArgumentError, "got 1099511627780"),
    "base": (lambda: rope(base=1.0), ArgumentError, "base: expected a finite number > 1, got 1.0"),
    "base nan": (lambda: rope(base=float("nan")), ArgumentError, "base: .* got nan"),
    "base inf": (lambda: rope(base=float("inf")), ArgumentError, "base: .* got inf"),
    "base type": (lambda: rope(base="1e4"), ArgumentTypeError, "base: .* got str"),
    "scaling": (lambda: rope(scaling={"rope_type": "yarn"}), ArgumentTypeError,
                "scaling: expected a record of attnx.positions"),
    "factors": (lambda: rope(scaling=LongRope([1.0], [2.0], 8, 4, 2)), ArgumentError,
                "short_factors: expected 4 numbers, half of the 8 that are turned, got 1"),
    "one pair": (lambda: rope(scaling=Ntk(2), rotary_dim=2), ArgumentError, "more than one pair"),
    "factor": (lambda: Linear(0.25), ArgumentError, "Linear: factor: .* number >= 1"),
    "ramp": (lambda: Yarn(2, 64, beta_fast=1, beta_slow=32), ArgumentError, "beta_fast >= "),
    "mscale": (lambda: Yarn(2, 64, mscale=1.0), ArgumentError, "mscale_all_dim or neither"),
    "llama": (lambda: Llama3(8, 64, 4.0, 4.0), ArgumentError, "high_freq_factor: .* > 4"),
    "length": (lambda: DynamicNtk(2, 64, 0), ArgumentError, "DynamicNtk: length: .* >= 1, got 0"),
    "fraction": (lambda: Proportional(1.5), ArgumentError, "fraction: expected at most 1"),
    "values": (lambda: Frequencies(3.0), ArgumentTypeError, "values: expected a sequence"),
    "no values": (lambda: Frequencies(()), ArgumentError, "values: expected at least one"),
    "table shape": (lambda: positions.rotate(x, x[0, 0], x[0, 0], style="half"), ArgumentError,
                    r"cos: expected \(L, R // 2\) or .* with 2 <= R <= D = 8, got \(5, 8\)"),
    "table length": (lambda: positions.rotate(x, *np.ones((2, 4, 2), f32), style="half"),
                     ArgumentError, r"cos: expected \(L,\) = \(5,\)"),
    "table pair": (lambda: positions.rotate(x, x[0, 0, :, :4], x[0, 0, :, :2], style="half"),
                   ArgumentError, r"sin: expected the shape of cos, \(5, 4\), got \(5, 2\)"),
    "table dtype": (lambda: positions.rotate(x, *np.ones((2, 5, 2)), style="half"),
                    ArgumentTypeError, "cos: expected float32 beside x of float32, got float64"),
    "table words": (lambda: positions.rope_table(p, 8, dtype="float16"), ArgumentError,
                    "dtype: expected 'float32' or 'float64', got 'float16'; did you mean"),
    "dim": (lambda: attnx.sinusoidal(p, 5), ArgumentError, "dim: expected an even number"),
    "sinusoidal": (lambda: attnx.sinusoidal(p > 1, 4), ArgumentTypeError, "positions: .* got bool"),
    "sinusoidal list": (lambda: attnx.sinusoidal([1], 4), ArgumentTypeError, "positions: expected"),
    "permutation": (lambda: positions.rope_permutation(4, source="half", target="gptj"),
                    ArgumentError, "target: expected 'half' or 'interleaved', got 'gptj'"),
    "heads": (lambda: attnx.alibi_slopes(0), ArgumentError, "heads: .* >= 1, got 0"),
    "heads bool": (lambda: attnx.alibi_slopes(True), ArgumentTypeError, "heads: .* got bool"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refusals(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    """S8.1: the argument, what was expected and what came."""
    with pytest.raises(error, match=message):
        call()


def test_a_rule_of_ones_own_is_a_frequencies() -> None:
    """A class of a user's has no text by which a compiled program could know it."""
    with pytest.raises(
        TypeError, match=r"Linear: a scaling of your own is a Frequencies\(values\)"
    ):
        type("Linear", (Linear,), {"__module__": "mine"})


def test_style_has_no_default() -> None:
    with pytest.raises(TypeError, match="style"):
        attnx.rope(x, p)  # type: ignore[call-arg]
