"""One call as a function without arguments, as `fastest` runs it: to its end, and told of faults.

What is timed is what a user waits for: with the gradient if the class wants one, by the same way
to it, and with the exchange of arrays there and back. Frameworks that compute asynchronously are
waited for; where the answer lies on a device, one number of it is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnx._loading import say

if TYPE_CHECKING:
    from collections.abc import Callable

    from attnx._call import Prepared
    from attnx._dispatch import Plan
    from attnx.plugin import Lane

__all__ = ["Guarded", "run_of"]


def run_of(lane: Lane, plan: Plan, ready: Prepared) -> Callable[[], None]:
    """A call by a plan: forward, and the gradient as the class says."""
    q, k, v, call, _ = ready

    def forward(q: Any, k: Any, v: Any) -> Any:
        return plan.apply(q, k, v, call)[0]

    if call.cls.gradient is None:
        return lambda: _finish(lane, forward(q, k, v))
    d_out = lane.full((*q.shape[:-1], v.shape[-1]), 1.0, q.dtype, q)
    if call.cls.gradient == "framework":
        vjp = lane.vjp
        assert vjp is not None  # a framework that records gradients gives them
        return lambda: _finish(lane, vjp(forward, (q, k, v), (d_out,))[1][0])

    def both() -> None:
        out, lse = plan.forward(q, k, v, call)
        _finish(lane, plan.backward((q, k, v, out, lse, d_out, None), call).q)

    return both


def _finish(lane: Lane, array: Any) -> None:
    """Wait until an array is computed."""
    lane.wait(array)
    if lane.device(array) != "cpu":
        lane.to_numpy(array[:1, :1, :1, :1])


class Guarded:
    """A run of a named backend; what it raises is written down, and it is not run again."""

    def __init__(self, run: Callable[[], None], name: str, failures: dict[str, str]) -> None:
        self._run, self._name, self._failures = run, name, failures

    def __call__(self) -> None:
        if self._name in self._failures:
            return
        try:
            self._run()
        except Exception as error:
            self._failures[self._name] = say(error)
