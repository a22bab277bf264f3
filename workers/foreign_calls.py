"""Which call of an environment a process is in: told by a file, which outlives the process.

An environment may hang, exit or crash, and then its process cannot say anything any more. So before
each call it notes, in memory that it shares with a file, what it calls, of which environment, with
which seed and at which step. Whoever sees the process end reads there what it was in; and `Watch`
sees a call that does not return, and a process that takes too much memory::

    process  --begin, end-->  the file  <--`Watch`: too long? too large? the process is killed,
                                  ^         with a reason
                                  +-- whoever sees the process end: `last_words`

Noting a call takes half a microsecond.
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import signal
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, NoReturn, Protocol

import msgspec

(
    MAKE,
    RESET,
    ASYNC_RESET,
    STEP,
    STEP_AND_RESET,
    RECV,
    RECV_AND_RESET,
    SEND,
    RENDER,
    CLOSE,
) = range(1, 11)
"""Calls of an environment; some may include the reset of episodes that have ended."""
_NAMES: Final = [
    "",
    "make",
    "reset",
    "async_reset",
    "step",
    "step",
    "recv",
    "recv",
    "send",
    "render",
    "close",
]
_OF_STEPS: Final = frozenset({STEP, STEP_AND_RESET, RECV, RECV_AND_RESET, SEND, RENDER})
_OF_RESETS: Final = frozenset({RESET, ASYNC_RESET, STEP_AND_RESET, RECV_AND_RESET, CLOSE})
_OF_EPISODES: Final = (_OF_STEPS | _OF_RESETS) - {RENDER, CLOSE}

_HEADER: Final = struct.Struct("<qdqqQ")
"""number of places; seconds that were waited for the call that did not return; process; which kind
of episode ended with it (`_NONE`, ...), where it was killed; its seed"""
_NONE, _SEEDED, _ANY = range(3)
_REASON: Final = slice(_HEADER.size, 4096)
_CALL: Final = struct.Struct("<B7xqdQqq")
"""kind of call; number of the call; limit in seconds; seed; steps of the environment's life; steps
of its episode"""
_FIRST: Final = 4096
"""bytes before the first call's note: a page for the header"""
_SIZE: Final = 256
"""bytes of a call's note; its label follows the numbers"""
MOST: Final = 1 << 16
"""places that a file has; it is sparse"""
_SEED: Final = (1 << 64) - 1
"""mask of the low 64 bits of a seed, which are noted"""
NO_LENGTH: Final = -1
"""length of episode of a simulator whose environments are at different steps of theirs"""

LOOKS: Final = 8
"""looks of a `Watch` within the shortest limit"""
_PAGE_MB: Final = os.sysconf("SC_PAGE_SIZE") / 1e6
"""megabytes of a page of memory"""


class FailedEpisode(msgspec.Struct, frozen=True):
    """An episode that ended with the process of its environment."""

    seed: int | None = None
    """seed of the call that ended the process; None where that is not known, or is not to blame"""


class UnderWay(msgspec.Struct, frozen=True):
    """A call that has not returned."""

    place: int
    number: int
    """differs from that of every other call there"""
    limit: float
    """seconds; 0: none"""
    setting: str
    """name of the setting that holds the limit"""
    where: str
    """the environment, its seed, the call and the step"""
    seed: int
    """its lowest 64 bits"""
    of_episode: bool
    """whether an episode ends where this call ends its process"""

    @property
    def verdict(self) -> Verdict:
        """Why the process is killed, once the call has taken too long."""
        reason = f"{self.where}, has not returned for {self.setting} = {self.limit:g}"
        return Verdict(reason, self.limit, FailedEpisode(self.seed) if self.of_episode else None)


class Verdict(NamedTuple):
    """Why a process is killed."""

    reason: str
    waited: float = 0.0
    """seconds for which it was waited until that was seen"""
    failed: FailedEpisode | None = None


class LastWords(msgspec.Struct, frozen=True):
    """Calls that a process was in when it ended."""

    reason: str = ""
    """why it was killed, where it was for a call that did not return"""
    waited: float = 0.0
    """seconds that were waited for that call"""
    where: tuple[str, ...] = ()
    """calls that had not returned"""
    failed: FailedEpisode | None = None
    """the episode that ended with the process, if one did"""

    @property
    def during(self) -> str:
        """The calls that had not returned, as the end of a sentence; empty for none."""
        return f"; under way was {' and '.join(self.where)}" if self.where else ""


class Limits(NamedTuple):
    """What a call of an environment, and its process, may take; 0: no limit."""

    make: float = 0.0
    """seconds, as those below"""
    reset: float = 0.0
    step: float = 0.0
    memory: float = 0.0
    """megabytes (10^6 bytes) that are resident"""

    def of(self, what: int) -> float:
        """The limit of this call; it has none where a part of it has none."""
        parts = self._parts(what)
        return sum(parts.values()) if all(parts.values()) else 0.0

    def settings(self, what: int) -> str:
        """The settings of that limit."""
        return " + ".join(f"env.{name}_seconds" for name in self._parts(what))

    def _parts(self, what: int) -> dict[str, float]:
        if what == MAKE:
            return {"make": self.make}
        parts = {"step": self.step} if what in _OF_STEPS else {}
        return parts | ({"reset": self.reset} if what in _OF_RESETS else {})


NO_LIMITS: Final = Limits()


class Call(Protocol):
    """Place where the calls of one environment, or of one simulator, are noted: one at a time."""

    def begin(self, what: int, seed: int = 0, steps: int = 0, length: int = NO_LENGTH) -> None:
        """Note that a call begins, at this step of its life and of its episode."""
        ...

    def end(self) -> None:
        """Note that it has returned, or raised."""
        ...


class _NotNoted:
    """The calls of an environment in a process that nobody watches: see `Call`."""

    def begin(self, what: int, seed: int = 0, steps: int = 0, length: int = NO_LENGTH) -> None:
        pass

    def end(self) -> None:
        pass


NOT_NOTED: Final[Call] = _NotNoted()


class _Noted:
    """See `Call`."""

    __slots__ = ("_at", "_limits", "_map", "_number", "_write")

    def __init__(self, shared: mmap.mmap, at: int, limits: Limits) -> None:
        self._map, self._at, self._number = shared, at, 0
        self._write = partial(_CALL.pack_into, shared, at)  # it is called for every step
        self._limits = [0.0, *(limits.of(what) for what in range(MAKE, CLOSE + 1))]

    def begin(self, what: int, seed: int = 0, steps: int = 0, length: int = NO_LENGTH) -> None:
        self._number += 1
        self._write(what, self._number, self._limits[what], seed & _SEED, steps, length)

    def end(self) -> None:
        self._map[self._at] = 0


class ForeignCalls:
    """The file of one process, which that process writes and others read.

    Args:
        file: a descriptor, open for reading and writing. It may be closed afterwards.
        most: places that it has.
    """

    def __init__(self, file: int, most: int = MOST) -> None:
        self._most = most
        size = _FIRST + most * _SIZE
        if os.fstat(file).st_size < size:
            os.ftruncate(file, size)
        self._map = mmap.mmap(file, size)
        self._lock = threading.Lock()

    def add(self, label: str, limits: Limits) -> Call:
        """A place for the calls of one environment, or of one simulator."""
        with self._lock:
            count, waited, _, kind, seed = _HEADER.unpack_from(self._map)
            if count == self._most:
                return NOT_NOTED
            at = _FIRST + count * _SIZE
            room = _SIZE - _CALL.size
            name = label.encode()[:room]
            self._map[at + _CALL.size : at + _SIZE] = name.ljust(room, b"\0")
            _HEADER.pack_into(self._map, 0, count + 1, waited, os.getpid(), kind, seed)
        return _Noted(self._map, at, limits)

    @property
    def process(self) -> int:
        """Process id of the process that makes these calls; 0 before there is any."""
        pid: int = _HEADER.unpack_from(self._map)[2]
        return pid

    def under_way(self) -> Iterator[UnderWay]:
        """The calls that have not returned."""
        count, *_ = _HEADER.unpack_from(self._map)
        for place in range(count):
            at = _FIRST + place * _SIZE
            if not self._map[at]:
                continue
            what, number, limit, seed, steps, length = _CALL.unpack_from(self._map, at)
            if MAKE <= what <= CLOSE:
                where = in_words(self._label(place), what, seed, steps, length)
                setting, of_episode = NO_LIMITS.settings(what), what in _OF_EPISODES
                yield UnderWay(place, number, limit, setting, where, seed, of_episode)

    def too_large(self, limit: float) -> Verdict | None:
        """Return why the process has to end that has more than ``limit`` MB in memory, if so."""
        count, _, process, *_ = _HEADER.unpack_from(self._map)
        used = resident_mb(process) if process else 0.0
        if used <= limit:
            return None
        others = f" and {count - 1} others" if count > 1 else ""
        call = next(self.under_way(), None)
        where = self._label(0) + others if call is None else call.where
        said = f"its process has {used:.0f} MB in memory, more than env.max_memory_mb = {limit:g}"
        failed = FailedEpisode() if call is None or call.of_episode else None
        return Verdict(f"{where}: {said}", 0.0, failed)

    def _label(self, place: int) -> str:
        at = _FIRST + place * _SIZE
        return self._map[at + _CALL.size : at + _SIZE].rstrip(b"\0").decode(errors="replace")

    def killed(self, verdict: Verdict) -> None:
        """Note why the process is killed."""
        room = _REASON.stop - _REASON.start
        self._map[_REASON] = verdict.reason.encode()[:room].ljust(room, b"\0")
        count, _, process, *_ = _HEADER.unpack_from(self._map)
        seed = None if verdict.failed is None else verdict.failed.seed
        kind = _NONE if verdict.failed is None else _ANY if seed is None else _SEEDED
        _HEADER.pack_into(self._map, 0, count, verdict.waited, process, kind, (seed or 0) & _SEED)

    def last_words(self) -> LastWords:
        """Return the calls that the process was in when it ended."""
        _, waited, _, kind, seed = _HEADER.unpack_from(self._map)
        reason = self._map[_REASON].rstrip(b"\0").decode(errors="replace")
        calls = [*self.under_way()]
        failed = None
        if reason:
            failed = {_SEEDED: FailedEpisode(seed), _ANY: FailedEpisode()}.get(kind)
        elif seeds := [one.seed for one in calls if one.of_episode]:
            failed = FailedEpisode(seeds[0] if len(seeds) == 1 else None)
        return LastWords(reason, waited, tuple(one.where for one in calls), failed)


def resident_mb(process: int) -> float:
    """Megabytes that a process has in memory; 0 where it has ended, or nobody can say."""
    try:
        pages = Path(f"/proc/{process}/statm").read_text(encoding="ascii").split()[1]
    except (OSError, IndexError):
        return 0.0
    return int(pages) * _PAGE_MB


def in_words(label: str, what: int, seed: int, steps: int, length: int) -> str:
    """Name a call and its environment, for an error."""
    if what == MAKE:
        return f"{label}, while it was made"
    episode = "" if length == NO_LENGTH else f" of its life and {length} of its episode"
    return f"{label}, seed {seed}, in {_NAMES[what]}() at step {steps}{episode}"


class Watch:
    """A thread that sees calls which do not return, and processes that take too much memory.

    Its clock stands still while this process does, so that a Ctrl-Z runs out no limit. It cannot
    run while a call here keeps the interpreter's lock; heartbeats are not answered then, either.
    """

    def __init__(self) -> None:
        self._watched: dict[ForeignCalls, tuple[float, Callable[[Verdict], None]]] = {}
        """limit of memory of each, and what ends it"""
        self._every = 1.0
        self._thread: threading.Thread | None = None

    def add(self, calls: ForeignCalls, limits: Limits, end: Callable[[Verdict], None]) -> None:
        """Watch the calls in this file, which have such limits.

        ``end`` is called in the thread, once for each call, and once for the memory.
        """
        self._watched[calls] = limits.memory, end
        found = [limit / LOOKS for limit in (limits.make, limits.reset, limits.step) if limit]
        self._every = min([self._every, *found])
        if self._thread is None or not self._thread.is_alive():  # as in a process that was forked
            self._thread = threading.Thread(target=self._run, name="foreign calls", daemon=True)
            self._thread.start()

    def remove(self, calls: ForeignCalls) -> None:
        """Watch these no longer."""
        self._watched.pop(calls, None)

    def _run(self) -> None:
        seen: dict[tuple[ForeignCalls, int], tuple[int, float]] = {}
        clock, before = 0.0, time.monotonic()
        while True:
            time.sleep(self._every)
            now = time.monotonic()
            clock += min(now - before, 2 * self._every)
            before = now
            present: dict[tuple[ForeignCalls, int], tuple[int, float]] = {}
            for calls, (memory, end) in tuple(self._watched.items()):
                for call in calls.under_way():
                    key = calls, call.place
                    number, since = seen.get(key, (0, 0.0))
                    if number != call.number:
                        since = clock
                    if call.limit and clock - since >= call.limit:
                        since = float("inf")
                        end(call.verdict)
                    present[key] = call.number, since
                if memory and (verdict := calls.too_large(memory)) is not None:
                    self._watched[calls] = 0.0, end
                    end(verdict)
            seen = present


# ---- of this process

_calls: ForeignCalls | None = None
_watched_here = True
watch: Final = Watch()
"""the watch of this process"""


def note_in(path: Path | None) -> None:
    """Note the calls of this process in the file at ``path``; None: in memory that only this
    process reads."""
    global _open
    _open = partial(_file, path)


def note_in_descriptor(descriptor: int) -> None:
    """Note the calls of this process in a file that another one watches. It has one place."""
    global _calls, _watched_here
    _calls, _watched_here = ForeignCalls(descriptor, 1), False


_open: Callable[[], int] | None = None


def _file(path: Path | None) -> int:
    if path is not None:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with tempfile.TemporaryFile() as unnamed:
        return os.dup(unnamed.fileno())


def of_this_process() -> ForeignCalls | None:
    """Return the file in which this process notes its calls; None where nobody would read it."""
    global _calls
    if _calls is None and _open is not None:
        file = _open()
        try:
            _calls = ForeignCalls(file)
        finally:
            os.close(file)
    return _calls


def place_for(label: str, limits: Limits) -> Call:
    """A place for the calls of one environment of this process, or of one simulator.

    A call that takes longer than its limit ends this process, see `end_this_process`.
    """
    calls = of_this_process()
    if calls is None:
        return NOT_NOTED
    if _watched_here and any(limits):
        watch.add(calls, limits, end_this_process)
    return calls.add(label, limits)


@contextlib.contextmanager
def making(call: Call) -> Iterator[None]:
    """Note the block as the making of an environment."""
    call.begin(MAKE)
    try:
        yield
    finally:
        call.end()


def end_this_process(verdict: Verdict) -> NoReturn:
    """Kill this process and what it has started, so that who sees its end is told the reason."""
    calls = of_this_process()
    if calls is not None:
        calls.killed(verdict)
    with contextlib.suppress(OSError, ValueError, RuntimeError):  # there may be no stderr
        os.write(2, f"{verdict.reason}\n".encode())
        faulthandler.dump_traceback()
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
    raise SystemExit(verdict.reason)


def last_words(path: Path) -> LastWords:
    """Return the calls that the process which noted them in this file was in; removes the file."""
    found = peek(path)
    path.unlink(missing_ok=True)
    return found


def peek(path: Path) -> LastWords:
    """Return the calls that the process which notes them in this file is in."""
    try:
        file = os.open(path, os.O_RDWR)
    except OSError:
        return LastWords()
    try:
        return ForeignCalls(file).last_words()
    finally:
        os.close(file)
