"""A cluster that is entered by one cell of a notebook and used by others: each is a task."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys

import pytest

import rlinf_async as ra
from tests.runtime.kit import Teller
from tests.runtime.scripts import PATIENCE, ROOT

IN_A_SESSION = """
import asyncio
import rlinf_async as ra

class Engine(ra.Worker):
    pass

async def main():
    async with ra.Cluster.process() as cluster:
        await cluster.launch(Engine)

asyncio.run(main())
"""


def test_a_class_of_an_interactive_session_is_refused_with_what_to_do() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", IN_A_SESSION],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    last = ended.stderr.splitlines()[-1]
    assert "BuildError: Engine is defined in a notebook or an interactive session" in last
    assert "write the class to a file" in last


class Heard(logging.Handler):
    """The first message of a logger."""

    def __init__(self) -> None:
        super().__init__()
        self.message: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def emit(self, record: logging.LogRecord) -> None:
        if not self.message.done():
            self.message.set_result(record.getMessage())


async def test_a_cluster_stays_open_over_several_tasks_and_its_failure_is_logged() -> None:
    heard, logger = Heard(), logging.getLogger("rlinf_async.runtime")
    logger.addHandler(heard)
    cluster = ra.Cluster.process()
    await asyncio.create_task(cluster.__aenter__())
    tellers = await asyncio.create_task(cluster.launch(Teller, count=2))
    [pid, _] = await tellers.call(Teller.pid)
    os.kill(pid, signal.SIGKILL)
    said = await heard.message
    logger.removeHandler(heard)
    assert said.startswith("the cluster failed: leave it, and make another one\nTeller[0]")
    with pytest.raises(ra.WorkerDied, match=r"Teller\[0\] failed in its process"):
        await asyncio.create_task(cluster.__aexit__(None, None, None))
