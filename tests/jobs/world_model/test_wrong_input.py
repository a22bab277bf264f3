"""What is wrong is named with its setting, and exit code 2, before any worker starts."""

from __future__ import annotations

import json
import pathlib

import pytest

from rlinf_async.observe.summary import EmbodiedSummary
from tests.jobs import kit as jobs
from tests.jobs.world_model.kit import Job
from tests.jobs.world_model.test_runs import IMAGINED


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("--demonstrations.policy", ""), "data.folders: [], and demonstrations.policy is ''"),
        (("--data.folders", '["a"]'), "give one of the two"),
        (("--data.held_out", 24), "data.held_out: 24 of demonstrations.episodes = 24 are held out"),
        (
            ("--data.held_out", 0, "--training.measure_every", 1),
            "training.measure_every: 1, but no episode is held out",
        ),
        (("--model.hidden_sizes", "[]"), "a network has at least one layer"),
        (("--model.horizon", 0), "horizon is 0; it must be at least 1"),
        (("--cluster.actors", 2), "several actors need a process each"),
        (
            ("--cluster.actors", 3, "--cluster.backend", "process"),
            "training.batch_size: 32 windows cannot be divided among 3 actors",
        ),
        (("--actor.optimizer.value_lr", 0.1), "a world model has no values"),
        (("--demonstrations.policy", "tests.jobs.world_model.envs:none"), "no function 'none'"),
        (("--env.entry_point", "tests.jobs.world_model.envs:none"), "env.entry_point: "),
        (("--env.id", "", "--env.entry_point", ""), "which environment?"),
    ],
)
def test_a_setting_that_is_wrong(job: Job, settings: tuple[object, ...], message: str) -> None:
    ended = job.command("check", job.file, *settings)
    assert ended.code == 2
    assert message in ended.err
    assert len(ended.err.splitlines()) == 1


@pytest.fixture
def recorded(job: Job, tmp_path: pathlib.Path) -> pathlib.Path:
    """A folder of episodes of at most 8 steps."""
    job.succeed("--training.steps", 20)
    return job.out / "demonstrations"


def test_episodes_that_do_not_fit(job: Job, recorded: pathlib.Path) -> None:
    def said(*settings: object) -> str:
        folders = ("--demonstrations.policy", "", "--data.folders", json.dumps([str(recorded)]))
        ended = job.command("check", job.file, *folders, *settings)
        assert ended.code == 2
        assert "data.folders: " in ended.err
        return ended.err

    assert "the longest episode has 8 steps" in said("--model.horizon", 9)
    assert "there are 24 episodes, and 24 are held out" in said("--data.held_out", 24)
    assert "the environment takes one choice" in said("--env.kwargs.choices", "true")
    assert "the environment shows state 'state' [2]" in said("--env.kwargs.shows", 2)
    assert "but the model is to be of another" in said("--env.id", "another")
    info = recorded / "demonstrations.json"
    info.write_text(info.read_text().replace('"transitions": true', '"transitions": false'))
    assert "have no rewards" in said()
    info.unlink()
    assert "holds no demonstrations" in said()


def test_a_model_that_a_policy_cannot_be_trained_in(
    job: Job, recorded: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = IMAGINED.format(model=job.model)
    one = jobs.Job(tmp_path / "imagined.toml", text, capsys, EmbodiedSummary)

    def said(*settings: object) -> str:
        ended = one.command("check", one.file, *settings)
        assert ended.code == 2
        assert len(ended.err.splitlines()) == 1
        return ended.err

    assert one.command("check", one.file).code == 0
    none = said("--env.kwargs.model", tmp_path / "none.safetensors")
    assert "env.kwargs.model: " in none
    assert "is no world model" in none
    assert "trained to predict 1 to 5 steps" in said("--env.kwargs.horizon", 6)
    assert "it is 'first' or 'anywhere'" in said("--env.kwargs.begins", "somewhere")
    assert "env.kwargs.success: 'reward'" in said("--env.kwargs.success", "reward")
    wide = said("--evaluation.env.kwargs.shows", 2)
    assert "evaluation.env: tests.jobs.world_model.envs:Line shows state 'state' [2]" in wide
    assert "evaluation.env.actions: clip, but" in said("--evaluation.env.actions", "clip")
    assert "evaluation.env: " in said("--evaluation.env.kwargs.choices", "true")
    assert "evaluation.env.seed: 3 has no effect" in said("--evaluation.env.seed", 3)
    assert "evaluation.env.entry_point: " in said("--evaluation.env.entry_point", "no.where:Line")
