"""The ways of an item, a trajectory, a sample and an episode in docs/architecture.md are those that
they take, and few files and functions are entered on them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from rlinf_async.channels import Channel, Receiver, Sender
from rlinf_async.cli import main
from rlinf_async.runtime import deadlock
from rlinf_async.runtime.jobs import view
from rlinf_async.runtime.jobs.embodied import collectors
from tests.architecture.sources import ROOT
from tests.architecture.walks import (
    Recorder,
    Step,
    WalkOfAJob,
    walks_of_a_get,
    walks_of_a_lease,
)
from tests.channels.wire.harness import settle, until, wired
from tests.jobs.embodied import kit as embodied
from tests.jobs.language import kit as language
from tests.jobs.language.agents import WITH_TOOLS

MOST_FILES_OF_AN_ITEM = 18
MOST_FUNCTIONS_OF_AN_ITEM = 80
MOST_FILES_OF_A_TRAJECTORY = 50
MOST_FILES_OF_A_SAMPLE = 45
MOST_FILES_OF_A_DECISION = 50
MOST_FILES_OF_AN_EPISODE = 52

AGENTS = "tests.jobs.language.agents"
ONE_TRAJECTORY = (
    *("--training.total_steps", 16, "--env.envs", 1, "--env.stages", 1),
    *("--evaluation.episodes", 1),
)
ONE_SAMPLE = (
    *("--training.iterations", 1, "--training.prompts", 1, "--training.group_size", 1),
    *("--evaluation.samples", 0, "--data.held_out", 0),
)
ONE_EPISODE = (
    *ONE_SAMPLE,
    *("--episode.run", f"{AGENTS}:calls", "--episode.tools", f"{AGENTS}:always_looks"),
    *("--cluster.episode_workers", 1, "--data.chat_template", "tools.jinja"),
)
ONE_ITERATION = (*("--devices", 16, "--work.iterations", 1, "--work.prompts_per_device", 1),)


@pytest.fixture
def clocks_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done once a second is on nobody's way; how often it is done, the machine decides."""
    for where, name in [
        (collectors, "PERIOD"),
        (deadlock, "PERIOD"),
        (view, "PERIOD"),
        (view, "LOOK_EVERY"),
        (view, "SPANS_EVERY"),
    ]:
        monkeypatch.setattr(where, name, 3600.0)


def described(way: str) -> list[Step]:
    """The rows of the table behind this mark."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    table = text.split(f"<!-- way: {way} -->")[1].split("\n\n")[1]
    rows = re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|", table, re.MULTILINE)
    assert rows
    return [(path, function) for path, function in rows]


async def taken_way(run: Callable[[], Awaitable[None]]) -> list[Step]:
    """Every function of the channels that is called, in order; paths are below channels/."""
    recorder = Recorder()
    recorder.start()
    try:
        await run()
        await settle()
    finally:
        calls = recorder.stop()
    return [
        (path.removeprefix("channels/"), name)
        for path, name in calls
        if path.startswith("channels/")
    ]


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


@pytest.mark.parametrize("walks", [walks_of_a_get, walks_of_a_lease])
async def test_an_item_enters_few_files_and_functions(
    walks: Callable[[str], Awaitable[list[set[Step]]]], tmp_path: Path
) -> None:
    entered = [
        {step for step in walk if step[0].startswith("channels/")}
        for walk in await walks(str(tmp_path))
    ]
    shortest = min(entered, key=len)
    files = {path for path, _ in shortest}
    assert len(files) <= MOST_FILES_OF_AN_ITEM, listed(shortest)
    assert len(shortest) <= MOST_FUNCTIONS_OF_AN_ITEM, listed(shortest)


@pytest.mark.parametrize(
    ("way", "kind", "one", "last", "most"),
    [
        (
            "a trajectory",
            embodied.Job,
            ONE_TRAJECTORY,
            "EnvironmentRun._write_row",
            MOST_FILES_OF_A_TRAJECTORY,
        ),
        ("a sample", language.Job, ONE_SAMPLE, "LanguageRun._account", MOST_FILES_OF_A_SAMPLE),
        ("an episode", language.Job, ONE_EPISODE, "LanguageRun._account", MOST_FILES_OF_AN_EPISODE),
    ],
    ids=["a trajectory", "a sample", "an episode"],
)
@pytest.mark.usefixtures("clocks_stand")
def test_the_walk_through_a_job_is_the_one_that_is_described_and_enters_few_files(
    way: str,
    kind: type[embodied.Job | language.Job],
    one: tuple[object, ...],
    last: str,
    most: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    steps = described(way)
    job = kind(tmp_path, capsys)
    monkeypatch.chdir(tmp_path)
    Path("tools.jinja").write_text(WITH_TOOLS)
    walk = WalkOfAJob(steps, first=steps[0][1], last=last)
    walk.run(lambda: job.succeed(*one))
    assert missing(steps, walk.calls) is None
    assert len({path for path, _ in walk.entered}) <= most, listed(walk.entered)


def test_a_decision_of_the_scheduler_enters_few_files() -> None:
    config = ROOT / "examples" / "simulated_long_reasoning.toml"
    walk = WalkOfAJob((), first="SchedulerWorker._decide", last="SimulatedRun._account")
    walk.run(lambda: main(["simulate", str(config), *map(str, ONE_ITERATION)]))
    files = {path for path, _ in walk.entered}
    assert 0 < len(files) <= MOST_FILES_OF_A_DECISION, listed(walk.entered)


def listed(entered: set[Step]) -> str:
    """What was entered, a line for each file, for who has to shorten the way."""
    files = sorted({path for path, _ in entered})
    lines = (f"{path}: {', '.join(sorted(n for p, n in entered if p == path))}" for path in files)
    return f"{len(files)} files, {len(entered)} functions\n" + "\n".join(lines)
