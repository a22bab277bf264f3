"""A critic beside an actor: values on the samples' way, then returns to learn from."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

import rlinf_async as ra
from rlinf_async.algorithms.config import LanguageAdvantageConfig
from rlinf_async.messages.language import SampleGroup
from rlinf_async.workers.actor import FSDPActor
from rlinf_async.workers.critic import FSDPCritic
from tests.workers.actor.language.kit import BATCHES, CONFIG, Channels, groups, sample_of

pytestmark = pytest.mark.parametrize("loop_kind", ["uvloop"])

PPO = msgspec.structs.replace(CONFIG, advantage=LanguageAdvantageConfig(name="gae"))


async def test_a_critic_gives_values_and_both_learn_from_the_same_groups(loop_kind: str) -> None:
    async with ra.Cluster.local() as cluster:
        channels = Channels(cluster)
        to_critic = cluster.channel(SampleGroup, name="to the critic", capacity=64)
        actors = await cluster.launch(FSDPActor, PPO, BATCHES)
        critics = await cluster.launch(FSDPCritic, PPO, BATCHES)
        errors = []
        for iteration in range(3):
            valuing = critics.call(
                FSDPCritic.run_inference, channels.samples.receiver, channels.done.sender
            )
            for group in range(4):
                for index in range(4):
                    await channels.samples.sender.put(sample_of(group, index, iteration))
            assert await valuing == [16]
            values = {}
            for _ in range(16):
                sample = await channels.done.receiver.get()
                values[sample.request.name] = sample.value
            made = groups(0, version=iteration)
            for one in (one for whole in made for one in whole.samples):
                one.value = values[f"{one.group}/{one.index}"]
                assert one.value is not None
                assert bool(one.value.any()) is (iteration > 0)
            acting = actors.call(FSDPActor.run_training, channels.groups.receiver)
            learning = critics.call(FSDPCritic.run_training_pipeline, to_critic.receiver)
            for whole in made:
                await channels.groups.sender.put(whole, key=0)
                await to_critic.sender.put(whole, key=0)
            [report] = await acting
            [learnt] = await learning
            assert report.version == learnt.version == iteration + 1
            assert np.isfinite(report.metrics["loss"])
            errors.append(learnt.metrics["value_error"])
        assert errors[-1] < errors[0]


async def test_actors_and_critics_must_be_as_many(loop_kind: str) -> None:
    async with ra.Cluster.local() as cluster:
        with pytest.raises(ra.WorkerError, match=r"one of 1 critics, but there are 2 actors"):
            await cluster.launch(FSDPCritic, PPO, BATCHES, actor_ranks=2)


async def test_samples_that_end_before_the_iteration_are_an_error_with_numbers(
    loop_kind: str,
) -> None:
    async with ra.Cluster.local() as cluster:
        channels = Channels(cluster)
        critics = await cluster.launch(FSDPCritic, PPO, BATCHES)
        valuing = critics.call(
            FSDPCritic.run_inference, channels.samples.receiver, channels.done.sender
        )
        await channels.samples.sender.put(sample_of(0, 0))
        channels.samples.sender.close()
        with pytest.raises(ra.WorkerError, match=r"ended 15 samples before the 16 of this iter"):
            await valuing
