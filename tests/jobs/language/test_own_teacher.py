"""``teacher.every``: the policy is compared with its own earlier versions."""

from __future__ import annotations

import pathlib
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch

from rlinf_async.observe.samples import read_samples
from rlinf_async.workers.inference import EarlierVersions
from tests.jobs.language.checkpoints import save_checkpoint
from tests.jobs.language.kit import TINY, Job
from tests.jobs.language.test_runs import LETTERS

MIXED = (
    *("--actor.loss.teacher_coefficient", 0.5, "--data.verifier", LETTERS),
    *("--actor.optimizer.lr", 1e-2, "--evaluation.samples", 0, "--cluster.inference_workers", 1),
)
KEPT_ALL = ("--training.checkpoint_every", 1, "--training.keep_checkpoints", 99)


def column(job: Job, name: str) -> list[float]:
    return [float(row[name]) for row in job.iterations]


@pytest.mark.parametrize("every", [1, 2, 3, 5])
@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_a_teacher_is_kept_for_as_long_as_a_sample_may_need_it(every: int, staleness: int) -> None:
    earlier = EarlierVersions(folder="/versions", every=every, max_staleness=staleness)
    for version in range(20):
        taught = earlier.teacher_of(version)
        assert version - every < taught <= version
        assert taught % every == 0
        possible = range(max(0, version - staleness), version + 1)
        assert earlier.oldest_needed(version) == min(map(earlier.teacher_of, possible))


def check_teachers(job: Job, every: int) -> None:
    """Compare what was told of each sample with transformers, on the version's own folder, and the
    metric with the samples."""
    from transformers import AutoModelForCausalLM

    factory: Any = AutoModelForCausalLM
    by_iteration = defaultdict(list)
    folders = EarlierVersions(folder=str(job.out / "teacher"), every=every)
    models: dict[int, Any] = {}
    for one in read_samples(job.out, kind="training"):
        version = max(one["versions"]) // every * every
        by_iteration[one["iteration"]].append(version)
        if version not in models:
            models[version] = factory.from_pretrained(folders.path(version))
        given, tokens = one["prompt_tokens"], one["tokens"]
        with torch.no_grad():
            logits = models[version](input_ids=torch.tensor([[*given, *tokens]])).logits[0]
        rows = logits[len(given) - 1 : -1].log_softmax(-1)
        expected = rows.gather(-1, torch.tensor(tokens)[:, None])[:, 0].tolist()
        np.testing.assert_allclose(one["teacher_log_probs"], expected, atol=1e-3)
    found = [float(np.mean(by_iteration[at])) for at in sorted(by_iteration)]
    assert column(job, "teacher_version") == pytest.approx(found)
    assert len(models) > 1


CELLS = {
    "mini-batches, epochs": (2, ("--actor.global_batches", 2, "--actor.epochs", 2)),
    "stale": (
        2,
        (
            *("--training.max_staleness", 2, "--training.iterations", 6),
            *("--actor.loss.proximal", "step"),
        ),
    ),
    "two ranks of each": (
        2,
        (
            *("--cluster.backend", "process", "--cluster.actors", 2),
            *("--cluster.inference_workers", 2, "--training.max_staleness", 1),
        ),
    ),
    "taking turns, an adapter": (
        2,
        ("--cluster.placement", "collocated", "--actor.lora.rank", 4),
    ),
    "a scheduler": (
        2,
        (
            *("--cluster.backend", "process", "--cluster.rollout_workers", 2),
            *("--scheduler.policy", "tail", "--training.prompts", 8, "--actor.global_batches", 2),
        ),
    ),
    "megatron": (2, ("--cluster.backend", "process", "--actor.backend", "megatron")),
}


@pytest.mark.parametrize("cell", CELLS)
def test_every_sample_is_compared_with_the_version_before_it(tiny: Job, cell: str) -> None:
    every, settings = CELLS[cell]
    tiny.succeed(*MIXED, *KEPT_ALL, *settings, "--teacher.every", every, "--teacher.top_k", 5)
    check_teachers(tiny, every)
    assert max(column(tiny, "teacher_divergence")) > 0.0


def test_a_version_is_the_model_that_its_checkpoint_holds(tiny: Job) -> None:
    """The folder of version 2 is what a run that ended there exports."""
    from safetensors.torch import load_file

    settings = (*MIXED, *KEPT_ALL, "--teacher.every", 2, "--actor.pipelined", "false")
    tiny.succeed(*settings, "--training.iterations", 2)
    trained = load_file(tiny.out / "trained" / "model.safetensors")
    version = load_file(tiny.out / "teacher" / "version-000002" / "model.safetensors")
    first = load_file(tiny.out / "teacher" / "version-000000" / "model.safetensors")
    assert trained.keys() == version.keys()
    assert all(torch.equal(one, version[name]) for name, one in trained.items())
    assert any(not torch.equal(one, version[name]) for name, one in first.items())


def test_a_resumed_run_has_the_teacher_that_it_would_have_had(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It goes on from version 3, whose teacher is version 2, of which there is no checkpoint."""
    settings = (
        *(*MIXED, "--teacher.every", 2, "--teacher.top_k", "all", "--actor.pipelined", "false"),
        *("--training.keep_checkpoints", 1, "--training.checkpoint_every", 3),
    )
    found = []
    for name in ("whole", "resumed"):
        (tmp_path / name).mkdir()
        job = Job(tmp_path / name, capsys, TINY)
        if name == "resumed":
            job.succeed(*settings, "--training.iterations", 3)
            assert [one.name for one in job.out.glob("checkpoints/version*")] == ["version-000003"]
        resumed = ("--resume",) if name == "resumed" else ()
        job.succeed(*settings, "--training.iterations", 5, *resumed)
        names = ("teacher_version", "teacher_divergence", "teacher_kl", "loss", "grad_norm")
        found.append([column(job, one) for one in names])
    assert found[0][0] == [0.0, 0.0, 2.0, 2.0, 4.0]
    np.testing.assert_allclose(found[0], found[1], atol=1e-5)
    ended = job.train(*settings, "--training.iterations", 6, "--teacher.every", 3, "--resume")
    assert ended.code == 2
    assert "teacher.every" in ended.err


def test_versions_go_that_no_checkpoint_needs(tiny: Job) -> None:
    settings = (*MIXED, "--teacher.every", 1, "--actor.epochs", 2, "--training.export", "false")
    tiny.succeed(*settings, "--training.iterations", 3, "--training.checkpoint_every", 0)
    assert [one.name for one in tiny.out.glob("teacher/*")] == ["version-000003"]
    tiny.succeed(*settings, *KEPT_ALL, "--training.iterations", 5, "--resume")
    there = sorted(one.name for one in tiny.out.glob("teacher/*"))
    assert there == ["version-000003", "version-000004", "version-000005"]


REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    "alone": (
        (
            *("--actor.loss.name", "distill", "--data.verifier", "none"),
            *("--actor.loss.teacher_coefficient", 0, "--teacher.every", 2),
        ),
        "teacher.every: with actor.loss.name = 'distill' the policy would learn from its own",
    ),
    "the present version": (
        ("--teacher.every", 1),
        "teacher.every: it is 1, and an iteration is one optimizer step on samples of the present",
    ),
    "a number below 0": (("--teacher.every", -1), "teacher"),
    "nobody to ask it": (
        ("--teacher.every", 2, "--cluster.inference_workers", 0),
        "cluster.inference_workers: nobody asks the teacher: set it to at least 1",
    ),
    "a loss that learns nothing from it": (
        ("--teacher.every", 2, "--actor.loss.teacher_coefficient", 0),
        "teacher.every: nothing is learnt from it by actor.loss.name = 'ppo'",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_check_names_what_cannot_be_learnt(tiny: Job, what: str) -> None:
    settings, said = REFUSED[what]
    ended = tiny.command("check", tiny.file, *MIXED, *settings)
    assert ended.code == 2, ended.out
    assert said in ended.err


def test_another_teacher_beside_is_refused(tiny: Job, tmp_path: pathlib.Path) -> None:
    folder = save_checkpoint(tmp_path / "teacher", "qwen3")
    ended = tiny.command("check", tiny.file, *MIXED, "--teacher.path", folder, "--teacher.every", 2)
    assert ended.code == 2, ended.out
    assert "teacher.every: every is 2: the teacher is an earlier version of the" in ended.err


def test_a_toy_has_no_earlier_version(job: Job) -> None:
    ended = job.command(
        *("check", job.file, "--teacher.every", 2, "--cluster.inference_workers", 1),
        *("--actor.loss.teacher_coefficient", 0.5),
    )
    assert ended.code == 2, ended.out
    assert "teacher.every: actor.backend is 'toy', which has no weights" in ended.err
