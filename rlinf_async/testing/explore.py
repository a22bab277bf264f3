"""Run a coroutine under one seed or under hundreds, and name the command that replays a failure."""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

from rlinf_async.testing.virtual_loop import Unhandled, VirtualLoop

T = TypeVar("T")

SEED_VARIABLE = "RLINF_ASYNC_SEED"
"""environment variable; set to a number, every `explore` runs this seed only"""


def run(main: Coroutine[Any, Any, T], *, seed: int | None = 0, max_steps: int = 1_000_000) -> T:
    """Run a coroutine to its end on a fresh `VirtualLoop`.

    Raises what ``main`` raises, `Deadlock`, `Livelock`, or `Unhandled` when ``main`` succeeded but
    callbacks or forgotten tasks failed.
    """
    __tracebackhide__ = True  # pytest: a failure is in the code under test, not in these frames
    return run_on(VirtualLoop(seed, max_steps=max_steps), main)


def run_on(loop: asyncio.AbstractEventLoop, main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end on this loop, then cancel what is left and close the loop."""
    __tracebackhide__ = True
    unhandled: list[Exception] = []
    loop.set_exception_handler(lambda _, context: unhandled.append(_error_of(context)))
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        try:
            result = runner.run(main)
        except BaseException as error:
            if isinstance(loop, VirtualLoop):  # now, before the runner cancels what is left
                error.add_note(f"the last steps were\n{loop.tail()}")
            raise
    if unhandled:
        raise Unhandled("errors that nobody handled", unhandled)
    return result


def explore(
    main_factory: Callable[[], Coroutine[Any, Any, T]],
    *,
    seeds: Iterable[int] = range(200),
    max_steps: int = 1_000_000,
) -> list[T]:
    """Run ``main_factory()`` once per seed; the results in the order of the seeds.

    The first failure is raised with notes: its last steps, its seed and the command that replays
    it. With ``RLINF_ASYNC_SEED=17`` in the environment only seed 17 runs.
    """
    __tracebackhide__ = True
    only = _seed_from_environment()
    results: list[T] = []
    for seed in seeds if only is None else [only]:
        results.append(_run_one(main_factory, seed, max_steps))  # noqa: PERF401  # hidden frames
    return results


def replay_command(seed: int) -> str:
    """The shell command that runs the current test, or this program, under one seed."""
    test = os.environ.get("PYTEST_CURRENT_TEST")
    if test:
        words = ["python", "-m", "pytest", test.rpartition(" (")[0], "-q"]
    else:
        words = ["python", *sys.orig_argv[1:]]
    return f"{SEED_VARIABLE}={seed} {shlex.join(words)}"


def _run_one(main_factory: Callable[[], Coroutine[Any, Any, T]], seed: int, max_steps: int) -> T:
    __tracebackhide__ = True
    loop = VirtualLoop(seed, max_steps=max_steps)
    try:
        return run_on(loop, main_factory())
    except BaseException as error:
        error.add_note(f"seed {seed} fails; replay it with: {replay_command(seed)}")
        raise


def _seed_from_environment() -> int | None:
    text = os.environ.get(SEED_VARIABLE)
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(
            f"{SEED_VARIABLE}={text!r} is not a seed: set it to a whole number, or unset it"
        ) from None


def _error_of(context: dict[str, Any]) -> Exception:
    error = context.get("exception")
    if isinstance(error, Exception):
        error.add_note(f"asyncio: {context['message']}")
        return error
    return RuntimeError(f"asyncio: {context['message']}")
