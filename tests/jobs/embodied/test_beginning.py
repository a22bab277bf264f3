"""A run that begins with the weights of another one, or of an exported policy: ``[model] path``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlinf_async.backends.checkpoint.reading import read_checkpoint
from tests.jobs.embodied.kit import Job
from tests.jobs.embodied_sac.kit import Job as SacJob

ONE = ("--training.total_steps", 64, "--evaluation.episodes", 1)
STILL = ("--actor.fsdp.optimizer.lr", 1e-30, "--actor.fsdp.optimizer.weight_decay", 0.0)
"""a learning rate with which no weight changes"""


class Sources:
    """Runs to begin with, each made once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def made(self, name: str, job: Any, *arguments: object) -> Path:
        run = self.folder / name
        if not run.exists():
            job.out, before = run, job.out
            job.succeed(*arguments)
            job.out = before
        return run

    def ppo(self, job: Job) -> Path:
        return self.made("ppo", job, "--training.total_steps", 256)

    def sac(self, job: SacJob) -> Path:
        return self.made("sac", job)

    def exported(self, name: str, job: Any, run: Path, form: str = "folder") -> Path:
        out = self.folder / f"{name}-{form}"
        if not out.exists():
            assert job.command("export", run, out, "--to", form).code == 0
        return out


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    return Sources(tmp_path_factory.mktemp("sources"))


@pytest.fixture
def sac(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> SacJob:
    folder = tmp_path / "sac"
    folder.mkdir()
    return SacJob(folder, capsys)


def weights(checkpoint: Path) -> dict[str, Tensor]:
    saved = read_checkpoint(checkpoint).tensors
    return {n.removeprefix("model."): v.whole().clone() for n, v in saved.items() if n[0] == "m"}


def steps(checkpoint: Path) -> set[float]:
    saved = read_checkpoint(checkpoint).tensors
    return {float(one.whole()) for name, one in saved.items() if name.endswith(".step")}


def newest(run: Path) -> Path:
    note = json.loads((run / "checkpoints/latest.json").read_bytes())
    return run / "checkpoints" / str(note["checkpoint"])


def test_ppo_begins_with_weights_and_statistics_of_a_run_and_counts_from_0(
    job: Job, sources: Sources
) -> None:
    """Optimizer, iteration and version are its own; a run that goes on changes nothing for it."""
    source = sources.ppo(job)
    before = weights(newest(source))
    summary = job.succeed("--model.path", source, *ONE, *STILL)
    assert summary.iterations == 1
    assert summary.extra["began"] == f"with 18 tensors of {newest(source)}"
    after = weights(newest(job.out))
    assert before.keys() == after.keys()
    for name, one in after.items():
        if "normalizer" not in name:
            torch.testing.assert_close(one, before[name], rtol=0, atol=0)
    count = "observation_normalizer.count"
    assert (float(before[count]), float(after[count])) == (256.0, 320.0)
    assert steps(newest(job.out)) == {8.0}  # two epochs of four minibatches
    assert 'checkpoint = "version-000004"' in (job.out / "config.toml").read_text()


def test_a_resumed_run_knows_what_it_has_begun_with(job: Job, tmp_path: Path) -> None:
    """The other run has gone on, and then its checkpoint is another one, or is gone."""
    source = tmp_path / "source"
    mine, job.out = job.out, source
    job.succeed(*ONE)
    job.out = mine
    job.succeed("--model.path", source, *ONE)
    job.out = source
    job.succeed("--resume", "--training.total_steps", 128)
    job.out = mine
    again = ("--resume", "--model.path", source, "--training.total_steps")
    job.succeed(*again, 128, "--model.checkpoint", 1)
    moved = tmp_path / "moved"
    shutil.copytree(source, moved)
    job.succeed("--resume", "--model.path", moved, "--training.total_steps", 192)
    ended = job.train("--resume", "--model.path", moved, "--model.checkpoint", 2)
    assert ended.code == 2
    assert "model.checkpoint (version-000001 in the run, version-000002 now)" in ended.err
    first, second = (moved / f"checkpoints/version-00000{one}" for one in (1, 2))
    shutil.rmtree(first)
    shutil.copytree(second, first)
    ended = job.train("--resume", "--model.path", moved, "--training.total_steps", 192)
    assert ended.code == 2
    assert "model.path: rank_0_of_1.safetensors differs" in ended.err


def test_another_environment_takes_what_fits_and_names_the_rest(job: Job, sources: Sources) -> None:
    """CartPole shows 4 numbers and takes 2 actions, Acrobot 6 and 3; from an exported policy."""
    folder = sources.exported("ppo", job, sources.ppo(job))
    asked = ("--env.id", "Acrobot-v1", "--model.path", folder)
    ended = job.command("check", job.file, *asked)
    assert ended.code == 2
    assert "answers with 2 choices, and Acrobot-v1 takes 3 choices" in ended.err
    assert "set model.partial = true" in ended.err
    summary = job.succeed(*asked, "--model.partial", "true", *ONE, *STILL)
    said = str(summary.extra["began"])
    assert said.startswith("with 11 tensors of ")
    assert "; 'actor.0.weight' is [64, 6], there [64, 4]; " in said
    before, after = weights(newest(sources.ppo(job))), weights(newest(job.out))
    for name in ("actor.2.weight", "critic.2.weight", "critic.4.bias"):
        torch.testing.assert_close(after[name], before[name], rtol=0, atol=0)
    # Of statistics that do not fit, none is taken: not the number of their samples either.
    assert float(after["observation_normalizer.count"]) == 64.0
    assert after["actor.4.weight"].abs().max() < 0.1


def test_other_actions_of_the_same_shape_begin_anew(job: Job, tmp_path: Path) -> None:
    """Two numbers, and a choice of two, are [2, 64] both."""
    plane = tmp_path / "plane.py"
    plane.write_text(
        "import gymnasium, numpy as np\n"
        "class Env(gymnasium.Env):\n"
        "    observation_space = gymnasium.spaces.Box(-1, 1, (4,))\n"
        "    action_space = gymnasium.spaces.Box(-1, 1, (2,))\n"
        "    def reset(self, *, seed=None, options=None):\n"
        "        return np.zeros(4, np.float32), {}\n"
        "    def step(self, action):\n"
        "        return np.zeros(4, np.float32), 1.0, True, False, {}\n"
    )
    source, mine = tmp_path / "source", job.out
    job.out = source
    job.succeed("--env.id", "plane", "--env.entry_point", f"{plane}:Env", *ONE)
    job.out = mine
    job.succeed("--model.path", source, "--model.partial", "true", "--seed", 5, *ONE, *STILL)
    before, after = weights(newest(source)), weights(newest(job.out))
    assert before["actor.4.weight"].shape == after["actor.4.weight"].shape
    assert not torch.equal(before["actor.4.weight"], after["actor.4.weight"])
    torch.testing.assert_close(after["actor.2.weight"], before["actor.2.weight"], rtol=0, atol=0)
    same = ("--env.id", "plane", "--env.entry_point", f"{plane}:Env", "--model.path", source)
    ended = job.command("check", job.file, *same, "--env.actions", "rescale")
    assert ended.code == 2
    assert "env.actions: 'rescale', but the policy in " in ended.err
    ended = job.command("check", job.file, *same, "--actor.fsdp.policy.initial_log_std", -1)
    assert ended.code == 2
    assert "actor.fsdp.policy.initial_log_std: -1.0 would have no effect" in ended.err


def test_soft_actor_critic_of_choices_begins_with_those_of_a_run(
    sac: SacJob, sources: Sources
) -> None:
    choosing = ("--env.id", "CartPole-v1", "--env.actions", "clip")
    source = sources.made("choices", sac, *choosing)
    sac.succeed(*choosing, "--model.path", source, *STILL)
    before, after = weights(newest(source)), weights(newest(sac.out))
    for name, one in after.items():
        if not name.startswith("target."):
            torch.testing.assert_close(one, before[name], rtol=0, atol=0)


def test_sac_begins_with_policy_critics_and_coefficient_of_a_run(
    sac: SacJob, sources: Sources
) -> None:
    """Its first actions are the policy's own, not uniform ones. An exported policy has no critics:
    they begin anew where that is asked for."""
    source = sources.sac(sac)
    sac.succeed("--model.path", source, *STILL)
    before, after = weights(newest(source)), weights(newest(sac.out))
    assert {"log_entropy_coefficient", "critic.weights.0", "target.weights.0"} <= before.keys()
    for name, one in after.items():
        if not name.startswith("target."):  # they move towards the critics
            torch.testing.assert_close(one, before[name], rtol=0, atol=0)
    assert not before["policy.uniform"]
    other = ("--model.path", source, "--actor.sac.initial_entropy_coefficient", 0.5)
    ended = sac.command("check", sac.file, *other)
    assert ended.code == 2
    assert "actor.sac.initial_entropy_coefficient: 0.5 would have no effect" in ended.err
    folder = sources.exported("sac", sac, source)
    ended = sac.command("check", sac.file, "--model.path", folder)
    assert ended.code == 2
    assert "'critic.weights.0' is not there" in ended.err
    sac.out = sac.out.with_name("exported")
    settings = ("--actor.sac.initial_entropy_coefficient", 0.5, "--model.partial", "true")
    said = sac.succeed("--model.path", folder, *settings).extra["began"]
    assert "'critic.weights.0' is not there" in str(said)


REFUSED = {
    "nothing there": (("--model.path", "nowhere"), "model.path: 'nowhere': there is no such"),
    "some folder": (("--model.path", "."), "neither a run, nor a checkpoint of one, nor a policy"),
    "a graph": (("--model.path", "GRAPH"), "holds a graph (torchscript), which cannot be trained"),
    "another job": (("--model.path", "SAC"), "is a run of 'embodied_sac'; its weights are of an"),
    "another family": (
        ("--model.path", "RUN", "--actor.fsdp.policy.name", "gru"),
        "holds a policy 'mlp_categorical', and this run trains 'gru'",
    ),
    "other sizes": (
        ("--model.path", "RUN", "--actor.fsdp.policy.hidden_sizes", "[64]"),
        "actor.fsdp.policy.hidden_sizes: [64], but the policy in",
    ),
    "not normalised": (
        ("--model.path", "RUN", "--actor.normalize_observation", "false"),
        "actor.normalize_observation: false, but the policy in",
    ),
    "no such checkpoint": (
        ("--model.path", "RUN", "--model.checkpoint", 7),
        "has no such checkpoint; it has: version-000002, version-000004",
    ),
    "a checkpoint of a folder": (
        ("--model.path", "FOLDER", "--model.checkpoint", 7),
        "model.checkpoint: '7' was given, but",
    ),
    "a checkpoint of nothing": (
        ("--model.checkpoint", 7),
        "model.checkpoint: '7' was given, but no path",
    ),
    "a part of nothing": (("--model.partial", "true"), "model.partial: True was given, but no"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_run_cannot_begin_with_is_refused(
    case: str, job: Job, sac: SacJob, sources: Sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, text = REFUSED[case]
    monkeypatch.chdir(job.file.parent)
    run = sources.ppo(job)
    places = {"RUN": lambda: run, "SAC": lambda: sources.sac(sac)}
    places["FOLDER"] = lambda: sources.exported("ppo", job, run)
    places["GRAPH"] = lambda: sources.exported("ppo", job, run, "torchscript")
    given = [places[str(one)]() if one in places else one for one in arguments]
    ended = job.command("check", job.file, *given)
    assert (ended.code, ended.out) == (2, "")
    assert text in ended.err
