"""What workers print stands in the cluster's log, line by line, under their names."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
from pathlib import Path

import pytest

import rlinf_async as ra
from rlinf_async.runtime.process import (
    LAST_LINES,
    LINES_AT_ONCE,
    LINES_PER_SECOND,
    LONGEST_LINE,
    PIPE_BYTES,
    LineLimit,
)
from tests.runtime.kit import NewCluster


class Printer(ra.Worker):
    """Prints."""

    async def say(self, text: str) -> None:
        print(text, end="", flush=True)

    async def say_as_others_do(self) -> None:
        print("to stderr", file=sys.stderr)
        logging.getLogger("of a library").warning("a warning")
        os.system("echo from a program")  # noqa: ASYNC221

    async def say_much(self, count: int) -> None:
        print("x" * 99, *["y" * 99] * (count - 1), sep="\n")

    async def die_saying(self, text: str) -> None:
        print(text, end="", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def setting() -> tuple[str, str]:
    """Only where there are processes."""
    return "process", "uvloop"


def lines_of(log: Path) -> list[str]:
    """The lines of a log without their times."""
    lines = log.read_text().splitlines()
    assert all(re.match(r"\d\d:\d\d:\d\d Printer\[\d\]: ", line) for line in lines)
    return [line.partition(" ")[2] for line in lines]


async def test_lines_are_in_the_log_with_time_and_worker(
    tmp_path: Path, new_cluster: NewCluster, capfd: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "workers.log"
    async with new_cluster(log=log) as cluster:
        printers = await cluster.launch(Printer, count=2)
        await printers[0].call(Printer.say, "a line\nhalf a ")
        await printers[1].call(Printer.say, "of another\n")
        await printers[0].call(Printer.say, "line\n10 %\r20 %\r30 %\r\nno end")
    assert sorted(lines_of(log)) == [
        *("Printer[0]: 30 %", "Printer[0]: a line", "Printer[0]: half a line"),
        *("Printer[0]: no end", "Printer[1]: of another"),
    ]
    assert capfd.readouterr() == ("", "")


async def test_output_of_libraries_and_of_started_programs_is_logged_too(
    tmp_path: Path, new_cluster: NewCluster
) -> None:
    async with new_cluster(log=tmp_path / "log") as cluster:
        printer = (await cluster.launch(Printer))[0]
        await printer.call(Printer.say_as_others_do)
    assert lines_of(tmp_path / "log") == [
        f"Printer[0]: {words}" for words in ("to stderr", "a warning", "from a program")
    ]


async def test_the_last_words_of_a_worker_that_is_killed_are_kept(
    tmp_path: Path, new_cluster: NewCluster
) -> None:
    async with new_cluster(log=tmp_path / "log") as cluster:
        printer = (await cluster.launch(Printer))[0]
        with pytest.raises(ra.WorkerDied):
            await printer.call(Printer.die_saying, "out of mem")
    assert lines_of(tmp_path / "log") == ["Printer[0]: out of mem"]


async def test_more_than_the_pipe_holds_is_written_while_it_is_printed(
    tmp_path: Path, new_cluster: NewCluster
) -> None:
    count = 2 * PIPE_BYTES // 100
    async with new_cluster(log=tmp_path / "log") as cluster:
        printer = (await cluster.launch(Printer))[0]
        await printer.call(Printer.say_much, count)
        await printer.call(Printer.say, "z" * (LONGEST_LINE * 3))
    lines = [line.removeprefix("Printer[0]: ") for line in lines_of(tmp_path / "log")]
    assert lines[:count] == ["x" * 99, *["y" * 99] * (count - 1)]
    assert "".join(lines[count:]) == "z" * (LONGEST_LINE * 3)
    assert max(map(len, lines)) <= 2 * LONGEST_LINE


async def test_a_full_disk_is_logged_once_and_the_workers_go_on(
    new_cluster: NewCluster, caplog: pytest.LogCaptureFixture
) -> None:
    async with new_cluster(log=Path("/dev/full")) as cluster:
        printer = (await cluster.launch(Printer))[0]
        for _ in range(3):
            await printer.call(Printer.say, "a line\n")
    said = [record.message for record in caplog.records]
    assert said == [
        "the output of workers cannot be written in /dev/full: [Errno 28] No space left on device"
    ]


def test_a_flood_is_limited_and_it_is_said_how_much_is_left_out() -> None:
    limit = LineLimit()
    flood = [str(number) for number in range(LINES_AT_ONCE + 1_000)]
    assert limit.allowed(flood, 100.0) == flood[:LINES_AT_ONCE]
    assert limit.allowed(["more"], 100.5) == []
    assert limit.allowed(["later"], 101.5) == [
        f"... 1001 lines are left out: more than {LINES_PER_SECOND} a second ...",
        "later",
    ]
    assert limit.rest() == []
    assert limit.allowed(flood, 101.5)[-1] == flood[LINES_PER_SECOND * 3 // 2 - 2]
    note, *last = limit.rest()
    assert last == flood[-LAST_LINES:]
    assert note.startswith(f"... {len(flood) - 299 - LAST_LINES} lines are left out")


async def test_the_last_words_after_a_flood_are_kept(
    tmp_path: Path, new_cluster: NewCluster
) -> None:
    log = tmp_path / "workers.log"
    said = "flood\n" * 2 * LINES_AT_ONCE + "last words\n"
    async with new_cluster(log=log) as cluster:
        printer = (await cluster.launch(Printer))[0]
        with pytest.raises(ra.WorkerDied):
            await printer.call(Printer.die_saying, said)
    lines = lines_of(log)
    assert lines[-1] == "Printer[0]: last words"
    assert LINES_AT_ONCE < len(lines) < LINES_AT_ONCE * 3 // 2
    assert any("lines are left out" in line for line in lines)
