"""Environments in processes of their own."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlinf_async.config import ConfigError
from rlinf_async.messages.embodied import Collect
from rlinf_async.messages.spaces import ObservationSpec, numbers_of
from rlinf_async.workers.env import EnvConfig, EnvError, EnvFailed, EnvWorker
from rlinf_async.workers.env.pool import EnvPool
from rlinf_async.workers.env.stage import EnvStage
from rlinf_async.workers.env.worker import Environments
from tests.jobs.embodied.envs import Kitchen
from tests.workers.env.test_async_stage import collected, equal
from tests.workers.env.toy import MAKE, Counting


class Dying(Counting):
    """Its process dies in a step, as a simulator that crashes does."""

    def step(self, action: Any) -> Any:
        if self.at == 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().step(action)


def elsewhere(here: int) -> Counting:
    """Can be made only in the process that says its own id."""
    if os.getpid() != here:
        raise RuntimeError("the licence is for one process")
    return Counting()


def kitchen() -> Kitchen:
    return Kitchen()


def pooled(entry: str = MAKE, envs: int = 2, **settings: Any) -> EnvConfig:
    settings = {"stages": 1, "ready": 1} | settings
    return EnvConfig(entry_point=entry, envs=envs, simulator="pool", **settings)


def made(config: EnvConfig) -> tuple[EnvStage, EnvPool]:
    environments = Environments(config, 0, 0)
    environments.look()
    stage = environments.stage(0)
    return stage, stage._envs  # type: ignore[attr-defined]


def processes_of(pool: EnvPool) -> list[int]:
    """The pool process and its children."""
    parent = pool._process.pid
    return [parent, *map(int, Path(f"/proc/{parent}/task/{parent}/children").read_text().split())]


@pytest.fixture
def stages() -> Iterator[list[EnvStage]]:
    """Stages that are closed after the test."""
    opened: list[EnvStage] = []
    yield opened
    for one in opened:
        one.close()


async def test_a_pool_collects_what_single_environments_collect() -> None:
    tickets = [Collect(iteration=number, steps=4, min_version=0) for number in range(2)]
    settings: dict[str, Any] = {"entry_point": MAKE, "envs": 4, "stages": 2, "seed": 5}
    wanted, _ = await collected(EnvWorker, EnvConfig(**settings), tickets)
    got, _ = await collected(EnvWorker, EnvConfig(**settings, simulator="pool"), tickets)
    equal(got, wanted)


def test_images_texts_and_composite_actions_travel(stages: list[EnvStage]) -> None:
    stage, _ = made(pooled("tests.workers.env.test_pool:kitchen"))
    stages.append(stage)
    stage.reset()
    seen = stage.observation.copy()
    assert seen["camera"].shape == (2, 6, 6, 3)
    assert bytes(seen["instruction"][0]).rstrip(b"\0") == b"grip it"
    outcome = stage.step(np.array([[1.0, 0.5, 0.5]] * 2, np.float32), np.arange(2))
    assert outcome.rows is not None
    assert outcome.reward.tolist() == [1.0] * len(outcome.rows)
    for row in outcome.rows:
        assert (stage.observation["camera"][row] != seen["camera"][row]).any()
    assert numbers_of(stage.observation) is not None


def test_closing_ends_all_processes() -> None:
    stage, pool = made(pooled())
    stage.reset()
    found = processes_of(pool)
    assert len(found) == 3
    stage.close()
    assert not [one for one in found if Path(f"/proc/{one}").exists()]


def test_one_that_does_not_close_is_named_and_killed(caplog: pytest.LogCaptureFixture) -> None:
    place = {"where": "close", "fault": "deaf"}
    stage, pool = made(pooled("tests.workers.env.failing:Failing", envs=1, kwargs=place))
    stage.reset()
    found = processes_of(pool)
    stage.close()
    [said] = [one.message for one in caplog.records]
    assert said.startswith("env tests.workers.env.failing:Failing[0], seed ")
    assert said.endswith(
        "in close() at step 0 of its life and 0 of its episode, does not return "
        "though its pool is closed"
    )
    assert not [one for one in found if Path(f"/proc/{one}").exists()]


def test_what_an_environment_raises_names_it_and_its_seed(stages: list[EnvStage]) -> None:
    stage, _ = made(pooled(kwargs={"fails_at": 1}))
    stages.append(stage)
    stage.reset()
    with pytest.raises(EnvFailed, match=r"toy:make\[\d\], seed \d+, in step\(\) .*ZeroDivisionErr"):
        stage.step(np.ones((2, 1), np.float32), np.arange(2))


def test_a_process_that_dies_is_named_with_its_signal(stages: list[EnvStage]) -> None:
    stage, _ = made(pooled("tests.workers.env.test_pool:Dying", envs=1))
    stages.append(stage)
    stage.reset()
    action, rows = np.ones((1, 1), np.float32), np.arange(1)
    stage.step(action, rows)
    with pytest.raises(
        EnvFailed, match=r"Dying\[0\], seed \d+, in step\(\) at step 2 .* SIGSEGV, in its pool"
    ):
        stage.step(action, rows)


def test_an_environment_that_cannot_be_made_there_says_why() -> None:
    config = pooled("tests.workers.env.test_pool:elsewhere", kwargs={"here": os.getpid()})
    with pytest.raises(EnvError, match="RuntimeError: the licence is for one process"):
        made(config)


def test_arguments_that_do_not_travel_are_named() -> None:
    config = pooled(kwargs={"shows": complex(1.0)})
    with pytest.raises(ConfigError, match="so its kwargs have to be numbers, texts, lists"):
        EnvPool(config, ObservationSpec(), ["a"])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"simulator": "single", "ready": 2}, "are all ready at the same time: leave ready out"),
        ({"simulator": "vector", "ready": "adaptive"}, "or use simulator = 'pool'"),
        ({"simulator": "pool", "ready": 5}, "lie between 1 and the 4 environments of a stage"),
        ({"simulator": "pool", "ready": 0}, "ready is 0; it must be 'adaptive' or lie between 1"),
        ({"simulator": "envpool", "ready": 9}, "lie between 1 and the 4 environments"),
        ({"simulator": "async"}, "simulator = 'async' needs entry_point"),
        ({"simulator": "async", "entry_point": "a:b", "group_size": 2}, "or 'pool'"),
    ],
)
def test_settings_that_do_not_go_together_are_named(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        EnvConfig(id="Toy", envs=8, stages=2, **settings)
