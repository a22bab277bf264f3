"""A run that corrects a frozen policy: ``[residual] path``."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from rlinf_async import Policy
from tests.jobs.embodied import test_beginning as beginning
from tests.jobs.embodied.kit import Job as PpoJob
from tests.jobs.embodied.test_beginning import newest, weights
from tests.jobs.embodied_sac.kit import Job

PLAYED = ("--evaluation.episodes", 1)
PPO = ("--training.total_steps", 64, "--cluster.rollout_workers", 0, *PLAYED)


class Sources(beginning.Sources):
    """Runs to correct, each made once: of PPO, whose actions are clipped to the bounds."""

    def pendulum(self, ppo: PpoJob, name: str = "ppo", *arguments: object) -> Path:
        return self.made(name, ppo, "--env.id", "Pendulum-v1", *PPO, *arguments)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    return Sources(tmp_path_factory.mktemp("sources"))


@pytest.fixture
def ppo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> PpoJob:
    folder = tmp_path / "ppo"
    folder.mkdir()
    return PpoJob(folder, capsys)


def test_a_run_begins_as_its_base_which_is_in_checkpoints_and_exports(
    job: Job, ppo: PpoJob, sources: Sources, tmp_path: Path
) -> None:
    source, base = sources.pendulum(ppo), tmp_path / "base"
    shutil.copytree(source, base)
    asked = ("--residual.path", base, "--evaluation.before", "true", *PLAYED)
    # From another folder than where it is evaluated and exported.
    with contextlib.chdir(tmp_path):
        summary = job.succeed(*asked, "--evaluation.seed", 3, "--residual.path", "base")
    played = job.command("evaluate", base, "--episodes", 1, "--seed", 3).out
    assert summary.return_before is not None
    assert f"return {summary.return_before:.2f} (" in played
    assert summary.extra["began"] == (
        f"with the policy of base/checkpoints/{newest(base).name}, which is frozen and corrected"
    )
    job.check_books(6)
    frozen, found = weights(newest(base)), weights(newest(job.out))
    for name, value in frozen.items():
        torch.testing.assert_close(found[f"policy.base.{name}"], value, rtol=0, atol=0)
    assert bool(found["policy.actor.1.weight"].any())  # it began with zeros
    moved = tmp_path / "moved"
    base.rename(moved)
    again = ("--resume", *asked, "--residual.path", moved, "--training.total_steps", 224)
    job.succeed(*again)
    job.check_books(7)
    seen = np.array([0.5, -0.5, 1.0], np.float32)
    actions = []
    for form in ("folder", "torchscript"):
        ended = job.command("export", job.out, tmp_path / form, "--to", form)
        assert ended.code == 0, ended.err
        actions.append(Policy.load(tmp_path / form).act(seen))
    np.testing.assert_allclose(actions[0], actions[1], rtol=1e-5, atol=1e-5)
    others, there = newest(sources.pendulum(ppo, "others", "--seed", 1)), newest(moved)
    shutil.rmtree(there)
    shutil.copytree(others, there)
    ended = job.train(*again)
    assert ended.code == 2
    assert "residual.path: rank_0_of_1.safetensors differs" in ended.err


def test_an_exported_policy_that_corrects_another_is_corrected(
    job: Job, ppo: PpoJob, sources: Sources
) -> None:
    """Over two actors, which take its weights in their shards."""
    run = sources.pendulum(ppo)
    mine, job.out = job.out, job.out.with_name("first")
    job.succeed("--residual.path", sources.exported("exported", ppo, run), *PLAYED)
    again = sources.exported("corrected", ppo, job.out)
    job.out = mine
    two = ("--cluster.backend", "process", "--cluster.actors", 2)
    job.succeed("--residual.path", again, "--residual.scale", 0.5, *two, *PLAYED)
    found, inner = weights(newest(job.out)), weights(newest(run))
    for name, value in inner.items():
        torch.testing.assert_close(found[f"policy.base.base.{name}"], value, rtol=0, atol=0)


REFUSED = {
    "nothing there": (("--residual.path", "nowhere"), "residual.path: 'nowhere': there is no such"),
    "some folder": (("--residual.path", "."), "neither a run, nor a checkpoint of one, nor a"),
    "a graph": (("--residual.path", "GRAPH"), "holds a graph (torchscript), which cannot be read"),
    "a part": (("--residual.path", "PART"), "is not all of a policy 'mlp_gaussian': 'policy."),
    "choices": (
        ("--residual.path", "PPO", "--env.id", "CartPole-v1", "--env.actions", "clip"),
        "residual.path: a correction is added to the numbers of an action, but CartPole-v1 takes 2",
    ),
    "other spaces": (
        ("--residual.path", "PPO", "--env.id", "MountainCarContinuous-v0"),
        "sees state 'state' [3], and MountainCarContinuous-v0 shows state 'state' [2]",
    ),
    "of choices": (
        ("--residual.path", "POLE"),
        "answers with 2 choices, and Pendulum-v1 takes 1 number",
    ),
    "chunks": (("--residual.path", "CHUNKS"), "answers with chunks of 2 actions, and single"),
    "a memory": (("--residual.path", "GRU"), "is recurrent ('gru')"),
    "weights of two": (
        ("--residual.path", "PPO", "--model.path", "PPO"),
        "is to be corrected by a new policy, and the run would begin with the weights of model",
    ),
    "no such checkpoint": (
        ("--residual.path", "PPO", "--residual.checkpoint", 9),
        "residual.checkpoint: ",
    ),
    "a checkpoint of a folder": (
        ("--residual.path", "FOLDER", "--residual.checkpoint", 9),
        "residual.checkpoint: '9' was given, but",
    ),
    "a scale of nothing": (("--residual.scale", 0.5), "residual.scale: 0.5 was given, but no path"),
    "no scale": (("--residual.path", "PPO", "--residual.scale", 0), "scale is 0.0; it must be"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_corrected_is_refused(
    case: str, job: Job, ppo: PpoJob, sources: Sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, text = REFUSED[case]
    monkeypatch.chdir(job.file.parent)
    run = sources.pendulum(ppo)
    gru = ("--actor.fsdp.policy.name", "gru")
    places = {
        "PPO": lambda: run,
        "POLE": lambda: sources.pendulum(ppo, "pole", "--env.id", "CartPole-v1"),
        "CHUNKS": lambda: sources.pendulum(ppo, "chunks", "--env.action_chunk", 2),
        "GRU": lambda: sources.pendulum(ppo, "gru", *gru),
        "FOLDER": lambda: sources.exported("exported", ppo, run),
        "GRAPH": lambda: sources.exported("graph", ppo, run, "torchscript"),
        "PART": lambda: without_statistics(sources.exported("exported", ppo, run)),
    }
    given = [places[str(one)]() if one in places else one for one in arguments]
    ended = job.command("check", job.file, *given)
    assert (ended.code, ended.out) == (2, "")
    assert text in ended.err


def without_statistics(exported: Path) -> Path:
    """A copy of an exported policy that lacks what observations are normalised by."""
    from safetensors.torch import load_file, save_file

    folder = exported.with_name("part")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(exported, folder)
    tensors = load_file(folder / "policy.safetensors")
    kept = {name: one for name, one in tensors.items() if not name.endswith("normalizer.mean")}
    save_file(kept, folder / "policy.safetensors")
    return folder
