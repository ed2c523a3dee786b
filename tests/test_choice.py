"""Who asked for which backend: contexts, threads, tasks, and the order among them (design 3)."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

import attnx
from attnx._choice import NOBODY, Choice, requested
from attnx.errors import ArgumentError, ArgumentTypeError


@pytest.fixture(autouse=True)
def no_default() -> Iterator[None]:
    """Whatever a test sets for the process is gone after it."""
    yield
    attnx.set_default_backend(None)


def current() -> Any:
    return requested().backends


def test_without_a_request_the_arrays_own_framework_decides() -> None:
    assert requested() == NOBODY == Choice(None, "the arrays' own framework")


def test_the_argument_goes_before_the_context_and_the_context_before_the_default() -> None:
    attnx.set_default_backend("default")
    assert requested() == Choice(("default",), "set_default_backend")
    with attnx.use_backend("context"):
        assert requested() == Choice(("context",), "use_backend")
        assert requested("argument") == Choice(("argument",), "backend=")
    assert requested("argument") == Choice(("argument",), "backend=")
    attnx.set_default_backend(None)
    assert requested() == NOBODY


def test_what_the_context_allows_holds_for_a_named_backend_too() -> None:
    with attnx.use_backend("context", fallback="warn", transfer=True):
        assert requested("argument") == Choice(("argument",), "backend=", "warn", True)


def test_a_context_may_go_back_to_the_arrays_own_framework() -> None:
    attnx.set_default_backend("default")
    with attnx.use_backend("outer"), attnx.use_backend(None):
        assert current() is None


def test_a_sequence_is_kept_in_order() -> None:
    backend = attnx.get_backend("numpy")
    for given in (["a", backend], ("a", backend)):
        assert requested(given).backends == ("a", backend)


@pytest.mark.parametrize("wrong", [3, b"numpy", {"numpy"}, [["numpy"]], [None], object(), type])
def test_what_is_no_backend_is_refused_wherever_it_is_named(wrong: Any) -> None:
    kind = type(wrong[0] if isinstance(wrong, list) else wrong).__name__
    for name, call in (
        ("backend", requested), ("use_backend", attnx.use_backend),
        ("set_default_backend", attnx.set_default_backend),
    ):  # fmt: skip
        with pytest.raises(ArgumentTypeError) as caught:
            call(wrong)
        assert str(caught.value) == (
            f"{name}: expected a name, a Backend or a sequence of them, got {kind}"
        )


def test_a_module_with_a_forward_is_no_backend() -> None:
    class Module:
        forward = print

    with pytest.raises(ArgumentTypeError, match="got Module"):
        requested(Module())


def test_an_empty_sequence_is_refused() -> None:
    with pytest.raises(ArgumentError, match="use_backend: expected at least one backend"):
        attnx.use_backend([])


def test_an_unknown_fallback_is_refused() -> None:
    with pytest.raises(
        ArgumentError, match="fallback: expected 'raise', 'warn' or 'allow', got 'maybe'"
    ):
        attnx.use_backend("numpy", fallback="maybe")


def test_contexts_nest_and_end_with_an_exception_too() -> None:
    with attnx.use_backend("outer"):
        with pytest.raises(KeyError), attnx.use_backend("inner"):
            raise KeyError
        assert current() == ("outer",)
    assert current() is None


def test_one_object_serves_again_and_inside_itself() -> None:
    """A reused context object keeps a stack."""
    chosen = attnx.use_backend("mine")
    for _ in range(2):
        with attnx.use_backend("outer"), chosen:
            with attnx.use_backend("between"), chosen:
                assert current() == ("mine",)
            assert current() == ("mine",)
        assert current() is None


def test_an_exit_in_another_context_restores_what_was_there() -> None:
    """As fixtures of asynchronous test frameworks do."""
    with attnx.use_backend("outer"):
        inner = attnx.use_backend("inner")
        inner.__enter__()
        contextvars.copy_context().run(inner.__exit__, None, None, None)
        assert current() == ("inner",)  # the other Context was a copy
    assert current() is None

    entered = attnx.use_backend("there")
    contextvars.copy_context().run(entered.__enter__)
    assert current() is None
    entered.__exit__(None, None, None)
    assert current() is None


def test_a_generator_keeps_its_choice_until_it_is_closed() -> None:
    """Documented: a generator shares its caller's context, so the choice leaks while it waits."""

    def stream() -> Iterator[Any]:
        with attnx.use_backend("inside"):
            yield current()

    generator = stream()
    assert next(generator) == ("inside",)
    assert current() == ("inside",)
    generator.close()
    assert current() is None


@contextmanager
def started(*targets: Any) -> Iterator[None]:
    threads = [threading.Thread(target=target) for target in targets]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join()


def test_threads_do_not_see_each_others_choice() -> None:
    seen: dict[str, Any] = {}
    barrier = threading.Barrier(2)

    def work(name: str) -> None:
        with attnx.use_backend(name):
            barrier.wait()
            seen[name] = current()
            barrier.wait()
        seen[f"after {name}"] = current()

    with attnx.use_backend("main"), started(lambda: work("one"), lambda: work("two")):
        pass
    assert seen == {"one": ("one",), "two": ("two",), "after one": None, "after two": None}


def test_one_object_in_two_threads_gives_each_its_own_back() -> None:
    chosen = attnx.use_backend("shared")
    barrier = threading.Barrier(2)
    seen: dict[str, Any] = {}

    def work(name: str, first: bool) -> None:
        with attnx.use_backend(name):
            if not first:
                barrier.wait()
            with chosen:
                if first:
                    barrier.wait()
                barrier.wait()  # both are inside; the one that came first leaves first
                if not first:
                    barrier.wait()
            seen[name] = current()
            if first:
                barrier.wait()

    with started(lambda: work("one", True), lambda: work("two", False)):
        pass
    assert seen == {"one": ("one",), "two": ("two",)}


def test_the_default_is_the_whole_processs() -> None:
    seen = []
    attnx.set_default_backend("default")
    with started(lambda: seen.append(current())):
        pass
    assert seen == [("default",)]


def test_tasks_and_to_thread_inherit_the_choice_and_keep_their_own() -> None:
    """Documented in `use_backend`."""

    async def task(name: str | None, started: asyncio.Event, go: asyncio.Event) -> Any:
        if name is None:
            started.set()
            await go.wait()
            return current()
        with attnx.use_backend(name):
            started.set()
            await go.wait()
            return current()

    async def main() -> list[Any]:
        go, events = asyncio.Event(), [asyncio.Event() for _ in range(3)]
        with attnx.use_backend("parent"):
            async with asyncio.TaskGroup() as group:
                names = ("one", None, "two")
                tasks = [
                    group.create_task(task(name, event, go))
                    for name, event in zip(names, events, strict=True)
                ]
                for event in events:
                    await event.wait()
                assert current() == ("parent",)
                go.set()
            found = [task.result() for task in tasks]
            return [*found, await asyncio.to_thread(current), current()]

    expected = [("one",), ("parent",), ("two",), ("parent",), ("parent",)]
    assert asyncio.run(main()) == expected


def test_an_executor_does_not_inherit_the_choice() -> None:
    """Documented in `use_backend`: neither `submit` nor `run_in_executor` copies the context."""

    async def main(pool: ThreadPoolExecutor) -> Any:
        with attnx.use_backend("parent"):
            return await asyncio.get_running_loop().run_in_executor(pool, current)

    with ThreadPoolExecutor(1) as pool:
        with attnx.use_backend("parent"):
            assert pool.submit(current).result() is None
        assert asyncio.run(main(pool)) is None
