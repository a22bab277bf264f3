"""The ways of an item that docs/architecture.md describes are those that it takes."""

from __future__ import annotations

import asyncio
import re
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import FrameType

import pytest

import rlinf_async.channels
from rlinf_async.channels import Channel, Receiver, Sender
from tests.architecture.sources import ROOT
from tests.channels.wire.harness import settle, until, wired
from tests.jobs.embodied import kit as embodied
from tests.jobs.language import kit as language

Step = tuple[str, str]
"""A file and a function in it: below channels/, or in the walk through a job below the root."""
FOLDER = Path(rlinf_async.channels.__file__).parent
MOST_FILES = 16
MOST_FILES_OF_A_JOB = 14

ONE_TRAJECTORY = (
    *("--training.total_steps", 16, "--env.envs", 1, "--env.stages", 1),
    *("--evaluation.episodes", 1),
)
ONE_SAMPLE = (
    *("--training.iterations", 1, "--training.prompts", 1, "--training.group_size", 1),
    *("--evaluation.samples", 0, "--data.held_out", 0),
)


def described(way: str) -> list[Step]:
    """The rows of the table behind this mark."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    table = text.split(f"<!-- way: {way} -->")[1].split("\n\n")[1]
    rows = re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|", table, re.MULTILINE)
    assert rows
    return [(path, function) for path, function in rows]


async def taken_way(run: Callable[[], Awaitable[None]]) -> list[Step]:
    """Every function of the channels that is called, in order."""
    calls: list[Step] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(FOLDER):
                calls.append((path.relative_to(FOLDER).as_posix(), frame.f_code.co_qualname))

    sys.setprofile(note)
    try:
        await run()
        await settle()
    finally:
        sys.setprofile(None)
    return calls


def taken_by_a_job(run: Callable[[], object], steps: list[Step]) -> list[Step]:
    """Every call of these functions while a job runs in this process, in order, in any thread."""
    wanted = set(steps)
    names = {name for _, name in steps}
    calls: list[Step] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_qualname in names:
            place = code.co_filename.removeprefix(f"{ROOT}/")
            place = re.sub(r"^rlinf_async/(channels|workers)/", r"\1/", place)  # symbolic links
            if (place, code.co_qualname) in wanted:
                calls.append((place, code.co_qualname))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return calls


def missing(steps: list[Step], calls: list[Step]) -> Step | None:
    """The first step that is not taken after the ones before it."""
    at = iter(calls)
    return next((step for step in steps if step not in at), None)


async def put_and_get(sender: Sender[int], receiver: Receiver[int], channel: Channel[int]) -> None:
    getting = asyncio.ensure_future(receiver.get())
    await until(lambda: channel.waits())
    await sender.put(7)
    assert await getting == 7


async def lease(receiver: Receiver[int]) -> None:
    async with receiver.lease() as leased:
        assert [*leased] == [8]


@pytest.mark.parametrize("way", ["put to get", "lease to settle"])
async def test_the_way_of_an_item_is_the_one_that_is_described(way: str) -> None:
    steps = described(way)
    assert len({path for path, _ in steps}) <= MOST_FILES
    channel = Channel(int, name="numbers")
    async with wired() as owner:
        producer, consumer = await owner.join("producer"), await owner.join("consumer")
        sender, receiver = owner.sender(channel, producer), owner.receiver(channel, consumer)
        for number in range(3):
            await sender.put(number)
            assert await receiver.get() == number
        await settle()
        if way == "put to get":
            calls = await taken_way(lambda: put_and_get(sender, receiver, channel))
        else:
            await sender.put(8)
            await settle()
            calls = await taken_way(lambda: lease(receiver))
        assert missing(steps, calls) is None
        producer.close()
        consumer.close()


def test_a_step_that_is_not_taken_is_found() -> None:
    steps = [("a.py", "f"), ("b.py", "g")]
    assert missing(steps, [("a.py", "f"), ("c.py", "h"), ("b.py", "g")]) is None
    assert missing(steps, [("b.py", "g"), ("a.py", "f")]) == ("b.py", "g")


@pytest.mark.parametrize(
    ("way", "kind", "one"),
    [
        ("a trajectory", embodied.Job, ONE_TRAJECTORY),
        ("a sample", language.Job, ONE_SAMPLE),
    ],
    ids=["a trajectory", "a sample"],
)
def test_the_walk_through_a_job_is_the_one_that_is_described(
    way: str,
    kind: type[embodied.Job | language.Job],
    one: tuple[object, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    steps = described(way)
    assert len({path for path, _ in steps}) <= MOST_FILES_OF_A_JOB
    job = kind(tmp_path, capsys)
    calls = taken_by_a_job(lambda: job.succeed(*one), steps)
    assert missing(steps, calls) is None
