"""Runs one schedule: forks its processes, does to them what the plan says, waits for the end.

Everybody is forked before anything runs, spares included, so that no fork copies a running loop. A
process that was killed, or was told that its connection is lost, is replaced by a spare that goes
on with the same end, as a restarted worker does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Coroutine
from tempfile import TemporaryDirectory
from typing import Any, Final, NoReturn

import msgspec

from tests.faults.journal import Did, Page, journal
from tests.faults.plan import HEARTBEAT, OWNER, Fault, Plan, Role
from tests.faults.roles import Closed, Order, Started, own, work

SECONDS: Final = 100.0
"""Within which a schedule ends, or hangs. It takes two, or many where others have the cores."""
SPARES: Final = 8
LOOK: Final = 0.0002
"""Seconds between two looks at who ended: the processes need the cores."""


class Process:
    """A forked process, and the socket over which it is told what to be."""

    def __init__(self, pid: int, control: socket.socket, page: Page) -> None:
        self.pid = pid
        self.control = control
        self.page = page
        self.role: Role | None = None
        self.wire: int | None = None
        """this process's copy of its connection's socket"""
        self.status: int | None = None
        """how it ended: its exit status, or the signal below zero"""

    def let_go(self) -> None:
        """Close the copy of its socket: its connection ends when it does."""
        if self.wire is not None:
            os.close(self.wire)
            self.wire = None


class Outcome(msgspec.Struct):
    """What there is to judge."""

    plan: Plan
    closed: Closed | None = None
    """what the owner saw, unless it was killed"""
    pages: list[tuple[Role, Page, int]] = []
    """who did what, and how each of them ended"""
    faults: list[Fault] = []
    """those that found a victim"""
    hung: str = ""


def perform(plan: Plan) -> Outcome:
    """Run a schedule to its end."""
    with TemporaryDirectory(prefix="faults-") as folder:
        stage = Stage(plan, folder)
        try:
            stage.run()
        except TimeoutError as error:
            stage.outcome.hung = str(error) or "a process said nothing"
        except (OSError, RuntimeError) as error:
            stage.outcome.hung = f"the owner does not answer: {error!r}"
        finally:
            stage.clear()
        return stage.outcome


class Stage:
    """The processes of one schedule."""

    def __init__(self, plan: Plan, folder: str) -> None:
        self.plan = plan
        self.outcome = Outcome(plan)
        self._deadline = time.monotonic() + SECONDS
        pages = journal(1 + len(plan.roles) + SPARES)
        self._every: list[Process] = []
        self._owner = self._fork(pages[0], lambda control: own(control, plan, folder))
        self._idle = [self._fork(page, self._worker(page)) for page in pages[1:]]
        self._at_work: dict[str, Process] = {}
        self._started: Started

    def run(self) -> None:
        self._started = msgspec.json.decode(self._hear(), type=Started)
        for role in self.plan.roles:
            self._employ(role)
        waiting = list(self.plan.faults)
        while self._at_work:
            time.sleep(LOOK)
            self._look()
            while waiting and self._done >= waiting[0].after:
                self._strike(waiting.pop(0))
        if self._owner.status is None:
            self._owner.control.sendall(b"over")
            self.outcome.closed = msgspec.json.decode(self._hear(), type=Closed)
            self._wait_for_owner()

    def clear(self) -> None:
        """End whoever is left."""
        for process in self._every:
            if process.status is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
                os.waitpid(process.pid, 0)
            process.let_go()
            process.control.close()

    # ---- inside

    def _fork(
        self, page: Page, main: Callable[[socket.socket], Coroutine[Any, Any, int | None]]
    ) -> Process:
        here, there = socket.socketpair()
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            here.close()
            for other in self._every:
                other.control.close()
            _be(there, main, uvloop=self.plan.uvloop)
        there.close()
        process = Process(pid, here, page)
        self._every.append(process)
        return process

    def _worker(self, page: Page) -> Callable[[socket.socket], Coroutine[Any, Any, int]]:
        async def main(control: socket.socket) -> int:
            order = control.recv(1 << 16)
            if not order:  # it is not needed
                return 0
            return await work(control, msgspec.json.decode(order, type=Order), page, self.plan)

        return main

    @property
    def _done(self) -> int:
        return sum(process.page.count for process in self._every)

    def _hear(self) -> bytes:
        """A line of the owner."""
        heard = b""
        while not heard.endswith(b"\n"):
            self._owner.control.settimeout(max(self._deadline - time.monotonic(), 0.001))
            found = self._owner.control.recv(1 << 20)
            if not found:
                raise RuntimeError("the owner died")
            heard += found
        return heard

    def _employ(self, role: Role) -> None:
        """Let an idle process be this."""
        process = self._idle.pop(0)
        process.role = role
        order = Order(role, self._started.path, self._started.ends[role.name], self.plan.seed)
        process.control.sendall(msgspec.json.encode(order))
        self._at_work[role.name] = process

    def _look(self) -> None:
        """See who ended, and who has connected."""
        if time.monotonic() > self._deadline:
            names = ", ".join(self._at_work)
            raise TimeoutError(f"{names} did not end within {SECONDS:g} s")
        for process in list(self._at_work.values()):
            self._take_socket(process)
            if self._ended(process):
                self._replace(process)
        if self._owner.status is None:
            self._ended(self._owner)

    def _take_socket(self, process: Process) -> None:
        if process.wire is None and select.select([process.control], [], [], 0)[0]:
            with contextlib.suppress(ConnectionResetError):  # it was killed before it was anything
                _, files, _, _ = socket.recv_fds(process.control, 16, 1)
                process.wire = files[0] if files else None

    def _ended(self, process: Process) -> bool:
        pid, status = os.waitpid(process.pid, os.WNOHANG)
        if not pid:
            return False
        process.status = os.waitstatus_to_exitcode(status)
        process.let_go()
        return True

    def _replace(self, process: Process) -> None:
        """Its end is used by a spare now, if it did not finish and the owner lives."""
        role, status = process.role, process.status
        assert role is not None
        assert status is not None
        del self._at_work[role.name]
        self.outcome.pages.append((role, process.page, status))
        if self._owner.status is not None or self._ended(self._owner):
            return
        if status == 0 or not self._idle:
            # Its end is closed, or will not be used: the word of that may have been cut off.
            self._owner.control.sendall(f"{role.name} ".encode())
            return
        begun = [one.item for one in process.page.read() if one.did == Did.PUTTING]
        self._employ(msgspec.structs.replace(role, first=begun[-1] + 1) if begun else role)

    def _strike(self, fault: Fault) -> None:
        process = self._owner if fault.victim == OWNER else self._at_work.get(fault.victim)
        if process is None or process.status is not None:
            return
        time.sleep(fault.moment)  # wherever it then is
        if fault.kind == "kill":
            os.kill(process.pid, signal.SIGKILL)
            process.let_go()
            if process is self._owner:
                self._wait_for_owner()
        elif fault.kind == "cut":
            if process.wire is None:
                return
            self._cut(process.wire)
        else:
            os.kill(process.pid, signal.SIGSTOP)
            time.sleep(HEARTBEAT * (2.5 if fault.kind == "stop" else 0.2))
            os.kill(process.pid, signal.SIGCONT)
        self.outcome.faults.append(fault)

    def _cut(self, wire: int) -> None:
        with socket.socket(fileno=os.dup(wire)) as copy, contextlib.suppress(OSError):
            copy.shutdown(socket.SHUT_RDWR)

    def _wait_for_owner(self) -> None:
        while not self._ended(self._owner):
            if time.monotonic() > self._deadline:
                raise TimeoutError("the owner did not end")
            time.sleep(0.001)


def _be(
    control: socket.socket,
    main: Callable[[socket.socket], Coroutine[Any, Any, int | None]],
    *,
    uvloop: bool,
) -> NoReturn:
    """In the forked process: run this and end, whatever it does."""
    status = 1
    try:
        status = asyncio.Runner(loop_factory=_factory(uvloop)).run(main(control)) or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _factory(uvloop: bool) -> Callable[[], asyncio.AbstractEventLoop]:
    if uvloop:
        from uvloop import new_event_loop

        return new_event_loop
    return asyncio.new_event_loop
