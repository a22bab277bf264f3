"""One life of a worker, played again: its host in this process, its calls, and their ends.

::

    waits for                            unblocked by
    a call's turn                        ends of the calls before it; what was put before it
    its end                              the worker
    a cancellation                       what was put and given before it
    anything                             nobody moves: `Script.force`, or the end

What a worker would write into the run's folder goes to a folder of its own, which is removed.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil

from rlinf_async.channels.wire.codec import Decoder
from rlinf_async.config import UsageError
from rlinf_async.recording.events import Called, Launched, Returned
from rlinf_async.recording.values import NotFound, found_at, restored
from rlinf_async.replaying.ends import KINDS, ChannelInfo
from rlinf_async.replaying.history import DEATHS, Life, RecordedCall
from rlinf_async.replaying.script import Script
from rlinf_async.runtime.recorded import text_of_error
from rlinf_async.runtime.wakers import free_task
from rlinf_async.workers.base import Device, Worker, WorkerInfo
from rlinf_async.workers.host import Invocation, WorkerHost

POLL: Final = 0.02
"""seconds between two looks whether anybody moves"""
PATIENCE: Final = 3.0
"""seconds without a move, and almost without work, after which nobody will move"""
PATIENCE_WITH_CHILDREN: Final = 60.0
"""the same, where processes of the worker may be at work"""
BUSY: Final = 0.05
"""share of the time in which threads compute, or wait for a core, from which on they are at work"""
GRACE: Final = 30.0
"""seconds that a worker has for its teardown"""
GRACE_IF_INTERRUPTED: Final = 2.0
"""the same, where the replay was interrupted"""
CHANNEL_ERRORS: Final = (
    "ChannelClosed", "ChannelFailed", "EndOfChannel", "NoReceivers", "ConnectionLost", "LeaseLost",
)  # fmt: skip
"""errors that only pass on what happened elsewhere: a replay does not know of that"""
ENDED_FROM_OUTSIDE: Final = (*CHANNEL_ERRORS, *DEATHS, "CancelledError")
PLAIN: Final = Decoder(Any)


class PlayedCall:
    """A call in the replay.

    Args:
        recorded: the call of the recording.
    """

    def __init__(self, recorded: RecordedCall) -> None:
        self.recorded = recorded
        self.invocation: Invocation | None = None
        self.ended = False
        self.value: Any = None
        self.error: BaseException | None = None
        self.cut = False
        """whether it was cancelled because nobody could go on"""

    @property
    def returns(self) -> Returned | None:
        """How it ended in the recording, by itself; None: it did not, or others ended it."""
        ended = self.recorded.ended
        if ended is None or ended.error.partition(":")[0] in ENDED_FROM_OUTSIDE:
            return None
        return ended

    def on_end(self, value: Any, error: BaseException | None) -> None:
        self.ended, self.value, self.error = True, value, error

    @property
    def error_text(self) -> str:
        """The error of the replay, as a recording has it; empty without one."""
        return "" if self.error is None else text_of_error(self.error)


class Stage:
    """Everything around a worker that is played again.

    Args:
        channel: finds a channel of the recording by its name; None: it was not recorded.
        folder: the run's folder, or that of a bundle.
        code: folder in which the files of code lie that came with a bundle.
    """

    def __init__(
        self,
        channel: Callable[[str], ChannelInfo | None],
        folder: Path,
        code: Path | None = None,
    ) -> None:
        self.channel = channel
        self.folder = folder
        self.code = code
        self.scratch = Path(tempfile.mkdtemp(prefix="rlinf-replay-"))
        self.notes: list[str] = []
        """what is not as it was when it was recorded"""

    def close(self) -> None:
        """Remove what the worker has written."""
        shutil.rmtree(self.scratch, ignore_errors=True)

    # ---- of a launch

    def class_of(self, launched: Launched) -> type[Worker]:
        """The class of a worker.

        Raises:
            UsageError: it cannot be imported, or is no worker.
        """
        try:
            cls = found_at(launched.cls, self.code)
        except NotFound as error:
            raise UsageError(f"{launched.worker} cannot be played again: {error}") from error
        if not (isinstance(cls, type) and issubclass(cls, Worker)):
            raise UsageError(f"{launched.worker}: {launched.cls} is no Worker")
        return cls

    def arguments_of(self, launched: Launched) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a worker's class.

        Raises:
            UsageError: they were not recorded, or something in them is not here.
        """
        _refuse_unrecorded(launched.worker, launched.details)
        try:
            args, kwargs = restored(PLAIN.decode(launched.body()), folder=self.code)
        except NotFound as error:
            raise UsageError(f"{launched.worker} cannot be played again: {error}") from error
        there = self._moved(launched)
        return tuple(there(one) for one in args), {name: there(one) for name, one in kwargs.items()}

    def named_arguments(self, cls: type[Worker], launched: Launched) -> Mapping[str, Any]:
        """The same by their names."""
        args, kwargs = self.arguments_of(launched)
        return inspect.signature(cls).bind(*args, **kwargs).arguments

    def info_of(self, launched: Launched) -> WorkerInfo:
        """The identity of a worker, with the devices that are here, too."""
        wanted = [_device(text) for text in launched.details.get("devices", [])]
        missing = sorted({str(one) for one in wanted if one.kind != "cpu" and not _is_here(one)})
        if missing:
            self.notes.append(
                f"recorded on {', '.join(missing)}, which is not here: played on the CPU, where "
                "numbers differ in their last digits"
            )
        return WorkerInfo(
            group=launched.group,
            rank=launched.rank,
            world_size=launched.world,
            devices=() if missing else tuple(wanted),
            incarnation=launched.incarnation,
            collective=launched.details.get("collective") or None,
            rendezvous=(self.scratch / f"rendezvous-{launched.number}").as_uri(),
        )

    # ---- of a call

    def call_arguments(self, launched: Launched, called: Called, script: Script) -> dict[str, Any]:
        """The arguments of a call, with ends that are fed from the recording; files that it would
        write into the run's folder go to another one.

        Raises:
            UsageError: they were not recorded, or something in them is not here.
        """
        _refuse_unrecorded(f"{called.worker}.{called.method}", called.details)

        def end(kind: str, channel: str) -> Any:
            info = self.channel(channel)
            if info is None:
                raise UsageError(
                    f"{called.worker}.{called.method} has an end of channel {channel!r}, which was "
                    "not recorded: record it too, --record all"
                )
            return KINDS[kind](info, script)

        try:
            data = PLAIN.decode(called.body())
            arguments: dict[str, Any] = restored(data, end, self.code)
        except NotFound as error:
            raise UsageError(f"{called.worker} cannot be played again: {error}") from error
        elsewhere = self.redirected(launched)
        return {name: elsewhere(value) for name, value in arguments.items()}

    def recorded_path(self, called: Called) -> str:
        """The first argument of a call, where that is a path; else an empty text."""
        data = PLAIN.decode(called.body())
        value = next(iter(restored(data, lambda kind, channel: None, self.code).values()), "")
        return value if isinstance(value, str) else ""

    def _moved(self, launched: Launched) -> Callable[[Any], Any]:
        """Changes paths below the folder in which the run was, to where that is now."""
        return _Prefix(launched.details.get("folder", ""), self.folder)

    def redirected(self, launched: Launched) -> Callable[[Any], Any]:
        """Changes paths below the folder in which the run was, to where the replay may write."""
        return _Prefix(launched.details.get("folder", ""), self.scratch)


class _Prefix:
    """Changes every path below one folder, among arguments, to the same below another."""

    def __init__(self, old: str, new: Path) -> None:
        self._old = old.rstrip("/")
        self._new = str(new)

    def __call__(self, value: Any) -> Any:
        if not self._old or self._old == self._new:
            return value
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, Path):
            return Path(self._text(str(value)))
        if type(value) in (list, tuple):
            return type(value)(self(one) for one in value)
        if type(value) is dict:
            return {key: self(one) for key, one in value.items()}
        if isinstance(value, msgspec.Struct):
            return self._struct(value)
        return value

    def _text(self, text: str) -> str:
        below = text == self._old or text.startswith(f"{self._old}/")
        return self._new + text[len(self._old) :] if below else text

    def _struct(self, value: msgspec.Struct) -> Any:
        before = {name: getattr(value, name) for name in value.__struct_fields__}
        after = {name: self(one) for name, one in before.items()}
        changed = {name: one for name, one in after.items() if one is not before[name]}
        changed = {name: one for name, one in changed.items() if one != before[name]}
        return msgspec.structs.replace(value, **changed) if changed else value


def _refuse_unrecorded(what: str, details: Mapping[str, Any]) -> None:
    why = details.get("unrecorded")
    if why:
        raise UsageError(f"{what} cannot be played again, its arguments were not recorded: {why}")


def _device(text: str) -> Device:
    kind, _, index = text.partition(":")
    return Device(kind, int(index or 0))


def _is_here(device: Device) -> bool:
    from rlinf_async.runtime.launching import host_devices

    return any(one.kind == device.kind and one.index == device.index for one in host_devices())


# ---- playing


class Play:
    """Plays one life, from its launch to its end.

    Args:
        life: what is played.
        script: what the worker is given, and when.
        stage: everything around it.
    """

    def __init__(self, life: Life, script: Script, stage: Stage) -> None:
        self.life = life
        self.script = script
        self.calls = [PlayedCall(one) for one in life.calls]
        self._stage = stage
        self.elsewhere = stage.redirected(life.launched)
        """changes paths below the run's folder to where this worker writes instead"""
        self._foreign = asyncio.all_tasks()
        """tasks that are not the worker's"""

    async def run(self, overrides: Mapping[str, Any] | None = None) -> None:
        """Build the worker, make its calls, and take it down. ``overrides``: keyword arguments of
        its class that are others than in the recording.

        Raises:
            UsageError: it cannot be built from what is here.
            WorkerError: ``__init__``, ``setup`` or ``teardown`` raised.
        """
        launched = self.life.launched
        cls = self._stage.class_of(launched)
        args, kwargs = self._stage.arguments_of(launched)
        bound = inspect.signature(cls).bind(*args, **kwargs)
        bound.arguments.update(overrides or {})
        with as_recorded(launched):
            info = self._stage.info_of(launched)
            host = WorkerHost(cls, bound.args, bound.kwargs, info)
            _limit_threads(host, launched)
            await host.start()
            grace = GRACE
            try:
                await self._play(host)
            except asyncio.CancelledError:
                grace = GRACE_IF_INTERRUPTED
                raise
            finally:
                with suppress(TimeoutError):
                    async with asyncio.timeout(grace):
                        await host.stop()

    async def _play(self, host: WorkerHost) -> None:
        idle = _Idle(self.script)
        while not all(call.ended for call in self.calls):
            self.script.changed.clear()
            if self._advance(host):
                await asyncio.sleep(0)
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL):
                    await self.script.changed.wait()
                continue
            if idle.lasts(self._stands_still(host)) and not self._go_on():
                await self._cut_off()

    def _advance(self, host: WorkerHost) -> bool:
        """Do what is due; whether there was something."""
        found = self.script.release()
        for call in self.calls:
            if call.invocation is None:
                found |= self._begin_if_due(host, call)
            elif not call.ended:
                found |= self._end_if_due(call)
        return found

    def _begin_if_due(self, host: WorkerHost, call: PlayedCall, *, force: bool = False) -> bool:
        number = call.recorded.begun.number
        if not force and not (
            self.script.was_put_before(number) and all(map(_has_ended, self._before(number)))
        ):
            return False
        begun = call.recorded.begun
        arguments = self._stage.call_arguments(self.life.launched, begun, self.script)

        def on_end(value: Any, error: BaseException | None) -> None:
            call.on_end(value, error)
            self.script.moves += 1
            self.script.changed.set()

        call.invocation = host.begin(begun.method, arguments, on_end)
        return True

    def _before(self, number: int) -> Iterator[PlayedCall]:
        """Calls that had ended before an event."""
        for call in self.calls:
            if call.recorded.ended is not None and call.recorded.ended.number < number:
                yield call

    def _end_if_due(self, call: PlayedCall) -> bool:
        """Cancel a call that was cancelled; end the channels of one that returned, where it waits
        for more than there was."""
        ended = call.recorded.ended
        if ended is None or not self._is_over(ended.number):
            return False
        if call.returns is None:
            if call.invocation is not None and not call.invocation.cancelled:
                call.invocation.cancel()
                return True
            return False
        begun = call.recorded.begun
        return self.script.end_channels(f"{begun.worker}.{begun.method}", ended.number)

    def _is_over(self, number: int) -> bool:
        return self.script.was_put_before(number) and self.script.was_given_before(number)

    def _stands_still(self, host: WorkerHost) -> bool:
        """Whether only others could let the worker go on."""
        own = asyncio.all_tasks() - self._foreign
        return not (host.context.what_works or host.context.computing or free_task(own))

    def _go_on(self) -> bool:
        """Let something go on before its time; whether there is something."""
        if self.script.force():
            return True
        for call in self.calls:
            if call.invocation is not None and not call.ended and call.returns is not None:
                begun = call.recorded.begun
                if self.script.end_channels(f"{begun.worker}.{begun.method}", -1):
                    return True
        return False

    async def _cut_off(self) -> None:
        """Cancel what runs: nothing will come of it."""
        stuck = [call.recorded.begun for call in self.calls if not call.ended and call.returns]
        if stuck:
            self._stage.notes.append(
                f"it was ended in {stuck[0].method}, call {stuck[0].call}, which had ended by "
                "itself in the recording: nobody moved any more"
            )
        for call in self.calls:
            if call.invocation is None:
                call.ended = call.cut = True
            elif not call.ended:
                call.cut = True
                call.invocation.cancel()
        running = [
            call.invocation.task
            for call in self.calls
            if call.invocation is not None and call.invocation.task is not None
        ]
        if running:
            await asyncio.wait(running, timeout=GRACE)
        for call in self.calls:
            call.ended = True


def _has_ended(call: PlayedCall) -> bool:
    return call.ended


class _Idle:
    """Tells whether nobody moves any more."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._moves = -1
        self._since = 0.0
        self._worked: dict[int, int] = {}

    def lasts(self, stands_still: bool) -> bool:
        """Whether nothing has moved since this was asked the last time, and nothing will: all tasks
        wait for others, or this process and its children have had nothing to compute for a while.
        """
        now = asyncio.get_running_loop().time()
        if self._script.moves != self._moves:
            self._moves, self._since, self._worked = self._script.moves, now, worked(family())
            return False
        if stands_still:
            self._moves = -1
            return True
        seconds, processes = now - self._since, family()
        if seconds < (PATIENCE if len(processes) == 1 else PATIENCE_WITH_CHILDREN):
            return False
        self._moves = -1
        since = sum(after - self._worked.get(at, 0) for at, after in worked(processes).items())
        return since / 1e9 < BUSY * seconds


def family() -> list[int]:
    """This process and those that it has started, by their ids."""
    return [os.getpid(), *(one.pid for one in psutil.Process().children(recursive=True))]


def worked(processes: Sequence[int]) -> dict[int, int]:
    """Nanoseconds in which each thread of these processes has computed, or was ready to and waited
    for a core: on a busy machine a worker that computes may have next to none."""
    found: dict[int, int] = {}
    threads = [one for process in processes for one in Path(f"/proc/{process}/task").glob("*")]
    for thread in threads:
        with suppress(OSError, ValueError):  # it has ended meanwhile
            computed, waited, _ = (thread / "schedstat").read_text(encoding="ascii").split()
            found[int(thread.name)] = int(computed) + int(waited)
    return found or {0: time.process_time_ns()}


@contextmanager
def as_recorded(launched: Launched) -> Iterator[None]:
    """Have the variables of the worker's environment in this one while the block runs, and torch
    begin with the random numbers of a new process."""
    variables: dict[str, str] = dict(launched.details.get("environment", {}))
    threads = launched.details.get("threads")
    if threads:
        variables.setdefault("OMP_NUM_THREADS", str(threads))
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.random.default_generator.manual_seed(NEW_PROCESS_SEED)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


NEW_PROCESS_SEED: Final = 67280421310721
"""seed of torch's generator where nobody has set one"""


def _limit_threads(host: WorkerHost, launched: Launched) -> None:
    """Compute with as many threads as in the recording: sums depend on it."""
    torch = sys.modules.get("torch")
    threads = launched.details.get("threads")
    if torch is not None and threads:
        torch.set_num_threads(threads)
        host.context.executor.submit(torch.set_num_threads, threads)
