"""Starts a process for a worker, sees it end, and ends it: it and all that it started.

A worker's process leads a session of its own. So the terminal's Ctrl-C is for the process that
started it alone, and whatever the worker starts (simulators, loaders) can be ended with it. What a
worker starts in yet another session is its own to end.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing.context import SpawnProcess

from rlinf_async.runtime.child import Boot, child_main
from rlinf_async.workers.errors import BuildError

_spawn_lock = threading.Lock()


async def spawn_whole(boot: Boot) -> SpawnProcess:
    """Start the process in a thread. If this is cancelled meanwhile, no process is left."""
    spawning = asyncio.create_task(asyncio.to_thread(_spawn, boot))
    try:
        return await asyncio.shield(spawning)
    except asyncio.CancelledError:
        while not spawning.done():  # cancelled once more, it still waits: nobody else would
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([spawning])
        if spawning.exception() is None:
            kill_tree(spawning.result())
            spawning.result().join()
            spawning.result().close()
        raise


def open_death(process: SpawnProcess) -> int:
    """A file that becomes readable when the process has ended; the caller closes it.

    Multiprocessing's own sentinel is a pipe, which what the process has forked holds open.
    """
    if hasattr(os, "pidfd_open") and process.pid is not None:
        return os.pidfd_open(process.pid)
    return os.dup(process.sentinel)


def kill_tree(process: SpawnProcess) -> None:
    """End the process and what it started, by force.

    Also after it has ended, but not after it was joined: its number may be another's by then.
    """
    if process.pid is None:
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()  # it may not lead its own group yet


def is_being_started() -> bool:
    """Whether this process is a child that still imports its main module."""
    return bool(getattr(multiprocessing.current_process(), "_inheriting", False))


def _spawn(boot: Boot) -> SpawnProcess:
    """Start the process. Its environment is set here, because its modules are imported first of
    all."""
    process = multiprocessing.get_context("spawn").Process(
        target=child_main, args=(boot,), name=boot.life, daemon=False
    )
    with _spawn_lock, _environment(boot.spec.env_vars), _no_interrupt():
        try:
            process.start()
        except OSError:
            raise
        except Exception as error:  # pickle raises what the arguments' own methods raise
            raise BuildError(
                f"{boot.life}: the worker class or its arguments cannot be sent to another process "
                f"({error}): define the class at the top level of an importable module, and pass "
                "plain data"
            ) from error
    return process


@contextlib.contextmanager
def _environment(extra: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in extra}
    os.environ.update(extra)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _no_interrupt() -> Iterator[None]:
    """The child inherits a blocked SIGINT: until it leads a session of its own, a Ctrl-C reaches
    it too."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
