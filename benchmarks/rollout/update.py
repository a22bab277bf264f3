"""New weights of an actor for live vLLM engines: one line of JSON.

    python update.py [ENGINES]

An actor (FSDP) and the rollout workers, each with its engine, run in processes of their own.

``own_load_seconds``: vLLM's own ``reload_weights`` of these bytes, files in the page cache, while
nothing runs. ``update_seconds``: from ``sync_model_to_rollout``, called on the actor, until every
engine serves the new version, while each of them generates for 16 requests: copy and checksum,
message, check, pause, load. ``dropped``: requests of which no whole response came. Log-probs are
compared with the actor's own.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

import rlinf_async as ra
from rlinf_async.backends.fsdp.config import OptimizerConfig
from rlinf_async.backends.fsdp.language.config import (
    LanguageFSDPConfig,
    LanguageModelConfig,
    LanguageTrainerConfig,
)
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
SHORT, MAX_TOKENS = 8, 120


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


async def measure(folder: str, engines: int) -> dict[str, float]:
    served = VllmEngineConfig(
        model=folder, weights="folder", context=512, max_concurrent=RUNNING, seeded=False
    )
    trained = LanguageTrainerConfig(
        fsdp=LanguageFSDPConfig(
            model=LanguageModelConfig(path=folder), optimizer=OptimizerConfig(lr=1e-6)
        )
    )
    async with ra.Cluster.process() as cluster:
        asking = cluster.channel(Request, name="requests", capacity=2 * RUNNING * engines)
        samples = cluster.channel(Sample, name="samples", capacity=2 * RUNNING * engines)
        weights = cluster.latest(WeightUpdate, name="weights")
        taken = cluster.channel(WeightsTaken, name="taken", capacity=8)
        actor = await cluster.launch(MeasuredActor, trained, LanguageBatches(samples=1))
        rollout = await cluster.launch(MeasuredRollout, served, backend="vllm", count=engines)
        serving = rollout.call(
            MeasuredRollout.serve, asking.receiver, samples.sender, weights.receiver, taken.sender
        )
        own, updates, dropped, pauses = [], [], 0, []
        parameters, got = 0, []
        for turn in range(TIMES):
            [parameters] = await actor.call(MeasuredActor.nudge)
            own.append(max(await rollout.call(MeasuredRollout.own_load, folder)))
            asked = requests(RUNNING * engines, 1000 * turn)
            for at, one in enumerate(asked):
                length = SHORT if at < engines else MAX_TOKENS
                await asking.sender.put(replace(one, sampling=Sampling(max_tokens=length)))
            # The short answers come when the prompts are computed and the rest is on its way.
            got = [await samples.receiver.get() for _ in range(engines)]
            start = time.perf_counter()
            syncing = actor.call(MeasuredActor.sync_model_to_rollout, weights.sender)
            told = [await taken.receiver.get() for _ in range(engines)]
            updates.append(time.perf_counter() - start)
            pauses.append(max(one.seconds for one in told))
            [version] = await syncing
            if {one.version for one in told} != {version}:
                raise SystemExit(f"version {version} was published, {told} were taken")
            got += [await samples.receiver.get() for _ in asked[engines:]]
            dropped += sum(one.generated.finish == "abort" for one in got) + len(asked) - len(got)
        pairs = [(one.request.prompt.token_ids, one.generated.token_ids[:64]) for one in got[-4:]]
        worst = 0.0
        [expected] = await actor.call(MeasuredActor.log_probs, pairs)
        for answer in await rollout.call(MeasuredRollout.log_probs, pairs):
            for ours, theirs in zip(expected, answer, strict=True):
                worst = max(worst, float(np.abs(ours - theirs).max(initial=0.0)))
        asking.close()
        await weights.sender.close()
        await serving
    return {
        "parameters": float(parameters),
        "own_load_seconds": statistics.median(own[2:]),
        "update_seconds": statistics.median(updates[2:]),
        "load_seconds": statistics.median(pauses[2:]),
        "log_prob_difference": worst,
        "dropped": float(dropped),
    }


def main() -> None:
    engines = int(sys.argv[1]) if sys.argv[1:] else 1
    with tempfile.TemporaryDirectory() as folder:
        path = save_model(Path(folder), hidden=512, layers=14, vocabulary=4096)
        print(json.dumps(ra.run(measure(path, engines))))


if __name__ == "__main__":
    main()
