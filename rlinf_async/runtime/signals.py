"""What Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 do to a run.

=========  =============================================================================
signal     effect
=========  =============================================================================
Ctrl-C     first: the main coroutine is cancelled, and takes down what it started
           second: it is cancelled again: a cluster that is being left stops waiting for workers
           third: the process ends at once, as if it had no handler; its workers see it and go
SIGUSR1    a checkpoint is requested; the run goes on
SIGTERM    a checkpoint is requested, and the run ends, as below
           second: the process and its workers are killed, exit code 143
SIGHUP     the terminal was closed: as the first SIGTERM, and what is still printed is dropped; a
           program that was started by ``nohup`` does not get it
=========  =============================================================================

After a SIGTERM, as shares of `RunSignals.grace_seconds`::

     0 %   inside `checked_each_step`: the step is finished and saved; elsewhere: cancelled.
           What runs in `unless_terminating` is given up
    60 %   cancelled, if it still goes on: workers are taken down, summary and trace written
    80 %   cancelled again: a cluster that is being left kills its workers
   100 %   the process and its workers are killed

In each case the exit code is 143. Where no coroutine runs (a configuration is read, a picture is
drawn), SIGTERM raises `Terminated` there, as Ctrl-C raises KeyboardInterrupt.

Workers ignore all four signals while the process that started them is alive, and go with it.

`run` runs the main coroutine of a script in an event loop, under these signals.
"""

from __future__ import annotations

import _thread
import asyncio
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, nullcontext, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any, Final, NoReturn, TypeVar

from rlinf_async.processes import kill_group
from rlinf_async.runtime.wakers import WorkEvent, WorkFuture

_folders: set[Path] = set()


def make_temporary_folder() -> Path:
    """A new folder in the temporary folder, which `exit_at_once` removes."""
    folder = Path(tempfile.mkdtemp(prefix="rlinf-async-"))
    _folders.add(folder)
    return folder


def remove_temporary_folder(folder: Path) -> None:
    """Remove a folder that `make_temporary_folder` made."""
    shutil.rmtree(folder, ignore_errors=True)
    _folders.discard(folder)


def kill_tree(process: BaseProcess) -> None:
    """Kill a process, and the processes of the group that it leads.

    Also after it has ended, but not after it was joined: its number may be another's by then.
    """
    if process.pid is None:
        return
    kill_group(process.pid)


def exit_at_once(code: int, reason: str) -> NoReturn:
    """Kill the processes that this one started, remove its temporary folders, and exit."""
    with suppress(OSError):
        os.write(2, f"{reason}\n".encode())  # `sys.stderr` may be locked by another thread
    for process in multiprocessing.active_children():
        with suppress(Exception):  # one that is being closed meanwhile is gone
            kill_tree(process)
    for folder in list(_folders):
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(code)


T = TypeVar("T")

EXIT_CODE: Final = 128 + signal.SIGTERM
"""exit code of a run that SIGTERM ended: 143"""
CANCELLATIONS: Final = 2
"""cancellations by Ctrl-C before the next one ends the process"""
CANCEL_AT: Final = 0.6
CANCEL_AGAIN_AT: Final = 0.8
"""shares of the grace"""
REPEATED: Final = 0.5
"""seconds in which another SIGTERM counts as the same one: ``timeout``, for one, sends two, to the
process and to its group"""
OF_THE_DRIVER: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""signals that are for the process that starts workers, and not for the workers"""
FOR_FORKED_CHILDREN: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""signals whose handlers a forked child does not keep"""


class Terminated(SystemExit):
    """SIGTERM ended the run. Where nobody catches it, the process exits with code 143."""

    def __init__(self) -> None:
        super().__init__(EXIT_CODE)

    def __str__(self) -> str:
        return "terminated by SIGTERM"


class RunSignals:
    """The signals of one run: what was requested, for a job to look at.

    A job that can save looks at the end of every step::

        signals = run_signals()
        with signals.checked_each_step():
            for step in range(steps):
                await train()
                if signals.take_checkpoint_request():
                    await save()
                await signals.leave_if_terminating()

    Args:
        grace_seconds: from a SIGTERM to the end of the process, at most. May be set later.
    """

    def __init__(self, grace_seconds: float = 25.0) -> None:
        self.grace_seconds = grace_seconds
        self.interrupts = 0
        """number of Ctrl-C so far"""
        self.terminating = False
        """whether a SIGTERM came"""
        self.checkpoint_requested = False
        """whether SIGUSR1 or SIGTERM came since the last `take_checkpoint_request`"""
        self._terminated_at = 0.0
        self.cancelled_by_sigterm = False
        """whether the coroutine was cancelled because of it"""
        self.failed = False
        """whether the run had failed before a signal cancelled it: then its error is raised"""
        self._given_up: set[asyncio.Task[Any]] = set()
        """what a SIGTERM cancels at once"""
        self._steps = 0  # blocks of `checked_each_step` that are entered
        self._task: asyncio.Task[Any] | None = None
        self._terminals: list[int] = []
        """descriptors of this process's output that is shown on a terminal"""
        self._handlers: dict[int, Callable[[int, FrameType | None], None]] = {}
        """handlers that are set now, by signal"""
        self._reported = WorkEvent()
        self._over = threading.Event()

    # ---- for the job

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the process is killed; None while no SIGTERM came."""
        if not self.terminating:
            return None
        return max(0.0, self._terminated_at + self.grace_seconds - time.monotonic())

    def take_checkpoint_request(self) -> bool:
        """Whether a checkpoint is requested; the caller saves it now."""
        requested, self.checkpoint_requested = self.checkpoint_requested, False
        return requested

    async def checkpoint_request(self) -> None:
        """Wait until a checkpoint is requested. Does not hide a deadlock."""
        while not self.checkpoint_requested:
            self._reported.clear()
            await self._reported.wait()

    @contextmanager
    def checked_each_step(self) -> Iterator[None]:
        """Keep a SIGTERM from cancelling the run at once while the block runs: the job looks at the
        end of each step, saves, and leaves. It is cancelled all the same at 60 % of the grace."""
        self._steps += 1
        try:
            yield
        finally:
            self._steps -= 1
        if self.terminating and not self._steps:
            self._cancel_once()

    async def unless_terminating(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Do work that is not worth the grace, such as an evaluation: a SIGTERM gives it up, and
        the result is None."""
        if self.terminating:
            work.close()
            return None
        task = asyncio.create_task(work)
        self._given_up.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            outer = asyncio.current_task()
            if self.terminating and (outer is None or not outer.cancelling()):
                return None
            raise
        finally:
            self._given_up.discard(task)

    def note_failure(self) -> None:
        """An error ends the run. What a signal has cancelled fails for that reason."""
        if not (self.interrupts or self.cancelled_by_sigterm):
            self.failed = True

    @property
    def leaving(self) -> bool:
        """Whether a SIGTERM came and its checkpoint request has been taken.

        One that came since `take_checkpoint_request` was asked waits for the next step.
        """
        return self.terminating and not self.checkpoint_requested

    async def leave(self) -> NoReturn:
        """End the run, by cancellation."""
        self._cancel_once()
        while True:
            await WorkFuture()

    async def leave_if_terminating(self) -> None:
        """`leave` if a SIGTERM came and its request has been taken."""
        if self.leaving:
            await self.leave()

    # ---- for those who start the run

    @contextmanager
    def handled(self, afterwards: signal.Handlers = signal.SIG_DFL) -> Iterator[RunSignals]:
        """Handle SIGTERM, SIGHUP and SIGUSR1 in this block, those that have no handler yet.

        Outside the main thread nothing is handled. ``afterwards``: what they do then; where they
        are ignored, because the process ends, the grace is enforced until it has.
        """
        global _current
        if not _in_main_thread():
            yield self
            return
        before, _current = _current, self
        self._terminals = [output for output in (1, 2) if os.isatty(output)]
        handlers = {
            signal.SIGTERM: self._on_terminate,
            signal.SIGHUP: self._on_hangup,
            signal.SIGUSR1: self._on_checkpoint,
        }
        self._handlers = {
            number: handler
            for number, handler in handlers.items()
            if signal.getsignal(number) is signal.SIG_DFL
        }
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        try:
            yield self
        finally:
            for number, handler in self._handlers.items():
                if signal.getsignal(number) == handler:  # nobody has replaced it
                    signal.signal(number, afterwards)
            self._handlers = {}
            _current = before
            if afterwards is not signal.SIG_IGN:
                self._over.set()

    def take_back(self, number: int, library: str) -> None:
        """Set the handler of a signal again, where a library that was imported by this name has
        set another one: in Python, or below it, where Python does not see it.

        Outside the main thread nothing is done.
        """
        handler = signal.getsignal(number)
        if not _in_main_thread() or handler is None:
            return
        module = getattr(handler, "__module__", None) or ""
        if module.partition(".")[0] == library:
            handler = self._handlers.get(number, handler)
        signal.signal(number, handler)

    @contextmanager
    def interrupts_handled(self) -> Iterator[None]:
        """Handle Ctrl-C in this block, unless it has another handler than Python's own."""
        handler = signal.default_int_handler
        if not _in_main_thread() or signal.getsignal(signal.SIGINT) is not handler:
            yield
            return
        signal.signal(signal.SIGINT, self._on_interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, handler)

    async def cancelling(self, main: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine, which signals cancel. SIGINT and SIGTERM may have come before."""
        self._task = asyncio.current_task()
        if self._task is not None and (self.interrupts or self.terminating):
            self._task.cancel()
        try:
            return await main
        finally:
            self._task = None

    # ---- handlers

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        self.interrupts += 1
        if self.interrupts > CANCELLATIONS:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        if self._task is not None and not self._task.done():
            self._task.cancel()
            self._task.get_loop().call_soon_threadsafe(_wake)

    def _on_checkpoint(self, number: int, frame: FrameType | None) -> None:
        self.checkpoint_requested = True
        if self._task is not None:
            self._task.get_loop().call_soon_threadsafe(self._reported.set)

    def _on_hangup(self, number: int, frame: FrameType | None) -> None:
        for output in self._terminals:
            if not os.isatty(output):  # it is gone: printing there would fail
                nothing = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nothing, output)
                os.close(nothing)
        if not self.terminating:  # the shell sends it, too
            self._on_terminate(number, frame)

    def _on_terminate(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.terminating:
            if now > self._terminated_at + REPEATED:
                exit_at_once(EXIT_CODE, "a second SIGTERM: all processes of the run are killed")
            return
        self.terminating, self._terminated_at = True, now
        self.checkpoint_requested = True
        # Not by `threading`: the thread that this interrupts may hold its locks.
        _thread.start_new_thread(self._enforce_grace, ())
        if self._task is None:
            raise Terminated
        self._task.get_loop().call_soon_threadsafe(self._begin_end)

    # ---- inside

    def _begin_end(self) -> None:
        """Begin the end of the run, in its loop."""
        self._reported.set()
        for task in self._given_up:
            task.cancel()
        if not self._steps:
            self._cancel_once()
        loop = asyncio.get_running_loop()
        loop.call_later(CANCEL_AT * self.grace_seconds, self._cancel_once)
        loop.call_later(CANCEL_AGAIN_AT * self.grace_seconds, self._cancel)

    def _cancel_once(self) -> None:
        if self._task is not None and not self.cancelled_by_sigterm:
            self.cancelled_by_sigterm = True
            self._cancel()

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _enforce_grace(self) -> None:
        """Exit when the grace is over; in a thread of its own, since the loop may be blocked."""
        if not self._over.wait(self.grace_seconds):
            exit_at_once(
                EXIT_CODE,
                f"not done {self.grace_seconds:g} s after SIGTERM: all processes of the run are "
                "killed",
            )


_current: RunSignals | None = None
_ignoring = False


def run_signals() -> RunSignals:
    """The signals of the run in this process; where there is none, nothing is ever requested."""
    return RunSignals() if _current is None else _current


def ignore_in_worker() -> None:
    """Ignore, in a worker's process, the signals of the process that started it.

    SIGINT as such, the others by a handler: programs that the worker starts can be ended by them.
    """
    global _ignoring
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in FOR_FORKED_CHILDREN:
        signal.signal(number, _ignore)
    _ignoring = True
    signal.pthread_sigmask(signal.SIG_UNBLOCK, OF_THE_DRIVER)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing; the process ends when the one that started it does."""


def _wake() -> None:
    """Do nothing. A loop that waits for files looks at its tasks only when something happens."""


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


_forking = threading.local()


def _before_fork() -> None:
    """Block them until the child has its own handlers: sent before, they would do nothing there."""
    if _current is not None or _ignoring:
        _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, FOR_FORKED_CHILDREN)


def _in_forked_child() -> None:
    """Let SIGTERM end a forked child: its parent's handlers would not."""
    for number in FOR_FORKED_CHILDREN:
        handler = signal.getsignal(number)
        if handler is _ignore or isinstance(getattr(handler, "__self__", None), RunSignals):
            signal.signal(number, signal.SIG_DFL)
    _after_fork()


def _after_fork() -> None:
    mask = _forking.__dict__.pop("mask", None)
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


os.register_at_fork(
    before=_before_fork, after_in_child=_in_forked_child, after_in_parent=_after_fork
)


def run(main: Coroutine[Any, Any, T], *, debug: bool | None = None) -> T:
    """Run a coroutine in a new event loop: uvloop's where it is installed, else asyncio's.

    Ctrl-C and SIGTERM cancel the coroutine, so that everything it started is taken down; then
    Ctrl-C raises `KeyboardInterrupt`, and SIGTERM `Terminated`, with which the process exits with
    code 143: see `rlinf_async.runtime.signals`. An error that the coroutine raises on its way out
    is its ``__cause__``; but where a cluster had failed before, the error of that is raised.
    Outside the main thread, and where a signal has a handler already, the signal is left alone.
    """
    if _loop_runs():
        main.close()
        raise RuntimeError(
            "run() starts an event loop, and one runs already in this thread (as in a notebook): "
            "write `await main()` instead of `run(main())`"
        )
    known = _current if _in_main_thread() else None  # where this is a part of a run
    with RunSignals().handled() if known is None else nullcontext(known) as seen:
        try:
            with (
                seen.interrupts_handled(),
                asyncio.Runner(debug=debug, loop_factory=loop_factory()) as runner,
            ):
                result = runner.run(seen.cancelling(main))
        except asyncio.CancelledError as error:
            if seen.terminating:
                raise Terminated from error  # says where the coroutine was
            if seen.interrupts:
                raise KeyboardInterrupt from error
            raise
        except Exception as error:
            # A worker whose channel's other end is closed on the way out fails: not the cause.
            if seen.cancelled_by_sigterm and not seen.failed:
                raise Terminated from error
            if seen.interrupts and not seen.failed:
                raise KeyboardInterrupt from error
            raise
        if seen.terminating:
            raise Terminated
        return result


def _loop_runs() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def loop_factory() -> Any:
    """Makes a uvloop event loop where that is installed; None means asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
