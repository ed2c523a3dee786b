"""What a plain function takes, in words: the vocabulary that wrapping and checking share.

`plugin.from_function` makes a backend of a function, and `attnx_conformance.check` examines one.
Both call it alike, so that one function and one tuple of words serve both. What a function is
called with, and what it thereby declares, follows from these words alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from attnx._contract import MASK_KINDS, Capabilities
from attnx.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["Supports"]

CAUSAL = ("causal", "causal_top_left", "causal_bottom_right")
OPTIONS = ("bias", "softcap", "sinks", "alibi", "dropout", "lse", "gqa")
"""Words that are also names of `Capabilities`."""

KEYWORDS = {
    "causal_top_left": "causal", "causal_bottom_right": "causal", "mask_objects": "mask",
    "alibi": "bias", "lse": "return_lse",
}  # fmt: skip
"""Words for what a function takes under another name; the others bear their own."""


class Supports(frozenset[str]):
    """A set of words for what a function `fn(q, k, v, **options)` takes.

    | word | what it gets |
    | --- | --- |
    | `causal` | `causal=True`, `"top_left"` or `"bottom_right"` |
    | `causal_top_left`, `causal_bottom_right` | `causal=True`; the other alignment as a mask |
    | `mask` | `mask=`, a boolean array, True = visible, that broadcasts to (*B, Hq, Lq, Lk) |
    | `mask_objects` | `mask=` and `causal=` as attnx has them |
    | `scale`, `softcap` | a float |
    | `bias`, `sinks` | an array |
    | `alibi` | `bias=`, an `attnx.Alibi` |
    | `dropout` | an `attnx.Dropout` of integers |
    | `lse` | `return_lse=True`, and gives (out, lse) |
    | `gqa` | Hq may be a multiple of Hk |
    | `gradients` | nothing: its framework can differentiate it |
    | `compile`, `vmap`, `forward_mode`, `higher_order` | nothing: it may be seen through these |
    | `memory` | nothing: its memory grows with L alone |

    Args:
        words: some of `Supports.KNOWN`, or one.

    Raises:
        ArgumentError: a word that is not known.

    Example:
        >>> from attnx.plugin import Supports
        >>> sorted(Supports(("lse", "mask")).keywords())
        ['mask', 'return_lse']
    """

    SEEN_THROUGH: ClassVar[frozenset[str]] = frozenset(
        {"compile", "vmap", "forward_mode", "higher_order"}
    )
    """Transforms of its framework that a function may be seen through; see `Capabilities`."""

    KNOWN: ClassVar[frozenset[str]] = (
        frozenset({*CAUSAL, *OPTIONS, "mask", "mask_objects", "scale", "gradients", "memory"})
        | SEEN_THROUGH
    )
    """Every word."""

    __slots__ = ()

    def __new__(cls, words: str | Iterable[str] = ()) -> Supports:
        """The words, once they are known ones."""
        made = super().__new__(cls, (words,) if isinstance(words, str) else words)
        unknown = sorted(made - cls.KNOWN)
        if unknown:
            raise ArgumentError(
                f"supports: unknown {', '.join(unknown)}; known: {', '.join(sorted(cls.KNOWN))}"
            )
        return made

    @classmethod
    def of(cls, capabilities: Capabilities) -> Supports:
        """The words for a declaration, where every mask beyond causal is an array.

        Example:
            >>> from attnx.plugin import Capabilities, Supports
            >>> few = Capabilities(frozenset({"float32"}), masks=frozenset(), bias=False, gqa=False)
            >>> sorted(Supports.of(few) - Supports.SEEN_THROUGH)
            ['gradients', 'lse', 'scale', 'sinks', 'softcap']
        """
        has = [
            word for word in (*OPTIONS, "scale", *cls.SEEN_THROUGH) if getattr(capabilities, word)
        ]
        has += ["causal"] * ("causal" in capabilities.masks)
        has += ["mask"] * bool(capabilities.masks - {"causal"})
        return cls((*has, *["gradients"] * capabilities.gradient))

    def takes_causal(self, align: Any, *, square: bool) -> bool:
        """Whether causal comes by its name; where Lq == Lk the alignments are one."""
        if "causal" in self or "mask_objects" in self:
            return True
        return bool(self & {*CAUSAL}) and (square or f"causal_{align}" in self)

    def keywords(self) -> frozenset[str]:
        """The names of the options that a function gets."""
        silent = {"gqa", "gradients", "memory", *self.SEEN_THROUGH}
        names = {KEYWORDS.get(word, word) for word in self - silent}
        return frozenset(names | ({"causal"} if "mask_objects" in self else set()))

    def check_signature(self, fn: Callable[..., Any], positional: str, *more: str) -> None:
        """Whether a function can be called with all that these words give it.

        Args:
            fn: the function.
            positional: what it gets by position, such as `"q, k, v"`.
            *more: further names of options.

        Raises:
            ArgumentError: it cannot; both signatures are told.
        """
        import inspect

        names = sorted({*self.keywords(), *more})
        try:
            signature = inspect.signature(fn)
        except (TypeError, ValueError):  # a built-in tells nothing
            return
        try:
            signature.bind(*positional.split(", "), **dict.fromkeys(names))
        except TypeError as error:
            keywords = "".join(f", {name}=..." for name in names)
            raise ArgumentError(
                f"function: expected one that can be called as fn({positional}{keywords}), "
                f"got {getattr(fn, '__name__', fn)}({', '.join(signature.parameters)}): {error}"
            ) from None

    def declared(
        self, dtypes: Iterable[str], isolation: str, *, gradient: bool, **more: Any
    ) -> Capabilities:
        """What a function that takes this declares.

        Args:
            dtypes: those that it takes.
            isolation: `"full"`, `"unseen"` or `"none"`.
            gradient: whether its gradient can be asked for.
            **more: other fields of `Capabilities`.
        """
        every = {"mask", "mask_objects"} & self
        masks = MASK_KINDS if every else frozenset({"causal"} if self & {*CAUSAL} else ())
        has: dict[str, Any] = {w: w in self for w in (*OPTIONS, "scale", *self.SEEN_THROUGH)}
        return Capabilities(
            frozenset(dtypes), masks=masks, gradient=gradient, bias_gradient="bias" in self,
            sinks_gradient="sinks" in self, lse_gradient="lse" in self, isolation=isolation,
            **has, **more,
        )  # fmt: skip
