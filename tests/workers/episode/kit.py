"""Episode workers in virtual time: agents of a test, and an engine that says what a script says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import cache
from typing import Any, Final

import msgspec
import numpy as np

import rlinf_async as ra
from rlinf_async.channels.queue import statistics_of
from rlinf_async.data.prompts import arithmetic_tokenizer, decode
from rlinf_async.episodes import Parsed, ToolCall, tool
from rlinf_async.episodes.parsing import Parser
from rlinf_async.episodes.template import ChatTemplate
from rlinf_async.messages.language import (
    Generated,
    Prompt,
    Request,
    Sample,
    Sampling,
    Tokens,
)
from rlinf_async.workers.episode import EpisodeConfig, EpisodeReport, EpisodeWorker
from rlinf_async.workers.episode.worker import Language

TEMPLATE: Final = (
    "{% if tools %}<system>{% for tool in tools %}{{ tool.function.name }}{% endfor %}{% endif %}"
    "{% for message in messages %}"
    "<{{ 'user' if message.role == 'tool' else message.role }}>{{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)

Script = Callable[[str], str]
"""What the model answers to the text that it has read, special tokens left out"""


@tool(seconds=30)
async def wait(seconds: float) -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    return f"waited {seconds:g}"


def parse(text: str) -> Parsed:
    """``!wait 3``: a call with one argument."""
    if not text.startswith("!"):
        return Parsed(text=text)
    name, _, value = text[1:].partition(" ")
    return Parsed(text="", tool_calls=(ToolCall(name=name, arguments={"seconds": value}),))


@cache
def language() -> Language:
    """One token for each character."""
    tokenizer = arithmetic_tokenizer()
    return Language(
        ChatTemplate(tokenizer, TEMPLATE), parse, lambda tokens: decode(tokenizer, tokens)
    )


def encoded(text: str) -> Tokens:
    """The tokens of an answer, with that of its end."""
    tokenizer = arithmetic_tokenizer()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return np.array([*ids, tokenizer.eos_token_id], np.int32)


class Acting(EpisodeWorker):
    """Runs an agent of the test; ``parser``: reads answers."""

    def __init__(
        self, agent: Any, config: EpisodeConfig | None = None, parser: Parser = parse
    ) -> None:
        super().__init__(config or EpisodeConfig(run="agent"), "")
        self._agent, self._parser = agent, parser

    async def setup(self) -> None:
        self._language = language()._replace(parser=self._parser)


def task(group: int = 0, question: str = "2+2=", **fields: Any) -> Request:
    """The task of an episode."""
    given: dict[str, Any] = {"iteration": 0, "min_version": 0, "group_size": 1, "index": 0} | fields
    messages = ({"role": "user", "content": question},)
    return Request(
        group=group,
        prompt=Prompt(
            index=group,
            text=question,
            token_ids=language().template.opening(messages),
            verifier="exact",
            reference="4",
            messages=messages,
        ),
        sampling=Sampling(max_tokens=60),
        seed=group,
        **given,
    )


class Engine:
    """Answers each turn by a script, after some time; counts what it was asked."""

    def __init__(self, script: Script, seconds: float | Callable[[Request], float] = 1.0) -> None:
        self._script = script
        self._seconds = seconds
        self.asked: list[Request] = []

    async def serve(self, requests: ra.Receiver[Request], turns: ra.Sender[Sample]) -> None:
        """Answer until there are no more requests."""
        with requests, turns:
            async with asyncio.TaskGroup() as group:
                async for request in requests:
                    group.create_task(self._answer(request, turns))

    async def _answer(self, request: Request, turns: ra.Sender[Sample]) -> None:
        self.asked.append(request)
        seconds = self._seconds
        await asyncio.sleep(seconds(request) if callable(seconds) else seconds)
        tokens = encoded(self._script(language().decode(request.prompt.token_ids)))
        most = request.sampling.max_tokens
        finish = "stop" if len(tokens) <= most else "length"
        await turns.put(answer(request, tokens[:most], finish), key=request.name)


def answer(request: Request, tokens: Tokens, finish: Any = "stop") -> Sample:
    """The sample of a turn, as rollout workers send it."""
    count = len(tokens)
    generated = Generated(
        token_ids=tokens,
        log_prob=-np.arange(1, count + 1, dtype=np.float32),
        version=np.full(count, len(request.prompt.token_ids) % 5, np.int32),
        finish=finish,
    )
    text = language().decode(tokens)
    return Sample(request=request, generated=generated, text=text, rollout_rank=3)


class Flow:
    """The channels around episode workers."""

    def __init__(self, cluster: ra.Cluster, max_deliveries: int = 100) -> None:
        self.tasks = cluster.channel(
            Request, name="tasks", capacity=1000, max_deliveries=max_deliveries
        )
        self.requests = cluster.channel(Request, name="requests", capacity=1000)
        self.turns = cluster.channel(
            Sample, name="turns", capacity=1000, max_deliveries=max_deliveries
        )
        self.episodes = cluster.channel(Sample, name="episodes", capacity=1000)

    def run(self, workers: ra.WorkerGroup[Any], rank: int = 0) -> ra.GroupCall[list[EpisodeReport]]:
        """Have this rank run episodes."""
        return workers.call_on(
            [rank],
            EpisodeWorker.run,
            self.tasks.receiver,
            self.requests.sender,
            self.turns.receiver,
            self.episodes.sender,
        )

    async def again(
        self,
        workers: ra.WorkerGroup[Any],
        running: ra.GroupCall[list[EpisodeReport]],
        rank: int = 0,
        lose: Callable[[Flow], None] | None = None,
    ) -> ra.GroupCall[list[EpisodeReport]]:
        """Have this rank die and be run again; ``lose``: takes what is lost with it."""
        running.cancel()
        await running.finished(within=1)
        if lose is not None:
            lose(self)
        return self.run(workers, rank)

    async def put(self, *tasks: Request) -> None:
        """Put tasks, and leave the channel open."""
        for one in tasks:
            await self.tasks.sender.put(one)

    def left(self) -> dict[str, int]:
        """Items that are in the channels or leased from them, by name, where there are any."""
        every = (self.tasks, self.requests, self.turns, self.episodes)
        seen = {one.name: statistics_of(one.queue) for one in every}
        counts = {name: one.depth + one.leases_out for name, one in seen.items()}
        return {name: count for name, count in counts.items() if count}


@asynccontextmanager
async def flowing(
    agent: Any,
    engine: Engine,
    config: EpisodeConfig | None = None,
    workers: int = 1,
    parser: Parser = parse,
) -> AsyncIterator[tuple[Flow, ra.WorkerGroup[Any]]]:
    """Workers that do not run yet, and an engine that does."""
    async with ra.Cluster.local() as cluster:
        flow = Flow(cluster)
        group = await cluster.launch(Acting, agent, config, parser, count=workers)
        serving = asyncio.create_task(
            engine.serve(flow.requests.receiver.clone(), flow.turns.sender.clone())
        )
        with flow.tasks.receiver, flow.requests.sender, flow.episodes.sender, flow.turns.receiver:
            yield flow, group
            flow.requests.close()
            await serving


async def revived(
    agent: Any, engine: Engine, *seconds: float, lose: Callable[[Flow], None] | None = None
) -> Sample:
    """An episode whose worker dies this long after each time that it began; ``lose``: as in
    `Flow.again`."""
    async with flowing(agent, engine) as (flow, group):
        running = flow.run(group)
        await flow.put(task())
        for one in seconds:
            await asyncio.sleep(one)
            running = await flow.again(group, running, lose=lose)
        found = await flow.episodes.receiver.get()
        flow.tasks.sender.close()
        await running
    return found


async def played(
    agent: Any,
    script: Script | Mapping[str, str],
    *tasks: Request,
    parser: Parser = parse,
    **config: Any,
) -> tuple[list[Sample], EpisodeReport]:
    """Run an episode for each task, by default one; the samples by name, and the report."""
    say = script.__getitem__ if isinstance(script, Mapping) else script
    settings = EpisodeConfig(run="agent", **config)
    async with flowing(agent, Engine(say), settings, parser=parser) as (flow, group):
        running = flow.run(group)
        await flow.put(*(tasks or (task(),)))
        flow.tasks.sender.close()
        [report] = await running
        found = [await flow.episodes.receiver.get() for _ in range(report.episodes)]
        # What was being drawn for a task that the episode has left behind is dropped by the job.
        assert flow.left().keys() <= {"turns"}
    return sorted(found, key=lambda one: (one.request.group, one.request.index)), report


def replaced(request: Request, **fields: Any) -> Request:
    """The same request with other fields."""
    return msgspec.structs.replace(request, **fields)
