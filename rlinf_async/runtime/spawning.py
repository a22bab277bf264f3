"""Starts the process of a worker, and gives a file by which its end is seen.

A worker's process leads a session of its own. So the terminal's Ctrl-C is for the process that
started it alone, and whatever the worker starts (simulators, loaders) can be ended with it. What a
worker starts in yet another session is its own to end.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnProcess
from typing import Any

from rlinf_async.runtime.backend import WorkerSpec
from rlinf_async.runtime.child import Boot, child_main
from rlinf_async.runtime.devices import device_environment
from rlinf_async.runtime.forced_exit import kill_tree
from rlinf_async.runtime.forked import ForkedProcess, NotForked
from rlinf_async.runtime.output import OutputPipe
from rlinf_async.runtime.signals import OF_THE_DRIVER
from rlinf_async.workers.errors import BuildError

log = logging.getLogger(__name__)

_spawn_lock = threading.Lock()


async def spawn_whole(boot: Boot, output: OutputPipe) -> SpawnProcess:
    """Start the process in a thread. If this is cancelled meanwhile, no process is left."""
    spawning = asyncio.create_task(asyncio.to_thread(_spawn, boot, output))
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

    Multiprocessing's own sentinel is a pipe, which what a spawned process has forked holds open;
    of a forked one, its server alone has the other end.
    """
    if isinstance(process, ForkedProcess):
        return os.dup(process.sentinel)
    if hasattr(os, "pidfd_open") and process.pid is not None:
        return os.pidfd_open(process.pid)
    return os.dup(process.sentinel)


def is_being_started() -> bool:
    """Whether this process is a child that still imports its main module."""
    return bool(getattr(multiprocessing.current_process(), "_inheriting", False))


def _spawn(boot: Boot, output: OutputPipe) -> SpawnProcess:
    """Start the process; forked, where modules that it imports take seconds."""
    with _spawn_lock, _signals_blocked():
        resource_tracker.ensure_running()  # by itself first: it unblocks signals in the end
    process: dict[str, Any] = {
        "target": child_main, "args": (output, boot), "name": boot.life, "daemon": False,
    }  # fmt: skip
    extra = device_environment(boot.spec.info.devices) | boot.spec.env_vars
    imports = (
        _slow_imports(boot.spec)
        if may_be_forked(*(one.kind for one in boot.spec.info.devices))
        else ()
    )
    if imports:
        with _spawn_lock:  # while another is spawned, `os.environ` is its own
            environment = dict(os.environ) | extra
        try:
            return _started(ForkedProcess(imports=imports, environment=environment, **process))
        except NotForked as why:
            log.warning("%s is not forked, and so starts more slowly: %s", boot.life, why)
    # Its environment is set here, because its modules are imported first of all.
    with _spawn_lock, _environment(extra):
        return _started(multiprocessing.get_context("spawn").Process(**process))


def _started(process: SpawnProcess) -> SpawnProcess:
    try:
        with _signals_blocked():
            process.start()
    except (OSError, NotForked):
        raise
    except Exception as error:  # pickle raises what the arguments' own methods raise
        raise cannot_be_sent(process.name, error) from error
    return process


def may_be_forked(*devices: str) -> bool:
    """A process that uses an accelerator begins with a new interpreter, as its libraries ask; so
    does any where the end of a process cannot be watched."""
    if sys.platform != "linux" or any(kind != "cpu" for kind in devices):
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):  # an old kernel, or one that forbids it
        return False
    return True


def _slow_imports(spec: WorkerSpec) -> Sequence[str]:
    """Modules that this worker says it takes seconds to import."""
    signature = inspect.signature(spec.cls)
    bound = signature.bind(*spec.args, **spec.kwargs)
    bound.apply_defaults()
    return spec.cls.slow_imports(bound.arguments)


def check_importable(cls: type[Any]) -> None:
    """Raise `BuildError` for a class that no other process can import."""
    if cls.__module__ == "__main__" and not hasattr(sys.modules["__main__"], "__file__"):
        raise BuildError(
            f"{cls.__name__} is defined in a notebook or an interactive session, which a worker's "
            "process cannot import: write the class to a file beside it, and import it from there"
        )


def cannot_be_sent(life: str, error: Exception) -> BuildError:
    """The error for a worker that cannot be pickled."""
    return BuildError(
        f"{life}: the worker class or its arguments cannot be sent to another process "
        f"({error}): define the class at the top level of an importable module, and pass "
        "plain data"
    )


@contextlib.contextmanager
def _environment(extra: Mapping[str, str]) -> Iterator[None]:
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
def _signals_blocked() -> Iterator[None]:
    """The child inherits the signals of this process as blocked, until it ignores them: before it
    leads a session of its own, what is sent to this process's group reaches it, too."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, OF_THE_DRIVER)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
