"""Runs of policies from LeRobot's folders: several cameras, cloned, trained, resumed, refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers")

from rlinf_async.policy import Policy
from tests.backends.expert_flow import pi0, smolvla
from tests.backends.expert_flow.arm import Arm
from tests.backends.expert_flow.kit import EXECUTED
from tests.jobs.embodied.kit import Job, record_training

ARM = "tests/backends/expert_flow/arm.py:"
NAME = "--actor.fsdp.policy.name"
MODEL = "--actor.fsdp.policy.vision_language."
FLOW = "--actor.fsdp.policy.flow."


@pytest.fixture
def tiny(tmp_path: Path) -> tuple[object, ...]:
    """The arguments of a tiny run of a SmolVLA."""
    return run_of(smolvla.write_folder(tmp_path / "folder"), "smolvla")


def run_of(folder: Path, name: str) -> tuple[object, ...]:
    return (
        *("--env.id", "arm", "--env.entry_point", f"{ARM}Arm", "--env.action_chunk", EXECUTED),
        *(NAME, name, "--actor.fsdp.policy.hidden_sizes", "[8]"),
        *(f"{MODEL}folder", folder, f"{FLOW}steps", 2, "--env.envs", 2),
        *("--training.steps_per_iteration", 6, "--training.total_steps", 24),
        *("--actor.ppo.minibatch_size", 4, "--actor.ppo.epochs", 1, "--evaluation.episodes", 1),
    )


def test_a_run_clones_goes_on_by_ppo_is_resumed_and_leaves(
    job: Job, tiny: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = record_training(monkeypatch)
    arguments = (
        *(*tiny, "--demonstrations.policy", f"{ARM}expert", "--demonstrations.episodes", 2),
        *("--actor.cloning.steps", 2, "--actor.ppo.log_prob_level", "action"),
        *("--training.checkpoint_every", 1),
    )
    summary = job.succeed(*arguments)
    assert (summary.iterations, summary.env_steps) == (2, 24)
    assert float(str(summary.extra["cloning_loss"])) > 0.0
    assert all(one.chain is not None for call in trained for one in call.batch)
    # One update of everything: its log-probs are those of the worker that acted.
    assert all(float(row["approx_kl"]) < 1e-6 for row in job.iterations)
    assert job.succeed(*arguments, "--resume", "--training.total_steps", 36).iterations == 3
    seen, _ = Arm().reset(seed=1)
    left = []
    for form in ("folder", "lerobot"):
        ended = job.command("export", job.out, tmp_path / f"as_{form}", "--to", form)
        assert ended.code == 0, ended.err
        left.append(np.asarray(Policy.load(tmp_path / f"as_{form}").act(seen)))
    assert left[0].shape == (EXECUTED, 2)
    np.testing.assert_array_equal(left[0], left[1])
    # What was written is a folder to begin with, and says how it is to be taken.
    config = json.loads((tmp_path / "as_lerobot/config.json").read_bytes())
    assert (config["num_steps"], config["n_action_steps"]) == (2, EXECUTED)
    again = (*tiny, f"{MODEL}folder", tmp_path / "as_lerobot")
    assert job.command("check", job.file, *map(str, again)).code == 0
    ended = job.command("check", job.file, *map(str, tiny), "--model.path", tmp_path / "as_lerobot")
    assert ended.code == 2
    assert "in lerobot's form: name it in actor.fsdp.policy.vision_language.folder" in ended.err


def test_a_pi0_is_cloned_trained_with_adapters_and_leaves(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = record_training(monkeypatch)
    folder = pi0.write_folder(tmp_path / "folder")
    summary = job.succeed(
        *(*run_of(folder, "pi0"), "--training.total_steps", 12, f"{MODEL}lora", "{rank = 2}"),
        *("--demonstrations.policy", f"{ARM}expert", "--demonstrations.episodes", 2),
        *("--actor.cloning.steps", 2, "--actor.ppo.log_prob_level", "action"),
    )
    assert (summary.iterations, summary.env_steps) == (1, 12)
    assert float(str(summary.extra["cloning_loss"])) > 0.0
    assert all(one.chain is not None for call in trained for one in call.batch)
    assert all(float(row["approx_kl"]) < 1e-6 for row in job.iterations)
    left = tmp_path / "left"
    ended = job.command("export", job.out, left, "--to", "lerobot")
    assert ended.code == 0, ended.err
    seen, _ = Arm().reset(seed=1)
    assert np.asarray(Policy.load(left).act(seen)).shape == (EXECUTED, 2)
    config = json.loads((left / "config.json").read_bytes())
    assert (config["num_inference_steps"], config["n_action_steps"]) == (2, EXECUTED)
    assert job.command("check", job.file, *map(str, run_of(left, "pi0"))).code == 0
    ended = job.command("check", job.file, *map(str, run_of(left, "smolvla")))
    assert ended.code == 2
    assert "family 'pi0': set actor.fsdp.policy.name = 'pi0'" in ended.err


@pytest.mark.usefixtures("no_cluster")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ((f"{MODEL}folder", "nowhere"), "vision_language.folder is 'nowhere': its config.json can"),
        ((f"{MODEL}chunk", "6"), "vision_language.chunk: policy 'smolvla' is as its folder says"),
        ((f"{MODEL}bins", "6"), "vision_language.bins: policy 'smolvla' is as its folder says"),
        ((f"{FLOW}noise_level", "0.3"), "flow.noise_level: it is a setting of noise = 'sde'"),
        (("--actor.fsdp.policy.channels", "[4]"), "channels: it is a setting of policy 'cnn'"),
        (
            ("--actor.fsdp.policy.observation_clip", "5"),
            "observation_clip: policy 'smolvla' nor",
        ),
        (("--actor.fsdp.policy.initial_log_std", "-1"), "initial_log_std: policy 'smolvla' would"),
        (("--actor.normalize_observation", "false"), "policy 'smolvla' normalises observations by"),
        (
            ("--env.action_chunk", "5", "--training.steps_per_iteration", "10"),
            "it predicts chunk_size = 4 actions at once, but env.action_chunk is 5",
        ),
        (("--env.kwargs.numbers", "3"), "its actions have 2 numbers, those of the environment hav"),
        (("--env.kwargs.state", "4"), "its observation.state has 3 numbers, the state of the env"),
        (("--env.kwargs.text", "false"), "it reads one instruction (a Text space)"),
        (
            ("--env.kwargs.sizes", "{front = [12, 16], wrist = [9, 8]}"),
            "its camera 'wrist' has pictures of [8, 8, 3], but the environment shows [9, 8, 3]",
        ),
        (
            (f"{FLOW}noise", "sde", "--actor.ppo.loss.entropy_coefficient", "0.01"),
            "entropy_coefficient: the noise of actor.fsdp.policy.flow.noise = 'sde'",
        ),
    ],
)
def test_what_does_not_fit_is_said_before_anything_starts(
    job: Job, tiny: tuple[object, ...], settings: tuple[str, ...], message: str
) -> None:
    ended = job.command("check", job.file, *map(str, tiny), *settings)
    assert ended.code == 2, ended.out
    [line] = ended.err.splitlines()
    assert message in line


def test_groups_of_episodes_are_trained_with_adapters(job: Job, tiny: tuple[object, ...]) -> None:
    summary = job.succeed(
        *(*tiny, "--env.group_size", 2, "--actor.advantage.name", "grpo", f"{FLOW}noise", "sde"),
        *("--actor.ppo.normalize_advantage", "none", "--actor.ppo.loss.value_coefficient", 0),
        *("--actor.ppo.log_prob_level", "token", f"{MODEL}lora", "{rank = 2}", "--env.stages", 1),
    )
    assert summary.iterations == 2
    assert all(float(row["skipped_updates"]) == 0.0 for row in job.iterations)
