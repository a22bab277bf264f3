"""Sample groups, samples of requests, and the channels around language actors."""

from __future__ import annotations

from typing import Any

import msgspec

import rlinf_async as ra
from rlinf_async.backends.base import OptimizerConfig
from rlinf_async.messages.language import LanguageTrainReport, Sample, SampleGroup
from rlinf_async.messages.weights import WeightUpdate
from rlinf_async.workers.actor import FSDPActor, LanguageBatches
from tests.backends.language.kit import as_sample, samples, trainer_config

GROUP = 4
BATCHES = LanguageBatches(
    samples=16, group_size=GROUP, optimizer_steps=2, max_tokens_per_micro_batch=40
)


def groups(iteration: int, *, count: int = 4, version: int = 0) -> list[SampleGroup]:
    """The groups of one iteration; every token was made by ``version``."""
    batch = samples(count, GROUP, seed=iteration)
    for one in batch:
        one.version = one.version + version
        one.prev_log_prob = None
    return [
        SampleGroup(iteration=iteration, group=number, samples=batch[start : start + GROUP])
        for number, start in enumerate(range(0, len(batch), GROUP))
    ]


def sample_of(group: int, index: int, version: int = 0) -> Sample:
    """What a rollout worker sends: the tokens of the training sample of the same numbers."""
    one = samples(group + 1, GROUP)[group * GROUP + index]
    one.version = one.version + version
    return as_sample(one)


class Channels:
    """The channels around the actors."""

    def __init__(self, cluster: ra.Cluster) -> None:
        self.groups = cluster.channel(SampleGroup, name="groups", capacity=64)
        self.weights = cluster.latest(WeightUpdate, name="weights")
        self.samples = cluster.channel(Sample, name="samples", capacity=64)
        self.done = cluster.channel(Sample, name="done", capacity=64)

    async def send(self, made: list[SampleGroup], actors: int = 1) -> None:
        for group in made:
            await self.groups.sender.put(group, key=group.group % actors, weight=len(group.samples))

    async def train(
        self, actors: ra.WorkerGroup[Any], iterations: int, *, pipeline: bool = False
    ) -> list[LanguageTrainReport]:
        """Train what is sent, up to this version, and publish each; the reports of all ranks."""
        method = FSDPActor.run_training_pipeline if pipeline else FSDPActor.run_training
        reports: list[LanguageTrainReport] = []
        # A call closes its ends: this one keeps the channel from ending between two of them.
        with self.groups.receiver.clone("between two calls"):
            versions = await actors.call(FSDPActor.version)
            for _ in range(versions[0], iterations):
                reports += await actors.call(method, self.groups.receiver)
                await actors.call(FSDPActor.sync_model_to_rollout, self.weights.sender)
        return reports


# An epsilon that keeps Adam from making large steps of the last bits of small gradients.
OPTIMIZER = OptimizerConfig(lr=1e-3, eps=1e-3, max_grad_norm=0.5)
CONFIG = trainer_config(fsdp={"optimizer": OPTIMIZER})
KEEPING = msgspec.structs.replace(CONFIG, reference=True)
