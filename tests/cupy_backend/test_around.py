"""What stands around the operation, on CuPy's lane, with arrays that are as strict as CuPy's.

An array here is NumPy's underneath, but it mixes with nothing but numbers, goes through the lane's
namespace alone, and tells whoever reads it: the lane says that reading waits for the device, so
heads, positions, caches and parts must do without.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import array_api_compat.cupy as cupy_xp
import array_api_compat.numpy as numpy_xp
import numpy as np
import pytest

import attnx
from attnx import Alibi, BlockMask, HeadWeights, KVCache, Lengths, Window
from attnx.heads import Rotary
from attnx.plugin import BackendSpec, hookimpl
from attnx.positions import Llama3, rope_table
from attnx_cupy._backend import CupyBackend
from attnx_cupy._lane import CupyLane

KERNEL = {"attnx._array_backend", "attnx_cupy._backend"}
"""Who may read: the backend itself, as its docstring says."""


def plain(value: Any) -> Any:
    """Device arrays as NumPy's, in tuples and lists too."""
    if isinstance(value, (tuple, list)):
        return type(value)(plain(x) for x in value)
    return value.host if isinstance(value, Device) else value


def device(value: Any) -> Any:
    """The way back; a number is an array without axes."""
    if isinstance(value, (tuple, list)):
        return type(value)(device(x) for x in value)
    return Device(np.asarray(value)) if isinstance(value, (np.ndarray, np.generic)) else value


def refuse_host(values: Any) -> None:
    """CuPy computes with arrays of its own and with numbers."""
    for x in values if isinstance(values, tuple) else (values,):
        if isinstance(x, np.ndarray):
            raise TypeError("Unsupported type <class 'numpy.ndarray'>")


def read(name: str) -> Any:
    def method(self: Any) -> Any:
        caller = inspect.currentframe().f_back.f_globals["__name__"]
        assert not caller.startswith("attnx") or caller in KERNEL, f"{caller} reads: {name}"
        return getattr(self.host, name)()

    return method


class Device(np.lib.mixins.NDArrayOperatorsMixin):
    """An array on a device that is not there."""

    device = SimpleNamespace(id=0)
    shape, dtype, ndim, size, strides = (
        property(attrgetter(f"host.{name}"))
        for name in ("shape", "dtype", "ndim", "size", "strides")
    )
    __bool__, __int__, __index__, __float__, tolist = (
        read(name) for name in ("__bool__", "__int__", "__index__", "__float__", "tolist")
    )

    def __init__(self, host: Any) -> None:
        self.host = host

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        refuse_host(inputs)
        with np.errstate(all="ignore"):
            made = getattr(ufunc, method)(
                *plain(inputs), **{n: plain(x) for n, x in options.items()}
            )
        return device(made)

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("Implicit conversion to a NumPy array is not allowed")

    def __getitem__(self, at: Any) -> Any:
        refuse_host(at)
        return device(self.host[plain(at)])

    def __setitem__(self, at: Any, value: Any) -> None:
        refuse_host((at, value))
        self.host[plain(at)] = plain(value)


class Namespace:
    """NumPy's namespace on such arrays; what is asked of it must be there in CuPy's."""

    def __getattr__(self, name: str) -> Any:
        value, theirs = getattr(numpy_xp, name), getattr(cupy_xp, name)
        if not callable(value) or isinstance(value, type):
            return value

        def called(*args: Any, **options: Any) -> Any:
            if name != "asarray":
                refuse_host(args)
            try:
                inspect.signature(theirs).bind(*args, **options)
            except ValueError:  # a ufunc, which takes arrays alone
                assert not options, name
            with np.errstate(all="ignore"):
                return device(value(*plain(args), **{n: plain(x) for n, x in options.items()}))

        return called


class LikeCupy(CupyLane):
    name = "like-cupy"
    xp = Namespace()
    array_types = (Device,)

    def on(self, array: Any) -> Any:
        return nullcontext()

    def to_numpy(self, array: Any) -> Any:
        return np.array(plain(array))

    def wait(self, *arrays: Any) -> None:
        pass


@pytest.fixture
def on_device(emulated: CupyBackend) -> Iterator[Callable[[Any], Any]]:
    """`on_device(array)`: a NumPy array as one of CuPy's, whose backend has emulated kernels."""
    lane = LikeCupy()

    class Kernels(type(emulated.kernels)):  # type: ignore[misc]
        def run(self, name: str, blocks: int, threads: int, arguments: tuple[Any, ...]) -> None:
            super().run(name, blocks, threads, plain(arguments))

    backend = CupyBackend(lane, Kernels(lane.xp))
    backend._devices = ("cuda:0",)
    types = (f"{Device.__module__}.{Device.__qualname__}",)

    class Plugin:
        @hookimpl
        def attnx_backends(self) -> list[BackendSpec]:
            return [
                BackendSpec(
                    lane.name, load=lambda: backend, lane=lambda: lane, framework=lane.name,
                    array_types=types,
                )
            ]  # fmt: skip

    attnx.register(Plugin(), lane.name)
    yield lambda array: Device(np.array(array))
    attnx.unregister(lane.name)


def draw(*shape: int) -> Any:
    return np.random.default_rng(math.prod(shape)).standard_normal(shape).astype(np.float32)


def same(found: Any, expected: Any, tolerance: float = 2e-5) -> None:
    """An array of the device's, as NumPy's lane has it."""
    assert isinstance(found, Device)
    np.testing.assert_allclose(found.host, expected, rtol=tolerance, atol=tolerance)


B, HQ, HK, L, D, DV = 2, 4, 2, 9, 8, 6
SLOPES = attnx.alibi_slopes(HQ)


def arrays() -> tuple[Any, Any, Any]:
    return draw(B, HQ, L, D), draw(B, HK, L, D), draw(B, HK, L, DV)


def test_the_arrays_are_strict(on_device: Any) -> None:
    """The emulation itself: what CuPy refuses is refused, and who reads is told."""
    x = on_device(draw(3))
    with pytest.raises(TypeError, match="Unsupported type"):
        x + draw(3)
    with pytest.raises(TypeError, match="Implicit conversion"):
        np.where(np.ones(3, bool), x, x)
    scope = {"__name__": "attnx.cache", "x": x}
    with pytest.raises(AssertionError, match=r"attnx\.cache reads: __bool__"):
        exec("bool(x[0] > 0)", scope)


def test_every_array_is_made_on_the_device_of_another(on_device: Any) -> None:
    """CuPy makes arrays on the current device, which may be another."""
    gone_to: list[Any] = []

    class Lane(LikeCupy):
        def on(self, array: Any) -> Any:
            gone_to.append(array)
            return nullcontext()

    lane, like = Lane(), on_device(draw(3))
    made = [
        lane.arange(0, 3, like), lane.full((3,), 1.0, np.float32, like),
        lane.integers((1, 2), like), lane.floats((0.5, 1.0), np.float32, like),
        lane.from_numpy(draw(3), like),
    ]  # fmt: skip
    assert all(isinstance(x, Device) for x in made)
    assert [x is like for x in gone_to] == [True] * len(made)


def test_positions(on_device: Any) -> None:
    x, p = arrays()[0], np.arange(L) * 7
    for style in ("half", "interleaved"):
        options = {"style": style, "scaling": Llama3(8, 64), "rotary_dim": 6}
        same(attnx.rope(on_device(x), on_device(p), **options), attnx.rope(x, p, **options))
        same(
            attnx.sinusoidal(on_device(p / 3), 8, style=style),
            attnx.sinusoidal(p / 3, 8, style=style),
        )
    same(rope_table(on_device(p), 8).sin, rope_table(p, 8).sin)
    same(attnx.alibi_slopes(6, like=on_device(x)), attnx.alibi_slopes(6))


@pytest.mark.parametrize("alone", [True, False], ids=["self", "cross"])
def test_heads_and_their_pullback(alone: bool, on_device: Any) -> None:
    x, c = draw(B, L, 12), draw(B, 7, 12)
    shapes = ((12, HQ * D), (12, HK * D), (12, HK * DV), (HQ * DV, 5))
    w = HeadWeights(*(draw(*s) / 4 for s in shapes), *(draw(s[1]) for s in shapes))
    found = []
    for make in (lambda a: a, on_device):
        tables = [rope_table(make(np.arange(n)), D) for n in (L, L if alone else 7)]
        y, pullback = attnx.multi_head_attention_vjp(
            make(x), None if alone else make(c), weights=HeadWeights(*map(make, w)), num_heads=HQ,
            num_kv_heads=HK, rotary=Rotary(tables[0], "half", tables[1]), sinks=make(draw(HQ)),
            bias=Alibi(SLOPES, "bottom_right"), causal="bottom_right",
        )  # fmt: skip
        grads = pullback(make(draw(B, L, 5)))
        flat = [y, grads.x, grads.context, *grads.weights, grads.sinks]
        found.append([a for a in flat if a is not None])
    for expected, got in zip(*found, strict=True):
        same(got, expected, 1e-4)


@pytest.mark.parametrize("window", [None, 4], ids=["all", "rolling"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_the_cache(window: int | None, layout: str, on_device: Any) -> None:
    """Token by token with slots of NaN, ragged, reordered; a sequence that ran over is NaN."""
    q, k, v = arrays()
    whole = attnx.attention(q, k, v, causal=True, mask=None if window is None else Window(3, 0))
    swap = (lambda x: x.swapaxes(1, 2)) if layout == "bshd" else (lambda x: x)
    cache = KVCache.empty(
        B, HK, L if window is None else window, D, DV, like=on_device(q), window=window,
        layout=layout, fill=math.nan,
    )  # fmt: skip
    for t in range(L):
        one = [on_device(swap(x[:, :, t : t + 1])) for x in (q, k, v)]
        counts = on_device(np.array([1, int(t < 5)]))
        cache = cache.append(*one[1:], counts)
        out = swap(cache.attend(one[0], counts=counts).host)
        np.testing.assert_allclose(out[0], whole[0, :, t : t + 1], rtol=2e-5, atol=2e-5)
        np.testing.assert_allclose(out[1], whole[1, :, t : t + 1] * (t < 5), rtol=2e-5, atol=2e-5)
    assert cache.lengths.host.tolist() == [L, 5]
    over = cache.append(*one[1:]).attend(one[0])
    assert np.isnan(over.host).all((1, 2, 3)).tolist() == [window is None, False]
    beams = cache.reorder(on_device(np.array([1, 0, 1])))
    assert beams.lengths.host[1] == cache.lengths.host[0]
    with pytest.raises(attnx.errors.ArgumentTypeError, match="k: expected a like-cupy array"):
        cache.append(swap(k[:, :, :1]), swap(v[:, :, :1]))


def test_a_prompt_in_chunks_and_the_cut_of_it(on_device: Any) -> None:
    q, k, v = arrays()
    cache = KVCache.empty(B, HK, L, D, DV, like=on_device(q), fill=math.nan)
    out, cache = cache.prefill(*map(on_device, (q, k, v)), chunk=4)
    same(out, attnx.attention(q, k, v, causal=True))
    assert cache.truncate([3, 0]).lengths.host.tolist() == [3, 0]


BLOCKS = np.array([[[[True, False, True], [True, True, False]]]])
OPTIONS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "lengths and sinks": lambda make: {
        "mask": Lengths(make(np.array([L, 3]))), "causal": "bottom_right", "sinks": make(draw(HQ)),
    },
    "alibi": lambda make: {"bias": Alibi(make(np.array(SLOPES, np.float32)), "top_left")},
    "a window": lambda make: {"mask": Window(3, 1, "bottom_right")},
    "blocks": lambda make: {"mask": BlockMask(make(BLOCKS), (5, 3))},
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_calls_in_parts(name: str, on_device: Any) -> None:
    q, k, v = arrays()
    ours = [on_device(x) for x in (q, k, v)]
    expected = attnx.attention(q, k, v, return_lse=True, **OPTIONS[name](np.array))
    given = {"causal": False, **OPTIONS[name](on_device), "return_lse": True}
    for made in (
        attnx.split_kv(*ours, parts=[2, 2, 5], **given), attnx.prefill(*ours, chunk=4, **given),
    ):  # fmt: skip
        for found, wanted in zip(made, expected, strict=True):
            same(found, wanted)


@pytest.mark.parametrize("feature_map", [None, "elu"])
@pytest.mark.parametrize("decays", [0, 1, 3], ids=["none", "heads", "steps"])
def test_linear_attention(decays: int, feature_map: str | None, on_device: Any) -> None:
    """Chunks, then a step from their state, and the gradients."""
    q, k, v = arrays()
    decay = 0.9 * np.abs(np.tanh(draw(B, HQ, L))) + 0.1
    found = []
    for make in (lambda a: a, on_device):
        steps = None if decays == 0 else make(decay[0, :, 0] if decays == 1 else decay)

        def part(cut: slice, steps: Any = steps, make: Any = make) -> dict[str, Any]:
            given = {"decay": make(decay[:, :, cut]) if decays == 3 else steps}
            return given | {"feature_map": feature_map}

        first, last = slice(0, L - 1), slice(L - 1, L)
        out, state = attnx.linear_attention(
            *(make(x[:, :, first]) for x in (q, k, v)), **part(first), chunk=3, return_state=True
        )
        step, _ = attnx.linear_attention_step(
            *(make(x[:, :, last]) for x in (q, k, v)), state, **part(last)
        )
        _, pullback = attnx.linear_attention_vjp(
            *map(make, (q, k, v)), **part(slice(0, L)), chunk=4
        )
        grads = pullback(make(draw(B, HQ, L, DV)))
        found.append([out, step, *(g for g in grads if g is not None)])
    for expected, got in zip(*found, strict=True):
        same(got, expected, 1e-3)
