"""Tokens per second of vLLM, through the rollout worker and bare, by turns: one line of JSON.

    python generate.py [--pairs 7] [--size full|small] [--concurrent 64]

One engine, in a rollout worker's process, answers the same requests in two ways::

    bare      that process calls ``AsyncLLM`` itself, with so many requests in flight
    ours      this process puts the requests into a channel, from which the rollout worker takes
              them, and gets the samples from another

A pair is one measurement of each, one right after the other, so what else the machine does hits
both. What is judged is the median of the pairs' ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import rlinf_async as ra
from rlinf_async.backends.vllm.config import VllmEngineConfig
from rlinf_async.messages.language import Prompt, Request, Sample, Sampling, WeightsTaken
from rlinf_async.messages.weights import WeightUpdate
from rlinf_async.workers.rollout.language import LanguageRolloutWorker

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.rollout.model import save_model

SIZES = {"full": {64: 256, 256: 512}, "small": {4: 4}}
"""requests in flight: requests of one measurement"""
MAX_TOKENS = 96


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


class BareToo(LanguageRolloutWorker):
    """A rollout worker whose engine can be asked without it."""

    async def bare(self, count: int, first: int, concurrent: int) -> tuple[int, float]:
        """Drive ``AsyncLLM`` alone; tokens, and seconds."""
        from rlinf_async.backends.vllm.library import make_sampling

        engine: Any = self._live.engine
        llm, room = engine._llm, asyncio.Semaphore(concurrent)

        async def one(asked: Request) -> int:
            params = make_sampling(
                max_tokens=MAX_TOKENS,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                logprobs=0,
                stop_token_ids=[1],
                seed=asked.seed,
            )
            prompt = {"prompt_token_ids": asked.prompt.token_ids.tolist()}
            made = 0
            async with room:
                async for output in llm.generate(prompt, params, f"{asked.name}/{time.time_ns()}"):
                    made = len(output.outputs[0].token_ids)
            return made

        asked = requests(count, first)
        start = time.perf_counter()
        tokens = sum(await asyncio.gather(*map(one, asked)))
        return tokens, time.perf_counter() - start


class Graph:
    """The worker and its channels."""

    def __init__(self, cluster: ra.Cluster) -> None:
        self.cluster = cluster
        self.asking = cluster.channel(Request, name="requests", capacity=256)
        self.samples = cluster.channel(Sample, name="samples", capacity=256)
        self.weights = cluster.latest(WeightUpdate, name="weights")
        self.taken = cluster.channel(WeightsTaken, name="taken", capacity=8)

    async def start(self, config: VllmEngineConfig) -> None:
        """Launch the worker, and have it serve."""
        self.rollout = await self.cluster.launch(BareToo, config, backend="vllm")
        self.serving = self.rollout.call(
            BareToo.serve,
            self.asking.receiver,
            self.samples.sender,
            self.weights.receiver,
            self.taken.sender,
        )

    async def ours(self, count: int, first: int) -> tuple[int, float]:
        """Send requests, wait for their samples; tokens, and seconds."""
        asked = requests(count, first)
        start = time.perf_counter()
        putting = asyncio.create_task(self._put(asked))
        tokens = 0
        for _ in asked:
            tokens += len((await self.samples.receiver.get()).generated.token_ids)
        await putting
        return tokens, time.perf_counter() - start

    async def bare(self, count: int, first: int, concurrent: int) -> tuple[int, float]:
        """Have the worker's process ask the engine itself."""
        [found] = await self.rollout.call(BareToo.bare, count, first, concurrent)
        return found

    async def stop(self) -> None:
        """Let the worker end."""
        self.asking.close()
        self.weights.sender.close()
        await self.serving

    async def _put(self, asked: list[Request]) -> None:
        for request in asked:
            await self.asking.sender.put(request)


async def measure(folder: str, concurrent: int, count: int, pairs: int) -> dict[str, float]:
    """Both rates with so many requests in flight, after a warm-up of each."""
    config = VllmEngineConfig(
        model=folder,
        weights="folder",
        max_concurrent=concurrent,
        kv_cache_bytes=128 * 2**20,
        context=256,
    )
    rates: dict[str, list[float]] = {"ours": [], "bare": []}
    # New prompts each time: the engine remembers the keys and values of those it has seen.
    first = itertools.count(step=count)
    async with ra.Cluster.process() as cluster:
        graph = Graph(cluster)
        await graph.start(config)
        await graph.ours(concurrent, 1_000_000)
        await graph.bare(concurrent, 2_000_000, concurrent)
        for pair in range(pairs):
            for way in ("ours", "bare") if pair % 2 else ("bare", "ours"):
                if way == "ours":
                    tokens, seconds = await graph.ours(count, next(first))
                else:
                    tokens, seconds = await graph.bare(count, next(first), concurrent)
                rates[way].append(tokens / seconds)
        await graph.stop()
    ratios = [ours / bare for ours, bare in zip(rates["ours"], rates["bare"], strict=True)]
    return {
        f"ours_{concurrent}": statistics.median(rates["ours"]),
        f"bare_{concurrent}": statistics.median(rates["bare"]),
        f"ratio_{concurrent}": statistics.median(ratios),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="The rollout worker against bare vLLM.")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--concurrent", type=int, help="one of the size's; all when left out")
    given = parser.parse_args()
    measured: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = save_model(Path(folder), hidden=64, layers=4)
        for concurrent, count in SIZES[given.size].items():
            if given.concurrent not in (None, concurrent):
                continue
            measured |= ra.run(measure(path, concurrent, count, given.pairs))
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
