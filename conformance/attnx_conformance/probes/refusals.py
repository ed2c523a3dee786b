"""Wrong use is told before anything is computed: the argument, what was expected, and what came.

One row a class of error (S8.1), through the subject's own arrays. Only what the specification asks
of a message is pinned here, not its words.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from attnx.errors import ArgumentError, ArgumentTypeError, AttnxError
from attnx.masks import Causal, Lengths, Prefix, Segments, Starts
from attnx_conformance._marshal import NotApplicableError
from attnx_conformance.plain import numpy_dtype

from ._kit import Array, Kit, moved
from ._probe import Probe

__all__ = ["CLASSES", "PROBES", "Wrong"]

B, L = 2, 5


class Valid(NamedTuple):
    """A right call, from which each row makes a wrong one; arrays are "bhsd"."""

    kit: Kit
    q: Array
    k: Array
    v: Array

    def cast(self, *names: str, to: Any) -> dict[str, Array]:
        """Operands in another dtype."""
        return {name: getattr(self, name).astype(to) for name in names}

    def array(self, value: Any, dtype: Any = None) -> Any:
        """A small array of the subject's framework that takes no part in the layout."""
        return self.kit.lane.from_numpy(np.asarray(value, dtype=dtype))

    @property
    def other(self) -> Any:
        """A floating dtype that is not q's."""
        return numpy_dtype("float16" if self.kit.dtype == "float32" else "float32")

    @property
    def foreign(self) -> Any:
        """A floating dtype that no bias beside q may have: neither q's nor float32."""
        return numpy_dtype("bfloat16" if self.kit.dtype == "float16" else "float16")


@dataclass(frozen=True)
class Wrong:
    """One wrong call.

    Attributes:
        what: a few words for a person.
        argument: what the message must name first.
        error: `ArgumentError` (shapes, values) or `ArgumentTypeError` (dtypes, types).
        give: the arguments that differ from a right call.
        says: what else the message must hold. "{shape}" and "{dtype}" stand for those of the
            argument as it came.
        needs_contents: whether what is wrong stands in an array: where that cannot be read without
            waiting for a device, it is clamped instead.
    """

    what: str
    argument: str
    error: type[Exception]
    give: Callable[[Valid], dict[str, Any]]
    says: tuple[str, ...] = ()
    needs_contents: bool = False


def _value(
    what: str, argument: str, give: Callable[[Valid], dict[str, Any]], *says: str
) -> Wrong:  # fmt: skip
    return Wrong(what, argument, ArgumentError, give, says)


def _type(what: str, argument: str, give: Callable[[Valid], dict[str, Any]], *says: str) -> Wrong:
    return Wrong(what, argument, ArgumentTypeError, give, says)


def _ones(*shape: int, dtype: Any = bool) -> Array:
    return np.ones(shape, dtype)


SHAPES = (
    _value("q of one axis", "q", lambda c: {"q": c.q[0, 0, 0]}, "D)", "{shape}"),
    _value("k of another rank", "k", lambda c: {"k": c.k[0]}, "Lk", "{shape}"),
    _value("v of another rank", "v", lambda c: {"v": c.v[0]}, "Dv", "{shape}"),
    _value("k of another batch", "k", lambda c: {"k": c.k[:1]}, "batch", f"({B},)", "(1,)"),
    _value("v of another batch", "v", lambda c: {"v": c.v[:1]}, "batch", f"({B},)", "(1,)"),
    _value("k of another head size", "k", lambda c: {"k": c.k[..., :7]}, "D", "8", "{shape}"),
    _value("v of fewer keys", "v", lambda c: {"v": c.v[:, :, :4]}, "Lk", f"{L}", "{shape}"),
    _value("v of fewer heads", "v", lambda c: {"v": c.v[:, :1]}, "Hk", "{shape}"),
    _value("a group of no whole number", "q", lambda c: {"q": c.q[:, :5]}, "multiple", "Hq=5",
           "Hk=", "{shape}"),
    _value("a head size of 0", "q", lambda c: {"q": c.q[..., :0], "k": c.k[..., :0]}, "D",
           "{shape}"),
    _value("values of size 0", "v", lambda c: {"v": c.v[..., :0]}, "Dv", "{shape}"),
    _value("an unknown layout", "layout", lambda c: {"layout": "BHSD"}, "'bhsd'", "'bshd'",
           "'BHSD'"),
)  # fmt: skip

FLOATS = ("float16", "bfloat16", "float32", "float64")
ELEMENTS = (
    _type("integers", "q", lambda c: c.cast("q", "k", "v", to=np.int32), *FLOATS, "{dtype}"),
    _type("booleans", "q", lambda c: c.cast("q", "k", "v", to=np.bool_), *FLOATS, "{dtype}"),
    _type("complex numbers", "q", lambda c: c.cast("q", "k", "v", to=np.complex64), *FLOATS,
          "{dtype}"),
    _type("integer keys", "k", lambda c: c.cast("k", to=np.int32), "{dtype}"),
    _type("keys of another dtype", "k", lambda c: c.cast("k", to=c.other), "dtype of q", "{dtype}"),
    _type("values of another dtype", "v", lambda c: c.cast("v", to=c.other), "dtype of q",
          "{dtype}"),
    _type("a list for k", "k", lambda c: {"k": c.k.tolist()}, "q", "list"),
    _type("None for v", "v", lambda c: {"v": None}, "q", "None"),
)  # fmt: skip

SCALARS = (
    _type("a boolean scale", "scale", lambda c: {"scale": True}, "real number", "boolean"),
    _type("an array as scale", "scale", lambda c: {"scale": c.array(0.5, np.float32)},
          "scalar", "multiply q by it"),
    _type("a complex scale", "scale", lambda c: {"scale": 1j}, "scalar", "complex"),
    _value("a scale of NaN", "scale", lambda c: {"scale": math.nan}, "finite", "nan"),
    _value("an infinite scale", "scale", lambda c: {"scale": -math.inf}, "finite", "-inf"),
    _value("a softcap of 0", "softcap", lambda c: {"softcap": 0}, "> 0", "0.0"),
    _value("a negative softcap", "softcap", lambda c: {"softcap": -2.5}, "> 0", "-2.5"),
    _value("an infinite softcap", "softcap", lambda c: {"softcap": math.inf}, "finite", "inf"),
    _type("an array as softcap", "softcap", lambda c: {"softcap": c.array([2.0], np.float32)},
          "scalar"),
    _type("a boolean softcap", "softcap", lambda c: {"softcap": True}, "real number", "boolean"),
    _type("return_lse=1", "return_lse", lambda c: {"return_lse": 1}, "True or False", "1"),
    _type("assume_finite=None", "assume_finite", lambda c: {"assume_finite": None},
          "True or False", "None"),
)  # fmt: skip

MASKS = (
    _value("causal of two lengths", "causal",
           lambda c: {"k": c.k[:, :, :3], "v": c.v[:, :, :3], "causal": True}, "Lq == Lk",
           f"Lq={L}", "Lk=3", "'top_left'", "'bottom_right'"),
    _value("Causal() of two lengths", "mask",
           lambda c: {"k": c.k[:, :, :3], "v": c.v[:, :, :3], "mask": Causal()}, "Lq == Lk",
           f"Lq={L}", "Lk=3", "'top_left'", "'bottom_right'"),
    _value("an unknown alignment", "causal", lambda c: {"causal": "lower_right"}, "'top_left'",
           "'bottom_right'", "'lower_right'"),
    _value("a mask of other keys", "mask", lambda c: {"mask": c.array(_ones(L, L + 1))}, "Lq, Lk",
           f"({L}, {L})", f"({L}, {L + 1})"),
    _value("a mask of three axes", "mask", lambda c: {"mask": c.array(_ones(B, L, L))},
           "(B, Lq, Lk)", "(Hq, Lq, Lk)", f"({B}, {L}, {L})"),
    _type("a floating mask", "mask", lambda c: {"mask": c.array(_ones(L, L), np.float32)},
          "boolean", "float32", "bias"),
    _type("an integer mask", "mask", lambda c: {"mask": c.array(_ones(L, L), np.int32)},
          "boolean", "int32", "bias"),
    _value("a length beyond the keys", "Lengths.kv", lambda c: {"mask": Lengths(L + 1)},
           f"Lk={L}", f"{L + 1}"),
    _value("a start beyond the keys", "Starts.kv", lambda c: {"mask": Starts(L + 1)}, f"Lk={L}",
           f"{L + 1}"),
    _value("a prefix beyond the keys", "Prefix.n", lambda c: {"mask": Prefix(L + 1)}, f"Lk={L}",
           f"{L + 1}"),
    Wrong("lengths beyond the keys", "Lengths.kv", ArgumentError,
          lambda c: {"mask": Lengths(c.array([1, L + 1], np.int32))}, (f"[0, Lk={L}]", f"{L + 1}"),
          needs_contents=True),
    Wrong("negative lengths", "Lengths.kv", ArgumentError,
          lambda c: {"mask": Lengths(c.array([1, -1], np.int32))}, (f"[0, Lk={L}]", "-1"),
          needs_contents=True),
    _value("lengths of another batch", "Lengths.kv",
           lambda c: {"mask": Lengths(c.array([1, 2, 3], np.int32))}, "*B", f"({B},)", "(3,)"),
    _type("floating lengths", "Lengths.kv",
          lambda c: {"mask": Lengths(c.array([1, 2], np.float32))}, "integers", "float32"),
    _value("two Lengths beside bottom_right", "mask",
           lambda c: {"mask": Lengths(3) & Lengths(4), "causal": "bottom_right"}, "Lengths"),
    _value("a Lengths under | beside bottom_right", "mask",
           lambda c: {"mask": Lengths(3) | Prefix(2), "causal": "bottom_right"}, "Lengths"),
    _value("ids of other tokens", "Segments.q_ids",
           lambda c: {"mask": Segments(c.array([0, 1], np.int32), c.array([0] * L, np.int32))},
           f"({L},)", "(2,)"),
)  # fmt: skip

ADDED = (
    _type("a boolean bias", "bias", lambda c: {"bias": c.array(_ones(L, L))}, "floating", "bool",
          "mask="),
    _type("an integer bias", "bias", lambda c: {"bias": c.array(_ones(L, L), np.int32)}, "int32"),
    _type("a bias of another dtype", "bias", lambda c: {"bias": c.array(_ones(L, L), c.foreign)},
          "float32", "{dtype}"),
    _type("a number as bias", "bias", lambda c: {"bias": 1.0}, "array", "float"),
    _value("a bias of other keys", "bias",
           lambda c: {"bias": c.array(_ones(L, 3), np.float32)}, "Lq, Lk", "{shape}"),
    _value("a bias of three axes", "bias", lambda c: {"bias": c.array(_ones(6, L, L), np.float32)},
           "(B, Lq, Lk)", "(Hq, Lq, Lk)", "{shape}"),
    _value("sinks of other heads", "sinks", lambda c: {"sinks": c.array(_ones(5), np.float32)},
           "(Hq,)", "(6,)", "{shape}"),
    _value("sinks of two axes", "sinks", lambda c: {"sinks": c.array(_ones(1, 6), np.float32)},
           "(Hq,)", "(6,)", "{shape}"),
    _type("integer sinks", "sinks", lambda c: {"sinks": c.array(_ones(6), np.int32)}, "int32"),
    _type("a list as sinks", "sinks", lambda c: {"sinks": [0.0] * 6}, "array", "list"),
)  # fmt: skip


CLASSES: dict[str, tuple[Wrong, ...]] = {
    "shapes": SHAPES, "dtypes": ELEMENTS, "scalars": SCALARS, "masks": MASKS, "added": ADDED,
}  # fmt: skip


def _valid(kit: Kit) -> Valid:
    return Valid(
        kit, kit.draw(B, kit.Hq, L, 8), kit.draw(B, kit.Hk, L, 8), kit.draw(B, kit.Hk, L, 5)
    )


def _arguments(c: Valid, given: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The wrong call's arrays in the subject's framework and layout, and its options."""
    kit, rest = c.kit, dict(given)
    operands = []
    for name in ("q", "k", "v"):
        value = rest.pop(name, getattr(c, name))
        if isinstance(value, np.ndarray):
            value = kit.lane.from_numpy(np.ascontiguousarray(moved(value, kit.layout)))
        operands.append(value)
    return operands, {"layout": kit.layout} | rest


def _told(kit: Kit, row: Wrong, call: Callable[[], Any], came: Any) -> None:
    try:
        call()
    except AttnxError as error:
        kit.require(
            isinstance(error, row.error),
            f"{row.what}: {type(error).__name__}, expected {row.error.__name__} (S8.1): {error}",
        )
        text = str(error)
    except Exception as error:
        kit.require(False, f"{row.what}: {type(error).__name__}, not an AttnxError: {error}")
    else:
        kit.require(False, f"{row.what}: it was computed, not refused (S8.1)")
    kit.require(text.startswith(row.argument), f"{row.what}: not of {row.argument}: {text}")
    for part in row.says:
        if part == "{shape}":
            part = str(tuple(came.shape))
        elif part == "{dtype}":
            part = kit.lane.dtype_name(came)
        kit.require(part in text, f"{row.what}: {part!r} is not said: {text}")


def _refuses(rows: tuple[Wrong, ...]) -> Callable[[Kit], None]:
    """Every row raises, by attention and by its pullback, and nothing reaches the subject."""

    def check(kit: Kit) -> None:
        subject, c = _refusing(kit), _valid(kit)
        with subject.watched() as witness:
            assert witness is not None
            kit.call(c.q, c.k, c.v)  # a plan is kept, and perhaps a shortcut
            before = sum(witness.calls.values())
            kit.require(before > 0, f"a right call never reached {kit.subject.name}")
            for row in rows:
                operands, options = _arguments(c, row.give(c))
                if row.needs_contents and not kit.lane.readable(options["mask"].kv):
                    continue
                came = (dict(zip("qkv", operands, strict=True)) | options).get(row.argument)
                for entry in (subject.attention, subject.attention_vjp):
                    _told(kit, row, partial(entry, *operands, **options), came)
                    after = sum(witness.calls.values())
                    kit.require(after == before, f"{row.what}: told after something was computed")

    return check


def _refusing(kit: Kit) -> Any:
    if not kit.subject.refuses:
        raise NotApplicableError("a plain function is asked only what it supports")
    return kit.subject


def _unknown_options(kit: Kit) -> None:
    """An option that does not exist is a TypeError that names it, never ignored (S8.2)."""
    subject, c = _refusing(kit), _valid(kit)
    (q, k, v), options = _arguments(c, {})
    for name in ("casual", "attn_mask", "dropout_p"):
        for entry in (subject.attention, subject.attention_vjp):
            try:
                entry(q, k, v, **options, **{name: True})
            except TypeError as error:
                kit.require(name in str(error), f"{name} is not named: {error}")
            else:
                kit.require(False, f"the unknown option {name} was ignored")


_IDS = {"shapes": ("D13", "E3"), "dtypes": ("L5", "L6"), "scalars": (), "masks": ("C1", "D6", "D7"),
        "added": ("D4", "D8", "D13")}  # fmt: skip
_CLAUSES = {"shapes": ("S8.1", "S1.1", "S1.3"), "dtypes": ("S8.1", "S5.1"),
            "scalars": ("S8.1", "S1.6"), "masks": ("S8.1", "S3.3", "S3.5"),
            "added": ("S8.1", "S2.4", "S3.3")}  # fmt: skip
_NAMES = {"added": "bias-and-sinks"}

PROBES = (
    *(Probe(f"refuses-{_NAMES.get(kind, kind)}", _CLAUSES[kind], "system", _refuses(rows),
            ids=_IDS[kind]) for kind, rows in CLASSES.items()),
    Probe("refuses-unknown-options", ("S8.2",), "system", _unknown_options),
)  # fmt: skip
