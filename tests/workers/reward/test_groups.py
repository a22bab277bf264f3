"""Samples of a prompt that a verifier judges at once: one item in, one item out."""

from __future__ import annotations

import asyncio
import random

import msgspec
import pytest

import rlinf_async as ra
from rlinf_async.messages.language import Failed, JudgeUse, Sample, Scored, ScoredSample
from rlinf_async.runtime.jobs.language.samples import Gatherer, judged_at_once
from rlinf_async.workers.reward import RewardConfig, RewardWorker
from tests.workers.reward.kit import Channels, sample

NAMED = "tests.rewards.verifiers"
LATER = f"{NAMED}:longest_later"


def config(*preload: str, processes: int = 1, cache: int = 0) -> RewardConfig:
    return RewardConfig(processes=processes, cache=cache, time_limit=60.0, preload=preload)


def samples(group: int, verifier: str, *texts: str, reference: str = "4") -> list[Sample]:
    """The samples of a prompt, with these texts."""
    replace = msgspec.structs.replace
    each = [sample(group, verifier, text, reference) for text in texts]
    return [
        replace(one, request=replace(one.request, index=at, group_size=len(texts)))
        for at, one in enumerate(each)
    ]


def whole(group: int, verifier: str, *texts: str, reference: str = "4") -> Sample:
    first, *others = samples(group, verifier, *texts, reference=reference)
    return msgspec.structs.replace(first, others=tuple(others))


def rewards_of(scored: ScoredSample) -> list[float | str]:
    """Rewards, or errors, in the order of the samples, each of which is by itself again."""
    every = scored.apart()
    assert [one.sample.request.index for one in every] == list(range(len(every)))
    assert not any(one.others or one.sample.others for one in every)
    return [
        one.outcome.reward if isinstance(one.outcome, Scored) else getattr(one.outcome, "error", "")
        for one in every
    ]


async def judged(settings: RewardConfig, *items: Sample, verifier: str = "") -> list[ScoredSample]:
    async with ra.Cluster.local() as cluster:
        channels = Channels(cluster)
        rewards = await cluster.launch(RewardWorker, settings, verifier)
        running = channels.start(rewards)
        await channels.put(*items)
        found = [await channels.next() for _ in items]
        channels.samples.close()
        [report] = await running
        assert report.samples == sum(len(one.apart()) for one in items)
        uses = [one.judge for each in found for one in each.apart() if one.judge is not None]
        if uses:
            assert report.judges.calls == sum(use.calls for use in uses)
        return sorted(found, key=lambda one: one.sample.request.group)


async def test_each_sample_gets_its_score_and_the_first_one_the_count() -> None:
    first, second, one = await judged(
        config(LATER, cache=10),
        whole(0, LATER, "a", "bb", "cc"),
        whole(1, LATER, "a", "bb"),
        whole(2, LATER, "a"),
    )
    assert rewards_of(first) == [0.0, 1.0, 1.0]
    assert rewards_of(second) == [0.0, 1.0]
    assert rewards_of(one) == [1.0]
    assert [each.judge for each in first.apart()] == [JudgeUse(calls=1), None, None]


async def test_an_episode_with_an_outcome_of_its_own_keeps_it_and_is_not_compared() -> None:
    item = whole(0, LATER, "dddd", "bb", "c", "dddd")
    item.outcome = Scored(reward=9.0)
    item.others[2].outcome = Failed(error="no tool")
    own = whole(1, LATER, "a", "b")
    own.outcome, own.others[0].outcome = Failed(error="x"), Scored(reward=2.0)
    first, second = await judged(config(LATER), item, own)
    assert rewards_of(first) == [9.0, 1.0, 0.0, "no tool"]
    assert rewards_of(second) == ["x", 2.0]
    assert second.judge is None


async def test_a_failure_names_the_prompt_and_a_verifier_of_single_answers_gets_each() -> None:
    name = f"{NAMED}:gives"
    items = [
        whole(7, name, "a", "b", reference="[1]"),
        whole(8, name, "a", "b", reference="[nan, 1]"),
    ]
    seven, eight = await judged(config(name), *items)
    error = f"verifier {name!r} returned 1 score for 2 answers: return a list of 2"
    assert rewards_of(seven) == [f"prompt 7 (group 7): {error}"] * 2
    nan, one = rewards_of(eight)
    assert nan == (
        f"prompt 8 (group 8): verifier {name!r} returned nan (a float), not a finite number"
    )
    assert one == 1.0
    for other in ("exact", f"{NAMED}:length"):
        [each] = await judged(config(), whole(0, LATER, "4", "no"), verifier=other)
        assert rewards_of(each) == ([1.0, 0.0] if other == "exact" else [1.0, 2.0])
        assert [one.verifier for one in each.apart()] == [other] * 2


async def test_a_group_verifier_refuses_a_sample_without_the_others() -> None:
    [alone] = await judged(config(), samples(0, "exact", "a", "b")[0], verifier=LATER)
    [error] = rewards_of(alone)
    assert "judges all answers to a prompt at once, and was given 1 of 2" in str(error)


@pytest.mark.parametrize("seed", range(3))
async def test_groups_go_on_whole_in_whatever_order_their_samples_come(seed: int) -> None:
    choice = random.Random(seed)
    groups = [samples(group, LATER, "a", "b", "c") for group in range(4)]
    alone = [samples(10 + at, "exact", "4", "4")[0] for at in range(3)]
    every = [one for group in groups for one in group]
    waited = {one.request.name for one in every}
    late = choice.sample(every, 3)
    coming = [*every, *alone]
    choice.shuffle(coming)
    left_out: list[int] = []
    async with ra.Cluster.local() as cluster:
        channels = Channels(cluster)
        gathered = cluster.channel(Sample, name="gathered", capacity=100)
        gatherer = Gatherer(
            channels.samples.receiver,
            gathered.sender,
            at_once=judged_at_once({LATER}),
            waited_for=lambda request: request.name in waited,
            leave_out=lambda: left_out.append(1),
        )
        gathering = asyncio.create_task(gatherer.run())
        half = len(coming) // 2
        for one in coming[:half]:
            await channels.samples.sender.put(one)
        await ra.testing.wait_all_blocked()
        there = {one.request.name for one in coming[:half]} & waited
        seen = list(gathered.queue.contents())
        held = {one.request.name for one in gatherer.held}
        sent = {
            one.request.name
            for item in seen
            for one in gathered.queue.value(item).apart()
            if one.request.group < 10
        }
        assert held | sent == there
        assert not held & sent
        for one in [*late, *coming[half:], *late]:  # some come a second time, before or after
            await channels.samples.sender.put(one)
        channels.samples.close()
        await gathering
        gathered.close()
        found = [item async for item in gathered.receiver]
    assert gatherer.held == []
    assert len(left_out) == 6
    wholes = {one.request.group: one.apart() for one in found if one.request.group < 10}
    assert len(found) == 7
    assert {group: [one.text for one in each] for group, each in wholes.items()} == {
        group: ["a", "b", "c"] for group in range(4)
    }


def test_which_samples_are_judged_at_once() -> None:
    [one, _] = samples(0, "exact", "a", "b")
    [ranked, _] = samples(0, LATER, "a", "b")
    of_set = msgspec.structs.replace(ranked.request, evaluation_set="more")
    for swapped, expected in (("", [False, True, True]), (LATER, [True] * 3),
                              ("exact", [False, False, True])):  # fmt: skip
        at_once = judged_at_once({LATER}, swapped)
        assert [at_once(each) for each in (one.request, ranked.request, of_set)] == expected
