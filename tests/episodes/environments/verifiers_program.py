"""Episodes of verifiers' environments, in the Python that has the package; it prints what came of
them, as JSON. Run as a program by `test_verifiers`."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import uvloop

from rlinf_async.config import ConfigError
from rlinf_async.episodes.agents import load_agent
from rlinf_async.episodes.endpoint import Endpoint, EndpointConfig
from rlinf_async.episodes.environments import Asked
from rlinf_async.episodes.episode import RunEpisode
from rlinf_async.messages.language import Scored
from tests.episodes.endpoint.kit import Scripted, assert_exact, episode_of
from tests.episodes.environments.kit import agent, ended

ENV = {
    "taskset": {"id": "sums-v1"},
    "agent": {"harness": {"id": "sums-v1"}, "runtime": {"type": "subprocess"}},
}


async def main() -> dict[str, Any]:
    """Play each case once; six episodes at once in the first."""
    run = agent("verifiers", env=ENV)
    endpoint = Endpoint(EndpointConfig())
    found: dict[str, Any] = {}

    async def one(
        number: int, answers: list[str], run: RunEpisode = run, **limits: int
    ) -> list[Any]:
        model = Scripted(answers)
        episode = episode_of(model, endpoint=endpoint, **limits)  # type: ignore[arg-type]
        episode.task = msgspec.structs.replace(episode.task, reference=str(number))
        ending = await ended(run, episode)
        await endpoint.end(episode)
        assert_exact(episode, model)
        outcome: Any = ending.outcome
        said = outcome.reward if isinstance(outcome, Scored) else getattr(outcome, "error", "")
        return [said, len(model.draws), episode.metrics, len(episode.chats)]

    answers = [[str(at), str(at + 1 if at % 2 else at)] for at in range(6)]
    found["at once"] = await asyncio.gather(*(one(at, said) for at, said in enumerate(answers)))
    workers = agent("verifiers", env=ENV), agent("verifiers", env=ENV)  # in one process
    both = [one(1, answers[1], each) for each in workers]
    found["two workers"] = await asyncio.gather(*both)
    found.update(await fixed_agents(endpoint, one))
    found["a row once"] = await rows(one)
    found["scoring raises"] = await one(3, ["1", "raise"])
    found["a limit"] = await one(3, ["4", "4"], turns=1)
    found["no such task"] = await one(20, [])
    found["keys left"] = [name for name in os.environ if name.startswith("RLINF_ASYNC_EPISODE")]
    for name, env, tasks in (
        ("unknown", {"taskset": {"id": "none-v1"}}, 0),
        ("strange", {**ENV, "x": 1}, 0),
        ("enough", ENV, 20),
        ("too few", ENV, 21),
    ):
        try:
            load_agent("verifiers", ("episode", "run"), {"env": env}, Asked(tasks=tasks))
        except ConfigError as error:
            found[name] = str(error)
    await endpoint.aclose()
    return found


async def fixed_agents(endpoint: Endpoint, one: Callable[..., Any]) -> dict[str, Any]:
    """An agent that is not trained, without a model of its own and with one."""
    duo = {"id": "duo-v1", "taskset": ENV["taskset"]}
    shared = await one(3, ["a", "4", "b", "c"], agent("verifiers", env=duo))
    elsewhere = episode_of(Scripted(["no", "yes"]), endpoint=endpoint)
    os.environ["JUDGE"] = elsewhere.key
    url = f"{elsewhere.base_url}/v1"
    client = {"type": "eval", "base_url": url, "api_key_var": "JUDGE"}
    judge = {"model": "another", "client": client}
    own = await one(3, ["a", "4"], agent("verifiers", env={**duo, "judge": judge}))
    await endpoint.end(elsewhere)
    return {"fixed": shared, "fixed apart": [*own, elsewhere.turns]}


async def rows(one: Callable[..., Any]) -> list[Any]:
    """An episode is cancelled while its row is read, and the next one wants a later row."""
    import sums_v1  # type: ignore[import-not-found]

    run = agent("verifiers", env=ENV)
    sums_v1.READING.clear()
    sums_v1.OPEN.clear()
    first = asyncio.create_task(one(sums_v1.SLOW, [], run))
    await asyncio.to_thread(sums_v1.READING.wait)
    first.cancel()
    second = asyncio.create_task(one(sums_v1.SLOW + 1, ["x", "12"], run))
    await asyncio.wait([second], timeout=0.5)  # would have failed by then
    early = second.done()
    sums_v1.OPEN.set()
    await asyncio.wait([first])
    return [early, await second, first.cancelled()]


if __name__ == "__main__":
    runs = {"asyncio": asyncio.run, "uvloop": uvloop.run}
    print(json.dumps(runs[sys.argv[1]](main())))
