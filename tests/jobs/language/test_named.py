"""Every registered advantage and loss is reached from a configuration, and trains."""

from __future__ import annotations

import math

import pytest

from rlinf_async.algorithms.config import PAIRED
from rlinf_async.algorithms.language.advantages import group_advantages
from rlinf_async.algorithms.language.losses import language_losses
from tests.jobs.language.kit import Job

ONE = (
    *("--training.iterations", 1, "--evaluation.samples", 0),
    *("--data.verifier", "tests.jobs.language.verifiers:letters"),
)

NEEDS: dict[str, tuple[object, ...]] = {
    "gae": ("--cluster.critics", 1),
    "turn_grpo": (
        *("--episode.run", "tests.jobs.language.agents:forks", "--cluster.episode_workers", 1),
    ),
}
"""settings without which a run with this advantage is refused"""


TAUGHT = {"distill"}
"""losses that need a teacher: tests/jobs/language/test_distillation.py"""


@pytest.mark.parametrize("name", group_advantages.names())
def test_a_model_is_trained_with_every_advantage(tiny: Job, name: str) -> None:
    needs = NEEDS.get(name, ())
    tiny.succeed(*ONE, "--actor.advantage.name", name, *needs)
    [row] = tiny.iterations
    assert math.isfinite(float(row["policy_loss"]))
    assert float(row["grad_norm"]) > 0.0


@pytest.mark.parametrize("name", sorted({*language_losses.names()} - PAIRED - TAUGHT))
def test_a_model_is_trained_with_every_loss(tiny: Job, name: str) -> None:
    tiny.succeed(*ONE, "--actor.loss.name", name, "--actor.advantage.name", "rloo")
    [row] = tiny.iterations
    assert math.isfinite(float(row["policy_loss"]))
    assert float(row["grad_norm"]) > 0.0


def test_several_epochs_are_several_optimizer_steps_of_one_version(tiny: Job) -> None:
    summary = tiny.succeed(
        *("--training.iterations", 2, "--data.verifier", ONE[-1], "--actor.optimizer.lr", 1e-2),
        *("--actor.epochs", 3, "--actor.global_batches", 2, "--training.max_staleness", 1),
    )
    assert [row["epochs"] for row in tiny.iterations] == ["3", "3"]
    assert [row["version"] for row in tiny.iterations] == ["1", "2"]
    assert float(tiny.iterations[0]["approx_kl"]) > 0.0  # later steps meet another policy
    assert summary.samples == 16
    assert summary.staleness is not None
    assert summary.staleness.max <= 1
