"""Tokens per second of an engine whose episodes wait for tools, over those of the same requests
without tools, by turns: one line of JSON.

    python tools.py [--engine toy|vllm] [--size full|small] [--pairs 2]

One engine, in a rollout worker's process, answers the same requests in two ways::

    with tools    an episode worker has 256 episodes open; after each answer but the last a tool
                  takes 0.1 to 2 s
    without       this process puts the requests that were asked for, 256 at a time

A pair is one measurement of each, one right after the other. The rate is that of the answers in the
middle, while all episodes are open: not of the first fifth, nor of the last quarter.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import rlinf_async as ra
from rlinf_async.backends.toy.config import ToyEngineConfig
from rlinf_async.backends.vllm.config import VllmEngineConfig
from rlinf_async.episodes import Episode, Parsed, ToolCall, tool
from rlinf_async.messages.language import Generated, Request, Sample, Sampling, WeightsTaken
from rlinf_async.messages.weights import WeightUpdate
from rlinf_async.workers.episode import EpisodeConfig, EpisodeWorker
from rlinf_async.workers.episode.worker import Language
from rlinf_async.workers.rollout.language import LanguageRolloutConfig, LanguageRolloutWorker
from tests.workers.episode.kit import language, replaced, task


class Size(NamedTuple):
    """How much is measured."""

    episodes: int
    open: int
    slots: int
    step: float
    """seconds of a step of the toy engine"""


SIZES: Final = {"full": Size(768, 256, 64, 0.02), "small": Size(48, 24, 2, 0.004)}
TURNS: Final = (1, 6)
"""fewest and most turns of an episode"""
SECONDS: Final = (0.1, 2.0)
MEAN_TOKENS, MOST = 40, 96
CONTEXT: Final = 1024
MIDDLE: Final = (0.2, 0.75)
"""answers that count, as shares of all"""


@tool(seconds=10)
async def look_up(seconds: float) -> str:
    """Take some time."""
    await asyncio.sleep(seconds)
    return "17"


def parse(text: str) -> Parsed:
    """Each answer calls the tool; how long that takes follows from its letters."""
    seconds = random.Random(text).uniform(*SECONDS)
    call = ToolCall(name=look_up.name, arguments={"seconds": seconds})
    return Parsed(text=text, tool_calls=(call,))


async def agent(episode: Episode) -> float:
    """As many turns as the task's number says, with a call in between."""
    chat = episode.chat(tools=[look_up])
    turn = await chat.turn()
    for _ in range(random.Random(episode.task.index).randrange(TURNS[0] - 1, TURNS[1])):
        await chat.answer(turn)
        turn = await chat.turn()
    return 0.0


class Acting(EpisodeWorker):
    """Runs that agent, with a template of the tests."""

    async def setup(self) -> None:
        self._agent = agent
        template, _, decode = language()
        self._language = Language(template, parse, decode)

    async def cpu(self) -> float:
        """Seconds of CPU of this process."""
        return time.process_time()


class Asked(NamedTuple):
    """What a rollout worker has answered."""

    requests: list[Request]
    ended: list[tuple[float, int]]
    """time, and tokens, of each answer"""


class Measured(LanguageRolloutWorker):
    """Notes what its engine was asked, and when it had answered."""

    asked = Asked([], [])

    async def generate(self, request: Request) -> Generated | None:
        self.asked.requests.append(request)
        found = await super().generate(request)
        if found is not None:
            self.asked.ended.append((time.perf_counter(), len(found.token_ids)))
        return found

    async def take(self) -> tuple[list[Request], list[tuple[float, int]]]:
        """What was noted since the last call."""
        found, self.asked = self.asked, Asked([], [])
        return found.requests, found.ended


class Graph:
    """The workers, and the channels around them."""

    def __init__(self, cluster: ra.Cluster, size: Size) -> None:
        self.cluster, self.size = cluster, size
        self.tasks = cluster.channel(Request, name="tasks", capacity=size.episodes)
        self.requests = cluster.channel(Request, name="requests", capacity=size.open)
        self.answers = cluster.channel(Sample, name="answers", capacity=size.open)
        self.episodes = cluster.channel(Sample, name="episodes", capacity=size.episodes)
        self.weights = cluster.latest(WeightUpdate, name="weights")
        self.taken = cluster.channel(WeightsTaken, name="taken", capacity=8)

    async def start(self, engine: Any, backend: str) -> None:
        """Launch the workers, and have them serve."""
        config = EpisodeConfig(
            run="agent", concurrent=self.size.open, max_turns=TURNS[1], max_tokens=CONTEXT
        )
        serving = LanguageRolloutConfig(max_concurrent=self.size.open)
        self.acting = await self.cluster.launch(Acting, config, "")
        self.rollout = await self.cluster.launch(Measured, engine, serving, backend=backend)
        self.serving = self.rollout.call(
            Measured.serve,
            self.requests.receiver,
            self.answers.sender,
            self.weights.receiver,
            self.taken.sender,
        )
        self.running = self.acting.call(
            Acting.run,
            self.tasks.receiver,
            self.requests.sender,
            self.answers.receiver,
            self.episodes.sender,
        )

    async def with_tools(self, first: int) -> tuple[list[Request], float, float]:
        """The requests of new episodes, tokens/s, and milliseconds of the episode worker's CPU for
        a turn."""
        [began] = await self.acting.call(Acting.cpu)
        for number in range(first, first + self.size.episodes):
            await self.tasks.sender.put(replaced(task(number), sampling=Sampling(max_tokens=MOST)))
        for _ in range(self.size.episodes):
            await self.episodes.receiver.get()
        [ended] = await self.acting.call(Acting.cpu)
        [(requests, answers)] = await self.rollout.call(Measured.take)
        return requests, _rate(answers), (ended - began) / len(requests) * 1000

    async def without(self, requests: list[Request]) -> float:
        """Tokens/s of these requests."""
        room = asyncio.Semaphore(self.size.open)

        async def put() -> None:
            for number, one in enumerate(requests):
                await room.acquire()
                await self.requests.sender.put(
                    msgspec.structs.replace(one, group=number, turn=0, partial=None)
                )

        putting = asyncio.create_task(put())
        for _ in requests:
            await self.answers.receiver.get()
            room.release()
        await putting
        [(_, answers)] = await self.rollout.call(Measured.take)
        return _rate(answers)


def _rate(ended: list[tuple[float, int]]) -> float:
    """Tokens/s of the answers in the middle."""
    ended = sorted(ended)
    first, last = (int(share * len(ended)) for share in MIDDLE)
    tokens = sum(count for _, count in ended[first + 1 : last + 1])
    return tokens / (ended[last][0] - ended[first][0])


async def measured(engine: Any, backend: str, size: Size, pairs: int) -> dict[str, float]:
    """Alternate measurements of both kinds; medians."""
    rates, bare, ratios, cpu = [], [], [], []
    async with ra.Cluster.process() as cluster:
        graph = Graph(cluster, size)
        await graph.start(engine, backend)
        with graph.answers.receiver, graph.requests.sender, graph.tasks.sender:
            if backend == "toy":  # the other one has its folder's
                await graph.weights.sender.publish(WeightUpdate(0, (), 0))
            for pair in range(pairs):
                requests, rate, each = await graph.with_tools(pair * size.episodes)
                other = await graph.without(requests)
                print(f"{rate:.0f} tokens/s, {other:.0f} without tools: {rate / other:.3f} x")
                rates.append(rate)
                bare.append(other)
                ratios.append(rate / other)
                cpu.append(each)
            graph.tasks.sender.close()
            await graph.running
            graph.requests.sender.close()
            await graph.serving
    return {
        "tools": statistics.median(rates),
        "without": statistics.median(bare),
        "ratio": statistics.median(ratios),
        "episode_cpu_ms": statistics.median(cpu),
        "load": os.getloadavg()[0],
    }


def main() -> None:
    """Print one line of JSON at the end."""
    parser = argparse.ArgumentParser(prog="tools.py")
    parser.add_argument("--engine", choices=["toy", "vllm"], default="toy")
    parser.add_argument("--size", choices=list(SIZES), default="full")
    parser.add_argument("--pairs", type=int, default=2)
    given = parser.parse_args()
    size = SIZES[given.size]
    with tempfile.TemporaryDirectory() as folder:
        engine: Any = ToyEngineConfig(
            slots=size.slots,
            seconds_per_step=size.step,
            mean_tokens=MEAN_TOKENS,
            tail=0.5,
            vocabulary=16,
        )
        if given.engine == "vllm":
            from benchmarks.rollout.model import save_model

            engine = VllmEngineConfig(
                model=save_model(Path(folder), hidden=64, layers=2, context=CONTEXT),
                weights="folder",
                max_concurrent=size.slots,
                kv_cache_bytes=512 * 2**20,
                context=CONTEXT,
            )
        print(json.dumps(asyncio.run(measured(engine, given.engine, size, given.pairs))))


if __name__ == "__main__":
    main()
