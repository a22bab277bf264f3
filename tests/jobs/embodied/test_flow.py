"""Runs of the flow policy: cloned by flow matching, trained by PPO and GRPO, refused by name."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest

from tests.jobs.embodied.kit import Job, record_training

REACH = "examples/reach_env.py:ReachTargets"
EXPERT = "examples/reach_env.py:expert"
FLOW = "--actor.fsdp.policy.flow."
TINY = (
    *("--env.id", "reach", "--env.entry_point", REACH, "--env.actions", "rescale"),
    *("--env.kwargs.pixels_only", "true", "--env.action_chunk", "4"),
    *("--actor.fsdp.policy.name", "flow_action", "--actor.fsdp.policy.hidden_sizes", "[8]"),
    *("--actor.fsdp.policy.channels", "[4, 4, 4]", "--actor.normalize_reward", "false"),
    *("--training.total_steps", "128", "--actor.ppo.minibatch_size", "16"),
)


@pytest.mark.parametrize("noise", ["network", "sde"])
def test_a_run_clones_goes_on_by_ppo_and_is_resumed(
    job: Job, noise: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = record_training(monkeypatch)
    arguments = (
        *(*TINY, f"{FLOW}noise", noise, f"{FLOW}steps", 3),
        *("--demonstrations.policy", EXPERT, "--demonstrations.episodes", 2),
        *("--actor.cloning.steps", 3, "--actor.ppo.epochs", 1, "--actor.ppo.minibatch_size", 16),
        *("--actor.ppo.log_prob_level", "action", "--training.checkpoint_every", 1),
    )
    summary = job.succeed(*arguments)
    assert (summary.iterations, summary.env_steps) == (2, 128)
    assert float(str(summary.extra["cloning_loss"])) > 0.0
    for call in trained:
        for one in call.batch:
            assert one.chain is not None
            assert one.chain.shape == (*one.action.shape[:2], 4 * 8)
            # What was executed is what the chain ends in.
            np.testing.assert_array_equal(one.chain[..., -8:], one.action)
    # One update of everything: its log-probs are those of the worker that acted.
    assert all(float(row["approx_kl"]) < 1e-6 for row in job.iterations)
    assert job.succeed(*arguments, "--resume", "--training.total_steps", 192).iterations == 3


def test_groups_of_episodes_are_trained_by_grpo(job: Job) -> None:
    summary = job.succeed(
        *(*TINY, "--env.group_size", "2", "--actor.advantage.name", "grpo"),
        *("--actor.ppo.normalize_advantage", "none", "--actor.ppo.loss.value_coefficient", "0"),
        *("--actor.ppo.loss.entropy_coefficient", "0.01", "--actor.ppo.log_prob_level", "token"),
    )
    assert summary.iterations == 2
    assert all(float(row["skipped_updates"]) == 0.0 for row in job.iterations)


@pytest.mark.usefixtures("no_cluster")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ((f"{FLOW}steps", "0"), "steps is 0; it must be at least 1"),
        ((f"{FLOW}noise", "none"), "actor.fsdp.policy.flow.noise: "),
        ((f"{FLOW}least_deviation", "0"), "least_deviation is 0.0; it must be above 0"),
        ((f"{FLOW}least_deviation", "0.3"), "which is above largest_deviation = 0.2"),
        ((f"{FLOW}largest_deviation", "nan"), "largest_deviation is nan"),
        ((f"{FLOW}noise", "sde", f"{FLOW}noise_level", "0"), "noise_level is 0.0; it must be ab"),
        ((f"{FLOW}noise", "sde", f"{FLOW}noise_level", "1.5"), "it must be below 1.41421"),
        ((f"{FLOW}noise_level", "0.3"), "flow.noise_level: it is a setting of noise = 'sde'"),
        (
            (f"{FLOW}noise", "sde", f"{FLOW}largest_deviation", "0.3"),
            "flow.largest_deviation: it is a setting of noise = 'network'",
        ),
        (
            (f"{FLOW}noise", "sde", "--actor.ppo.loss.entropy_coefficient", "0.01"),
            "actor.ppo.loss.entropy_coefficient: the noise of actor.fsdp.policy.flow.noise = 'sde'",
        ),
        (("--env.actions", "clip"), "env.actions: 'clip', but the actions of policy 'flow_action'"),
        (("--actor.fsdp.policy.memory_size", "8"), "memory_size: it is a setting of policy 'gru'"),
        (
            ("--actor.fsdp.policy.initial_log_std", "-1"),
            "initial_log_std: policy 'flow_action' would",
        ),
        (
            ("--actor.fsdp.policy.vision_language.layers", "1"),
            "layers: it is a setting of policy 'vision_language_action', but the policy is 'flow",
        ),
        (
            ("--env.kwargs.pixels_only", "false", "--actor.fsdp.policy.channels", "[4]"),
            "channels: it is a setting of policy 'cnn', but the policy is 'flow_action'",
        ),
        (
            (
                *("--env.kwargs.pixels_only", "false", "--actor.fsdp.policy.vision_language.bins"),
                *("9", "--actor.fsdp.policy.channels", "[16, 32, 32]"),
            ),
            "vision_language.bins: it is of actions as tokens, but policy 'flow_action'",
        ),
        (
            ("--actor.fsdp.policy.name", "cnn", f"{FLOW}steps", "8"),
            "flow.steps: it is a setting of policy 'flow_action', but the policy is 'cnn'",
        ),
    ],
)
def test_what_does_not_fit_is_said_before_anything_starts(
    job: Job, settings: tuple[str, ...], message: str
) -> None:
    ended = job.command("check", job.file, *TINY, *settings)
    assert ended.code == 2, ended.out
    [line] = ended.err.splitlines()
    assert message in line


@pytest.mark.usefixtures("no_cluster")
def test_discrete_actions_are_refused(job: Job, tmp_path: pathlib.Path) -> None:
    ended = job.command("check", job.file, "--actor.fsdp.policy.name", "flow_action")
    assert ended.code == 2
    assert "it integrates the numbers of a Box, but the environment takes 2 choices" in ended.err
