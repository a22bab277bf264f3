"""Real actors in processes of their own, with FSDP2 over gloo."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
import torch.distributed.tensor  # assert_close does so at its first use: not in the loop
from torch import Tensor

import rlinf_async as ra
from rlinf_async.algorithms.config import LanguageAdvantageConfig, LanguageLossConfig
from rlinf_async.messages.embodied import Floats
from rlinf_async.weights.pack import unpack
from rlinf_async.workers.actor import FSDPActor
from tests.backends.language.kit import trainer_config
from tests.workers.actor.language.kit import (
    BATCHES,
    OPTIMIZER,
    Channels,
    groups,
    sample_of,
)

WHITENED = trainer_config(
    advantage=LanguageAdvantageConfig(name="reinforce++"),
    loss=LanguageLossConfig(aggregation="sequence-mean-token-mean"),
    fsdp={"optimizer": OPTIMIZER},
    reference=True,
)
"""normalised over both ranks; fsdp2"""


async def trained(
    world_size: int, *, pipeline: bool
) -> tuple[dict[str, Tensor], dict[str, Floats], float]:
    """Weights after two iterations, log-probs of samples under them, largest metric of loss."""
    async with ra.Cluster.process() if world_size > 1 else ra.Cluster.local() as cluster:
        channels = Channels(cluster)
        actors = await cluster.launch(
            FSDPActor,
            WHITENED,
            BATCHES,
            count=world_size,
            collective="gloo" if world_size > 1 else None,
            env_vars={"OMP_NUM_THREADS": "1"},
        )
        training = asyncio.create_task(channels.train(actors, 2, pipeline=pipeline))
        for iteration in range(2):
            await channels.send(groups(iteration, version=iteration), world_size)
        reports = await training
        assert await actors.call(FSDPActor.version) == [2] * world_size
        assert sorted(report.rank for report in reports) == sorted([*range(world_size)] * 2)
        asking = actors.call(
            FSDPActor.run_inference, channels.samples.receiver, channels.done.sender, True
        )
        for group in range(4):
            for index in range(4):
                await channels.samples.sender.put(sample_of(group, index))
        assert await asking == [16 // world_size] * world_size
        log_probs = {
            one.request.name: one.prev_log_prob
            async for one in channels.done.receiver
            if one.prev_log_prob is not None
        }
        update = await channels.weights.receiver.get()
    assert update.version == 2
    return unpack(update), log_probs, reports[-1].metrics["loss"]


@pytest.mark.parametrize("loop_kind", ["uvloop"])
async def test_two_sharded_ranks_in_pipeline_mode_train_and_answer_like_one_that_collects(
    loop_kind: str,
) -> None:
    one, answers, loss = await trained(1, pipeline=False)
    two, same, other = await trained(2, pipeline=True)
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=0.0, atol=1e-5, msg=name)
    assert len(answers) == 16
    for name, log_prob in answers.items():
        np.testing.assert_allclose(same[name], log_prob, atol=1e-5)
    assert other == pytest.approx(loss, rel=1e-4, abs=1e-6)
