"""Every exception is an AttnxError and the builtin that a stranger to attnx would catch."""

from __future__ import annotations

import inspect
import pickle

import pytest

from attnx import errors, plugin

BUILTINS = {
    errors.ArgumentError: ValueError,
    errors.ArgumentTypeError: TypeError,
    errors.MissingExtra: ModuleNotFoundError,
    errors.PluginError: RuntimeError,
    errors.UnavailableBackend: ImportError,
    errors.UnknownBackend: LookupError,
    errors.UnsupportedError: NotImplementedError,
}


@pytest.mark.parametrize("kind", BUILTINS, ids=lambda kind: kind.__name__)
def test_an_error_is_an_attnx_error_and_the_builtin_a_caller_would_catch(kind: type) -> None:
    assert issubclass(kind, errors.AttnxError)
    assert issubclass(kind, BUILTINS[kind])


def test_the_module_lists_every_class_it_defines() -> None:
    defined = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and value.__module__ == errors.__name__
    }
    assert set(errors.__all__) == defined
    assert {kind.__name__ for kind in BUILTINS} < defined


def test_warnings_are_user_warnings_of_one_family() -> None:
    assert issubclass(errors.FallbackWarning, errors.AttnxWarning)
    assert issubclass(errors.AttnxWarning, UserWarning)


def test_an_unsupported_error_keeps_its_reasons_in_tuples() -> None:
    reason = plugin.Reason("softcap", "given", "none")
    error = errors.UnsupportedError("no", backend="x", reasons=[reason], alternatives=["y"])
    assert (error.backend, error.reasons, error.alternatives) == ("x", (reason,), ("y",))
    plain = errors.UnsupportedError("no")
    assert (plain.backend, plain.reasons, plain.alternatives) == (None, (), ())


def test_the_error_of_one_backend_says_every_reason() -> None:
    reasons = (plugin.Reason("softcap", "given", "none"), plugin.Reason("device", "cuda", "cpu"))
    error = errors.UnsupportedError.because("x", *reasons)
    assert str(error) == (
        "backend 'x' cannot do this call: softcap=given (has none); device=cuda (has cpu)"
    )
    assert (error.backend, error.reasons) == ("x", reasons)


def test_an_unsupported_error_survives_pickling() -> None:
    """An error from a worker process arrives with its reasons."""
    reason = plugin.Reason("softcap", "given", "none", "leave it out")
    error = errors.UnsupportedError("no", backend="x", reasons=(reason,), alternatives=("y",))
    back = pickle.loads(pickle.dumps(error))
    assert str(back) == "no"
    assert (back.backend, back.reasons, back.alternatives) == ("x", (reason,), ("y",))


def test_a_reason_reads_as_a_sentence() -> None:
    assert str(plugin.Reason("dtype", "int8", "float32")) == "dtype=int8 (has float32)"
    with_hint = plugin.Reason("device", "cuda:0", "cpu", "move it")
    assert str(with_hint) == "device=cuda:0 (has cpu); move it"
