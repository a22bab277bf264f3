"""Real critics in their processes: the number of those that train changes between iterations."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

import rlinf_async as ra
from rlinf_async.messages.embodied import Floats
from rlinf_async.messages.language import SampleGroup
from rlinf_async.parallel import Strategy
from rlinf_async.workers.actor import LanguageBatches
from rlinf_async.workers.critic import FSDPCritic
from tests.backends.rescale.kit import critic_config
from tests.workers.actor.language.kit import Channels, groups

GROUPS = 24
BATCHES = LanguageBatches(
    samples=GROUPS * 4, group_size=4, optimizer_steps=2, max_tokens_per_micro_batch=64
)
CONFIG = critic_config()
RING = (1, 2, 1)
"""how many ranks train, one after the other; `tests/backends/rescale` has more of them"""


class Learnt(msgspec.Struct):
    """What came of one iteration."""

    numbers: list[float]
    """loss, error of the values, learning rate"""
    values: Floats
    """of all tokens, by group and sample"""


async def learnt(ranks: int, ring: tuple[int, ...]) -> list[Learnt]:
    """Two iterations on each number of ranks."""
    async with ra.Cluster.process() if ranks > 1 else ra.Cluster.local() as cluster:
        channels = Channels(cluster)
        valued = cluster.channel(SampleGroup, name="valued", capacity=64)
        critics = await cluster.launch(
            FSDPCritic,
            CONFIG,
            BATCHES,
            actor_ranks=ranks,
            count=ranks,
            collective="gloo" if ranks > 1 else None,
            env_vars={"OMP_NUM_THREADS": "1"},
        )
        found: list[Learnt] = []
        if ranks > 1:
            await critics.call(FSDPCritic.init_trainer_resharding, ring[0])
        with channels.groups.receiver.clone(), valued.sender.clone():  # a call closes its ends
            for size in ring:
                if ranks > 1:
                    applied = await critics.call(
                        FSDPCritic.apply_parallel_strategy, Strategy(dp=size)
                    )
                    assert [one.active for one in applied] == [rank < size for rank in range(ranks)]
                for iteration in (len(found), len(found) + 1):
                    made = groups(iteration, count=GROUPS, version=iteration)
                    for group in made:
                        await channels.groups.sender.put(group, key=group.group % size)
                    reports = await critics.call(
                        FSDPCritic.value_and_train, channels.groups.receiver, valued.sender
                    )
                    assert [one.samples for one in reports] == [
                        BATCHES.samples // size if rank < size else 0 for rank in range(ranks)
                    ]
                    assert {one.ranks for one in reports} == {size}
                    found.append(
                        Learnt(
                            [reports[0].metrics[one] for one in ("loss", "value_error", "lr")],
                            await taken(valued, size),
                        )
                    )
        return found


async def taken(valued: ra.Channel[SampleGroup], ranks: int) -> Floats:
    """The values of one iteration, which went to the actor of each critic's rank."""
    by_group: dict[int, list[Floats]] = {}
    for number in range(GROUPS):
        group = await valued.receiver.get(key=number % ranks)
        assert group.group % ranks == number % ranks
        by_group[group.group] = [one.value for one in group.samples if one.value is not None]
    return np.concatenate([value for at in range(GROUPS) for value in by_group[at]])


@pytest.mark.parametrize("loop_kind", ["uvloop"])
async def test_a_critic_on_1_2_1_ranks_learns_the_values_of_one(
    loop_kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    alone, found = await learnt(1, (1,) * len(RING)), await learnt(2, RING)
    assert len(found) == len(alone) == 2 * len(RING)
    numbers = torch.tensor([[one.numbers for one in each] for each in (alone, found)])
    worst = (numbers[0] - numbers[1]).abs().max(0).values.tolist()
    apart = max(
        float(np.abs(one.values - other.values).max())
        for one, other in zip(alone, found, strict=True)
    )
    with capsys.disabled():
        print(f"\nFSDPCritic: loss, value error, lr differ by at most {worst}, values {apart}")
    assert max(worst[:2]) < 1e-6
    assert worst[2] == 0.0
    assert apart < 1e-6
    assert any(one.values.any() for one in found)
