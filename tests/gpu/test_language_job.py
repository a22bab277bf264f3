"""The language job on one GPU, by the command line: actors and engines take turns on it."""

from __future__ import annotations

import math
import pathlib
from typing import Any

import pytest

from tests.gpu.kit import DEVICE
from tests.jobs.language.kit import TINY, Job

PROCESS = ("--cluster.backend", "process")
LETTERS = ("--data.verifier", "tests.jobs.language.verifiers:letters")
TURNS = ("--cluster.placement.actor", "0", "--cluster.placement.rollout", "shared with actor")
HALF_PRECISION = (
    *("--actor.precision", "bfloat16", "--rollout.transformers.dtype", "bfloat16"),
    *("--actor.publish_precision", "bfloat16"),
)
"""the comparison of the two engines' log-probs is on in every run"""


@pytest.fixture
def job(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> Job:
    """With a real model, on processes."""
    return Job(tmp_path, capsys, TINY.replace('backend = "local"', 'backend = "process"'))


def check_trained(job: Job, iterations: int = 4) -> None:
    """Every iteration trained on weights that were sampled by the version before."""
    summary = job.summary
    assert summary.outcome == "finished"
    assert summary.restarts == {}
    assert summary.samples == 8 * iterations
    assert len(job.iterations) == iterations
    for row in job.iterations:
        assert math.isfinite(float(row["policy_loss"]))
        assert float(row["grad_norm"]) > 0.0
    assert summary.staleness is not None
    assert summary.staleness.max == 0


def test_check_finds_the_gpu_and_lets_all_share_it(job: Job) -> None:
    ended = job.command("check", job.file)
    assert ended.code == 0, ended.err
    rows = [line for line in ended.out.splitlines() if f"{DEVICE}:0" in line]
    assert [next(w for w in line.split() if w.isalpha()) for line in rows] == ["actor", "rollout"]


@pytest.mark.parametrize("way", [(), HALF_PRECISION], ids=["float32", "bfloat16"])
def test_actor_and_engine_take_turns_and_agree_on_log_probs(
    job: Job, way: tuple[object, ...]
) -> None:
    job.succeed(*LETTERS, *way, "--training.check_weights_every", 1)
    check_trained(job)


def test_a_critic_and_inference_workers_share_the_device_too(job: Job) -> None:
    gae = ("--actor.advantage.name", "gae", "--cluster.critics", 1, "--critic.optimizer.lr", 1e-2)
    reference = ("--cluster.inference_workers", 1, "--actor.advantage.kl_coefficient", 0.01)
    job.succeed(*LETTERS, *gae, *reference)
    check_trained(job)
    values = [float(row["critic_value"]) for row in job.iterations]
    assert values[0] == 0.0
    assert all(math.isfinite(one) for one in values)


@pytest.mark.parametrize("onto", [(), "cpu"], ids=["the same", "the cpu"])
def test_a_run_goes_on_from_its_checkpoint(job: Job, onto: Any) -> None:
    job.succeed(*LETTERS, "--training.iterations", 2)
    placed: tuple[object, ...] = ()
    if onto:
        placed = ("--cluster.placement.actor", onto, "--cluster.placement.rollout", onto)
    job.succeed(*LETTERS, "--training.iterations", 4, "--resume", *placed)
    assert job.summary.iterations == 4
    assert len(job.iterations) == 4
    assert job.checkpoints == ["version-000002", "version-000004"]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_megatron_takes_turns_with_the_engine(job: Job, precision: str) -> None:
    pytest.importorskip("megatron.core")
    settings = ("--actor.backend", "megatron", "--actor.precision", precision)
    job.succeed(*LETTERS, *settings, "--training.check_weights_every", 1)
    check_trained(job)


def test_megatron_trains_on_the_cpu_beside_an_engine_on_the_device(job: Job) -> None:
    """It computes on any GPU that it sees, and so is shown none."""
    pytest.importorskip("megatron.core")
    job.succeed(*LETTERS, "--actor.backend", "megatron", "--cluster.placement.actor", "cpu")
    check_trained(job)


def test_two_actors_on_one_device_are_refused_before_anything_starts(job: Job) -> None:
    """NCCL refuses two ranks on one device, with an error that says little."""
    ended = job.train("--cluster.actors", 2, *TURNS)
    assert ended.code == 2
    assert "2 workers with 1 devices each need 2, but actor has 1" in ended.err
    assert not job.out.exists() or not (job.out / "metrics.csv").exists()


def test_two_engines_of_transformers_on_one_device_are_refused(job: Job) -> None:
    """vLLM's share a device, each with its share of the memory."""
    half = ("--cluster.placement.rollout.devices_per_worker", 0.5)
    ended = job.train("--cluster.placement.rollout.devices", "0", *half)
    assert ended.code == 2
    assert "each rollout worker uses one device, and shares it with no other" in ended.err


def test_a_device_that_is_not_there_is_refused(job: Job) -> None:
    ended = job.train("--cluster.placement.actor", "63")
    assert ended.code == 2
    assert "device 63 is not there" in ended.err
