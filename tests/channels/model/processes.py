"""Runs programs over real processes, some of which are killed, or cut off.

Processes are started once and carry out one program after the other. One that is killed is replaced
for the next program.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import tempfile
import time
from multiprocessing.connection import Connection as Pipe
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from rlinf_async.channels import Channel, Sender
from rlinf_async.channels.wire import (
    ChannelServer,
    Connection,
    EndRef,
    Router,
    Server,
    connect,
    serve,
)
from rlinf_async.channels.wire.direct import host_id
from rlinf_async.channels.wire.homes import HomedQueues
from rlinf_async.channels.wire.protocol import End, EndKind, Home, Look, Open, Seen
from rlinf_async.channels.wire.remote_ends import ConfirmedNotices, next_clone_number
from tests.channels.model.generate import HOMES
from tests.channels.model.history import Event, History, Journal
from tests.channels.model.journal_file import judge_death, read_events
from tests.channels.model.party import Party, SharedEnd
from tests.channels.model.program import EndName, Program, end_names, end_of, name_of
from tests.channels.model.sockets import CUT_PATIENCE, SECRET, Patient, cut_sockets, loop_factory
from tests.channels.model.stage import Stage
from tests.channels.model.worker import SILENCE, Order, serve_orders, set_distance
from tests.runtime.scripts import process_state

PRELOADED = ["tests.channels.model.worker", "tests.channels.model.tensor_items"]
"""by the process from which workers are forked: each of them would import torch for seconds"""
RECORD_BYTES = 70
"""Of the journal, about; cuts come after so many for each operation."""
STEP = 0.001
TCP = "tcp://127.0.0.1:0"
LISTEN = {"direct": TCP, "far": TCP, "home-tcp": TCP, "home-tls": "tls://127.0.0.1:0"}
"""where the owner listens; others have a Unix socket"""


class Worker:
    """A process, and the pipe by which it is told what to do."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.pipe: Pipe
        self.pipe, there = context.Pipe()
        self.process: BaseProcess = context.Process(target=serve_orders, args=(there,), daemon=True)
        self.process.start()
        there.close()

    async def carry_out(self, order: Order) -> str | None:
        """What went wrong in it, if anything; None where it has died."""
        self.pipe.send(order)
        loop = asyncio.get_running_loop()
        readable: asyncio.Future[None] = loop.create_future()

        def read() -> None:
            if not readable.done():
                readable.set_result(None)

        loop.add_reader(self.pipe.fileno(), read)
        try:
            await readable
        finally:
            loop.remove_reader(self.pipe.fileno())
        try:
            said: str = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            return None
        return said

    @property
    def runs(self) -> bool:
        """Whether it does not wait for anything."""
        pid = self.process.pid
        return pid is not None and process_state(pid) in ("R", "D")

    def end(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.join()


_idle: list[Worker] = []


def end_workers() -> None:
    """No more programs."""
    while _idle:
        _idle.pop().end()


def run_over(program: Program, transport: str, patience: float) -> History:
    """Run it over processes: ``process``, ``direct``, ``far`` or ``home``."""
    workers = {
        place: _idle.pop() if _idle else Worker()
        for place in sorted({task.at for task in program.tasks} - {0})
    }
    try:
        with asyncio.Runner(loop_factory=loop_factory(program)) as runner:
            history = runner.run(_run(program, transport, patience, workers))
            set_distance("")
    except BaseException:
        for worker in workers.values():
            worker.end()
        raise
    for place, worker in workers.items():
        if history.hung or history.violations or place in history.killed:
            worker.end()
        else:
            _idle.append(worker)
    return history


async def _run(
    program: Program, transport: str, patience: float, workers: dict[int, Worker]
) -> History:
    set_distance(transport)
    with tempfile.TemporaryDirectory(prefix="model-") as folder:
        router = Router()
        owner: Owner = Homed(router) if transport in HOMES else ChannelServer(router)
        address = LISTEN.get(transport, Path(folder) / "s")
        async with await serve(
            address, SECRET, name="owner", router=router,
            patience=CUT_PATIENCE, heartbeat_limit=SILENCE,
        ) as server:  # fmt: skip
            return await _Run(
                program, transport, patience, workers, owner, server, Path(folder)
            ).perform()


class Homed:
    """An owner whose channel another process has made, which gives the ends of it away. (That is a
    connection of this process.)"""

    def __init__(self, router: Router) -> None:
        self._queues = HomedQueues(router)
        self._refs: dict[int, EndRef] = {}

    async def make(self, channel: Channel[Any], server: Server) -> None:
        """Make the channel."""
        self._maker = await connect(server.address, SECRET, name="maker", router=Router())
        while not (  # noqa: ASYNC110  (a server tells of it by a function alone)
            found := [one for one in server.connections if one.peer == "maker"]
        ):
            await asyncio.sleep(STEP)
        self._home = Home("owner", host_id(), (str(server.address),))
        self._queue = self._queues.add(channel, found[0])

    def end_ref(self, own: Any, holder: str) -> EndRef:
        """Open an end like this one for another process."""
        queue = own.queue
        kind: EndKind = "sender" if isinstance(own, Sender) else "receiver"
        number = next_clone_number()
        opened = Open(self._queue, kind, number, holder)
        self._maker.notify("home.open", opened, control=True)
        return EndRef(number, kind, queue.name, queue=self._queue, form=queue.form, home=self._home)

    def release(self, number: int) -> None:
        """Close an end that was opened for another process."""
        ConfirmedNotices.of(self._maker).send("channel.close", End(number))

    async def told(self) -> None:
        """Wait until every end is open: the tasks of the owner do not wait for that."""
        await self._maker.request("home.look", Look(), reply=Seen, control=True)

    async def close(self) -> None:
        """Leave."""
        self._maker.close()
        await self._maker.wait_closed()


Owner = ChannelServer | Homed


class _Run:
    def __init__(
        self,
        program: Program,
        transport: str,
        patience: float,
        workers: dict[int, Worker],
        owner: Owner,
        server: Server,
        folder: Path,
    ) -> None:
        self.program = program
        self.transport = transport
        self.workers = workers
        self.owner = owner
        self.server = server
        self.folder = folder
        medium = Patient(patience, self._progress, self._busy)
        self.stage = Stage(program, medium, local=False, clock=time.monotonic_ns)
        self.stage.refresh = self._refresh
        self.refs: dict[EndName, EndRef] = {}

    async def perform(self) -> History:
        stage, program = self.stage, self.program
        if isinstance(self.owner, Homed):
            await self.owner.make(stage.channel, self.server)
        shared: dict[EndName, Any] = {}
        for end in end_names(program):
            channel = stage.channel
            own: Any = channel.sender if end[0] == "send" else channel.receiver
            if end[1]:
                self.refs[end] = self.owner.end_ref(own, name_of(end))
            else:
                shared[end] = SharedEnd(own.clone(name_of(end)))
        if isinstance(self.owner, Homed):
            await self.owner.told()
        here = [
            Party(
                program, index, shared[end_of(task)], stage.journal, here=True,
                count_depth=stage.note_depth,
            )
            for index, task in enumerate(program.tasks)
            if not task.at
        ]  # fmt: skip
        cutting = asyncio.create_task(self._cut_when_due())
        try:
            history = await stage.conduct(
                [*(party.run() for party in here), *map(self._carry_out, self.workers)]
            )
        finally:
            cutting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await cutting
        if isinstance(self.owner, Homed):
            await self.owner.close()
        if not history.hung:
            await stage.medium.holds(lambda: not self.server.connections)
        self._refresh()
        await stage.close()
        return history

    async def _carry_out(self, place: int) -> None:
        ends = [(name, ref) for name, ref in self.refs.items() if name[1] == place]
        after = [kill.after for kill in self.program.kills if kill.at == place]
        order = Order(
            self.program, place, self.server.address, ends, str(self._journal(place)),
            min(after, default=None), self.transport,
        )  # fmt: skip
        said = await self.workers[place].carry_out(order)
        if said == "":
            return
        if said is None:
            self.stage.history.killed.append(place)
            for connection in self._connections(place):
                connection.peer_ended()
            said = "" if after else "died by itself"
        if said:
            self.stage.history.violations.append(f"process {place} {said}")
        await self.stage.medium.holds(lambda: not self._connections(place))
        for _, ref in ends:  # nobody else closes them
            self.owner.release(ref.number)

    def _connections(self, place: int) -> list[Connection]:
        return [one for one in self.server.connections if one.peer == f"process {place}"]

    def _journal(self, place: int) -> Path:
        return self.folder / f"journal{place}"

    def _progress(self, journal: Journal) -> object:
        return len(journal.events), journal.finished, self._written()

    def _busy(self) -> bool:
        """Whether a process runs, or would if it had a core: where many share one, it may be long
        until it begins."""
        return any(worker.runs for worker in self.workers.values())

    def _written(self) -> int:
        paths = map(self._journal, self.workers)
        return sum(path.stat().st_size for path in paths if path.exists())

    def _refresh(self) -> None:
        """Put together what all processes have done."""
        found: list[Event] = [*self.stage.journal.events]
        for place in self.workers:
            events = read_events(self._journal(place))
            if place in self.stage.history.killed:
                judge_death(events)
            found += events
        self.stage.history.events = found

    async def _cut_when_due(self) -> None:
        for number, after in enumerate(self.program.cuts):
            while self._written() < after * RECORD_BYTES:  # noqa: ASYNC110  (of other processes)
                await asyncio.sleep(STEP)
            cut_sockets(self.server.address, only=number)
