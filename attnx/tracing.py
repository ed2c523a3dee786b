"""Watching what attnx decides: a line for each new plan, or counts of them.

Both are plugins with the one hook `attnx_planned`, so they see *plans*, not calls: a plan is made
at the first call of a class and serves all others, and nobody stands on the path of a call. When
one comes or goes every plan is made anew, so it sees what is in use from then on; programs that
`torch.compile` or `jax.jit` compiled before stay, and with them the choices in them. They hold for
the whole process.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any

from attnx._registry import registry
from attnx.errors import ArgumentTypeError
from attnx.plugin import hookimpl

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attnx import Explanation
    from attnx.plugin import CallClass

__all__ = ["Counters", "counting", "describe", "log_plans", "short"]

_numbers = count()


class log_plans:
    """Log each new plan on one line: the class of calls, who computes, by which route and why.

    Args:
        logger: a logger's name, or a logger.
        level: the level it logs at.

    Raises:
        ArgumentTypeError: something that is no logger or no level.

    Example:
        >>> import attnx
        >>> from attnx import tracing
        >>> attnx.register(tracing.log_plans())
        >>> attnx.unregister("log_plans")
    """

    __name__ = "log_plans"

    def __init__(
        self, logger: str | logging.Logger = "attnx.plans", level: int = logging.INFO
    ) -> None:
        if not isinstance(logger, (str, logging.Logger)):
            raise ArgumentTypeError(
                f"log_plans: logger: expected a name or a logging.Logger, "
                f"got {type(logger).__name__}"
            )
        if type(level) is not int:
            raise ArgumentTypeError(
                f"log_plans: level: expected an integer such as logging.INFO, "
                f"got {type(level).__name__}"
            )
        self._logger = logging.getLogger(logger) if isinstance(logger, str) else logger
        self._level = level

    @hookimpl
    def attnx_planned(self, explanation: Explanation) -> None:
        """Write the line."""
        if self._logger.isEnabledFor(self._level):
            self._logger.log(self._level, "%s", describe(explanation))


def describe(explanation: Explanation) -> str:
    """An explanation on one line.

    Example:
        >>> import attnx, numpy as np
        >>> from attnx import tracing
        >>> x = np.ones((1, 2, 3, 4), np.float32)
        >>> tracing.describe(attnx.explain(x, x, x, causal=True, backend="numpy")).split(";")[0]
        'numpy float32 cpu D=4 mask=causal[top_left] -> numpy by blas tiles'
    """
    parts = [f"{short(explanation.call)} -> {explanation.choice or 'nobody'}"]
    if explanation.route:
        parts.append(f"by {explanation.route}")
    text = " ".join(parts)
    if explanation.exchange:
        text += f"; {explanation.exchange}"
    return " ".join(f"{text} ({explanation.why})".split())  # what others name may hold line ends


def short(call: CallClass) -> str:
    """A class of calls in a few words; the usual is left out.

    Example:
        >>> import attnx, numpy as np
        >>> from attnx import tracing
        >>> x = np.ones((1, 2, 3, 4), np.float32)
        >>> tracing.short(attnx.explain(x, x, x, causal=True, gradient=True).call)
        'numpy float32 cpu D=4 mask=causal[top_left] gradient=vjp'
    """
    words = [call.framework, call.dtype, call.device, f"D={call.D}"]
    words += [f"Dv={call.Dv}"] if call.Dv != call.D else []
    words += ["grouped"] if call.grouped else []
    words += [] if call.square else ["Lq!=Lk"]
    words += [call.layout] if call.layout != "bhsd" else []
    words += [f"mask={call.mask}"] if call.mask is not None else []
    words += [f"gradient={call.gradient}"] if call.gradient is not None else []
    given = ("softcap", "bias", "alibi", "sinks", "dropout", "assume_finite", "traced")
    words += [name for name in given if getattr(call, name)]
    words += ["lse"] if call.need_lse and call.gradient != "vjp" else []
    return " ".join(words)


class Counters:
    """Counts of plans, not of calls: how often somebody was chosen, and how.

    Refused calls have no plan and are not counted; the backends that a plan passed over are.

    Example:
        >>> from attnx import tracing
        >>> tracing.Counters().snapshot()["plans"]
        0
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, Counter[str]] = {}
        self.reset()

    @hookimpl
    def attnx_planned(self, plan: Any, explanation: Explanation) -> None:
        """Count one."""
        with self._lock:
            self._counts["plans"]["plans"] += 1
            self._counts["backends"][plan.backend] += 1
            self._counts["routes"][f"{plan.backend}: {plan.route}"] += 1
            self._counts["whys"][explanation.why] += 1
            self._counts["passed_over"].update(plan.reasons.keys())
            if explanation.exchange is not None:
                self._counts["exchanges"][f"{explanation.call.framework} to {plan.backend}"] += 1
            if explanation.why.startswith("fallback"):
                self._counts["fallbacks"][plan.backend] += 1

    def snapshot(self) -> dict[str, Any]:
        """The counts so far, as plain values that nobody changes any more.

        Returns:
            `plans`: how many; by name `backends`, `routes`, `whys` (who chose), `exchanges`
            (framework to backend), `fallbacks` (who computed instead) and `passed_over` (who was
            asked before and could not).
        """
        with self._lock:
            counts = {name: dict(counter) for name, counter in self._counts.items()}
        return {**counts, "plans": counts["plans"].get("plans", 0)}

    def reset(self) -> None:
        """Start again from zero."""
        names = ("plans", "backends", "routes", "whys", "exchanges", "fallbacks", "passed_over")
        with self._lock:
            self._counts = {name: Counter() for name in names}


@contextmanager
def counting() -> Iterator[Counters]:
    """Count the plans that are made inside a `with` block, by any thread.

    Example:
        >>> import attnx, numpy as np
        >>> from attnx import tracing
        >>> x = np.ones((1, 2, 3, 4), np.float32)
        >>> with tracing.counting() as counts:
        ...     for _ in range(3):
        ...         out = attnx.attention(x, x, x, backend="numpy")
        >>> counts.snapshot()["backends"]  # one plan, three calls
        {'numpy': 1}
    """
    counters, name = Counters(), f"attnx-counting-{next(_numbers)}"
    registry.register(counters, name)
    try:
        yield counters
    finally:
        registry.unregister(name)
