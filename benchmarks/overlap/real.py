"""Pipelined against in turns, with vLLM on one core and FSDP on another: one line of JSON.

    python real.py [--pairs 6] [--size full|small]

GRPO on the task of the ``grpo`` bench, strictly on-policy, over one graph whose iterations are
trained by turns in one way and the other::

    pipelined   train on a group when its samples are there, while others are still generated
    in turns    generate all samples of the iteration, then train on them

An iteration counts from its first request until the engine serves the weights that came of it. The
engine has so few slots (16) that its groups finish one after the other, as they do where an engine
has less room than an iteration has samples; 5 M parameters make generation and training take about
equally long, which is printed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import rlinf_async as ra
from rlinf_async.backends.base import OptimizerConfig
from rlinf_async.backends.fsdp.language.config import LanguageFSDPConfig, LanguageTrainerConfig
from rlinf_async.backends.language_training.config import LanguageModelConfig
from rlinf_async.backends.vllm.config import VllmEngineConfig
from rlinf_async.data import load_tokenizer
from rlinf_async.messages.language import (
    LanguageTrainReport,
    Prompt,
    Request,
    Sample,
    SampleGroup,
    Sampling,
    Scored,
    ScoredSample,
    WeightsTaken,
)
from rlinf_async.messages.weights import WeightUpdate
from rlinf_async.runtime.jobs.language.samples import Ledger, to_train
from rlinf_async.workers.actor import FSDPActor, LanguageBatches
from rlinf_async.workers.rollout.language import LanguageRolloutWorker

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.grpo import task
from benchmarks.grpo.model import model_folder

SLOTS = 16
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


class Iteration(NamedTuple):
    """What one took."""

    seconds: float
    report: LanguageTrainReport


class Run:
    """The graph: requests to the rollout worker, its samples to here, their groups to the actor."""

    def __init__(self, cluster: ra.Cluster, folder: Path, size: task.Size) -> None:
        self.cluster, self.folder, self.size = cluster, folder, size
        self.requests = cluster.channel(Request, name="requests", capacity=size.samples)
        self.samples = cluster.channel(Sample, name="samples", capacity=size.samples)
        self.groups = cluster.channel(SampleGroup, name="groups", capacity=size.prompts)
        self.weights = cluster.latest(WeightUpdate, name="weights")
        self.taken = cluster.channel(WeightsTaken, name="taken", capacity=8)
        self.tokenizer = load_tokenizer(folder)
        self.ledger = Ledger(
            prompts=size.prompts,
            group_size=task.GROUP,
            max_staleness=0,
            sampling=Sampling(max_tokens=task.MAX_TOKENS),
            seed=0,
        )

    async def start(self) -> None:
        """Both workers, each on a core of its own, and the first weights in the engine."""
        engine = VllmEngineConfig(model=str(self.folder), context=256, max_concurrent=SLOTS)
        trainer = LanguageTrainerConfig(
            fsdp=LanguageFSDPConfig(
                model=LanguageModelConfig(path=str(self.folder)),
                optimizer=OptimizerConfig(lr=task.LR, max_grad_norm=task.MAX_GRAD_NORM),
            )
        )
        batches = LanguageBatches(
            samples=self.size.samples, group_size=task.GROUP, micro_batch_size=task.GROUP
        )
        self.rollout, self.actor = await asyncio.gather(
            self.cluster.launch(
                LanguageRolloutWorker,
                engine,
                backend="vllm",
                placement=ra.Ranks([0]),
                env_vars=ONE_THREAD,
            ),
            self.cluster.launch(
                FSDPActor, trainer, batches, placement=ra.Ranks([1]), env_vars=ONE_THREAD
            ),
        )
        self.serving = self.rollout.call(
            LanguageRolloutWorker.serve,
            self.requests.receiver,
            self.samples.sender,
            self.weights.receiver,
            self.taken.sender,
        )
        await self.publish()

    async def publish(self) -> None:
        """Give the actor's weights to the engine; ends when it serves them."""
        await self.actor.call(FSDPActor.sync_model_to_rollout, self.weights.sender)
        await self.taken.receiver.get()

    async def iteration(self, asked: list[int], pipelined: bool) -> Iteration:
        """Generate and train one."""
        began = time.perf_counter()
        method = FSDPActor.run_training_pipeline if pipelined else FSDPActor.run_training
        number = self.ledger.next_iteration
        training = self.actor.call(method, self.groups.receiver)
        for request in self.ledger.admit([self.prompt(one) for one in asked]):
            await self.requests.sender.put(request)
        for _ in range(self.size.samples):
            sample = await self.samples.receiver.get()
            reward = task.reward(sample.text, int(sample.request.prompt.reference))
            scored = ScoredSample(sample=sample, outcome=Scored(reward=reward))
            group = self.ledger.take(scored)
            if group is not None:
                await self.groups.sender.put(to_train(group), key=0)
        [report] = await training
        self.ledger.trained(number)
        await self.publish()
        return Iteration(time.perf_counter() - began, report)

    def prompt(self, number: int) -> Prompt:
        """What asks for so many letters."""
        text = task.prompt(number)
        tokens = np.asarray(self.tokenizer(text)["input_ids"], np.int32)
        return Prompt(index=0, text=text, token_ids=tokens, verifier="here", reference=str(number))

    async def stop(self) -> None:
        """Let the rollout worker end."""
        self.requests.close()
        self.weights.sender.close()
        await self.serving


async def measure(folder: Path, size: task.Size, pairs: int) -> dict[str, float]:
    """Iterations in pairs over the same prompts, one of each way, in turning order."""
    found: dict[bool, list[Iteration]] = {True: [], False: []}
    async with ra.Cluster.process() as cluster:
        run = Run(cluster, folder, size)
        await run.start()
        await run.iteration(task.numbers(size.prompts, seed=0), pipelined=True)  # warms up
        for pair in range(pairs):
            asked = task.numbers(size.prompts, seed=pair + 1)
            for pipelined in (True, False) if pair % 2 else (False, True):
                found[pipelined].append(await run.iteration(asked, pipelined))
        await run.stop()
    pipelined_seconds = statistics.median(one.seconds for one in found[True])
    turns_seconds = statistics.median(one.seconds for one in found[False])
    return {
        "pipelined_samples_per_second": size.samples / pipelined_seconds,
        "turns_samples_per_second": size.samples / turns_seconds,
        "speedup": statistics.median(
            turns.seconds / pipelined.seconds
            for turns, pipelined in zip(found[False], found[True], strict=True)
        ),
        "generation_seconds": statistics.median(one.report.wait_seconds for one in found[False]),
        "training_seconds": statistics.median(one.report.train_seconds for one in found[False]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Pipelined against in turns: vLLM and FSDP.")
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--size", choices=task.SIZES, default="full")
    given = parser.parse_args()
    size = task.SIZES[given.size]
    measured: Any = ra.run(measure(model_folder(size), size, given.pairs))
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
