"""Runs of the vision-language-action policy: cloned from demonstrations, in chunks, in groups."""

from __future__ import annotations

import json
import pathlib
import shutil
from typing import Any

import gymnasium
import numpy as np
import pytest

from rlinf_async.cli import main
from rlinf_async.data.demonstrations import read_episodes, read_info
from tests.jobs.embodied.kit import Job, record_training

REACH = "examples/reach_env.py:ReachTargets"
EXPERT = "examples/reach_env.py:expert"
TINY = (
    *("--env.id", "reach", "--env.entry_point", REACH, "--env.actions", "rescale"),
    *("--env.action_chunk", "4", "--actor.fsdp.policy.name", "vision_language_action"),
    *("--actor.fsdp.policy.vision_language.hidden_size", "16"),
    *("--actor.fsdp.policy.vision_language.heads", "2"),
    *("--actor.fsdp.policy.vision_language.layers", "1"),
    *("--actor.fsdp.policy.vision_language.bins", "5"),
    *("--training.total_steps", "128", "--actor.ppo.minibatch_size", "16"),
)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Four demonstrations of the task of the example."""
    folder = tmp_path_factory.mktemp("recorded")
    file = folder / "reach.toml"
    file.write_text(
        f'job = "embodied_ppo"\n[env]\nentry_point = "{REACH}"\nactions = "rescale"\n'
        "[training]\ntotal_steps = 64\nsteps_per_iteration = 16\n"
    )
    out = folder / "demonstrations"
    options = ("--policy", EXPERT, "--episodes", "4", "--out", str(out))
    assert main(["demonstrations", str(file), *options]) == 0
    return out


def test_demonstrations_of_a_scripted_policy_are_recorded(recorded: pathlib.Path) -> None:
    info, episodes = read_info(recorded), list(read_episodes(recorded))
    assert (info.episodes, info.successes, info.action_size) == (4, 4, 2)
    assert len(episodes) == 4
    for one in episodes:
        assert one.observation["image"].shape == (len(one.action), 32, 32, 3)
        assert bytes(one.observation["instruction"][0]).startswith(b"reach ")
        assert np.abs(one.action).max() <= 1.0


def test_a_run_clones_demonstrations_and_goes_on_by_ppo(
    job: Job, recorded: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    shutil.copytree(recorded, tmp_path / "shown")
    cloned = (
        *TINY,
        *("--actor.cloning.demonstrations", tmp_path / "shown", "--actor.cloning.steps", 3),
        *("--actor.ppo.log_prob_level", "token", "--actor.advantage.level", "action"),
        *("--evaluation.before", "true"),
    )
    summary = job.succeed(*cloned)
    assert (summary.iterations, summary.env_steps) == (2, 128)
    assert summary.success_rate_before is not None
    assert summary.extra["cloning_steps"] == "3"
    assert float(str(summary.extra["cloning_loss"])) > 0.0
    assert all(float(row["skipped_updates"]) == 0.0 for row in job.iterations)
    episode = tmp_path / "shown" / "episode_000001.npz"
    shutil.copy(tmp_path / "shown" / "episode_000000.npz", episode)
    ended = job.train(*cloned, "--resume", "--training.total_steps", 192)
    assert ended.code == 2
    assert "actor.cloning.demonstrations: episode_000001.npz differs" in ended.err


@pytest.mark.parametrize("head", ["bins", "continuous"])
def test_slots_that_see_each_other_are_cloned_and_trained(job: Job, head: str) -> None:
    own = "--actor.fsdp.policy.vision_language."
    bins = (f"{own}bins", 256) if head == "continuous" else ()
    summary = job.succeed(
        *(*TINY, *bins, f"{own}attention", "bidirectional", f"{own}head", head, f"{own}chunk", 8),
        *("--demonstrations.policy", EXPERT, "--demonstrations.episodes", 2),
        *("--actor.cloning.steps", 2, "--actor.ppo.log_prob_level", "token"),
        *("--actor.ppo.epochs", 1, "--training.total_steps", 64, "--evaluation.episodes", 1),
    )
    assert float(str(summary.extra["cloning_loss"])) > 0.0
    # One update of everything: its log-probs are those of the worker that acted.
    assert all(float(row["approx_kl"]) < 1e-6 for row in job.iterations)


def test_tokens_have_values_and_advantages_of_their_own(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = record_training(monkeypatch)
    job.succeed(
        *TINY,
        *("--actor.ppo.log_prob_level", "token", "--actor.advantage.level", "token"),
        *("--actor.fsdp.policy.vision_language.decoding", "autoregressive"),
        *("--training.total_steps", 64, "--evaluation.episodes", 1),
    )
    [one, *_] = trained[0].batch
    assert one.value.shape == (5, 2, 8)
    assert one.log_prob.shape == (4, 2, 8)


def test_a_run_records_its_demonstrations_itself_and_is_resumed(job: Job) -> None:
    own = ("--demonstrations.policy", EXPERT, "--demonstrations.episodes", "2")
    job.succeed(*TINY, *own, *("--actor.cloning.steps", 2))
    assert read_info(job.out / "demonstrations").episodes == 2
    summary = job.succeed(*TINY, *own, *("--actor.cloning.steps", 2), "--resume",
                          "--training.total_steps", "192")  # fmt: skip
    assert summary.iterations == 3


def test_groups_of_episodes_from_the_same_state_are_trained_by_grpo(job: Job) -> None:
    summary = job.succeed(
        *TINY,
        *("--env.group_size", "2", "--actor.advantage.name", "grpo"),
        *("--actor.ppo.normalize_advantage", "none", "--actor.ppo.loss.value_coefficient", "0"),
    )
    assert summary.iterations == 2


class Start(gymnasium.Env[Any, Any]):
    """Shows where an episode began, and says it as its reward."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,))
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,))

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.start, self.steps = self.np_random.random(1).astype(np.float32), 0
        return self.start, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return self.start, float(self.start[0]), False, self.steps == 5, {}


def test_environments_of_a_group_begin_in_the_same_state(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = record_training(monkeypatch)
    job.succeed(
        *("--env.id", "start", "--env.entry_point", f"{__name__}:Start", "--env.group_size", "2"),
        *("--actor.advantage.name", "grpo", "--training.total_steps", "128"),
    )
    starts = [one.observation[0, :, 0].tolist() for call in trained for one in call.batch]
    assert len(starts) == 4
    assert all(first == second for first, second in starts)
    assert len({first for first, _ in starts}) == 4


def test_every_epoch_of_an_iteration_has_groups_of_its_own(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = record_training(monkeypatch)
    job.succeed(
        *("--env.id", "start", "--env.entry_point", f"{__name__}:Start", "--env.group_size", "2"),
        *("--actor.advantage.name", "grpo", "--training.total_steps", "192"),
        *("--training.rollout_epochs", 3, "--training.steps_per_iteration", 8),
    )
    assert [len(call.batch) for call in trained] == [2 * 3, 2 * 3]
    starts = [one.observation[0, :, 0].tolist() for call in trained for one in call.batch]
    assert all(first == second for first, second in starts)
    assert len({first for first, _ in starts}) == 12


@pytest.mark.usefixtures("no_cluster")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("--training.steps_per_iteration", "18"), "18 steps are no whole chunks of env.action_ch"),
        (("--actor.fsdp.policy.vision_language.chunk", "6"), "take a multiple of 4"),
        (("--env.actions", "clip"), "env.actions: 'clip', but the actions of policy 'vision_l"),
        (("--actor.fsdp.policy.vision_language.head", "continuous"), "bins is 5, but head = 'con"),
        (("--actor.fsdp.policy.initial_log_std", "-1"), "initial_log_std: policy 'vision_lang"),
        (("--env.kwargs.size", "20"), "images of 20 x 20 pixels cannot be cut"),
        (("--env.group_size", "2"), "'gae' and env.group_size = 2"),
        (("--env.group_size", "3"), "no whole groups of group_size = 3"),
        (("--actor.fsdp.policy.vision_language.folder", "x"), "its config.json cannot be read"),
        (("--actor.cloning.demonstrations", "nowhere"), "'nowhere' holds no demonstrations"),
        (("--demonstrations.policy", "nowhere.py:expert"), "'nowhere.py' cannot be imported"),
        (("--demonstrations.policy", "os:getcwd"), "'os:getcwd' takes other arguments (too many"),
        (("--actor.advantage.level", "action"), "actor.ppo.log_prob_level: 'chunk' is one ratio"),
        (("--actor.advantage.level", "token"), "gives each its own advantage: set 'token'"),
        (("--actor.fsdp.policy.name", "nowhere.py:Policy"), "'nowhere.py' cannot be imported"),
    ],
)
def test_what_does_not_fit_is_said_before_anything_starts(
    job: Job, settings: tuple[str, str], message: str
) -> None:
    ended = job.train(*TINY, *settings)
    assert ended.code == 2, ended.err
    assert message in ended.err


@pytest.mark.usefixtures("no_cluster")
def test_demonstrations_with_images_of_another_size_are_refused(
    job: Job, recorded: pathlib.Path
) -> None:
    ended = job.train(*TINY, "--env.kwargs.size", "16", "--actor.cloning.demonstrations", recorded)
    assert ended.code == 2, ended.err
    assert "image 'image' [32, 32, 3]" in ended.err
    assert "but the environment shows" in ended.err


def test_a_folder_that_holds_files_is_not_recorded_into(
    recorded: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = recorded.parent / "reach.toml"
    options = ("--policy", EXPERT, "--out", str(recorded))
    assert main(["demonstrations", str(file), *options]) == 2
    assert "is not empty; name a new folder" in capsys.readouterr().err


def test_the_folder_says_what_it_holds(recorded: pathlib.Path) -> None:
    said = json.loads((recorded / "demonstrations.json").read_bytes())
    assert said["env"] == REACH
    assert said["observation"]["parts"][1]["kind"] == "image"


def test_demonstrated_actions_that_the_policy_cannot_take_are_refused_by_check(
    job: Job, recorded: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    folder = tmp_path / "copied"
    shutil.copytree(recorded, folder)
    cloning = ("--actor.cloning.demonstrations", folder)
    assert job.command("check", job.file, *TINY, *cloning).code == 0
    path = folder / "episode_000002.npz"
    arrays = dict(np.load(path))
    arrays["action"][3, 1] = -1.5
    np.savez(path, **arrays)
    ended = job.command("check", job.file, *TINY, *cloning)
    assert ended.code == 2
    assert "actor.cloning.demonstrations: " in ended.err
    assert "episode_000002.npz" in ended.err
    assert "action of step 3" in ended.err
