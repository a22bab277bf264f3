"""Which samples a checkpoint finds in a channel, and what a resumed run takes up of it."""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec
import numpy as np
import pytest

import rlinf_async as ra
from rlinf_async.channels.encoded import copy_of
from rlinf_async.channels.queue import statistics_of
from rlinf_async.messages.language import (
    Generated,
    Kept,
    Request,
    Sample,
    Sampling,
    Scored,
    ScoredSample,
)
from rlinf_async.runtime.jobs.language import samples
from rlinf_async.runtime.jobs.language.config import LanguageConfig
from rlinf_async.runtime.jobs.language.roles import LanguageChannels
from rlinf_async.runtime.jobs.language.samples import (
    InFlight,
    LanguageProgress,
    Ledger,
    LedgerState,
    Unfinished,
    _items,
    drop_turns,
    in_flight,
    load_unfinished,
)
from tests.backends.requests import request
from tests.channels.wire.direct_kit import item, items, world
from tests.jobs.language.kit import TOY


async def test_a_sample_whose_arrays_are_still_with_its_producer_is_left_to_the_ledger() -> None:
    channel = items()
    async with world() as one:
        near, far = await one.plain("near"), await one.producer("far")
        for number, party in enumerate((near, far, near)):
            sender = party.sender(channel)
            await sender.put(item(number))
            await sender.flush()
        assert [each.check() for each in _items(channel)] == [0, 2]
        assert statistics_of(channel.queue).depth == 3


def generated(kept: Kept | None) -> Generated:
    """Two tokens."""
    return Generated(
        token_ids=np.array([4, 5], np.int32),
        log_prob=np.array([-1.0, -2.0], np.float32),
        version=np.zeros(2, np.int32),
        finish="stop",
        kept=kept,
    )


def sample(one: Request, kept: Kept | None) -> Sample:
    return Sample(request=one, generated=generated(kept), text="", rollout_rank=0)


def test_what_was_kept_is_in_the_checkpoint_and_tokens_without_it_are_generated_again(
    tmp_path: Path,
) -> None:
    """A run of an older version, which truncated, did not write what it kept."""
    kept = Kept.of([[4, 70_000], [5]])
    every = [request(index, top_k=2) for index in range(6)]
    plain = [request(index) for index in (6, 7)]

    def finished(one: Request, kept: Kept | None) -> ScoredSample:
        return ScoredSample(sample=sample(one, kept), outcome=Scored(reward=1.0))

    def begun(one: Request, kept: Kept | None) -> Request:
        return msgspec.structs.replace(one, partial=generated(kept))

    written = Unfinished(
        ledger=LedgerState(
            running=[begun(every[0], kept), begun(every[1], None), begun(plain[0], None)],
            finished=[finished(every[2], kept), finished(every[3], None), finished(plain[1], None)],
        ),
        data=b"{}",
        waiting=InFlight(
            partial=[begun(every[0], kept), begun(every[1], None)],
            generated=[sample(every[4], kept), sample(every[5], None)],
        ),
    )
    (tmp_path / "one").mkdir()
    for name, content in written.files().items():
        (tmp_path / "one" / name).write_bytes(content)
    found = load_unfinished(tmp_path, LanguageProgress(checkpoint="one"))
    running = {one.index: one.partial for one in found.ledger.running}
    assert {index for index, partial in running.items() if partial is None} == {1, 3}
    assert running.keys() == {0, 1, 3, 6}
    assert running[0] is not None
    assert running[0].kept is not None
    assert [one.tolist() for one in running[0].kept.sets()] == [[4, 70_000], [5]]
    assert running[0].kept.counts.dtype == np.uint8
    assert running[0].kept.token_ids.dtype == np.uint32
    assert [one.sample.request.index for one in found.ledger.finished] == [2, 7]
    assert [one.partial is None for one in found.waiting.partial] == [False, True]
    assert [one.request.index for one in found.waiting.generated] == [4]


def with_episodes() -> LanguageConfig:
    """A run whose samples are episodes."""
    tables = tomllib.loads(TOY.format(data="none.jsonl"))
    tables["episode"] = {"run": "tests.jobs.language.agents:talks"}
    tables["cluster"]["episode_workers"] = 1
    return msgspec.convert(tables, LanguageConfig)


def turn(group: int, number: int) -> Sample:
    """The answer to a turn of an episode."""
    return sample(request(0, group=group, turn=number), None)


async def keys_of(channels: LanguageChannels) -> list[str]:
    """Names of the turns that wait for their episodes."""
    return sorted(str(key) for key in channels.turns.queue.keys)


async def test_turns_of_open_episodes_are_saved_whoever_has_them_and_put_back_as_they_were() -> (
    None
):
    running = [request(0, group=group) for group in range(3)]
    async with ra.Cluster.local() as cluster:
        channels = LanguageChannels(cluster, with_episodes())
        with channels.held_open(), channels.turns.sender as sender, channels.turns.receiver as ends:
            for one in (turn(0, 2), turn(0, 1), turn(1, 1), turn(7, 1)):
                await sender.put(one, key=one.request.name)
            await channels.generated.sender.put(sample(running[1], None))
            async with ends.lease(key="0/0.1"):
                found = in_flight(channels, [], running)
    assert [one.request.name for one in found.turns] == ["0/0.1", "0/0.2"]
    assert [one.request.name for one in found.generated] == ["1/0"]

    ledger = Ledger(
        prompts=3,
        group_size=1,
        max_staleness=0,
        sampling=Sampling(),
        seed=0,
        state=LedgerState(running=running),
    )
    found.enter(ledger)
    assert [one.replay for one in ledger.running] == [True, False, False]
    async with ra.Cluster.local() as cluster:
        channels = LanguageChannels(cluster, with_episodes())
        with channels.held_open(), channels.turns.receiver:
            await found.put_back(channels)
            assert await keys_of(channels) == ["0/0.1", "0/0.2"]


async def test_answers_that_no_open_episode_waits_for_are_dropped_unless_they_are_leased() -> None:
    async with ra.Cluster.local() as cluster:
        channels = LanguageChannels(cluster, with_episodes())
        with channels.held_open(), channels.turns.sender as sender, channels.turns.receiver as ends:
            for one in (turn(0, 1), turn(1, 1), turn(1, 1), turn(2, 1), turn(-3, 1)):
                await sender.put(one, key=one.request.name)
            async with ends.lease(key="2/0.1"):
                assert drop_turns(channels, [request(0)]) == 3
                assert await keys_of(channels) == ["0/0.1", "2/0.1"]
            assert drop_turns(channels, []) == 1
            assert await keys_of(channels) == []


async def test_answers_of_a_finished_episode_that_is_run_once_more_are_kept_for_it() -> None:
    async with ra.Cluster.local() as cluster:
        channels = LanguageChannels(cluster, with_episodes())
        with channels.held_open(), channels.turns.sender as sender, channels.turns.receiver:
            await channels.tasks.sender.put(request(0))
            async with channels.tasks.receiver.lease():
                await sender.put(turn(0, 1), key="0/0.1")
                assert drop_turns(channels, []) == 0
            assert drop_turns(channels, []) == 1


async def test_the_tasks_are_read_only_for_answers_of_episodes_that_are_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[object] = []

    def reading(item: object) -> object:
        read.append(item)
        return copy_of(item)

    monkeypatch.setattr(samples, "copy_of", reading)
    async with ra.Cluster.local() as cluster:
        channels = LanguageChannels(cluster, with_episodes())
        with channels.held_open(), channels.turns.sender as sender, channels.turns.receiver:
            await channels.tasks.sender.put(request(0))
            await sender.put(turn(0, 1), key="0/0.1")
            assert drop_turns(channels, [request(0)]) == 0
            assert not read
            assert drop_turns(channels, []) == 0
            assert len(read) == 1


def test_a_checkpoint_without_turns_can_still_be_read(tmp_path: Path) -> None:
    """Of a version that knew no episodes."""
    (tmp_path / "one").mkdir()
    written = Unfinished(ledger=LedgerState(), data=b"{}")
    [(name, content)] = written.files().items()
    (tmp_path / "one" / name).write_bytes(content.replace(b"turns", b"other"))
    found = load_unfinished(tmp_path, LanguageProgress(checkpoint="one"))
    assert found.waiting == InFlight()
