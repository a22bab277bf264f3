"""Tokens per second of vLLM, bare or through the rollout worker: one line of JSON.

    python generate.py bare | ours

The same engine, settings, model, prompts and sampling. ``bare`` drives ``AsyncLLM`` in its own
process with so many requests in flight. ``ours`` puts the same requests into a channel, from which
a rollout worker in a process of its own takes them, and gets the samples from another.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np

import rlinf_async as ra
from rlinf_async.backends.vllm.config import VllmEngineConfig
from rlinf_async.messages.language import Prompt, Request, Sample, Sampling, WeightsTaken
from rlinf_async.messages.weights import WeightUpdate

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.rollout.model import save_model

CONCURRENT = (64, 256)
ROUNDS = 4
"""requests of a measurement, in times the number in flight"""
MAX_TOKENS = 96

Measure = Callable[[list[Request]], Awaitable[int]]


def requests(count: int, first: int) -> list[Request]:
    """Prompts of 16 tokens, each for one response that the model ends or ``MAX_TOKENS`` does."""
    made = []
    for index in range(first, first + count):
        tokens = np.random.default_rng(index).integers(2, 200, 16).astype(np.int32)
        prompt = Prompt(index=index, text="", token_ids=tokens, verifier="none", reference="")
        made.append(
            Request(
                group=index,
                index=0,
                group_size=1,
                iteration=0,
                min_version=0,
                prompt=prompt,
                sampling=Sampling(max_tokens=MAX_TOKENS),
                seed=index,
            )
        )
    return made


async def rates(concurrent: int, measure: Measure) -> dict[str, float]:
    """Tokens per second with so many requests in flight, after a warm-up of one round."""
    await measure(requests(concurrent, 1_000_000))
    asked = requests(ROUNDS * concurrent, 0)
    start = time.perf_counter()
    tokens = await measure(asked)
    return {f"tokens_per_second_{concurrent}": tokens / (time.perf_counter() - start)}


async def bare(config: VllmEngineConfig, concurrent: int) -> dict[str, float]:
    """Drive ``AsyncLLM`` alone; `VllmEngine` only starts it."""
    from rlinf_async.backends.vllm.engine import VllmEngine
    from rlinf_async.backends.vllm.library import make_sampling

    engine = VllmEngine(config)
    await engine.start()
    llm: Any = engine._llm
    room = asyncio.Semaphore(concurrent)

    async def one(asked: Request) -> int:
        params = make_sampling(
            max_tokens=MAX_TOKENS,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            logprobs=0,
            stop_token_ids=[1],
            seed=asked.seed if config.seeded else None,
        )
        prompt = {"prompt_token_ids": asked.prompt.token_ids.tolist()}
        count = 0
        async with room:
            async for output in llm.generate(prompt, params, f"{asked.name}/{time.time_ns()}"):
                count = len(output.outputs[0].token_ids)
        return count

    async def measure(asked: list[Request]) -> int:
        return sum(await asyncio.gather(*(one(request) for request in asked)))

    try:
        return await rates(concurrent, measure)
    finally:
        await engine.close()


async def ours(config: VllmEngineConfig, concurrent: int) -> dict[str, float]:
    """Through a rollout worker and its channels."""
    from rlinf_async.workers.rollout.language import LanguageRolloutWorker

    async with ra.Cluster.process() as cluster:
        asking = cluster.channel(Request, name="requests", capacity=256)
        samples = cluster.channel(Sample, name="samples", capacity=256)
        weights = cluster.latest(WeightUpdate, name="weights")
        taken = cluster.channel(WeightsTaken, name="taken", capacity=8)
        rollout = await cluster.launch(LanguageRolloutWorker, config, backend="vllm")
        serving = rollout.call(
            LanguageRolloutWorker.serve,
            asking.receiver,
            samples.sender,
            weights.receiver,
            taken.sender,
        )

        async def put(asked: list[Request]) -> None:
            for request in asked:
                await asking.sender.put(request)

        async def measure(asked: list[Request]) -> int:
            putting = asyncio.create_task(put(asked))
            tokens = 0
            for _ in asked:
                tokens += len((await samples.receiver.get()).generated.token_ids)
            await putting
            return tokens

        measured = await rates(concurrent, measure)
        asking.close()
        await weights.sender.close()
        await serving
    return measured


def main() -> None:
    run = {"bare": bare, "ours": ours}[sys.argv[1]]
    measured: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = save_model(Path(folder), hidden=64, layers=4)
        for concurrent in CONCURRENT:
            config = VllmEngineConfig(
                model=path,
                weights="folder",
                max_concurrent=concurrent,
                kv_cache_bytes=128 * 2**20,
                context=256,
            )
            measured |= ra.run(run(config, concurrent))
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
