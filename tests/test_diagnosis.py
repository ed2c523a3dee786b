"""What a plugin raised becomes a cause and a remedy, on one line each."""

from __future__ import annotations

import pytest

from attnx._diagnosis import diagnose, say, traceback_of


def chained() -> ImportError:
    """As NumPy raises it: the cause is a module's, the message one of a whole screen."""
    try:
        raise AttributeError("_ARRAY_API not found")
    except AttributeError as inner:
        error = ImportError("\nnumpy.core.multiarray failed to import\n\nlong advice")
        error.__cause__ = inner
        return error


ABI = {
    "numpy dtype": (
        ValueError(
            "numpy.dtype size changed, may indicate binary incompatibility. Expected 96 from C"
        ),
        "built for another NumPy",
    ),
    "numpy 1": (
        ImportError("\nA module that was compiled using NumPy 1.x cannot be run in\nNumPy 2.4.0"),
        "built for another NumPy",
    ),
    "numpy version": (
        RuntimeError("module compiled against ABI version 0x1000009 but this version of numpy is"),
        "built for another NumPy",
    ),
    "numpy chain": (chained(), "built for another NumPy"),
    "symbol": (
        ImportError("/x/mlx.so: undefined symbol: _ZN3c106detail14torchCheckFailE"),
        "built for another version of a library",
    ),
    "macOS symbol": (
        ImportError("dlopen(/x/a.so, 0x0002): symbol not found in flat namespace '_PyCObject'"),
        "built for another version of a library",
    ),
    "glibc": (
        ImportError("/lib/libc.so.6: version `GLIBC_2.38' not found (required by /x/a.so)"),
        "built for another version of a library",
    ),
    "architecture": (
        ImportError("dlopen(/x/a.so): mach-o file, but is an incompatible architecture (have 'x'"),
        "built for another kind of machine",
    ),
    "ELF": (ImportError("/x/a.so: wrong ELF class: ELFCLASS32"), "built for another kind of"),
    "python": (
        ImportError("bad magic number in 'attnx_x': b'a\\r\\r\\n'"), "built for another Python"
    ),
    "jaxlib": (
        RuntimeError("jaxlib version 0.3.1 is newer than and incompatible with jax version 0.2"),
        "jax and jaxlib do not fit",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", ABI)
def test_an_extension_built_for_another_version_is_named_as_such(kind: str) -> None:
    error, what = ABI[kind]
    found = diagnose(error, "mine", "attnx-mine 1.2")
    assert found.detail.startswith(f"ABI error ({what}")
    assert "install" in found.remedy
    assert "\n" not in found.detail + found.remedy


def test_a_value_error_of_the_plugins_own_is_no_abi_error() -> None:
    assert diagnose(ValueError("size changed"), "mine") == (
        "ValueError: size changed", "repair or uninstall mine"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (
            ModuleNotFoundError("No module named 'attnx_mine'", name="attnx_mine"),
            "its files are not installed: pip install --force-reinstall attnx-mine",
        ),
        (
            ModuleNotFoundError("No module named 'mlx.core'", name="mlx.core"),
            "install mlx; attnx-mine should import it in load and name it in "
            "BackendSpec(requires=...)",
        ),
        (
            ImportError("libcudart.so.12: cannot open shared object file: No such file"),
            "install that library, or put its folder on the loader's path",
        ),
        (
            ImportError("cannot import name 'Old' from 'attnx.plugin' (x)", name="attnx.plugin"),
            "update attnx-mine or attnx: it was written for another attnx",
        ),
        (
            AttributeError("module 'attnx.plugin' has no attribute 'Old'"),
            "update attnx-mine or attnx: it was written for another attnx",
        ),
        (SystemExit(3), "a plugin must not end the process: repair or uninstall mine"),
        (
            DeprecationWarning("old"),
            "it is a warning that this process turns into an error: allow it, or repair mine",
        ),
    ],
    ids=["its own files", "framework", "library", "name", "attribute", "exit", "warning"],
)
def test_every_cause_has_its_own_remedy(error: BaseException, remedy: str) -> None:
    found = diagnose(error, "mine", "attnx-mine 1.2", "attnx_mine._plugin")
    assert found.remedy == remedy
    assert str(error) in found.detail


class Unreadable(Exception):
    """An error whose message is made by code that fails."""

    def __str__(self) -> str:
        raise RuntimeError


def test_an_error_is_said_on_one_line_whatever_it_holds() -> None:
    assert say(ValueError("\n\n  first \nsecond")) == "ValueError: first"
    assert say(ValueError()) == "ValueError"
    assert say(Unreadable()) == "Unreadable: its message cannot be read"
    assert "Unreadable" in traceback_of(Unreadable())
    assert diagnose(Unreadable(), "mine").detail == "Unreadable: its message cannot be read"
