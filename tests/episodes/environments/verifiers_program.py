"""Episodes of verifiers' environments, in the Python that has the package; it prints what came of
them, as JSON. Run as a program by `test_verifiers`."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

import msgspec
import uvloop

from rlinf_async.config import ConfigError
from rlinf_async.episodes.endpoint import Endpoint, EndpointConfig
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

    async def one(number: int, answers: list[str], **limits: int) -> list[Any]:
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
    found["scoring raises"] = await one(3, ["1", "raise"])
    found["a limit"] = await one(3, ["4", "4"], turns=1)
    found["no such task"] = await one(20, [])
    found["keys left"] = [name for name in os.environ if name.startswith("RLINF_ASYNC_EPISODE")]
    for name, env in (("unknown", {"taskset": {"id": "none-v1"}}), ("strange", {**ENV, "x": 1})):
        try:
            agent("verifiers", env=env)
        except ConfigError as error:
            found[name] = str(error)
    await endpoint.aclose()
    return found


if __name__ == "__main__":
    runs = {"asyncio": asyncio.run, "uvloop": uvloop.run}
    print(json.dumps(runs[sys.argv[1]](main())))
