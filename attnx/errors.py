"""Every exception and warning of attnx, in one place.

Each derives from `AttnxError`, so that one clause catches all of them, and from the builtin that a
caller who has never heard of attnx would catch (spec S8.1, S8.2).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "AttnxError",
    "AttnxWarning",
    "FallbackWarning",
    "MissingExtra",
    "PluginError",
    "UnavailableBackend",
    "UnknownBackend",
    "UnsupportedError",
]

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnx.plugin import Reason


class AttnxError(Exception):
    """The base of every attnx exception."""


class ArgumentError(AttnxError, ValueError):
    """A shape, a length or a value is wrong (S8.1)."""


class ArgumentTypeError(AttnxError, TypeError):
    """A type or a dtype is wrong, or two frameworks are mixed in one call (S8.1)."""


class UnsupportedError(AttnxError, NotImplementedError):
    """A backend cannot do this call; raised before anything is computed (S8.2).

    Attributes:
        backend: the backend that was asked, or None when no candidate could do the call.
        reasons: one `Reason` for each option that is lacking.
        alternatives: names of installed backends that could do the call.
    """

    def __init__(
        self,
        message: str,
        *,
        backend: str | None = None,
        reasons: Sequence[Reason] = (),
        alternatives: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.backend = backend
        self.reasons = tuple(reasons)
        self.alternatives = tuple(alternatives)

    @classmethod
    def because(cls, backend: str, *reasons: Reason) -> UnsupportedError:
        """The error that says why a backend cannot do a call (S8.2).

        Example:
            >>> from attnx.plugin import Reason
            >>> raise UnsupportedError.because("x", Reason("softcap", "given", "none"))
            Traceback (most recent call last):
            ...
            attnx.errors.UnsupportedError: backend 'x' cannot do this call: softcap=given (has none)
        """
        why = "; ".join(map(str, reasons))
        return cls(
            f"backend {backend!r} cannot do this call: {why}", backend=backend, reasons=reasons
        )


class MissingExtra(AttnxError, ModuleNotFoundError):
    """A library that an optional part needs is not installed; `name` says which."""


class UnavailableBackend(AttnxError, ImportError):
    """A backend is known, but cannot be loaded here (its framework or its device is missing)."""


class UnknownBackend(AttnxError, LookupError):
    """No backend of that name is registered."""


class PluginError(AttnxError, RuntimeError):
    """A plugin breaks the contract; raised under `ATTNX_STRICT_PLUGINS=1`, else recorded."""


class AttnxWarning(UserWarning):
    """The base of every attnx warning."""


class FallbackWarning(AttnxWarning):
    """A named backend refused a call and `fallback="warn"` let another one compute it (S8.3)."""
