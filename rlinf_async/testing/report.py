"""Where every task of a loop stands, in words that are the same in every run."""

from __future__ import annotations

import asyncio
import linecache
import os
from collections.abc import Callable, Iterable
from types import CodeType, FrameType
from typing import Any

_LIBRARIES = (
    os.path.dirname(asyncio.__file__) + os.sep,
    os.path.dirname(os.path.dirname(__file__)) + os.sep,  # rlinf_async itself
)


def is_waiting(task: asyncio.Task[Any]) -> bool:
    """Whether a task waits for a future that is not done: it cannot run now."""
    waiter = _waiter(task)
    return waiter is not None and not waiter.done()


def unfinished(loop: asyncio.AbstractEventLoop) -> list[asyncio.Task[Any]]:
    """The tasks of a loop that have not finished, by name."""
    return sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name())


def describe_tasks(tasks: Iterable[asyncio.Task[Any]]) -> str:
    """One line a task: its name, where it stands, and what it waits for."""
    return "\n".join(f"  {task.get_name()} {_where(task)}{_awaited(task)}" for task in tasks)


def describe_callback(callback: Callable[..., object]) -> str:
    """A callback's name, without addresses."""
    inner: Any = callback
    while hasattr(inner, "func"):  # functools.partial
        inner = inner.func
    return short_name(getattr(inner, "__qualname__", None) or type(inner).__qualname__)


def short_name(qualname: str) -> str:
    """``test_it.<locals>.producer`` as ``producer``."""
    return qualname.rpartition("<locals>.")[2]


def _waiter(task: asyncio.Task[Any]) -> asyncio.Future[Any] | None:
    # Not public, but the same attribute in every CPython since 3.4, and uvloop runs the same tasks.
    waiter: asyncio.Future[Any] | None = getattr(task, "_fut_waiter", None)
    return waiter


def _where(task: asyncio.Task[Any]) -> str:
    stack = _await_stack(task.get_coro())
    if not stack:
        return "has not started"
    own = [place for place in stack if not place[0].co_filename.startswith(_LIBRARIES)]
    code, line = (own or stack)[-1]
    text = linecache.getline(code.co_filename, line).strip()
    inside = "" if code is stack[-1][0] else f" [in {short_name(stack[-1][0].co_qualname)}]"
    place = f"{_shown(code.co_filename)}:{line}"
    return f"stands in {short_name(code.co_qualname)} ({place}): {text}{inside}"


def _await_stack(awaitable: Any) -> list[tuple[CodeType, int]]:
    """Code and line of each suspended coroutine or generator, from the outermost in."""
    places: list[tuple[CodeType, int]] = []
    while awaitable is not None:
        frame: FrameType | None = _attribute(awaitable, "frame")
        if frame is not None and frame.f_lasti >= 0:
            places.append((frame.f_code, frame.f_lineno))
        awaitable = _attribute(awaitable, "await") or _attribute(awaitable, "yieldfrom")
    return places


def _attribute(awaitable: Any, name: str) -> Any:
    for prefix in ("cr_", "ag_", "gi_"):
        found = getattr(awaitable, prefix + name, None)
        if found is not None:
            return found
    return None


def _awaited(task: asyncio.Task[Any]) -> str:
    waiter = _waiter(task)
    if isinstance(waiter, asyncio.Task):
        return f" [waits for task {waiter.get_name()}]"
    return ""


def _shown(path: str) -> str:
    """A path as seen from the working directory, or its last two parts."""
    inside = os.path.relpath(path)
    return inside if not inside.startswith("..") else os.sep.join(path.split(os.sep)[-2:])
