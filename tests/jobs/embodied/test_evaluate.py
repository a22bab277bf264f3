"""``rlinf-async evaluate`` as a user meets it: the run's own figures again, pictures, refusals."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import gymnasium
import numpy as np
import pytest
from PIL import Image

from rlinf_async.observe.run_folder import RunFolder
from rlinf_async.observe.summary import EmbodiedSummary, read_summary
from tests.jobs.embodied.kit import ENTRY, Job
from tests.jobs.embodied_sac.kit import Job as SacJob

SMALL = ("--training.total_steps", 64)


class Lamp(gymnasium.Env[Any, Any]):
    """An episode of 4 steps succeeds where its seed says so; its picture shows how far it is."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012 Gymnasium's name
    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,))
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,))

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.at, self.lit = 0, bool(self.np_random.random() < 0.5)
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.at += 1
        over = self.at == 4
        return np.zeros(2, np.float32), 1.0, over, False, {"is_success": over and self.lit}

    def render(self) -> Any:
        picture = np.zeros((8, 10, 3), np.uint8)
        picture[:, : 2 * self.at + 1] = 200 if self.lit else 100
        return picture


gymnasium.register("Lamp-v0", entry_point=f"{__name__}:Lamp")
LAMP = ("--env.id", "Lamp-v0")


@pytest.mark.parametrize("form", [(), ("--env.simulator", "vector"), ("--env.simulator", "pool")])
def test_the_episodes_of_the_runs_own_evaluation_come_out_the_same(
    job: Job, form: tuple[str, ...]
) -> None:
    summary = job.succeed(*SMALL, *form)
    ended = job.command("evaluate", job.out, "--json")
    assert (ended.code, ended.err) == (0, "")
    told = json.loads(ended.out)
    assert (told["episodes"], told["seed"]) == (3, 10_000)
    assert told["return"] == summary.return_
    assert told["checkpoint"] == "version-000001"
    assert told["success_rate"] is None


def test_a_policy_with_a_memory_begins_each_episode_without_one(job: Job) -> None:
    summary = job.succeed(*SMALL, "--actor.fsdp.policy.name", "gru")
    told = json.loads(job.command("evaluate", job.out, "--json").out)
    assert told["return"] == summary.return_


def test_a_policy_of_soft_actor_critic_is_evaluated_too(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = SacJob(tmp_path, capsys)
    job.succeed()
    told = json.loads(job.command("evaluate", job.out, "--json").out)
    assert told["return"] == read_summary(job.out / "summary.json", EmbodiedSummary).return_


def test_pictures_show_an_episode_that_succeeded(job: Job, tmp_path: pathlib.Path) -> None:
    job.succeed(*SMALL, *LAMP)
    strip, video = tmp_path / "strip.png", tmp_path / "video.mp4"
    ended = job.command(
        *("evaluate", job.out, "--episodes", 20, "--pictures", strip, "--video", video)
    )
    assert (ended.code, ended.err) == (0, "")
    first, *files = ended.out.splitlines()
    assert "20 episodes from seed 10000: success rate 0." in first
    assert [line.partition(": ")[0] for line in files] == [str(strip), str(video)]
    assert all(line.endswith(", 5 frames: success") for line in files)
    with Image.open(strip) as image:
        pixels = np.asarray(image.convert("RGB"))
    assert pixels.shape == (8, 5 * 10 + 4 * 4, 3)
    lit = (pixels[0, :, 0] == 200).reshape(-1)
    assert [int(lit[14 * place : 14 * place + 10].sum()) for place in range(5)] == [1, 3, 5, 7, 9]
    assert video.stat().st_size > 0


def test_an_older_checkpoint_is_evaluated_by_its_number(job: Job) -> None:
    job.succeed("--training.total_steps", 256)
    told = json.loads(job.command("evaluate", job.out, "--checkpoint", 2, "--json").out)
    assert told["checkpoint"] == "version-000002"
    refused = job.command("evaluate", job.out, "--checkpoint", 3)
    assert refused.code == 2
    assert "it has: version-000002, version-000004" in refused.err


def test_a_simulator_of_many_is_filmed_as_the_single_environment_of_its_id(
    job: Job, tmp_path: pathlib.Path
) -> None:
    job.succeed(*SMALL, *LAMP, "--env.simulator", "vector")
    ended = job.command("evaluate", job.out, "--pictures", tmp_path / "strip.png")
    assert (ended.code, ended.err) == (0, "")
    assert (tmp_path / "strip.png").stat().st_size > 0


def test_what_is_no_run_and_what_has_no_policy_is_named(job: Job, tmp_path: pathlib.Path) -> None:
    missing = job.command("evaluate", tmp_path / "nowhere")
    assert (missing.code, missing.out) == (2, "")
    assert "there is no such folder" in missing.err
    job.succeed(*SMALL)
    (job.out / "checkpoints" / "latest.json").unlink()
    without = job.command("evaluate", job.out)
    assert (without.code, without.out) == (2, "")
    assert "there is no checkpoint yet" in without.err


def test_a_run_that_learns_from_examples_has_nothing_to_evaluate(job: Job) -> None:
    with RunFolder.create(job.out, config_text='job = "sft"\n'):
        ended = job.command("evaluate", job.out)
    assert (ended.code, ended.out) == (2, "")
    assert "a run of 'sft', whose policy acts in no environment" in ended.err


def test_a_policy_takes_no_settings(job: Job) -> None:
    job.succeed(*SMALL)
    ended = job.command("evaluate", job.out, "--env.seed", 3)
    assert (ended.code, ended.out) == (2, "")
    assert "--env.seed: a policy is evaluated with the settings of its run" in ended.err


def test_files_and_environments_without_pictures_are_refused_before_anything_is_played(
    job: Job, tmp_path: pathlib.Path
) -> None:
    wrong = job.command("evaluate", job.out, "--pictures", "strip.jpg")
    assert (wrong.code, wrong.out) == (2, "")
    assert "a file whose name ends with .png" in wrong.err
    nowhere = job.command("evaluate", job.out, "--video", tmp_path / "no" / "a.mp4")
    assert (nowhere.code, nowhere.out) == (2, "")
    assert "there is no folder" in nowhere.err
    job.succeed(*SMALL, "--env.id", "", "--env.entry_point", f"{ENTRY}:Walk")
    dark = job.command("evaluate", job.out, "--pictures", tmp_path / "strip.png")
    assert dark.code == 1
    assert "no video: could not make the env" in dark.err
    assert not (tmp_path / "strip.png").exists()
