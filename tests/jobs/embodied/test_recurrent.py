"""Runs of a recurrent policy: what it remembers arrives, and is trained on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from rlinf_async.backends.fsdp.embodied import EmbodiedTrainer
from rlinf_async.backends.fsdp.rollout_batch import flat_batch
from rlinf_async.messages.embodied import Trajectory
from tests.jobs.embodied.kit import ENTRY, Job

GRU = ("--actor.fsdp.policy.name", "gru", "--actor.fsdp.policy.hidden_sizes", "[8]")
WALK = ("--env.id", "Walk", "--env.entry_point", f"{ENTRY}:Walk")


@pytest.fixture
def differences(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The largest difference of log-probs between rollout and actor, of each iteration."""
    train, found = EmbodiedTrainer.train, list[float]()

    def compared(trainer: EmbodiedTrainer, given: Sequence[Trajectory]) -> Any:
        ordered = sorted(given, key=lambda one: (one.env_rank, one.stage))
        batch = flat_batch(trainer.manager, trainer._policy, ordered, trainer.config)
        with torch.no_grad():
            evaluated = trainer.manager.model(batch.observation, batch.action)
        found.append((evaluated.log_prob - batch.log_prob).abs().max().item())
        if trainer.version == 1:  # after 16 steps no episode of `Walk` has just begun
            assert any(np.any(one.memory) for one in ordered if one.memory is not None)
        return train(trainer, given)

    monkeypatch.setattr(EmbodiedTrainer, "train", compared)
    return found


@pytest.mark.parametrize(
    "form",
    [WALK, (*WALK, "--cluster.rollout_workers", 0), ("--env.simulator", "vector")],
    ids=["apart", "together", "vector"],
)
def test_log_probs_of_rollout_and_actor_agree_over_episodes_and_iterations(
    job: Job, differences: list[float], form: tuple[object, ...]
) -> None:
    summary = job.succeed(*GRU, *form)
    assert summary.iterations == 6
    assert summary.evaluation_episodes == 3
    assert len(differences) == 6
    assert max(differences) < 1e-4


def test_it_is_trained_in_lower_precision(job: Job) -> None:
    summary = job.succeed(*GRU, *WALK, "--actor.fsdp.precision", "bfloat16")
    assert summary.iterations == 6


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (("--actor.ppo.minibatch_size", 24), "24 steps are no whole sequences of"),
        ((*WALK, "--env.action_chunk", 2), "policy 'gru': it acts once for each observation"),
        (
            ("--env.group_size", 2, "--actor.advantage.name", "grpo"),
            "env.group_size: 2, but the recurrent policy 'gru' is trained on whole iterations",
        ),
        (
            ("--demonstrations.policy", f"{ENTRY}:rooms"),
            "the recurrent policy 'gru' cannot clone demonstrations",
        ),
        (
            ("--env.id", "Kitchen", "--env.entry_point", f"{ENTRY}:Kitchen"),
            "policy 'gru': an MLP takes one vector of numbers",
        ),
    ],
)
def test_what_a_recurrent_policy_cannot_have_is_named(
    job: Job, wrong: tuple[object, ...], message: str
) -> None:
    ended = job.train(*GRU, *wrong)
    assert ended.code == 2, ended.err
    assert message in ended.err
    assert not job.out.exists()
