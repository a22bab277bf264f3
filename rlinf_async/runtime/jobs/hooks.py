"""Code of the user's own that a run calls while it goes on: ``[hooks]``.

::

    this process    row of an iteration --> metrics.csv --> on_iteration(IterationView) --> the next

A hook sees what a run has done; it changes nothing of it. It is called at least once for each
iteration: those after the checkpoint that a killed run goes on from are trained again, and told
again. What it raises ends the run.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

import msgspec

from rlinf_async.config.registry import Registry, raised
from rlinf_async.observe.run_folder import RunFolder
from rlinf_async.runtime.jobs.checkpoints import Checkpointer
from rlinf_async.runtime.jobs.view import LiveView
from rlinf_async.threads import ThreadEach

ON_ITERATION: Final = ("hooks", "on_iteration")
"""the setting"""
CALLING: Final = "waiting for hooks.on_iteration"
"""what the live view says meanwhile"""


class HookFailed(RuntimeError):
    """A hook raised; the message names the setting, the iteration and the error."""


class HooksConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Functions that the run calls."""

    on_iteration: str = ""
    """called with an `IterationView` after each iteration: ``"file.py:name"`` or
    ``"module:name"``; empty: none is"""


class IterationView(NamedTuple):
    """An iteration that is trained, accounted for and written to ``metrics.csv``."""

    run: str
    """name of the run"""
    folder: Path
    """folder of the run"""
    iteration: int
    """its number, from 0"""
    iterations: int
    """iterations of the whole run"""
    metrics: Mapping[str, float]
    """its row of ``metrics.csv``, by column; read only"""


IterationHook = Callable[[IterationView], Awaitable[None] | None]

iteration_hooks: Registry[IterationHook] = Registry("hook", called_with=("iteration",))
"""functions that ``on_iteration`` names"""


def check_hooks(config: HooksConfig) -> None:
    """Raise `ConfigError` for a hook that cannot be loaded, or takes other arguments."""
    if config.on_iteration:
        iteration_hooks.check(config.on_iteration, ON_ITERATION)


async def after_iteration(
    config: HooksConfig,
    run: str,
    folder: RunFolder,
    iteration: int,
    iterations: int,
    row: Mapping[str, float],
    checkpointer: Checkpointer,
    shown: LiveView,
) -> None:
    """Call the hook, if there is one, with what an iteration has come to, and wait for it. One that
    is no coroutine function is called in a thread: it holds up nothing but the run's own next step,
    and a Ctrl-C does not wait for it. ``shown`` says meanwhile that the run waits.

    Raises:
        HookFailed: it raised; a checkpoint that was begun is on the disk by then.
    """
    if not config.on_iteration:
        return
    metrics = MappingProxyType(dict(row))
    note, shown.note = shown.note, CALLING
    view = IterationView(run, folder.path, iteration, iterations, metrics)
    try:
        hook = iteration_hooks.named(config.on_iteration)
        if inspect.iscoroutinefunction(hook):
            await hook(view)
            return
        loop = asyncio.get_running_loop()
        returned = await loop.run_in_executor(ThreadEach("hook"), hook, view)
        if inspect.isawaitable(returned):
            await returned
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise  # the run ends; else something of the hook's own was cancelled
        await checkpointer.finish()
        raise HookFailed(
            f"hooks.on_iteration: {config.on_iteration!r} raised in iteration {iteration}: "
            f"{raised(error)}"
        ) from error
    finally:
        shown.note = note
