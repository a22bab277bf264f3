"""Samples to be scored, and what came out."""

from __future__ import annotations

from typing import Any

import numpy as np

import rlinf_async as ra
from rlinf_async.messages.language import (
    Generated,
    Prompt,
    Request,
    Sample,
    Sampling,
    ScoredSample,
)
from rlinf_async.workers.reward import RewardReport, RewardWorker


def sample(group: int, verifier: str = "exact", text: str = "4", reference: object = "4") -> Sample:
    tokens = np.arange(3, dtype=np.int32)
    return Sample(
        request=Request(
            group=group,
            index=0,
            group_size=1,
            iteration=0,
            min_version=0,
            prompt=Prompt(
                index=group,
                text="2+2=",
                token_ids=tokens,
                verifier=verifier,
                reference=str(reference),
            ),
            sampling=Sampling(),
            seed=0,
        ),
        generated=Generated(
            token_ids=tokens,
            log_prob=np.zeros(3, np.float32),
            version=np.zeros(3, np.int32),
            finish="stop",
        ),
        text=text,
        rollout_rank=0,
    )


def custom(group: int, name: str, reference: object = "4") -> Sample:
    """A sample for one of `tests.rewards.verifiers`."""
    return sample(group, f"tests.rewards.verifiers:{name}", reference=reference)


class Channels:
    """What a reward worker is connected to."""

    def __init__(self, cluster: ra.Cluster, capacity: int = 1000) -> None:
        self.samples = cluster.channel(Sample, name="samples", capacity=capacity)
        self.scored = cluster.channel(ScoredSample, name="scored", capacity=capacity)

    def start(self, rewards: ra.WorkerGroup[Any]) -> ra.GroupCall[list[RewardReport]]:
        return rewards.call(RewardWorker.run, self.samples.receiver, self.scored.sender)

    async def put(self, *samples: Sample) -> None:
        for one in samples:
            await self.samples.sender.put(one)

    async def next(self) -> ScoredSample:
        return await self.scored.receiver.get()
