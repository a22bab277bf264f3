"""What the run's process asks of its workers, without any."""

from __future__ import annotations

import asyncio
import tomllib
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np

import rlinf_async as ra
from rlinf_async.messages.language import Prompt, Tokens, WeightsTaken
from rlinf_async.runtime.jobs.language.channels import LanguageChannels
from rlinf_async.runtime.jobs.language.config import LanguageConfig
from rlinf_async.runtime.jobs.language.roles import Roles
from rlinf_async.testing import run, wait_all_blocked
from rlinf_async.workers.rollout.language import LanguageRolloutWorker
from tests.jobs.language.kit import TOY

PROMPT = Prompt(
    index=0, text="", token_ids=np.arange(3, dtype=np.int32), verifier="numeric", reference="2"
)


class Rollouts:
    """In place of two workers: one takes the weights just after it has answered, and while the
    other has not yet."""

    def __init__(self, taken: ra.Sender[WeightsTaken]) -> None:
        self._taken = taken
        self._version = 0

    async def call(self, method: object, *arguments: object) -> list[Any]:
        if method is LanguageRolloutWorker.log_probs:
            return [[]]
        answers = [self._version, 1]
        self._version = 1
        await self._taken.put(WeightsTaken(rollout_rank=0, version=1, checksum=0, seconds=0.0))
        await wait_all_blocked()
        return answers


class Learners:
    """In place of an actor."""

    async def compare(self, sequences: list[tuple[Tokens, Tokens]], answer: Any) -> float:
        return 0.0


def test_weights_that_are_taken_while_the_versions_are_asked_for_are_not_waited_for_again() -> None:
    config = msgspec.convert(tomllib.loads(TOY.format(data="none.jsonl")), LanguageConfig)
    config = msgspec.structs.replace(
        config, rollout=msgspec.structs.replace(config.rollout, backend="transformers")
    )

    async def main() -> float | None:
        async with ra.Cluster.local() as cluster:
            channels = LanguageChannels(cluster, config)
            roles = Roles(cluster, config, channels, Path())
            parts = cast(Any, roles)
            parts._rollouts = Rollouts(channels.taken.sender)
            parts.learners = Learners()
            watching = asyncio.create_task(parts._watch_versions())
            try:
                return await roles.check_weights([PROMPT], version=1)
            finally:
                watching.cancel()

    assert run(main()) == 0.0
