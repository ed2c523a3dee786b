"""A backend out of one function, with an optional backward: what is said of it, and is it so?

The words are those by which the suite examines a plain function, so a kernel is described once.
What contradicts itself is an error here, when the backend is made, and not in some later call.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from attnx import _install
from attnx._contract import Capabilities
from attnx._function_backend import WIDER, FunctionBackend, Kernel
from attnx._supports import Supports
from attnx.errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from attnx._contract import Backend
    from attnx._lane import Lane

__all__ = ["from_function"]

LN2 = math.log(2.0)


def from_function(
    fn: Callable[..., Any],
    *,
    name: str,
    framework: str = "numpy",
    supports: str | Iterable[str] = (),
    dtypes: str | Iterable[str] | None = None,
    capabilities: Capabilities | None = None,
    backward: Callable[..., Any] | None = None,
    isolation: str | None = None,
    layout: str = "bhsd",
    lse_base: str | int = "e",
    devices: str | Iterable[str] | None = None,
    max_head_size: int | None = None,
) -> Backend:
    """A backend whose attention is one function.

    `fn(q, k, v, **options) -> out`, or `(out, lse)` with `return_lse=True`, is called with arrays
    of its framework, always of four axes, and with the options that `supports` names: the words and
    the calls are those of `attnx_conformance.check`, so what that has found right is right here.
    With `"scale"` it always gets a float, the default included.

    A call that needs anything else is refused. These things are done for it:

    - B, Lq or Lk of 0, rows that causal alignment leaves without a key, and keys that it hides from
      all rows never reach it.
    - Rows that see nothing get out 0 and lse -inf, or the sink, whatever it gives (S3.7); with
      `"mask_objects"` and `isolation="full"` that is its own to do.
    - Unless it has `isolation="full"`, keys that nobody sees come as zeros (S4.1).
    - out, lse and gradients may come in a wider dtype; each is rounded once.
    - The gradient of a bias may come for all of (B, Hq, Lq, Lk); it is summed.
    - `attention_weights` is asked of it with one-hot values.

    Gradients come from `backward`, or, where `supports` names `"gradients"`, from the framework,
    which differentiates `fn` itself; else there are none, and asking is an `UnsupportedError`.

    Args:
        fn: the function. It writes to none of its arrays, and gives new ones (S1.4).
        name: the backend's name.
        framework: the name of a registered framework whose arrays it takes.
        supports: words of `Supports`, such as `("causal", "mask", "scale", "lse", "gqa")`.
        dtypes: of q, k and v; by default float32.
        capabilities: a whole declaration in place of `supports`, `dtypes`, `isolation`, `devices`
            and `max_head_size`; `Supports.of` says which words it stands for.
        backward: `backward(q, k, v, out, lse, d_out, d_lse, **options) -> (dq, dk, dv)`, with the
            options that `fn` got but `return_lse`; then dbias where it got a bias that is an array,
            and dsinks where it got sinks. d_lse may be None. It is given arrays that no transform
            looks into, except by JAX, which traces it. It needs `"lse"` in `supports`.
        isolation: `"full"` where a NaN in a key that a row does not see never reaches the row, in
            `backward` too (S4.2); `"unseen"`, the default, where a hidden key may.
        layout: `"bhsd"` or `"bshd"`, of all arrays that it takes and gives; lse is (B, Hq, Lq) or
            (B, Lq, Hq). Axes of a mask, a bias and dbias are (B, Hq, Lq, Lk) in both.
        lse_base: `"e"`, or 2 where the lse that it gives, and takes back in `backward`, is a
            logarithm to the base 2; d_lse is then of that lse too.
        devices: kinds of device that are here, by default the CPU.
        max_head_size: the greatest D and Dv, or None.

    Returns:
        A `Backend`, for `backend=`, `use_backend` and `BackendSpec(load=...)`.

    Raises:
        ArgumentError: a word or value that is not known, a function that cannot be called so, or
            gradients that nobody computes.
        ArgumentTypeError: `fn` or `backward` is no function.
        UnavailableBackend: nobody brings that framework, or it is not installed.

    Example:
        >>> import numpy as np, attnx
        >>> from attnx import plugin
        >>> def kernel(q, k, v, *, scale, mask=None):
        ...     s = q @ k.swapaxes(-1, -2) * np.float32(scale)
        ...     s = s if mask is None else np.where(mask, s, -np.inf)
        ...     p = np.exp(s - s.max(axis=-1, keepdims=True))
        ...     return p / p.sum(axis=-1, keepdims=True) @ v
        >>> mine = plugin.from_function(kernel, name="mine", supports=("mask", "scale"))
        >>> q = np.ones((1, 2, 3, 4), np.float32)
        >>> attnx.attention(q, q, q, causal=True, backend=mine).shape
        (1, 2, 3, 4)
        >>> attnx.explain(q, q, q, backend=mine).route
        'function kernel'
        >>> [
        ...     str(reason)
        ...     for reason in attnx.explain(q, q, q, softcap=30.0, backend=mine)
        ...     .candidates[0]
        ...     .reasons
        ... ]
        ['softcap=given (has none)']
    """
    _check_types(fn, backward, name, capabilities, max_head_size)
    separate = {
        "supports": supports or None, "dtypes": dtypes, "isolation": isolation, "devices": devices,
        "max_head_size": max_head_size,
    }  # fmt: skip
    if capabilities is None:
        has = Supports(supports)
        gradient = backward is not None or "gradients" in has
        capabilities = has.declared(
            _names(dtypes, "float32"), isolation or "unseen", gradient=gradient,
            devices=frozenset(_names(devices, "cpu")), max_head_size=max_head_size,
        )  # fmt: skip
    else:
        twice = [word for word, value in separate.items() if value is not None]
        if twice:
            raise ArgumentError(
                f"{twice[0]}: expected it in capabilities, which are given, or all without them"
            )
        has = Supports.of(capabilities)
    _check_choices(layout, lse_base, capabilities, WIDER)
    lane = _install.lane(framework)
    kernel = Kernel(fn, backward, has, layout == "bshd", LN2 if lse_base == 2 else 1.0)
    _check_gradients(kernel, capabilities, lane)
    return FunctionBackend(name, lane, capabilities, kernel)


def _names(given: str | Iterable[str] | None, default: str) -> tuple[str, ...]:
    if given is None:
        return (default,)
    return (given,) if isinstance(given, str) else tuple(given)


def _check_types(fn: Any, backward: Any, name: Any, capabilities: Any, size: Any) -> None:
    checks = (
        ("fn", fn, callable(fn), "a function"),
        ("backward", backward, backward is None or callable(backward), "a function"),
        ("name", name, isinstance(name, str), "a text"),
        ("capabilities", capabilities, isinstance(capabilities, Capabilities | None),
         "Capabilities"),
        ("max_head_size", size, size is None or type(size) is int, "an integer"),
    )  # fmt: skip
    for what, value, right, expected in checks:
        if not right:
            raise ArgumentTypeError(f"{what}: expected {expected}, got {type(value).__name__}")
    if not name:
        raise ArgumentError("name: expected the backend's name, got an empty text")


def _check_choices(
    layout: Any, base: Any, capabilities: Capabilities, dtypes: Iterable[str]
) -> None:
    choices = (
        ("layout", layout, ("bhsd", "bshd")),
        ("lse_base", base, ("e", 2)),
        ("isolation", capabilities.isolation, ("full", "unseen")),
        *(("dtypes", dtype, tuple(dtypes)) for dtype in capabilities.dtypes),
    )
    for name, value, known in choices:
        if value not in known:
            expected = ", ".join(map(repr, known))
            raise ArgumentError(f"{name}: expected one of {expected}, got {value!r}")
    if not capabilities.dtypes:
        raise ArgumentError("dtypes: expected at least one, got none")


def _check_gradients(kernel: Kernel, capabilities: Capabilities, lane: Lane) -> None:
    kernel.has.check_signature(kernel.fn, "q, k, v")
    always = Supports(kernel.has & {"scale"})  # and what else comes may be left out
    more = ["causal"] * ("mask_objects" in kernel.has)
    always.check_signature(kernel.fn, "q, k, v", *more)
    if kernel.backward is not None:
        if not capabilities.gradient:
            raise ArgumentError("backward: given, but capabilities have gradient=False")
        if "lse" not in kernel.has:
            raise ArgumentError(
                'backward: it starts from lse; add "lse" to supports and return (out, lse) '
                "with return_lse=True"
            )
        names = Supports(kernel.has - {"lse"})
        for words in (names, always):
            words.check_signature(kernel.backward, "q, k, v, out, lse, d_out, d_lse", *more)
    elif capabilities.gradient and lane.vjp is None:
        raise ArgumentError(
            f"gradients: {lane.name} has no differentiation of its own; give backward=, or declare "
            "no gradient"
        )
