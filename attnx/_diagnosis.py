"""From what a plugin raised to a cause and a remedy, each on one line.

Python says that a shared object lacks a symbol or that a dtype changed its size, and leaves the
reader to know that an extension was built for another version of something. What an error of that
kind means, and what to do about it, is written down here once.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from attnx.errors import PluginError

__all__ = ["Diagnosis", "diagnose", "say", "traceback_of"]

NUMPY_ABI = (
    r"numpy\.\w+ size changed|_ARRAY_API not found|numpy\.core\.multiarray failed to import|"
    r"compiled using NumPy \d|compiled against (?:NumPy )?(?:C-)?A[PB]I version"
)
SYMBOL = (
    r"undefined symbol|symbol not found|version `[^']+' not found|"
    r"procedure could not be found|symbol lookup error"
)
MACHINE = (
    r"wrong ELF class|invalid ELF header|Exec format error|wrong architecture|"
    r"incompatible architecture|not a valid Win32 application|slice is not valid mach-o"
)
PYTHON = (
    r"bad magic number|compiled for Python|Python version mismatch|"
    r"built for (?:Python|CPython)|does not support loading in subinterpreters"
)
LIBRARY = r"cannot open shared object file|Library not loaded|specified module could not be found"
JAXLIB = r"jaxlib (?:version|is version)"
PARTNERS = "attnx.plugin", "attnx.masks", "attnx.tiling", "attnx.errors", "attnx"
LONGEST = 20_000
"""Characters of a traceback that are kept: its end tells more than its beginning."""


class Diagnosis(NamedTuple):
    """What went wrong and what to do about it, a line each."""

    detail: str
    remedy: str


def say(error: BaseException) -> str:
    """An error on one line: its type, and the first line of its message with anything on it."""
    first = next((line.strip() for line in _message(error).splitlines() if line.strip()), "")
    kind = type(error).__name__
    return f"{kind}: {first}" if first else kind


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # a message may be made by the plugin's own code
        return "its message cannot be read"


def traceback_of(error: BaseException) -> str:
    """The traceback, with the errors that led to it."""
    import traceback

    try:
        return "".join(traceback.format_exception(error))[-LONGEST:]
    except Exception:  # the same
        return say(error)


def diagnose(
    error: BaseException, name: str, distribution: str = "", target: str = ""
) -> Diagnosis:
    """The cause and the remedy of an error that a plugin raised.

    Args:
        error: what it raised.
        name: the plugin's or backend's name.
        distribution: the distribution that brought it, with its version, or "".
        target: the module that its entry point names, or "".
    """
    package = distribution.split(" ")[0] or name
    if isinstance(error, PluginError):  # attnx's own words
        return Diagnosis(_message(error), f"repair or uninstall {name}")
    if type(error).__name__ == "PluginValidationError":
        return Diagnosis(" ".join(_message(error).split()), f"repair or uninstall {name}")
    for seen in _chain(error):
        for find in (_native, _missing, _other_contract):
            found = find(seen, package, target)
            if found is not None:
                return found
    said = say(error)
    if isinstance(error, Warning):
        remedy = (
            f"it is a warning that this process turns into an error: allow it, or repair {name}"
        )
        return Diagnosis(said, remedy)
    if isinstance(error, SystemExit):
        return Diagnosis(said, f"a plugin must not end the process: repair or uninstall {name}")
    if isinstance(error, SyntaxError):
        import platform

        remedy = f"repair {name}, or install a release of it for Python {platform.python_version()}"
        return Diagnosis(said, remedy)
    return Diagnosis(said, f"repair or uninstall {name}")


def _chain(error: BaseException) -> list[BaseException]:
    """An error, and then those that led to it."""
    found: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and not any(at is seen for seen in found):
        found.append(at)
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)
    return found


def _native(error: BaseException, package: str, target: str) -> Diagnosis | None:
    """An extension that was built for something else than what is here."""
    if not isinstance(error, (ImportError, RuntimeError, ValueError, AttributeError, OSError)):
        return None
    text = _message(error)
    lines = [line.strip() for line in text.splitlines()]
    reinstall = f"pip install --force-reinstall {package}"
    kinds = (
        (NUMPY_ABI, "built for another NumPy", f"install a {package} built for the NumPy that is "
         f"here, or the NumPy that it was built for: {reinstall}"),
        (JAXLIB, "jax and jaxlib do not fit", "install jax and jaxlib of one version"),
        (MACHINE, "built for another kind of machine", f"install it for this machine: {reinstall}"),
        (PYTHON, "built for another Python", f"install it for this Python: {reinstall}"),
        (SYMBOL, "built for another version of a library", f"install a {package} built for the "
         f"versions that are here, or build it again: {reinstall} --no-cache-dir"),
    )  # fmt: skip
    for pattern, what, remedy in kinds:
        line = next((line for line in lines if re.search(pattern, line, re.IGNORECASE)), None)
        if line is not None:
            return Diagnosis(f"ABI error ({what}): {type(error).__name__}: {line}", remedy)
    line = next((line for line in lines if re.search(LIBRARY, line)), None)
    if line is not None and isinstance(error, (ImportError, OSError)):
        remedy = "install that library, or put its folder on the loader's path"
        return Diagnosis(f"a native library is missing: {line}", remedy)
    return None


def _missing(error: BaseException, package: str, target: str) -> Diagnosis | None:
    """A module that is not there."""
    module = error.name if isinstance(error, ModuleNotFoundError) else None
    if not module:
        return None
    if module.split(".")[0] == target.split(".")[0]:
        remedy = f"its files are not installed: pip install --force-reinstall {package}"
    else:
        remedy = (
            f"install {module.split('.')[0]}; {package} should import it in load and name it in "
            "BackendSpec(requires=...)"
        )
    return Diagnosis(say(error), remedy)


def _other_contract(error: BaseException, package: str, target: str) -> Diagnosis | None:
    """A name that attnx does not have, and has had or will have."""
    asked = isinstance(error, ImportError) and error.name in PARTNERS
    text = _message(error)
    asked |= isinstance(error, AttributeError) and text.startswith(
        tuple(f"module '{module}' has no attribute" for module in PARTNERS)
    )
    asked |= isinstance(error, ImportError) and "circular import" in text
    if not asked:
        return None
    if "circular import" in text:
        return Diagnosis(say(error), f"import less when {package} is imported: more in load")
    from attnx.plugin import API_VERSION

    remedy = f"update {package} or attnx: it was written for another attnx"
    return Diagnosis(f"{say(error)} (this is contract version {API_VERSION})", remedy)
