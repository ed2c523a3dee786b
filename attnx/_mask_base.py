"""The tree under the mask objects: freezing, structure, `& | ~`, and walks over the leaves.

It stands apart from `masks`, which holds what the masks mean to a user, so that each fits a screen
or two. A tree is hashable by structure, and its leaves can be replaced without running a check,
because a framework rebuilds masks from tracers and placeholders.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from attnx import _install
from attnx.errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = [
    "And",
    "Mask",
    "Not",
    "Or",
    "is_scalar",
    "leaves",
    "map_leaves",
    "rebuild",
    "show",
    "walk",
]


class Mask:
    """The base of all mask objects: frozen, combinable, hashable by structure (S3.6)."""

    __slots__ = ("structure",)

    _array_fields: ClassVar[tuple[str, ...]] = ()
    _static_fields: ClassVar[tuple[str, ...]] = ()

    structure: str
    """What a plan may depend on: the tree without its numbers and arrays."""

    def _set(self, **fields: Any) -> None:
        for name, value in fields.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "structure", self._key())
        if _install.early:
            _install.first_mask()

    def _key(self) -> str:
        return type(self).__name__.lower()

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"a mask is frozen: make a new {type(self).__name__} to change {name}")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a mask is frozen: {name} cannot be deleted")

    __array_ufunc__ = None  # an array beside & or | leaves the answer to the mask

    def __and__(self, other: Mask) -> Mask:
        return And((self, other))

    def __or__(self, other: Mask) -> Mask:
        return Or((self, other))

    def __rand__(self, other: Mask) -> Mask:
        return And((other, self))

    def __ror__(self, other: Mask) -> Mask:
        return Or((other, self))

    def __invert__(self) -> Mask:
        return Not(self)

    def __bool__(self) -> NoReturn:
        raise ArgumentTypeError("a mask has no truth value: combine masks with & | ~, not and/or")

    def _static(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in self._static_fields)

    def _arrays(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in self._array_fields)

    def __eq__(self, other: object) -> bool:
        """Equal structure and statics, and leaves that are the same object or the same integer."""
        if type(other) is not type(self):
            return NotImplemented
        mine, theirs = self._arrays(), other._arrays()
        return self._static() == other._static() and all(
            a is b or (isinstance(a, (int, tuple)) and type(a) is type(b) and a == b)
            for a, b in zip(mine, theirs, strict=True)
        )

    def __hash__(self) -> int:
        return hash((type(self), self.structure, self._static()))

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild, (type(self), self._static(), self._arrays(), self.structure)

    def __repr__(self) -> str:
        """As it would be written; arrays by dtype and shape."""
        given = [show(getattr(self, name)) for name in self._static_fields]
        if given and given[-1] == "None":
            given.pop()
        named = [
            f"{name}={show(leaf)}" if self._static_fields else show(leaf)
            for name, leaf in zip(self._array_fields, self._arrays(), strict=True)
            if leaf is not None
        ]
        return f"{type(self).__name__}({', '.join([*given, *named])})"


class _Compound(Mask):
    __slots__ = ("parts",)
    _array_fields = ("parts",)
    _sign: ClassVar[str] = ""
    parts: tuple[Mask, ...]

    def __init__(self, parts: Iterable[Mask]) -> None:
        flat: list[Mask] = []
        for part in (parts,) if isinstance(parts, Mask) else parts:
            _check_part(type(self).__name__, part)
            flat.extend(part.parts if isinstance(part, type(self)) else (part,))
        if not flat:
            raise ArgumentError(f"{type(self).__name__}: expected at least one mask, got none")
        self._set(parts=tuple(flat))

    def _key(self) -> str:
        return f"({self._sign.join(part.structure for part in self.parts)})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, type(self)):
            return NotImplemented
        return self.parts == other.parts

    def __hash__(self) -> int:
        return hash((type(self), self.parts))

    def __repr__(self) -> str:
        return f" {self._sign} ".join(_wrap(part) for part in self.parts)


class And(_Compound):
    """Visible where every part says so; made by `&`, and flat."""

    __slots__ = ()
    _sign = "&"


class Or(_Compound):
    """Visible where any part says so; made by `|`, and flat."""

    __slots__ = ()
    _sign = "|"


class Not(Mask):
    """The complement over the whole grid, padding included; made by `~`."""

    __slots__ = ("part",)
    _array_fields = ("part",)
    part: Mask

    def __init__(self, part: Mask) -> None:
        _check_part("Not", part)
        self._set(part=part)

    def _key(self) -> str:
        return f"~{self.part.structure}"

    def __eq__(self, other: object) -> bool:
        return self.part == other.part if isinstance(other, Not) else NotImplemented

    def __hash__(self) -> int:
        return hash((Not, self.part))

    def __repr__(self) -> str:
        return f"~{_wrap(self.part)}"


def rebuild(
    cls: type[Mask], static: tuple[Any, ...], arrays: tuple[Any, ...], structure: str
) -> Mask:
    """Make a mask from its parts without a check: leaves may be tracers or placeholders."""
    mask: Mask = object.__new__(cls)
    for name, value in zip(cls._static_fields, static, strict=True):
        object.__setattr__(mask, name, value)
    for name, value in zip(cls._array_fields, arrays, strict=True):
        object.__setattr__(mask, name, value)
    object.__setattr__(mask, "structure", structure)
    return mask


def walk(mask: Mask) -> Iterator[Mask]:
    """Every node of the tree, parents first."""
    yield mask
    if isinstance(mask, _Compound):
        for part in mask.parts:
            yield from walk(part)
    elif isinstance(mask, Not):
        yield from walk(mask.part)


def map_leaves(mask: Mask, fn: Callable[[Mask, str, Any], Any]) -> Mask:
    """The same tree with `fn(node, field, leaf)` in place of each leaf that is not None."""
    arrays: tuple[Any, ...]
    if isinstance(mask, _Compound):
        arrays = (tuple(map_leaves(part, fn) for part in mask.parts),)
    elif isinstance(mask, Not):
        arrays = (map_leaves(mask.part, fn),)
    else:
        arrays = tuple(
            None if leaf is None else fn(mask, name, leaf)
            for name, leaf in zip(mask._array_fields, mask._arrays(), strict=True)
        )
    return rebuild(type(mask), mask._static(), arrays, mask.structure)


def leaves(mask: Mask) -> Iterator[tuple[Mask, str, Any]]:
    """`(node, field, leaf)` for each leaf that is given, in the order of `map_leaves`."""
    for node in walk(mask):
        if not isinstance(node, (_Compound, Not)):
            for name, leaf in zip(node._array_fields, node._arrays(), strict=True):
                if leaf is not None:
                    yield node, name, leaf


def _check_part(owner: str, part: object) -> None:
    if not isinstance(part, Mask):
        raise ArgumentTypeError(
            f"{owner}: expected mask objects, got {type(part).__name__}; "
            "wrap a boolean array in attnx.Dense"
        )


def is_scalar(value: Any) -> bool:
    """Whether a value is a NumPy scalar, which has a shape and is no array."""
    kind = type(value)
    return kind.__module__ == "numpy" and kind.__name__ != "ndarray" and value.shape == ()


def show(value: Any) -> str:
    """A leaf or a static field as `repr` says it; an array by dtype and shape."""
    if isinstance(value, tuple):
        return f"[{', '.join(show(item) for item in value)}]"
    if hasattr(value, "shape") and value.shape != ():
        return f"<{getattr(value, 'dtype', '?')} {tuple(value.shape)}>"
    return repr(value)


def _wrap(mask: Mask) -> str:
    return f"({mask!r})" if isinstance(mask, _Compound) else repr(mask)
