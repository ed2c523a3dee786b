"""Who asked for which backend: the context, the process-wide default and the environment.

Precedence: `backend=`, then `use_backend`, then `set_default_backend`, then `ATTNX_BACKEND`, then
the arrays' own framework. The context is a ContextVar, so threads and tasks do not see each
other's choice.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

from attnx import _install
from attnx._contract import Backend
from attnx._settings import SETTINGS
from attnx.errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

__all__ = ["Choice", "requested", "set_default_backend", "use_backend"]

FALLBACKS = ("raise", "warn", "allow")


class Choice(NamedTuple):
    """A request for a backend.

    Attributes:
        backends: names or backend objects to try in order; None for the arrays' own framework.
        source: who asked, as an explanation says it.
        fallback: what happens when none of them can do a call: `"raise"`, `"warn"` or `"allow"`.
        transfer: whether arrays may move between devices.
    """

    backends: tuple[Any, ...] | None
    source: str
    fallback: str = "raise"
    transfer: bool = False


def normalize(backend: Any, argument: str) -> tuple[Any, ...] | None:
    """A name, a backend object or a sequence of them, as a tuple; None stays None."""
    if backend is None:
        return None
    items = tuple(backend) if isinstance(backend, (list, tuple)) else (backend,)
    if not items:
        raise ArgumentError(f"{argument}: expected at least one backend, got an empty sequence")
    for item in items:
        if not isinstance(item, (str, Backend)):
            raise ArgumentTypeError(
                f"{argument}: expected a name, a Backend or a sequence of them, "
                f"got {type(item).__name__}"
            )
    return items


NOBODY = Choice(None, "the arrays' own framework")


class _Process:
    """The process-wide default, an attribute so that reading it is cheap."""

    key: str = ""
    default: Choice = (
        NOBODY
        if SETTINGS.backend is None
        else Choice(normalize(SETTINGS.backend, "ATTNX_BACKEND"), "ATTNX_BACKEND")
    )


on_default: list[Callable[[], None]] = []
"""Called when the process-wide default has changed: plans that were made for it are out of date."""

context: ContextVar[Choice | None] = ContextVar("attnx_backend", default=None)
asked: ContextVar[str | None] = ContextVar("attnx_asked", default=None)
"""The same as text, which a compiler can guard its programs by."""

process = _Process()


def key_of(choice: Choice) -> str:
    """A choice as text; a backend object by `@` and its name."""
    items = choice.backends or ()
    names = ",".join([x if isinstance(x, str) else f"@{x.name}" for x in items])
    return f"{names};{choice.fallback};{'transfer' if choice.transfer else 'stay'}"


process.key = key_of(process.default)


def _current() -> tuple[Choice | None, Choice]:
    return context.get(), process.default


_install.current = _current


def requested(backend: Any = None) -> Choice:
    """The request that holds for a call with this `backend=`."""
    current = context.get()
    if backend is not None:
        names = normalize(backend, "backend")
        if current is None:
            return Choice(names, "backend=")
        return Choice(names, "backend=", current.fallback, current.transfer)
    return process.default if current is None else current


class use_backend:
    """Choose a backend for the calls inside a `with` block (this thread or task alone).

    Threads started inside by `run_in_executor` or `ThreadPoolExecutor.submit` do not inherit the
    choice; asyncio tasks and `asyncio.to_thread` do.

    Args:
        backend: a name, a backend object, or a sequence to try in order; None goes back to the
            arrays' own framework.
        fallback: when none of them can do a call: `"raise"` (the default), `"warn"` or `"allow"`
            the arrays' own framework to compute it (S8.3).
        transfer: allow arrays to move between devices.

    Raises:
        ArgumentError: an unknown `fallback`, or an empty sequence.
        ArgumentTypeError: something that is no backend.

    Example:
        >>> import numpy as np, attnx
        >>> q = np.ones((1, 2, 3, 4), np.float32)
        >>> with attnx.use_backend("numpy"):
        ...     attnx.attention(q, q, q).shape
        (1, 2, 3, 4)
    """

    __slots__ = ("_choice", "_key", "_tokens")

    def __init__(
        self,
        backend: str | Backend | Sequence[str | Backend] | None,
        *,
        fallback: str = "raise",
        transfer: bool = False,
    ) -> None:
        if fallback not in FALLBACKS:
            raise ArgumentError(f"fallback: expected 'raise', 'warn' or 'allow', got {fallback!r}")
        names = normalize(backend, "use_backend")
        self._choice = Choice(names, "use_backend", fallback, bool(transfer))
        self._key = key_of(self._choice)
        self._tokens: list[tuple[Any, Any]] = []

    def __enter__(self) -> use_backend:
        _entered(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _left(self)


def _entered(block: use_backend) -> None:
    """Make the block's choice that of this thread or task."""
    before = context.get(), asked.get()
    block._tokens.append(((context.set(block._choice), asked.set(block._key)), before))
    _install.tell()


def _left(block: use_backend) -> None:
    """Go back to the choice before the block."""
    # One object may be entered several times, by several threads: each leaves its own entry.
    for entry in block._tokens[::-1]:
        try:
            context.reset(entry[0][0])
            asked.reset(entry[0][1])
        except ValueError:
            continue
        block._tokens.remove(entry)
        break
    else:  # left in another Context, as asynchronous fixtures do
        before = block._tokens.pop()[1]
        context.set(before[0])
        asked.set(before[1])
    _install.tell()


def set_default_backend(backend: str | Backend | Sequence[str | Backend] | None) -> None:
    """Choose a backend for the whole process, under any `use_backend`.

    Args:
        backend: a name, a backend object or a sequence to try in order; None goes back to
            `ATTNX_BACKEND`, or to the arrays' own framework.

    Example:
        >>> import attnx
        >>> attnx.set_default_backend("numpy")
        >>> attnx.set_default_backend(None)
    """
    names = normalize(backend, "set_default_backend")
    process.default = _Process.default if names is None else Choice(names, "set_default_backend")
    process.key = key_of(process.default)
    for forget in on_default:
        forget()
    _install.tell()
