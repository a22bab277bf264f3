"""The embodied jobs with their policies, and a simulator, on one GPU."""

from __future__ import annotations

import math
import pathlib
from typing import Any

import numpy as np
import pytest
import torch

from rlinf_async.backends.fsdp.embodied import EmbodiedTrainer
from rlinf_async.weights.pack import unpack
from tests.backends import test_embodied_trainer as numbers
from tests.backends.vision_language import kit as vision_language
from tests.gpu.kit import DEVICE, assert_near
from tests.jobs.embodied.kit import SMALL, Job
from tests.jobs.embodied_sac import kit as sac

replace: Any = __import__("msgspec").structs.replace


@pytest.fixture
def job(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> Job:
    made = Job(tmp_path, capsys)
    made.file.write_text(SMALL.replace('backend = "local"', 'backend = "process"'))
    return made


def check_trained(job: Any, rows: int = 6) -> None:
    assert job.summary.outcome == "finished"
    assert job.summary.restarts == {}
    assert len(job.iterations) == rows
    for row in job.iterations:
        for name, number in row.items():
            if name.endswith("_loss") and number:
                assert math.isfinite(float(number)), name


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_policy_on_the_device_trains(job: Job, env: str, workers: int) -> None:
    job.succeed("--env.id", env, "--cluster.rollout_workers", workers)
    check_trained(job)


@pytest.mark.parametrize("device", ["", "shared with actor"], ids=["sees all", "has it"])
def test_a_simulator_on_the_device_gives_its_tensors(job: Job, device: str) -> None:
    own = ("--cluster.placement.env", device) if device else ()
    entry = ("--env.id", "Points", "--env.entry_point", "tests.gpu.envs:points")
    job.succeed(*entry, "--env.simulator", "vector", *own)
    check_trained(job)
    assert job.summary.env_steps == 384


def test_a_run_goes_on_from_its_checkpoint_on_the_cpu(job: Job) -> None:
    job.succeed("--training.total_steps", 192)
    cpu = ("--cluster.placement.actor", "cpu", "--cluster.placement.rollout", "cpu")
    job.succeed("--resume", *cpu)
    assert job.summary.iterations == 6


def test_soft_actor_critic_trains(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = sac.Job(tmp_path, capsys)
    job.file.write_text(sac.SMALL.replace('backend = "local"', 'backend = "process"'))
    job.succeed("--env.id", "Pendulum-v1")
    check_trained(job)


def on(config: Any, device: str) -> EmbodiedTrainer:
    return EmbodiedTrainer(replace(config, fsdp=replace(config.fsdp, device=device)), 1, 0)


@pytest.mark.parametrize("fused", [True, False])
def test_a_policy_learns_what_the_cpu_learns(fused: bool) -> None:
    config = replace(numbers.CONFIG, ppo=replace(numbers.CONFIG.ppo, fused=fused))
    here, there = on(config, DEVICE), on(config, "cpu")
    for seed in range(3):
        mine, theirs = (one.train(numbers.iteration(seed)) for one in (here, there))
        for name, number in theirs.items():
            if name.endswith("loss"):
                assert mine[name] == pytest.approx(number, abs=1e-4), name
    assert_near(unpack(here.publish()), unpack(there.publish()), 1e-4)


def test_a_vision_language_action_policy_learns_what_the_cpu_learns() -> None:
    config = vision_language.trainer_config()
    here, there = on(config, DEVICE), on(config, "cpu")
    batch = [vision_language.trajectory(stage) for stage in range(2)]
    for one in (here, there):
        one.train(batch)
    mine, theirs = unpack(here.publish()), unpack(there.publish())
    assert_near(mine, theirs, 2e-3)
    largest = max(float(one.float().abs().max()) for one in mine.values())
    assert np.isfinite(largest)


def test_the_device_is_there_after_all_of_them() -> None:
    assert float(torch.ones(3, device=DEVICE).sum()) == 3.0
