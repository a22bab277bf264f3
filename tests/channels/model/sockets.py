"""Runs programs over a Unix socket or TCP whose both sides are in one event loop.

Each process of the program is a connection of its own. Sockets are cut as a network would cut them:
they are found among the open files of this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from rlinf_async.channels import Receiver, Sender
from rlinf_async.channels.wire import (
    ChannelClient,
    ChannelServer,
    Connection,
    Router,
    Server,
    connect,
    serve,
)
from tests.channels.model.history import History, Journal
from tests.channels.model.party import Party, SharedEnd
from tests.channels.model.program import Program, end_names, end_of, name_of
from tests.channels.model.stage import Stage

SECRET: Final = b"a secret for programs, 32 bytes."
CUT_PATIENCE: Final = 5.0
"""Seconds for which a connection that was cut is kept; less than a program's patience."""
TURNS: Final = 30
"""Of the loop in a row without anything going on, before it is looked whether that stays so."""
MOMENT: Final = 0.001
STEP: Final = 0.002


class Patient:
    """Over a wire it is not known when nothing goes on: it is when it has been so for a while.

    Args:
        patience: seconds without progress after which what waits counts as waiting for ever.
        progress: differs when something has gone on.
        busy: whether another process is at work.
    """

    def __init__(
        self,
        patience: float,
        progress: Callable[[Journal], object],
        busy: Callable[[], bool] = lambda: False,
    ) -> None:
        self._patience = patience
        self._progress = progress
        self._busy = busy

    async def quiet(self, tasks: Sequence[asyncio.Future[Any]], journal: Journal) -> None:
        while not all(task.done() for task in tasks):
            seen = self._progress(journal)
            for _ in range(TURNS):
                await asyncio.sleep(0)
            await asyncio.sleep(MOMENT)
            if seen == self._progress(journal) and not self._busy():
                return

    async def holds(self, condition: Callable[[], object]) -> bool:
        for _ in range(20):
            if condition():
                return True
            await asyncio.sleep(0)
        until = asyncio.get_running_loop().time() + self._patience
        while asyncio.get_running_loop().time() < until:
            if condition():
                return True
            await asyncio.sleep(STEP)
        return False

    async def ended(self, tasks: Sequence[asyncio.Future[Any]], journal: Journal) -> bool:
        seen: object = None
        while seen != (seen := self._progress(journal)):
            _, left = await asyncio.wait(tasks, timeout=self._patience)
            if not left:
                return True
        return False


def done_here(journal: Journal) -> object:
    """What differs when something has gone on in this process."""
    return len(journal.events), journal.finished


def run_over(program: Program, transport: str, patience: float) -> History:
    """Run it over ``unix``, ``tcp`` or ``tls``."""
    with asyncio.Runner(loop_factory=loop_factory(program)) as runner:
        return runner.run(_run(program, transport, patience))


def loop_factory(program: Program) -> Callable[[], asyncio.AbstractEventLoop]:
    """uvloop, which the runtime uses, or asyncio's own."""
    if len(program.tasks) % 2:
        return asyncio.new_event_loop
    import uvloop

    return uvloop.new_event_loop


async def _run(program: Program, transport: str, patience: float) -> History:
    with tempfile.TemporaryDirectory(prefix="model-") as folder:
        address = Path(folder) / "s" if transport == "unix" else f"{transport}://127.0.0.1:0"
        router = Router()
        owner = ChannelServer(router)
        async with await serve(
            address, SECRET, name="owner", router=router, patience=CUT_PATIENCE
        ) as server:
            return await _perform(
                Stage(program, Patient(patience, done_here), local=False), owner, server
            )


async def _perform(stage: Stage, owner: ChannelServer, server: Server) -> History:
    program = stage.program
    connections: dict[int, Connection] = {}
    clients: dict[int, ChannelClient] = {}
    for place in sorted({task.at for task in program.tasks} - {0}):
        connections[place] = await connect(
            server.address, SECRET, name=f"process {place}", router=Router()
        )
        clients[place] = ChannelClient(connections[place])
    shared: dict[Any, SharedEnd] = {}
    for end in end_names(program):
        own: Any = stage.channel.sender if end[0] == "send" else stage.channel.receiver
        if end[1]:
            ref = owner.end_ref(own, name_of(end))
            remote = clients[end[1]].end(ref, stage.channel.item_type)
            assert isinstance(remote, Sender | Receiver)
            shared[end] = SharedEnd(remote)
        else:
            shared[end] = SharedEnd(own.clone(name_of(end)))
    parties = [
        Party(
            program, index, shared[end_of(task)], stage.journal, here=not task.at,
            count_depth=stage.note_depth,
        )
        for index, task in enumerate(program.tasks)
    ]  # fmt: skip
    cutting = asyncio.create_task(_cut_when_due(stage.journal, program, server.address))
    try:
        history = await stage.conduct([party.run() for party in parties])
    finally:
        cutting.cancel()
        await asyncio.gather(cutting, return_exceptions=True)
    for connection in connections.values():
        connection.close()
    for connection in connections.values():
        await connection.wait_closed()
    await stage.close()
    return history


async def _cut_when_due(journal: Journal, program: Program, address: str) -> None:
    done = 0
    for after in program.cuts:
        await journal.after(max(after - done, 1))
        done = after
        cut_sockets(address)


def cut_sockets(address: str, *, only: int | None = None) -> int:
    """Cut the connections of this process to this address; of those, the one at ``only``. How many
    there were."""
    found = [number for number in _open_files() if _leads_to(number, address)]
    chosen = found if only is None else [found[only % len(found)]] if found else []
    for number in chosen:
        with socket.socket(fileno=os.dup(number)) as copy, contextlib.suppress(OSError):
            copy.shutdown(socket.SHUT_RDWR)
    return len(found)


def _open_files() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/fd")]


def _leads_to(number: int, address: str) -> bool:
    """Whether this is the owner's side of a connection that was accepted at this address."""
    try:
        if not stat.S_ISSOCK(os.fstat(number).st_mode):
            return False
        with socket.socket(fileno=os.dup(number)) as copy:
            copy.getpeername()  # else it listens
            name = copy.getsockname()
    except OSError:
        return False
    return bool(name == address or (isinstance(name, tuple) and address.endswith(f":{name[1]}")))
