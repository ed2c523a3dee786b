"""The `ATTNX_*` variables are read once, and one that nobody knows is told of."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from attnx import _settings

Python = Callable[..., str]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", None), ("numpy", "numpy"), (" numpy ", "numpy"), ("numpy,torch", ("numpy", "torch")),
        (" numpy , ,torch ", ("numpy", "torch")), (",", None),
    ],
)  # fmt: skip
def test_a_backend_is_one_name_or_several(given: str, expected: object) -> None:
    assert _settings.read({"ATTNX_BACKEND": given}).backend == expected


def test_plugins_are_allowed_by_name_and_blocked_by_a_minus() -> None:
    read = _settings.read({"ATTNX_PLUGINS": "numpy, jax,-torch"})
    assert read.allow == {"numpy", "jax"}
    assert read.block == {"torch"}
    assert _settings.read({"ATTNX_PLUGINS": "-torch"}).allow is None
    assert _settings.read({}).allow is None


@pytest.mark.parametrize(("given", "strict"), [("1", True), ("0", False), ("", False)])
def test_strict_is_on_when_it_is_neither_empty_nor_0(given: str, strict: bool) -> None:
    assert _settings.read({"ATTNX_STRICT_PLUGINS": given}).strict is strict


def test_a_name_that_nobody_reads_comes_with_the_nearest_known_one() -> None:
    settings = _settings.read({"ATTNX_BACKND": "numpy", "ATTNX_ZZZ": "1", "OTHER": "1"})
    assert _settings.unknown(settings, []) == [
        ("ATTNX_BACKND", "ATTNX_BACKEND"),
        ("ATTNX_ZZZ", None),
    ]
    assert _settings.unknown(settings, ["ATTNX_ZZZ"]) == [("ATTNX_BACKND", "ATTNX_BACKEND")]


CALL = """
import warnings
import numpy as np
import attnx
x = np.ones((3, 4), np.float32)
"""


def test_the_environment_chooses_the_backend_and_a_change_after_import_has_no_effect(
    python: Python,
) -> None:
    code = CALL + (
        "import os\n"
        "os.environ['ATTNX_BACKEND'] = 'nobody'\n"
        "print(attnx.explain(x, x, x).why)\n"
        "attnx.set_default_backend('numpy'); print(attnx.explain(x, x, x).why)\n"
        "attnx.set_default_backend(None); print(attnx.explain(x, x, x).why)\n"
    )
    expected = ["ATTNX_BACKEND", "set_default_backend", "ATTNX_BACKEND"]
    assert python(code, ATTNX_BACKEND="numpy", ATTNX_PLUGINS="numpy").splitlines() == expected


def test_a_wrong_name_in_the_environment_is_said_at_the_first_call(python: Python) -> None:
    text = python(CALL + "attnx.attention(x, x, x)", fails=True, ATTNX_BACKEND="nunpy")
    assert "UnknownBackend: backend: no backend 'nunpy' is registered" in text
    assert "did you mean 'numpy'? (asked by ATTNX_BACKEND)" in text


def test_an_unknown_setting_warns_once_with_a_suggestion_and_stands_in_doctor(
    python: Python,
) -> None:
    code = CALL + (
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    attnx.attention(x, x, x)\n"
        "    attnx.attention(x[:2], x, x)\n"
        "print(*[f'{w.category.__name__}: {w.message}' for w in caught], sep='\\n')\n"
        "print([r for r in attnx.doctor() if r.subject == 'ATTNX_BACKND'][0].detail)\n"
    )
    said = "no part of attnx reads it; did you mean ATTNX_BACKEND?"
    assert python(code, ATTNX_BACKND="numpy", ATTNX_PLUGINS="numpy").splitlines() == [
        f"AttnxWarning: ATTNX_BACKND: {said}",
        "unknown setting; did you mean ATTNX_BACKEND?",
    ]


def test_an_unknown_setting_is_an_error_when_strict_at_every_call(python: Python) -> None:
    code = CALL + (
        "for _ in range(2):\n"
        "    try:\n"
        "        attnx.attention(x, x, x)\n"
        "    except attnx.errors.PluginError as error:\n"
        "        print(error)\n"
    )
    strict = {"ATTNX_STRICT_PLUGINS": "1", "ATTNX_BACKND": "numpy", "ATTNX_PLUGINS": "numpy"}
    said = "ATTNX_BACKND: no part of attnx reads it; did you mean ATTNX_BACKEND?"
    assert python(code, **strict).splitlines() == [said, said]
