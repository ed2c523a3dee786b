"""The backend that `from_function` makes: a function's calls, its answers and its gradients.

Whatever a function returns is looked at before anybody builds on it: shapes, dtypes and the number
of results, each told with the function's name. Gradients have two ways. A backward that is given
computes with concrete arrays, or as JAX traces it, and the lane puts the framework's own
differentiation around it. Or the framework differentiates the function itself, and all that stands
around it here.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from attnx._contract import Backend, Far, Gradients, Reason
from attnx._function_call import ask
from attnx.errors import PluginError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from attnx._call import Call, CallClass
    from attnx._contract import Capabilities
    from attnx._function_call import Asked
    from attnx._lane import Lane
    from attnx._supports import Supports

__all__ = ["WIDER", "FunctionBackend", "Kernel"]

WIDER = {
    "float16": ("float16", "float32", "float64"), "bfloat16": ("bfloat16", "float32", "float64"),
    "float32": ("float32", "float64"), "float64": ("float64",),
}  # fmt: skip
"""The dtypes in which a result of each dtype may come; it is rounded once."""


class Kernel(NamedTuple):
    """The function, and how it is to be called.

    Attributes:
        fn: the function.
        backward: its gradient, or None.
        has: what it takes.
        turned: whether its layout is "bshd".
        unit: what its lse is multiplied with to be natural.
    """

    fn: Callable[..., Any]
    backward: Callable[..., Any] | None
    has: Supports
    turned: bool
    unit: float

    def label(self) -> str:
        """The function's name."""
        return str(getattr(self.fn, "__name__", type(self.fn).__name__))


class FunctionBackend(Backend):
    """What `from_function` makes."""

    def __init__(self, name: str, lane: Lane, capabilities: Capabilities, kernel: Kernel) -> None:
        self.name, self.lane, self.capabilities = name, lane, capabilities
        self.kernel = kernel
        self.by_framework = capabilities.gradient and kernel.backward is None

    def devices(self) -> tuple[str, ...]:
        """Those that it declares."""
        return tuple(sorted(self.capabilities.devices))

    def route(self, cls: CallClass) -> str:
        """The names of the functions."""
        told = f"function {self.kernel.label()}"
        if cls.gradient is None or not self.capabilities.gradient:
            return told
        if self.kernel.backward is None:
            return f"{told}, differentiated by {self.lane.name}"
        return f"{told}, backward {getattr(self.kernel.backward, '__name__', 'given')}"

    def reasons(self, cls: CallClass) -> tuple[Reason, ...]:
        """Those of the declaration, and a transform that it does not take."""
        found = super().reasons(cls)
        watched = cls.traced or cls.gradient == "framework"
        if watched and not self.by_framework and self.lane.attach is None:
            hint = "use attention_vjp, outside the transform"
            found += (Reason("tracing", f"by {cls.framework}", "concrete arrays", hint),)
        return found

    def apply(self, q: Any, k: Any, v: Any, call: Call) -> tuple[Any, Any]:
        """`forward`, with the framework's differentiation around it where somebody looks."""
        cls = call.cls
        if not (cls.traced or cls.gradient == "framework"):
            return self.forward(q, k, v, call)
        if self.by_framework:
            answer = self.forward(q, k, v, call)
            if not cls.traced:
                self._require_record(answer[0])
            return answer
        lacking = super().reasons(cls._replace(gradient="framework", need_lse=True))
        attach = self.lane.attach
        assert attach is not None  # `reasons` refused
        run = attach(Far(self.name, self.forward, self.backward, lacking))
        made: tuple[Any, Any] = run(q, k, v, call)
        return made

    def _require_record(self, out: Any) -> None:
        """A function that its framework cannot differentiate must not look like a constant."""
        if not self.lane.wants_gradient(out):
            raise PluginError(
                f"function {self.kernel.label()}: declares gradients, but {self.lane.name} has "
                "recorded none for what it returned; give backward=, or declare no gradient"
            )

    def forward(self, q: Any, k: Any, v: Any, call: Call) -> tuple[Any, Any]:
        """See `Backend.forward`."""
        if 0 in (call.B, call.Lq, call.Lk):
            answer = self._nothing(q, call, call.Lq)
            return self._tied(answer, q, k, v, call) if self.by_framework else answer
        fill = self.by_framework and self.capabilities.isolation != "full"
        asked = self._ask(q, k, v, call, fill=fill)
        with self.lane.quiet():
            out, lse = self._run(asked, call)
            if asked.live is not None:
                zero, empty = self._nothing(out, call, asked.q.shape[2])
                out = self.lane.xp.where(asked.live, out, zero)
                lse = self.lane.xp.where(asked.live[..., 0], lse, empty)
            if asked.i0:
                above = self._nothing(out, call, asked.i0)
                pairs = zip(above, (out, lse), strict=True)
                out, lse = (self.lane.xp.concat(pair, axis=2) for pair in pairs)
        return out, lse

    def _ask(self, q: Any, k: Any, v: Any, call: Call, *, fill: bool = False) -> Asked:
        guard = self.capabilities.isolation != "full"
        return ask(self.lane, self.kernel.has, q, k, v, call, guard=guard, fill=fill)

    def _wide(self, call: Call) -> Any:
        return self.lane.xp.float64 if call.dtype == "float64" else self.lane.xp.float32

    def _nothing(self, like: Any, call: Call, rows: int) -> tuple[Any, Any]:
        """out and lse of rows that see nothing (S3.7)."""
        xp, shape = self.lane.xp, (call.B, call.Hq, rows)
        out = self.lane.full((*shape, call.Dv), 0.0, like.dtype, like=like)
        if call.sinks is None:
            return out, self.lane.full(shape, -math.inf, self._wide(call), like=like)
        sinks = xp.astype(xp.reshape(call.sinks, (1, call.Hq, 1)), self._wide(call))
        return out, xp.broadcast_to(sinks, shape)

    def _tied(self, answer: tuple[Any, Any], q: Any, k: Any, v: Any, call: Call) -> tuple[Any, Any]:
        """The same values, which the framework can differentiate: every gradient is 0."""
        xp = self.lane.xp

        def tied(value: Any) -> Any:
            for array in (q, k, v, call.bias, call.sinks):
                if array is not None:
                    value = value + xp.astype(xp.sum(array[:0, ...]), value.dtype)
            return value

        return tied(answer[0]), tied(answer[1])

    def _run(self, asked: Asked, call: Call) -> tuple[Any, Any]:
        """out and lse of the function, in the contract's shapes, dtypes and base."""
        kernel, rows = self.kernel, asked.q.shape[2]
        starts_from_lse = call.cls.gradient is not None and not self.by_framework
        wanted = (call.need_lse or starts_from_lse) and "lse" in kernel.has
        arrays = (self._turn(x) for x in (asked.q, asked.k, asked.v))
        made = kernel.fn(*arrays, **asked.options, **({"return_lse": True} if wanted else {}))
        if wanted and not (isinstance(made, (tuple, list)) and len(made) == 2):
            self._wrong("return_lse=True", "a pair (out, lse)", type(made).__name__)
        out, lse = made if wanted else (made, None)
        shape = (call.B, call.Hq, rows)
        out = self._taken("out", out, (*shape, call.Dv), asked.q)
        unread = self.lane.full(shape, math.nan, self._wide(call), like=out)
        if not wanted:  # a caller who asks for lse was refused
            return out, unread
        lse = self._taken("lse", lse, shape, unread)
        return out, lse if kernel.unit == 1.0 else lse * kernel.unit

    def _turn(self, array: Any) -> Any:
        """From the contract's layout to the function's, and back; lse has three axes."""
        if array is None or not self.kernel.turned:
            return array
        return self.lane.xp.permute_dims(array, (0, 2, 1, 3)[: array.ndim])

    def _taken(self, what: str, array: Any, shape: tuple[int, ...], like: Any) -> Any:
        """A result, once it is what was expected; in the contract's layout and dtype."""
        return self._rounded(what, self._shaped(what, array, shape), like)

    def _shaped(self, what: str, array: Any, shape: tuple[int, ...]) -> Any:
        if not self.lane.owns(array):
            self._wrong(what, f"an array of {self.lane.name}", type(array).__name__)
        turned = self.kernel.turned and what in ("out", "lse", "dq", "dk", "dv")
        expected = (shape[0], shape[2], shape[1], *shape[3:]) if turned else shape
        if tuple(array.shape) != expected:
            self._wrong(what, f"shape {expected}", f"{tuple(array.shape)}")
        return self._turn(array) if turned else array

    def _rounded(self, what: str, array: Any, like: Any) -> Any:
        """A result in the dtype of an array, unless it is narrower already."""
        got, wide = self.lane.dtype_name(array), WIDER[self.lane.dtype_name(like)]
        if got not in wide:
            self._wrong(what, " or ".join(wide), got)
        return array if got == wide[0] else self.lane.xp.astype(array, like.dtype)

    def _wrong(self, what: str, expected: str, got: str) -> NoReturn:
        of = f"function {self.kernel.label()} of backend {self.name!r}"
        raise PluginError(f"{of}: {what}: expected {expected}, got {got}")

    # Gradients ---------------------------------------------------------------------------------

    def backward(
        self, q: Any, k: Any, v: Any, out: Any, lse: Any, d_out: Any, d_lse: Any, call: Call
    ) -> Gradients:
        """See `Backend.backward`."""
        if d_lse is not None and not self.capabilities.lse_gradient:
            reason = Reason("lse gradient", "given", "none", "leave out d_lse")
            raise UnsupportedError.because(self.name, reason)
        if 0 in (call.B, call.Lq, call.Lk):
            return self._no_gradients(q, k, v, d_lse, call)
        if self.by_framework:
            return self._differentiated(q, k, v, d_out, d_lse, call)
        if self.kernel.backward is None:
            raise UnsupportedError.because(self.name, Reason("gradient", "given", "none"))
        asked = self._ask(q, k, v, call)
        with self.lane.quiet():
            rows = [x if x is None else x[:, :, asked.i0 :, ...] for x in (out, lse, d_out, d_lse)]
            rows = self._silenced(asked, rows, call)
            arrays = (self._turn(x) for x in (asked.q, asked.k, asked.v, *rows))
            made = self.kernel.backward(*arrays, **asked.options)
            return self._whole(asked, self._found(asked, made, call), d_lse, call)

    def _no_gradients(self, q: Any, k: Any, v: Any, d_lse: Any, call: Call) -> Gradients:
        """Where no row sees a key: 0, but for the sinks (S6.3)."""
        zeros = self.lane.xp.zeros_like
        dbias = None if call.bias is None else zeros(call.bias)
        return Gradients(zeros(q), zeros(k), zeros(v), dbias, self._sink_flow(d_lse, None, call))

    def _sink_flow(self, d_lse: Any, dsinks: Any, call: Call) -> Any:
        """dsinks, and the whole d_lse of rows that never reached the function."""
        xp = self.lane.xp
        if call.sinks is None:
            return None
        dsinks = xp.zeros_like(call.sinks) if dsinks is None else dsinks
        if d_lse is None or 0 in d_lse.shape:
            return dsinks
        return dsinks + xp.astype(xp.sum(d_lse, axis=(0, 2)), call.sinks.dtype)

    def _differentiated(
        self, q: Any, k: Any, v: Any, d_out: Any, d_lse: Any, call: Call
    ) -> Gradients:
        """By the framework, as `attention_vjp` asks for it."""
        differentiate = self.lane.vjp
        assert differentiate is not None  # checked when it was made
        names = [name for name in ("bias", "sinks") if getattr(call, name) is not None]
        cls = call.cls._replace(need_lse=d_lse is not None)

        def fn(q: Any, k: Any, v: Any, *others: Any) -> tuple[Any, ...]:
            given = dict(zip(names, others, strict=True))
            answer = self.forward(q, k, v, call._replace(cls=cls, **given))
            if self.lane.wants_gradient(q):
                self._require_record(answer[0])
            return answer if d_lse is not None else answer[:1]

        inputs = (q, k, v, *(getattr(call, name) for name in names))
        cotangents = (d_out,) if d_lse is None else (d_out, d_lse)
        dq, dk, dv, *others = differentiate(fn, inputs, cotangents)[1]
        return Gradients(dq, dk, dv, **dict(zip(names, others, strict=True)))

    def _silenced(self, asked: Asked, rows: list[Any], call: Call) -> list[Any]:
        """out, lse, d_out and d_lse as the function has them; 0 in rows that see nothing."""
        xp, unit = self.lane.xp, self.kernel.unit
        out, lse, d_out, d_lse = rows
        if asked.live is not None:
            live = asked.live[..., 0]
            d_out = xp.where(asked.live, d_out, xp.zeros_like(d_out))
            # exp(-inf - lse) is then 0, where a sink is -inf as well.
            lse = xp.where(live | (lse != -xp.inf), lse, xp.zeros_like(lse))
            if call.sinks is None:
                d_lse = None if d_lse is None else xp.where(live, d_lse, xp.zeros_like(d_lse))
        if unit != 1.0:
            lse, d_lse = lse / unit, None if d_lse is None else d_lse * unit
        return [out, lse, d_out, d_lse]

    def _found(self, asked: Asked, made: Any, call: Call) -> Gradients:
        """What backward returned, once it is what was expected."""
        bias = asked.options.get("bias") if call.bias is not None else None
        given = {"dq": asked.q, "dk": asked.k, "dv": asked.v, "dbias": bias, "dsinks": call.sinks}
        wanted = {name: x for name, x in given.items() if x is not None}
        if not isinstance(made, (tuple, list)) or len(made) != len(wanted):
            kind = len(made) if isinstance(made, (tuple, list)) else type(made).__name__
            self._wrong("backward", f"({', '.join(wanted)})", f"{kind}")
        found: dict[str, Any] = {}
        for (name, like), array in zip(wanted.items(), made, strict=True):
            shape = tuple(like.shape)
            if name == "dbias" and tuple(getattr(array, "shape", ())) != shape:
                shape = (call.B, call.Hq, asked.q.shape[2], asked.k.shape[2])
            array = self._shaped(name, array, shape)
            array = self._summed(array, like) if name == "dbias" else array
            found[name] = self._rounded(name, array, like)
        if asked.live is not None:
            zeros = self.lane.xp.zeros_like(found["dq"])
            found["dq"] = self.lane.xp.where(asked.live, found["dq"], zeros)
        return Gradients(*(found.get(name) for name in given))

    def _summed(self, array: Any, like: Any) -> Any:
        """The gradient of a bias, summed over the axes along which the bias was broadcast."""
        axes = tuple(a for a in range(4) if array.shape[a] != like.shape[a])
        if not axes:
            return array
        xp, narrow = self.lane.xp, self.lane.dtype_name(array) in ("float16", "bfloat16")
        total = xp.sum(xp.astype(array, xp.float32) if narrow else array, axis=axes, keepdims=True)
        return xp.astype(total, array.dtype) if narrow else total

    def _whole(self, asked: Asked, found: Gradients, d_lse: Any, call: Call) -> Gradients:
        """The gradients of all of q, k and v: 0 for what was cut off."""
        front, back = asked.i0, call.Lk - asked.j1
        dbias = found.bias
        if dbias is not None and dbias.shape[2] != 1:
            dbias = self._padded(dbias, 2, front, 0)
        if dbias is not None and dbias.shape[3] != 1:
            dbias = self._padded(dbias, 3, 0, back)
        above = None if d_lse is None else d_lse[:, :, :front]
        return Gradients(
            self._padded(found.q, 2, front, 0), self._padded(found.k, 2, 0, back),
            self._padded(found.v, 2, 0, back), dbias, self._sink_flow(above, found.sinks, call),
        )  # fmt: skip

    def _padded(self, array: Any, axis: int, front: int, back: int) -> Any:
        if not (front or back):
            return array
        shape = list(array.shape)
        shape[axis] = front or back
        zeros = self.lane.full(tuple(shape), 0.0, array.dtype, like=array)
        return self.lane.xp.concat((zeros, array) if front else (array, zeros), axis=axis)

    # Weights -----------------------------------------------------------------------------------

    def weights(self, q: Any, k: Any, call: Call) -> Any:
        """P of S2.5, by one-hot values, D keys at a time."""
        xp, n = self.lane.xp, call.D
        shape = (call.B, call.Hk, call.Lk, n)
        if 0 in (call.B, call.Lq, call.Lk):
            return self.lane.full((call.B, call.Hq, call.Lq, call.Lk), 0.0, q.dtype, like=q)
        call = call._replace(Dv=n, cls=call.cls._replace(Dv=n, need_lse=False))
        keys = self.lane.arange(0, call.Lk, q)[:, None]
        tiles = []
        for j0 in range(0, call.Lk, n):
            hot = xp.astype(keys == self.lane.arange(j0, j0 + n, q)[None, :], q.dtype)
            tiles.append(self.forward(q, k, xp.broadcast_to(hot, shape), call)[0])
        return xp.concat(tiles, axis=3)[..., : call.Lk]
