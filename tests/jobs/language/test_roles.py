"""What the run's process asks of its workers, without any."""

from __future__ import annotations

import asyncio
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest

import rlinf_async as ra
from rlinf_async.messages.language import Prompt, Tokens, WeightsTaken
from rlinf_async.runtime.jobs.language.config import LanguageConfig
from rlinf_async.runtime.jobs.language.roles import LanguageChannels, Roles
from rlinf_async.runtime.launching import stated_devices
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

    async def call_on(self, ranks: range, method: object, *arguments: object) -> list[Any]:
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


class Noted:
    """In place of any workers: notes what is asked of them."""

    def __init__(self, whose: str, notes: list[str]) -> None:
        self._whose, self._notes = whose, notes

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def asked(*arguments: Any) -> Any:
            ranks = int(name == "call_on")  # its first argument
            what = arguments[ranks].__name__ if name in ("call", "call_on") else name
            self._notes.append(f"{self._whose} {what}")
            return 0.0 if name == "compare" else [1]

        return asked


@pytest.mark.parametrize(
    ("rollout", "apart"),
    [("", True), ("shared with inference", False), ("shared with actor", False)],
)
def test_an_engine_does_not_start_while_another_role_takes_memory_of_its_device(
    rollout: str, apart: bool
) -> None:
    tables = tomllib.loads(TOY.format(data="none.jsonl"))
    tables["rollout"]["backend"], tables["actor"]["backend"] = "transformers", "fsdp"
    tables["cluster"] |= {"inference_workers": 1, "placement": {"rollout": rollout}}
    config = msgspec.convert(tables, LanguageConfig)

    async def main() -> bool:
        async with ra.Cluster.local(devices=stated_devices("4xH100")) as cluster:
            roles = Roles(cluster, config, LanguageChannels(cluster, config), Path())
            return bool(cast(Any, roles)._apart)

    assert run(main()) is apart


@pytest.mark.parametrize("shared", [True, False])
def test_learners_leave_shared_devices_before_an_engine_starts_and_take_them_in_turns(
    shared: bool,
) -> None:
    preset = "collocated" if shared else "disaggregated"
    tables = tomllib.loads(TOY.format(data="none.jsonl"))
    tables["cluster"]["placement"] = preset
    tables["rollout"]["backend"], tables["actor"]["backend"] = "transformers", "fsdp"
    config = msgspec.convert(tables, LanguageConfig)
    notes: list[str] = []

    async def main() -> None:
        async with ra.Cluster.local() as cluster:
            roles = Roles(cluster, config, LanguageChannels(cluster, config), Path())
            parts = cast(Any, roles)
            parts.learners = Noted("learners", notes)
            parts._rollouts = rollouts = Noted("rollouts", notes)
            parts._launch_rollouts, parts._launch_others = rollouts.launch, Noted("", notes).others
            await roles.launch(None)
            await roles.check_weights([PROMPT], version=1)

    run(main())
    wanted = [
        "learners launch_actors",
        "learners launch_critics",
        "learners offload",  # where devices are shared
        "rollouts launch",
        " others",
        "rollouts version",
        "rollouts log_probs",
        "rollouts stop",
        "learners compare",
        "learners offload",
        "rollouts resume",
    ]
    turns = {"learners offload", "rollouts stop", "rollouts resume"}
    assert notes == [one for one in wanted if shared or one not in turns]


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
