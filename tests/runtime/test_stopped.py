"""A job that was stopped for longer than its heartbeats, as by Ctrl-Z, goes on where it was."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.runtime.scripts import Script, running, wait_until_stopped

LIMIT = 2.0
STOPPED = 5.0
"""Seconds. The time itself is what these tests are about."""

SCRIPT = f"""
import asyncio, os, signal
from pathlib import Path
import rlinf_async as ra
from tests.runtime import kit

async def main() -> None:
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, told.set)
    async with ra.Cluster.process(heartbeat_limit={LIMIT}) as cluster:
        tellers = await cluster.launch(kit.Teller, count=2)
        numbers = cluster.channel(kit.Number, name="numbers")
        waiters = await cluster.launch(kit.Waiter)
        waiting = waiters.call(kit.Waiter.for_item, numbers.receiver)
        pids = [cluster.pid(name) for name in ("Teller[0]", "Teller[1]", "Waiter[0]")]
        Path(__file__).with_name("pids").write_text(" ".join(map(str, pids)))
        print("ready", flush=True)
        await told.wait()
        with numbers.sender as sender:
            await sender.put(kit.Number(7))
        print(await waiting, await tellers.call(kit.Teller.life))

if __name__ == "__main__":
    ra.run(main())
"""


def pids(script: Script) -> list[int]:
    return [int(pid) for pid in Path(script.folder / "pids").read_text().split()]


@pytest.mark.slow
@pytest.mark.parametrize("who", ["driver", "workers first", "driver first"])
def test_a_job_that_was_stopped_and_continued_loses_no_worker(who: str) -> None:
    with running(SCRIPT) as script:
        script.wait_for("ready")
        driver, workers = [script.process.pid], pids(script)
        everybody = driver if who == "driver" else driver + workers
        for pid in everybody:
            os.kill(pid, signal.SIGSTOP)
        for pid in everybody:
            wait_until_stopped(pid)
        time.sleep(STOPPED)
        for pid in everybody if who == "driver first" else reversed(everybody):
            os.kill(pid, signal.SIGCONT)
        script.process.send_signal(signal.SIGUSR1)
        code, out, err = script.end()
    assert (code, out) == (0, ["[7] [0, 0]", "ready"]), err
