"""The backend: nothing inherited but `Backend` and `Lane` themselves, and a backward of its own."""

import array_api_strict as xp
import numpy as np

from attnx.errors import UnsupportedError
from attnx.plugin import Backend, Capabilities, Gradients, Lane, Reason
from attnx.tiling import Grid, position_offset, visible


class FirstLane(Lane):
    name = "first"
    xp = xp
    array_types = (type(xp.zeros(1)),)

    def device(self, array):
        return "cpu"

    def fast_key(self, q, k, v):
        return ("first", q.dtype) if q.dtype == k.dtype == v.dtype else None

    def quiet(self):
        return np.errstate(all="ignore")

    def to_numpy(self, array):
        return np.array(np.from_dlpack(array))

    def from_numpy(self, array, like=None):
        return xp.asarray(array, copy=True)


LANE = FirstLane()


class First(Backend):
    name = "first"
    lane = LANE
    capabilities = Capabilities(
        dtypes=frozenset({"float32", "float64"}),
        masks=frozenset({"causal", "window", "lengths", "dense", "positions", "or", "not"}),
        gqa=True,
        bias=True,
        softcap=False,
        sinks=False,
        dropout=False,
        isolation="unseen",
        max_head_size=256,
    )

    def version(self):
        return "1.0"

    def devices(self):
        return ("cpu",)

    def reasons(self, cls):
        found = super().reasons(cls)
        if cls.D % 2:
            found = (*found, Reason("D", str(cls.D), "even head sizes", "pad q and k"))
        return found

    def route(self, cls):
        return "dense, masked" if cls.mask else "dense"

    def forward(self, q, k, v, call):
        q, k, v, shown = self._inputs(q, k, v, call)
        s = self._scores(q, k, shown, call)
        top = s.max(axis=-1, keepdims=True, initial=-np.inf)
        p = np.exp(s - np.where(top == -np.inf, 0, top))
        total = p.sum(axis=-1, keepdims=True)
        out = p @ v / np.where(total == 0, 1, total)
        lse = np.log(total) + top
        return self._array(out), self._array(lse[..., 0])

    def backward(self, q, k, v, out, lse, d_out, d_lse, call):
        if call.softcap is not None:
            raise UnsupportedError.because("first", Reason("softcap", "given", "none"))
        groups = call.Hq // call.Hk
        q, k, v, shown = self._inputs(q, k, v, call)
        out, lse, d_out = (LANE.to_numpy(x) for x in (out, lse, d_out))
        s = self._scores(q, k, shown, call)
        lse = lse[..., None]
        p = np.where(lse == -np.inf, 0, np.exp(s - np.where(lse == -np.inf, 0, lse)))
        flow = (d_out * out).sum(axis=-1, keepdims=True)
        if d_lse is not None:
            flow = flow - LANE.to_numpy(d_lse)[..., None]
        ds = np.where(p == 0, 0, p * (d_out @ v.swapaxes(-1, -2) - flow))
        dq = ds @ k * ds.dtype.type(call.scale)
        dk = ds.swapaxes(-1, -2) @ q * ds.dtype.type(call.scale)
        dv = p.swapaxes(-1, -2) @ d_out

        def shared(x):
            return x.reshape(call.B, call.Hk, groups, *x.shape[2:]).sum(axis=2)

        bias = None
        if call.bias is not None:
            axes = tuple(n for n, size in enumerate(call.bias.shape) if size == 1)
            bias = self._array(ds.sum(axis=axes, keepdims=True))
        return Gradients(
            q=self._array(dq), k=self._array(shared(dk)), v=self._array(shared(dv)), bias=bias
        )

    def weights(self, q, k, call):
        q, k, _, shown = self._inputs(q, k, k, call)
        s = self._scores(q, k, shown, call)
        top = s.max(axis=-1, keepdims=True, initial=-np.inf)
        p = np.exp(s - np.where(top == -np.inf, 0, top))
        total = p.sum(axis=-1, keepdims=True)
        return self._array(p / np.where(total == 0, 1, total))

    def _inputs(self, q, k, v, call):
        q, k, v = (LANE.to_numpy(x) for x in (q, k, v))
        shown = np.ones((1, 1, 1, 1), bool)
        if call.mask is not None:
            every = (slice(0, n) for n in (call.B, call.Hq, call.Lq, call.Lk))
            grid = Grid(xp, xp.arange, *every, position_offset(call.mask, call.Lq, call.Lk))
            shown = LANE.to_numpy(visible(call.mask, grid))
        shown = np.broadcast_to(shown, (call.B, call.Hq, call.Lq, call.Lk))
        grouped = shown.reshape(call.B, call.Hk, -1, call.Lk)
        seen = grouped.any(axis=2)[..., None]
        k, v = np.where(seen, k, 0), np.where(seen, v, 0)
        return q, *(np.repeat(x, call.Hq // call.Hk, axis=1) for x in (k, v)), shown

    def _scores(self, q, k, shown, call):
        s = q @ k.swapaxes(-1, -2) * q.dtype.type(call.scale)
        if call.bias is not None:
            s = s + LANE.to_numpy(call.bias)
        return np.where(shown, s, -np.inf)

    def _array(self, x):
        return LANE.from_numpy(np.ascontiguousarray(x))
