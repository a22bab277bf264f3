"""``python -m tests.workers.scheduler.losses --iterations 50``

A run of processes in which the actor (FSDP) has 1 rank, then 2, then 1 again in each iteration,
while one of two rollout workers stops and comes back; and a run of one rank that never changes,
over the same samples. Prints the largest difference of a loss, and of a weight, and what was lost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import defaultdict
from typing import Any

import msgspec
import numpy as np

import rlinf_async as ra
from rlinf_async.backends.toy.config import ToyEngineConfig
from rlinf_async.messages.language import LanguageTrainReport, SampleGroup
from rlinf_async.messages.weights import WeightUpdate
from rlinf_async.weights.pack import unpack
from rlinf_async.workers.actor import FSDPActor
from tests.backends.language.kit import VOCABULARY, trainer_config
from tests.workers.actor.language.kit import OPTIMIZER
from tests.workers.scheduler.kit import BATCHES, Ran, Run

ENGINE = ToyEngineConfig(
    slots=8, seconds_per_step=0.002, mean_tokens=10, tail=1.0, vocabulary=VOCABULARY
)
TRAINER = trainer_config(fsdp={"optimizer": OPTIMIZER})
METRICS = ("loss", "policy_loss", "grad_norm", "entropy")

Groups = dict[int, list[SampleGroup]]
"""of each iteration"""


async def scheduled(iterations: int) -> tuple[Ran, Groups, WeightUpdate]:
    """Run with the scheduler; also what it was trained on, and its weights."""
    made: Groups = defaultdict(list)

    def note(group: SampleGroup) -> None:
        made[group.iteration].append(_copy(group))

    async with ra.Cluster.process() as cluster:
        run = Run(cluster, engine=ENGINE, trainer=TRAINER, backend="fsdp")
        await run.start()
        ran = await run.train(iterations, note, in_order=True)
        return ran, made, await run.channels.weights.receiver.get()


def _copy(group: SampleGroup) -> SampleGroup:
    """The same samples, without what a trainer adds to them."""
    copy = msgspec.structs.replace
    return copy(group, samples=[copy(one) for one in group.samples])


async def static(made: Groups) -> tuple[list[LanguageTrainReport], WeightUpdate]:
    """Train one rank on the same samples; its reports and weights."""
    async with ra.Cluster.local() as cluster:
        groups = cluster.channel(SampleGroup, name="groups", capacity=64)
        weights = cluster.latest(WeightUpdate, name="weights")
        actor = await cluster.launch(FSDPActor, TRAINER, BATCHES)
        found: list[LanguageTrainReport] = []
        with groups.receiver.clone("between two calls"):
            for _, trained in sorted(made.items()):
                for group in trained:
                    await groups.sender.put(group, key=0)
                found += await actor.call(FSDPActor.run_training, groups.receiver)
        await actor.call(FSDPActor.sync_model_to_rollout, weights.sender)
        return found, await weights.receiver.get()


async def compare(iterations: int) -> dict[str, Any]:
    """Both runs, and what differs."""
    ran, made, update = await scheduled(iterations)
    reports, weights = await static(made)
    ours, theirs = unpack(update), unpack(weights)
    losses = [
        abs(one[0].metrics[name] - other.metrics[name])
        for one, other in zip(ran.reports, reports, strict=True)
        for name in METRICS
        if name in other.metrics
    ]
    assert ran.summary is not None
    wanted = iterations * BATCHES.samples
    return {
        "iterations": iterations,
        "loss_difference": max(losses),
        "weight_difference": max(
            float(np.abs(np.asarray(ours[name]) - np.asarray(theirs[name])).max()) for name in ours
        ),
        "lost": wanted - len(ran.samples),
        "doubled": sum(ran.samples.values()) - len(ran.samples),
        "untrained": wanted - sum(one.samples for ranks in ran.reports for one in ranks),
        "iterations_on_two_ranks": sum(ranks[1].samples > 0 for ranks in ran.reports),
        **msgspec.structs.asdict(ran.summary),
    }


def main() -> None:
    """Print what differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.workers.scheduler.losses")
    parser.add_argument("--iterations", type=int, default=50)
    print(json.dumps(asyncio.run(compare(parser.parse_args().iterations))))


if __name__ == "__main__":
    main()
