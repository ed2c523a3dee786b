"""From a request and a call's class to a plan: who computes, why, and why not the others.

A plan depends on its key alone (the class, the request, what is registered), so it is made once
and then found by one look-up. Nothing falls back silently: a named backend computes or refuses,
and `use_backend(fallback=...)` is the way to ask for anything else (S8.3).
"""

from __future__ import annotations

import sys
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from attnx import _interop
from attnx._choice import NOBODY, Choice
from attnx._loading import say
from attnx._registry import registry
from attnx.errors import (
    ArgumentTypeError,
    AttnxError,
    AttnxWarning,
    FallbackWarning,
    PluginError,
    UnavailableBackend,
    UnknownBackend,
    UnsupportedError,
)
from attnx.plugin import Backend, Call, CallClass, Gradients, Lane, Ranking, Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

__all__ = [
    "Candidate", "Explanation", "Plan", "explain_choice", "lane_of", "make_plan", "warn",
]  # fmt: skip


class Candidate(NamedTuple):
    """A backend as a plan saw it.

    Attributes:
        name: as registered.
        reasons: why it cannot do the call; empty when it can.
        chosen: whether it computes.
        note: the route it would take, how arrays reach it and what a policy knows of it; or why it
            is not available.
    """

    name: str
    reasons: tuple[Reason, ...]
    chosen: bool
    note: str


class Explanation(NamedTuple):
    """What `explain` returns; it prints as a table.

    Attributes:
        choice: the backend that computes, or None.
        why: who chose it; a policy by its plugin's name.
        route: its kernel route, or None.
        exchange: how arrays reach it and come back, or None when they need not move.
        candidates: every registered backend, with its reasons.
        call: the class of the call.
    """

    choice: str | None
    why: str
    route: str | None
    exchange: str | None
    candidates: tuple[Candidate, ...]
    call: CallClass

    def __rich__(self) -> Any:
        """The table."""
        from rich.markup import escape
        from rich.table import Table

        title = escape(f"{self.choice or 'no backend can do this call'} ({self.why})")
        table = Table("backend", "", "route or reason", title=title, title_justify="left")
        for candidate in self.candidates:
            text = "; ".join(map(str, candidate.reasons)) or candidate.note
            mark = "chosen" if candidate.chosen else "no" if candidate.reasons else "could"
            table.add_row(escape(candidate.name), mark, escape(text))
        return table

    def __str__(self) -> str:
        from io import StringIO

        from rich.console import Console

        text = StringIO()
        Console(file=text, width=100).print(self)
        return text.getvalue()


class Plan:
    """A backend for a class of calls, with the way there and back.

    Attributes:
        backend: its name.
        route: its kernel route.
        reasons: why the backends that were asked before it could not do the call.
        cls: the class.
        explanation: the whole story.
    """

    __slots__ = (
        "_exchange", "_warning", "apply", "backend", "cls", "direct", "explanation", "impl",
        "reasons", "route",
    )  # fmt: skip

    def __init__(
        self, impl: Backend, cls: CallClass, explanation: Explanation, exchange: Any,
        warning: str = "",
    ) -> None:  # fmt: skip
        self.impl, self.cls, self.explanation = impl, cls, explanation
        self._exchange, self._warning = exchange, warning
        self.backend = impl.name
        self.route = explanation.route
        self.reasons = {c.name: c.reasons for c in explanation.candidates if c.reasons}
        self.apply = self._told(impl.apply if exchange is None else exchange.attend(cls))
        native = exchange is None and not warning
        self.direct = impl.direct(cls) if native else None

    def _told(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, which tells of a fallback."""
        if not self._warning:
            return run

        def told(*arguments: Any) -> Any:
            warn(self._warning, FallbackWarning)
            return run(*arguments)

        return told

    def forward(self, q: Any, k: Any, v: Any, call: Call) -> tuple[Any, Any]:
        """The answer (out, lse), constant to the framework's differentiation."""
        run: Callable[..., Any] = self.impl.forward
        run = run if self._exchange is None else self._exchange.around(run)
        out: tuple[Any, Any] = self._told(run)(q, k, v, call)
        return out

    def backward(self, arrays: Sequence[Any], call: Call) -> Gradients:
        """Gradients, for (q, k, v, out, lse, d_out, d_lse)."""
        run: Callable[..., Any] = self.impl.backward
        return Gradients(
            *(run if self._exchange is None else self._exchange.around(run))(*arrays, call)
        )

    def weights(self, q: Any, k: Any, call: Call) -> Any:
        """P of S2.5."""
        run = self.impl.weights if self._exchange is None else self._exchange.weights(self.cls)
        return self._told(run)(q, k, call)


def lane_of(q: Any, name: str = "q") -> Lane:
    """The lane of an argument's framework."""
    lane = registry.lane_of(q)
    if lane is None:
        known = sorted({t for spec in registry.specs.values() for t in spec.array_types})
        kind = type(q)
        raise ArgumentTypeError(
            f"{name}: expected an array of a registered framework ({', '.join(known)}), "
            f"got {kind.__module__}.{kind.__qualname__}"
            f"{registry.blocked(kind.__module__.split('.')[0])}"
        )
    return lane


def _examine(item: Any, cls: CallClass, choice: Choice) -> tuple[Backend | None, Candidate]:
    """One backend against one class of calls; a plugin that raises here cannot do any."""
    name = item if isinstance(item, str) else item.name
    try:
        backend = registry.backend(item) if isinstance(item, str) else item
        reasons = _interop.reasons(backend, cls, choice.transfer) or _ask(backend, cls)
        note = "" if reasons else _route(backend, cls)
    except UnknownBackend as error:
        raise UnknownBackend(f"{error} (asked by {choice.source})") from None
    except (Exception, SystemExit) as error:
        if registry.settings.strict and isinstance(error, PluginError):
            raise
        if isinstance(error, UnavailableBackend):
            why = str(error)
        else:
            why = f"it failed: {say(error)}"
            registry.fail_backend(name, "reasons or route", error)
        reason = Reason("backend", name, "not available here", why)
        return None, Candidate(name, (reason,), False, why)
    return (None if reasons else backend), Candidate(name, reasons, False, note)


def _ask(backend: Backend, cls: CallClass) -> tuple[Reason, ...]:
    reasons = tuple(backend.reasons(_interop.local(backend, cls)))
    for reason in reasons:
        if not isinstance(reason, Reason):
            raise TypeError(f"reasons() gave {type(reason).__name__}, not Reason")
    return reasons


def _route(backend: Backend, cls: CallClass) -> str:
    exchange = _interop.describe(backend, cls)
    route = backend.route(_interop.local(backend, cls))
    return f"{route}; {exchange}" if exchange else route


class _Asked(NamedTuple):
    """Who is asked in turn, who decided that, and what is known of them."""

    items: list[Any]
    why: str
    notes: Mapping[str, str]


def _candidates(choice: Choice, cls: CallClass, *, explaining: bool) -> _Asked:
    if choice.backends is not None:
        return _Asked(list(choice.backends), choice.source, {})
    native = registry.native(cls.framework)
    ranked = _rank(cls, native, explaining=explaining)
    if ranked is None:
        return _Asked(native[:1], choice.source, {})
    plugin, ranking = ranked
    why = f"the plugin {plugin!r}" + (f": {ranking.why}" if ranking.why else "")
    if choice.source != NOBODY.source:
        why = f"{choice.source}; {why}"
    order = [name for name in ranking.order if name in registry.specs]
    return _Asked(order, why, ranking.notes or {})


def _rank(cls: CallClass, names: list[str], *, explaining: bool) -> tuple[str, Ranking] | None:
    """The first order that a plugin gives; one that fails is told of and passed over."""
    for plugin, ranked in _each(
        "attnx_rank", call=cls, candidates=list(names), explaining=explaining
    ):
        if ranked is None:
            continue
        ranking = ranked if isinstance(ranked, Ranking) else Ranking(ranked)
        order = ranking.order
        if isinstance(order, (list, tuple)) and all(isinstance(name, str) for name in order):
            return plugin, ranking
        registry.fail_hook(plugin, "attnx_rank", f"gave {order!r}, not a list of names")
        warn(f"attnx_rank of {plugin!r} gave {order!r}, not a list of names", AttnxWarning)
    return None


def _each(hook: str, **arguments: Any) -> Iterator[tuple[str, Any]]:
    """Every plugin's answer to a hook; one that raises is told of and hides no other."""
    for plugin, ask in registry.implementations(hook):
        try:
            answer = ask(**arguments)
        except (Exception, SystemExit) as error:
            if registry.settings.strict:
                raise
            warn(f"{hook} of {plugin!r} failed: {say(error)}", AttnxWarning)
        else:
            yield plugin, answer


def warn(text: str, category: type[Warning] = AttnxWarning) -> None:
    """Warn at the first line outside attnx, however deep the call stands."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("attnx."):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)


def make_plan(choice: Choice, cls: CallClass, *, observed: bool = True) -> Plan:
    """Choose a backend for a class of calls; observers see it unless it serves no user's call.

    Raises:
        UnsupportedError: none of those asked for can do it; with reasons and alternatives (S8.2).
        UnavailableBackend: the one asked for cannot be loaded.
        UnknownBackend: nobody registered that name.
    """
    explanation, backend = _decide(choice, cls, everyone=False)
    warning = ""
    if backend is None and choice.fallback != "raise" and choice.backends is not None:
        why = "; ".join(
            f"{c.name}: {'; '.join(map(str, c.reasons))}" for c in explanation.candidates
        )
        explanation, backend = _fall_back(choice, cls, explanation)
        if backend is not None and choice.fallback == "warn":
            warning = f"{backend.name} computes, because {why}"
    if backend is None:
        raise _refusal(explanation, choice, cls)
    plan = Plan(backend, cls, explanation, _interop.exchange(backend, cls), warning)
    if observed:
        for _ in _each("attnx_planned", plan=plan, explanation=explanation):
            pass
    return plan


def explain_choice(choice: Choice, cls: CallClass) -> Explanation:
    """The choice with every registered backend examined; nothing is raised for what is lacking."""
    return _decide(choice, cls, everyone=True)[0]


def _decide(
    choice: Choice, cls: CallClass, *, everyone: bool
) -> tuple[Explanation, Backend | None]:
    chosen: Backend | None = None
    seen: dict[str, Candidate] = {}
    asked, why, notes = _candidates(choice, cls, explaining=everyone)
    for item in asked:
        backend, candidate = _examine(item, cls, choice)
        if backend is not None and chosen is None:
            chosen = backend
            candidate = candidate._replace(chosen=True)
        seen[candidate.name] = candidate
        if chosen is not None and not everyone:
            break
    if everyone:
        for name in registry.names():
            if name not in seen:
                with suppress(UnknownBackend):  # another thread has just taken it out
                    seen[name] = _examine(name, cls, choice)[1]
    for name in notes.keys() & seen.keys():
        if not seen[name].reasons:
            note = f"{seen[name].note}; {notes[name]}"
            seen[name] = seen[name]._replace(note=note)
    explanation = Explanation(
        choice=None if chosen is None else chosen.name,
        why=why,
        route=None if chosen is None else chosen.route(_interop.local(chosen, cls)),
        exchange=None if chosen is None else _interop.describe(chosen, cls),
        candidates=tuple(seen.values()),
        call=cls,
    )
    return explanation, chosen


def _fall_back(
    choice: Choice, cls: CallClass, refused: Explanation
) -> tuple[Explanation, Backend | None]:
    native = Choice(None, f"fallback from {choice.source}", "raise", choice.transfer)
    explanation, backend = _decide(native, cls, everyone=False)
    if backend is None:
        return refused, None
    both = (*refused.candidates, *explanation.candidates)
    return explanation._replace(candidates=both), backend


def _refusal(explanation: Explanation, choice: Choice, cls: CallClass) -> AttnxError:
    refused = explanation.candidates
    if len(refused) == 1 and refused[0].reasons[0].option == "backend":
        return UnavailableBackend(refused[0].note)
    others = [
        c.name
        for c in explain_choice(choice, cls).candidates
        if not c.reasons and c.name not in {r.name for r in refused}
    ]
    what = "; ".join(str(UnsupportedError.because(c.name, *c.reasons)) for c in refused)
    hint = f"; {', '.join(map(repr, others))} could" if others else "; no installed backend could"
    return UnsupportedError(
        f"{what or f'no backend for {cls.framework} arrays'}{hint} (asked by {explanation.why})",
        backend=refused[0].name if len(refused) == 1 else None,
        reasons=tuple(reason for c in refused for reason in c.reasons),
        alternatives=others,
    )
