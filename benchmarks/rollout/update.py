"""New weights of an actor for live vLLM engines: one line of JSON.

    python update.py [ENGINES]

An actor (FSDP) and the rollout workers, each with its engine, run in processes of their own.

``own_load_seconds``: vLLM's own ``reload_weights`` of these bytes, files in the page cache, while
nothing runs. ``update_seconds``: from ``sync_model_to_rollout``, called on the actor, until every
engine serves the new version, while each of them generates for 16 requests: copy and checksum,
message, check, pause, load. ``idle_update_seconds``: the same while no engine has a request.
``dropped``: requests of which no whole response came. Log-probs are compared with the actor's own.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

import rlinf_async as ra
from rlinf_async.backends.base import OptimizerConfig
from rlinf_async.backends.fsdp.language.config import LanguageFSDPConfig, LanguageTrainerConfig
from rlinf_async.backends.language_training.config import LanguageModelConfig
from rlinf_async.backends.vllm.config import VllmEngineConfig
from rlinf_async.messages.language import Request, Sample, Sampling, WeightsTaken
from rlinf_async.messages.weights import WeightUpdate
from rlinf_async.workers.actor import FSDPActor, LanguageBatches
from rlinf_async.workers.rollout.language import LanguageRolloutWorker

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.rollout.generate import requests
from benchmarks.rollout.model import save_model

TIMES = 5
"""updates; the first two are not counted: memory is taken then"""
RUNNING = 16
"""requests of each engine"""
SHORT, MAX_TOKENS = 8, 64
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


class MeasuredActor(FSDPActor):
    """An actor whose weights can be moved without training."""

    async def nudge(self) -> int:
        """Change every weight a little, and count the version up; the number of weights."""
        return await self.compute(self._nudge)

    def _nudge(self) -> int:
        import torch

        trainer: Any = self._trainer
        count = 0
        with torch.no_grad():
            for parameter in trainer.manager.model.parameters():
                parameter.mul_(1.001)
                count += parameter.numel()
        trainer.end_iteration()
        return count


class MeasuredRollout(LanguageRolloutWorker):
    """A rollout worker that lets vLLM load by itself."""

    async def own_load(self, folder: str) -> float:
        """Seconds of ``reload_weights``. What is served then is the folder's."""
        llm: Any = self._live.engine._llm  # type: ignore[attr-defined]
        start = time.perf_counter()
        await llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
        return time.perf_counter() - start


class Taken(NamedTuple):
    """How long an update took."""

    seconds: float
    """from the call until the last engine serves it"""
    load_seconds: float
    """of the slowest engine: from its arrival there"""


class Run:
    """An actor, and engines that serve what it publishes."""

    def __init__(self, cluster: ra.Cluster, engines: int) -> None:
        self.cluster, self.engines = cluster, engines
        room = 2 * RUNNING * engines
        self.asking = cluster.channel(Request, name="requests", capacity=room)
        self.samples = cluster.channel(Sample, name="samples", capacity=room)
        self.weights = cluster.latest(WeightUpdate, name="weights")
        self.taken = cluster.channel(WeightsTaken, name="taken", capacity=8)

    async def start(self, folder: str) -> None:
        """Launch the workers, and have the engines serve."""
        served = VllmEngineConfig(
            model=folder, weights="folder", context=512, max_concurrent=RUNNING, seeded=False
        )
        trained = LanguageTrainerConfig(
            fsdp=LanguageFSDPConfig(
                model=LanguageModelConfig(path=folder), optimizer=OptimizerConfig(lr=1e-6)
            )
        )
        self.actor, self.rollout = await asyncio.gather(
            self.cluster.launch(
                MeasuredActor, trained, LanguageBatches(samples=1), env_vars=ONE_THREAD
            ),
            self.cluster.launch(
                MeasuredRollout, served, backend="vllm", count=self.engines, env_vars=ONE_THREAD
            ),
        )
        self.serving = self.rollout.call(
            MeasuredRollout.serve,
            self.asking.receiver,
            self.samples.sender,
            self.weights.receiver,
            self.taken.sender,
        )

    async def nudge(self) -> int:
        """Have something to publish; the number of weights."""
        [parameters] = await self.actor.call(MeasuredActor.nudge)
        return parameters

    async def own_load(self, folder: str) -> float:
        """Seconds of the slowest engine's own."""
        return max(await self.rollout.call(MeasuredRollout.own_load, folder))

    async def ask(self, first: int) -> int:
        """Send requests to every engine, of which so many are short; the number of all."""
        asked = requests(RUNNING * self.engines, first)
        for at, one in enumerate(asked):
            length = SHORT if at < self.engines else MAX_TOKENS
            await self.asking.sender.put(replace(one, sampling=Sampling(max_tokens=length)))
        return len(asked)

    async def get(self, count: int) -> list[Sample]:
        """The next samples."""
        return [await self.samples.receiver.get() for _ in range(count)]

    async def update(self) -> Taken:
        """Publish, until every engine serves it."""
        start = time.perf_counter()
        syncing = self.actor.call(MeasuredActor.sync_model_to_rollout, self.weights.sender)
        told = [await self.taken.receiver.get() for _ in range(self.engines)]
        seconds = time.perf_counter() - start
        [version] = await syncing
        if {one.version for one in told} != {version}:
            raise SystemExit(f"version {version} was published, {told} were taken")
        return Taken(seconds, max(one.seconds for one in told))

    async def difference(self, samples: list[Sample]) -> float:
        """The largest between a log-prob of an engine and of the actor."""
        pairs = [(one.request.prompt.token_ids, one.generated.token_ids) for one in samples]
        [expected] = await self.actor.call(MeasuredActor.log_probs, pairs)
        return max(
            float(np.abs(ours - theirs).max(initial=0.0))
            for answer in await self.rollout.call(MeasuredRollout.log_probs, pairs)
            for ours, theirs in zip(expected, answer, strict=True)
        )

    async def stop(self) -> None:
        """Let the engines end."""
        self.asking.close()
        self.weights.sender.close()
        await self.serving


async def measure(folder: str, engines: int) -> dict[str, float]:
    own: list[float] = []
    running: list[Taken] = []
    idle: list[Taken] = []
    parameters = dropped = 0
    got: list[Sample] = []
    async with ra.Cluster.process() as cluster:
        run = Run(cluster, engines)
        await run.start(folder)
        for turn in range(TIMES):
            parameters = await run.nudge()
            own.append(await run.own_load(folder))
            count = await run.ask(1000 * turn)
            # The short answers come when the prompts are computed and the rest is on its way.
            got = await run.get(engines)
            running.append(await run.update())
            got += await run.get(count - engines)
            dropped += sum(one.generated.finish == "abort" for one in got)
            await run.nudge()
            idle.append(await run.update())
        worst = await run.difference(got[-4:])
        await run.stop()
    return {
        "parameters": float(parameters),
        "own_load_seconds": statistics.median(own[2:]),
        "update_seconds": statistics.median(one.seconds for one in running[2:]),
        "load_seconds": statistics.median(one.load_seconds for one in running[2:]),
        "idle_update_seconds": statistics.median(one.seconds for one in idle[2:]),
        "log_prob_difference": worst,
        "dropped": float(dropped),
    }


def main() -> None:
    engines = int(sys.argv[1]) if sys.argv[1:] else 1
    with tempfile.TemporaryDirectory() as folder:
        path = save_model(Path(folder), hidden=512, layers=16, vocabulary=4096)
        print(json.dumps(ra.run(measure(path, engines))))


if __name__ == "__main__":
    main()
