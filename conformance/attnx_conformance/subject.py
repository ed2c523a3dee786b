"""What the suite examines: a registered backend, or a plain function that nobody registered.

Both are asked through the same few methods, in NumPy-free terms: arrays of the subject's own
framework go in and come out. What a subject must do and what it must refuse follows from its
`Capabilities` alone, so that a new one adds no test code: what it declares must be right, and what
it does not declare must raise `UnsupportedError`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlencode

import numpy as np

import attnx
from attnx.errors import ArgumentError
from attnx.masks import Mask, map_leaves
from attnx.plugin import Alibi, Capabilities, Lane, Supports, mask_kinds

from ._marshal import NotApplicableError, plain_dropout
from ._visibility import Grid, visibility
from ._witness import Witness
from .cases import DTYPES

__all__ = [
    "FEATURES",
    "BackendSubject",
    "FunctionSubject",
    "Subject",
    "function_spec",
    "resolve",
    "several",
]

LAYOUTS = ("bhsd", "bshd")
FEATURES = Supports.KNOWN
"""What `FunctionSubject(supports=...)` may name; see `attnx.plugin.Supports`."""


def several(names: str | Iterable[str]) -> tuple[str, ...]:
    """Names, where one alone need not be put into a sequence."""
    return (names,) if isinstance(names, str) else tuple(names)


class Subject:
    """One thing under examination.

    Attributes:
        name: as reports say it.
        spec: `"backend:NAME"` or `"function:MODULE:CALLABLE"`, from which `resolve` makes it again
            in another process.
        target: what names it on the command line; "" where nothing does.
        lane: the framework of its arrays.
        capabilities: what it declares.
        ways: how its gradients can be asked for: "vjp" by an explicit pullback, "framework" by the
            framework's own differentiation.
        layouts: the layouts that it takes.
        has_weights: whether it gives the probabilities.
        refuses: whether it must itself refuse what it does not declare; a plain function is simply
            not asked.
        linear_memory: whether it says that its memory grows with L alone; a backend always does.
        mask_objects: whether masks reach it as objects, and not as boolean arrays.
    """

    name: str
    spec: str
    target: str = ""
    lane: Lane
    capabilities: Capabilities
    ways: tuple[str, ...]
    layouts: tuple[str, ...] = ("bhsd", "bshd")
    has_weights: ClassVar[bool] = False
    refuses: ClassVar[bool] = False
    linear_memory: bool = True
    mask_objects: bool = True

    def attention(self, q: Any, k: Any, v: Any, **options: Any) -> Any:
        """As `attnx.attention`."""
        raise NotImplementedError

    def attention_vjp(self, q: Any, k: Any, v: Any, **options: Any) -> Any:
        """As `attnx.attention_vjp`."""
        raise NotImplementedError

    def attention_weights(self, q: Any, k: Any, **options: Any) -> Any:
        """As `attnx.attention_weights`; only where `has_weights`."""
        raise NotImplementedError

    def watched(self) -> AbstractContextManager[Witness | None]:
        """Count what really reaches the code under examination."""
        return nullcontext()


class BackendSubject(Subject):
    """A registered backend, called by its name through the public API."""

    has_weights = True
    refuses = True

    def __init__(self, name: str) -> None:
        backend = attnx.get_backend(name)
        self.name = self.target = backend.name
        self.spec = f"backend:{backend.name}"
        self.lane, self.capabilities = backend.lane, backend.capabilities
        self.ways = ("vjp",) if self.lane.vjp is None else ("vjp", "framework")

    def attention(self, q: Any, k: Any, v: Any, **options: Any) -> Any:
        """By the backend, whatever the environment asks for."""
        return attnx.attention(q, k, v, **options, backend=self.name)

    def attention_vjp(self, q: Any, k: Any, v: Any, **options: Any) -> Any:
        """Alike."""
        return attnx.attention_vjp(q, k, v, **options, backend=self.name)

    def attention_weights(self, q: Any, k: Any, **options: Any) -> Any:
        """Alike."""
        return attnx.attention_weights(q, k, **options, backend=self.name)

    def watched(self) -> AbstractContextManager[Witness | None]:
        """Every plan that names the backend is wrapped, so that nothing else can do its work."""
        return Witness(self.name)


class FunctionSubject(Subject):
    """A plain function `fn(q, k, v, **options) -> out`, or `(out, lse)` with `return_lse=True`.

    It gets only the options that `supports` names. Masks come as one boolean array of the
    function's framework, True = visible, that broadcasts to (*B, Hq, Lq, Lk); with
    `"mask_objects"` they come as attnx's own. A call that asks for something it does not support
    is never made: it does not apply.

    Args:
        fn: the function.
        name: as reports say it.
        framework: the name of a registered backend whose arrays it takes.
        layout: "bhsd" or "bshd"; or both, and it is told by `layout=`.
        dtypes: names of the dtypes that it takes.
        supports: some of `FEATURES`. "causal" passes `causal=True`, "top_left" or "bottom_right";
            the two others pass `causal=True`, and the other alignment of a rectangular call as a
            mask. "alibi" passes an `attnx.Alibi` as `bias=` (S2.7), but in no case where positions
            follow from lengths that the function is not told. "dropout" passes an `attnx.Dropout`
            of integers, seed and offset (S9).
        vjp: its own pullback maker, as `attnx.attention_vjp`; else the framework differentiates.
        isolation: "full" where it keeps NaN in unseen keys from the rows that do not see them.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        name: str = "",
        framework: str = "numpy",
        layout: str | tuple[str, ...] = "bhsd",
        dtypes: Iterable[str] = ("float32",),
        supports: Collection[str] = (),
        vjp: Callable[..., Any] | None = None,
        isolation: str = "none",
        spec: str = "",
    ) -> None:
        dtypes, layouts = several(dtypes), several(layout)
        for what, given, known in (("layout", layouts, LAYOUTS), ("dtypes", dtypes, DTYPES)):
            if not given or not set(given) <= set(known):
                raise ArgumentError(
                    f"{what}: expected some of {', '.join(known)}, got {', '.join(given) or 'none'}"
                )
        self.supports = Supports(supports)
        if isolation not in ("full", "unseen", "none"):
            raise ArgumentError(f"isolation: expected full, unseen or none, got {isolation!r}")
        self.supports.check_signature(fn, "q, k, v", *["layout"] * (len(layouts) > 1))
        self.fn, self.vjp = fn, vjp
        self.name = name or getattr(fn, "__name__", type(fn).__name__)
        self.isolation, self.linear_memory = isolation, "memory" in self.supports
        self.spec, self.layouts = spec, layouts
        self.mask_objects = "mask_objects" in self.supports
        self.lane = attnx.get_backend(framework).lane
        self.ways = self._ways()
        if "gradients" in self.supports and not self.ways:
            raise ArgumentError(
                f"supports: {self.lane.name} has no differentiation of its own to ask for "
                "gradients; give vjp=, or another framework="
            )
        if vjp is not None and "gradients" not in self.supports:
            raise ArgumentError('vjp: add "gradients" to supports, or it is never asked')
        self.capabilities = self.supports.declared(dtypes, isolation, gradient=bool(self.ways))

    def _ways(self) -> tuple[str, ...]:
        if "gradients" not in self.supports:
            return ()
        own = ("vjp",) if self.vjp is not None else ()
        return own + (("framework",) if self.lane.vjp is not None else ())

    def attention(self, q: Any, k: Any, v: Any, **options: Any) -> Any:
        """The function's answer for the options that it takes.

        Raises:
            NotApplicableError: the call needs what it does not support.
        """
        return self.fn(q, k, v, **self._translated(q, k, options))

    def attention_vjp(self, q: Any, k: Any, v: Any, **options: Any) -> Any:
        """By its own pullback maker."""
        if self.vjp is None:
            raise NotApplicableError(f"{self.name} has no pullback of its own")
        return self.vjp(q, k, v, **self._translated(q, k, options))

    def _translated(self, q: Any, k: Any, options: dict[str, Any]) -> dict[str, Any]:
        given = {n: x for n, x in options.items() if x is not None and n != "assume_finite"}
        layout = given.pop("layout", self.layouts[0])
        if len(self.layouts) > 1:
            given["layout"] = layout
        causal, mask = given.pop("causal", False), given.pop("mask", None)
        if given.pop("return_lse", False):
            if "lse" not in self.supports:
                raise NotApplicableError(f"{self.name} gives no lse")
            given["return_lse"] = True
        for name in ("bias", "scale", "softcap", "sinks", "dropout"):
            said = "alibi" if isinstance(given.get(name), Alibi) else name
            if name in given and said not in self.supports:
                raise NotApplicableError(f"{self.name} takes no {said}")
        self._check_told(given.get("bias"), mask)
        if "dropout" in given:
            given["dropout"] = plain_dropout(given["dropout"], self.lane.to_numpy)
        return given | self._masks(q, k, causal, mask, layout)

    def _check_told(self, bias: Any, mask: Any) -> None:
        """Whether it can know where the queries stand: lengths are not in a boolean mask (S3.5)."""
        moved = isinstance(bias, Alibi) and bias.align == "bottom_right" and isinstance(mask, Mask)
        if moved and "lengths" in mask_kinds(mask.structure) and not self.mask_objects:
            raise NotApplicableError(f"{self.name} is not told the lengths that positions need")

    def _masks(self, q: Any, k: Any, causal: Any, mask: Any, layout: str) -> dict[str, Any]:
        if "mask_objects" in self.supports:
            return {"causal": causal} | ({} if mask is None else {"mask": mask})
        axis = -2 if layout == "bhsd" or len(q.shape) == 2 else -3
        square = q.shape[axis] == k.shape[axis]
        passed: dict[str, Any] = {}
        # An alignment may depend on the mask's own lengths (S3.5), which a function does not know.
        by_name = causal is not False and self.supports.takes_causal(causal, square=square)
        if not isinstance(mask, Mask) and by_name:
            passed["causal"] = causal if "causal" in self.supports else True
            causal = False
        if causal is False and mask is None:
            return passed
        if "mask" not in self.supports:
            raise NotApplicableError(f"{self.name} takes no mask")
        if causal is False and not isinstance(mask, Mask):
            return passed | {"mask": mask}
        return passed | {"mask": self.lane.from_numpy(self._expanded(q, k, causal, mask, layout))}

    def _expanded(self, q: Any, k: Any, causal: Any, mask: Any, layout: str) -> Any:
        """The mask as one boolean array (*B, Hq, Lq, Lk), by the oracle's own reading."""
        rows, heads = (-2, -3) if layout == "bhsd" else (-3, -2)
        flat = len(q.shape) == 2
        batch = () if flat else tuple(q.shape[:-3])
        Lq, Lk = (q.shape[0], k.shape[0]) if flat else (q.shape[rows], k.shape[rows])
        grid = Grid(batch, 1 if flat else q.shape[heads], Lq, Lk, len(q.shape))
        if isinstance(mask, Mask):
            mask = map_leaves(mask, lambda _node, _field, leaf: self._leaf(leaf))
        elif mask is not None:
            mask = self.lane.to_numpy(mask)
        return np.ascontiguousarray(visibility(mask, causal, None, grid).reshape(grid.full))

    def _leaf(self, leaf: Any) -> Any:
        return self.lane.to_numpy(leaf) if self.lane.owns(leaf) else leaf


def function_spec(
    text: str, *, framework: str, layouts: Iterable[str], dtypes: Iterable[str],
    supports: Iterable[str], isolation: str,
) -> str:  # fmt: skip
    """The `spec` of a plain function `"MODULE:CALLABLE"` and what it can do."""
    options = {
        "framework": framework, "layouts": ",".join(layouts), "dtypes": ",".join(dtypes),
        "supports": ",".join(supports), "isolation": isolation,
    }  # fmt: skip
    return f"function:{text}?{urlencode(options)}"


def resolve(spec: str) -> Subject:
    """A subject from its text: `"backend:NAME"`, or what `function_spec` makes.

    Raises:
        ArgumentError: it is of no known form, or names nothing.
    """
    form, _, rest = spec.partition(":")
    if form == "backend":
        return BackendSubject(rest)
    text, _, query = rest.partition("?")
    found = _import(text)
    if isinstance(found, Subject):
        found.spec = spec
        found.target = found.target or f"--function {text}"
        return found
    options = {name: values[0] for name, values in parse_qs(query).items()}
    layouts = tuple(options.get("layouts", "bhsd").split(","))
    supports = tuple(name for name in options.get("supports", "").split(",") if name)
    made = FunctionSubject(
        found, layout=layouts[0] if len(layouts) == 1 else layouts, spec=spec, supports=supports,
        dtypes=options.get("dtypes", "float32").split(","),
        framework=options.get("framework", "numpy"), isolation=options.get("isolation", "full"),
    )  # fmt: skip
    made.target = f"--function {text} --framework {made.lane.name} --isolation {made.isolation}"
    made.target += f" --supports {','.join(supports)}" if supports else ""
    return made


def _import(text: str) -> Any:
    module, _, attribute = text.partition(":")
    if not (module and attribute):
        raise ArgumentError(f"function: expected MODULE:CALLABLE, got {text!r}")
    try:
        found: Any = importlib.import_module(module)
        for name in attribute.split("."):
            found = getattr(found, name)
    except Exception as error:  # the module is the user's, and may do anything
        told = str(error) if isinstance(error, (ImportError, AttributeError)) else repr(error)
        raise ArgumentError(f"function: cannot import {text!r}: {told}") from error
    if not (callable(found) or isinstance(found, Subject)):
        raise ArgumentError(f"function: {text} is a {type(found).__name__}, not a function")
    return found
