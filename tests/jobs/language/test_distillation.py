"""``[teacher]`` in the language job: a cell of settings learns from it, or is refused."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import pathlib
from typing import Any

import numpy as np
import pytest
import torch

from rlinf_async.backends.fsdp.language.part import FSDP
from rlinf_async.observe.samples import read_samples
from tests.jobs.language.checkpoints import save_checkpoint
from tests.jobs.language.kit import TINY, Job
from tests.jobs.language.test_runs import LETTERS

ALONE = (
    *("--actor.loss.name", "distill", "--data.verifier", "none", "--evaluation.samples", 0),
    *("--training.group_size", 1, "--actor.optimizer.lr", 1e-2),
)
MIXED = (
    *("--actor.loss.teacher_coefficient", 0.5, "--data.verifier", LETTERS),
    *("--actor.optimizer.lr", 1e-2),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return save_checkpoint(tmp_path_factory.mktemp("teacher"), "qwen3")


def asks(folder: pathlib.Path, top_k: object = 0) -> tuple[object, ...]:
    return (
        *("--teacher.path", folder, "--teacher.top_k", top_k),
        *("--cluster.inference_workers", 1),
    )


def column(job: Job, name: str) -> list[float]:
    return [float(row[name]) for row in job.iterations]


@pytest.mark.parametrize("top_k", [0, 5, "all"])
def test_a_policy_learns_from_a_teacher_alone(
    tiny: Job, folder: pathlib.Path, top_k: object
) -> None:
    """No verifier, no groups, no rewards; and nothing is said of a lack of signal."""
    ended = tiny.train(*ALONE, *asks(folder, top_k), "--training.prompts", 16)
    assert (ended.code, ended.err) == (0, "")
    assert column(tiny, "teacher_kl")[0] > 0.05
    assert min(column(tiny, "grad_norm")) > 0.0
    if top_k:
        divergences = column(tiny, "teacher_divergence")
        assert divergences[-1] < divergences[0]
        assert divergences == pytest.approx(column(tiny, "loss"), abs=1e-6)
    assert set(column(tiny, "reward")) == {0.0}


def test_a_teachers_log_probs_are_those_of_transformers_at_the_tokens_that_the_policy_drew(
    tiny: Job, folder: pathlib.Path
) -> None:
    from transformers import AutoModelForCausalLM

    factory: Any = AutoModelForCausalLM
    model = factory.from_pretrained(folder)
    tiny.succeed(*ALONE, *asks(folder), "--training.iterations", 2)
    found = read_samples(tiny.out, kind="training")
    assert len(found) == 8
    differences = []
    for one in found:
        given, tokens = one["prompt_tokens"], one["tokens"]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*given, *tokens]])).logits[0]
        rows = logits[len(given) - 1 : -1].log_softmax(-1)
        expected = rows.gather(-1, torch.tensor(tokens)[:, None])[:, 0].tolist()
        np.testing.assert_allclose(one["teacher_log_probs"], expected, atol=1e-3)
        differences += [
            (one["iteration"], own, theirs)
            for own, theirs in zip(one["log_probs"], expected, strict=True)
        ]
    first = [own - theirs for iteration, own, theirs in differences if iteration == 0]
    assert column(tiny, "teacher_kl")[0] == pytest.approx(float(np.mean(first)), abs=1e-3)


CELLS = {
    "mini-batches, epochs": ("--actor.global_batches", 2, "--actor.epochs", 2),
    "the step's weights": (
        *("--actor.global_batches", 2, "--actor.loss.proximal", "step"),
        *("--training.max_staleness", 1),
    ),
    "stale": ("--training.max_staleness", 1),
    "collected": ("--actor.pipelined", "false"),
    "packed by tokens": ("--actor.max_tokens", 64),
    "what was kept": ("--rollout.sampling.top_p", 0.8, "--rollout.sampling.top_k", 9),
    "a temperature": ("--rollout.sampling.temperature", 0.7),
    "taking turns": ("--cluster.placement", "collocated"),
    "a reference": ("--actor.loss.kl_coefficient", 0.1),
    "an entropy bonus": ("--actor.loss.entropy_coefficient", 0.01),
    "bfloat16": ("--actor.precision", "bfloat16"),
}
LEARNING = {"alone": ALONE, "mixed": MIXED}


ASKED = itertools.cycle([(0, "alone"), ("all", "alone"), (0, "mixed"), (7, "mixed")])


@pytest.mark.parametrize(
    ("cell", "top_k", "learning"),
    [(cell, *asked) for cell, asked in zip(CELLS, ASKED, strict=False)],
)
def test_every_cell_trains(
    tiny: Job, folder: pathlib.Path, cell: str, top_k: object, learning: str
) -> None:
    settings = CELLS[cell]
    if "--actor.max_tokens" in settings:
        text = tiny.file.read_text(encoding="utf-8")
        tiny.file.write_text(text.replace("micro_batch_size = 4\n", ""), encoding="utf-8")
    size = ("--training.prompts", 8) if learning == "alone" else ("--evaluation.samples", 0)
    tiny.succeed(
        *LEARNING[learning], *asks(folder, top_k), *size, *settings, "--training.iterations", 3
    )
    assert all(math.isfinite(one) for one in column(tiny, "teacher_kl"))
    assert min(column(tiny, "grad_norm")) > 0.0
    if top_k:
        assert min(column(tiny, "teacher_divergence")) > 0.0


def test_rewards_and_a_teacher_are_both_in_the_loss(tiny: Job, folder: pathlib.Path) -> None:
    tiny.succeed(*MIXED, *asks(folder, "all"), "--training.iterations", 1)
    [row] = tiny.iterations
    expected = float(row["policy_loss"]) + 0.5 * float(row["teacher_divergence"])
    assert float(row["loss"]) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("divergence", ["forward", "jsd", "mixed"])
def test_every_divergence_falls(tiny: Job, folder: pathlib.Path, divergence: str) -> None:
    tiny.succeed(
        *ALONE, *asks(folder, 8), "--actor.loss.divergence", divergence, "--training.prompts", 16
    )
    found = column(tiny, "teacher_divergence")
    assert found[-1] < found[0]
    assert all(0.0 < one < 1.0 for one in column(tiny, "teacher_mass"))


def test_episodes_learn_from_a_teacher(tiny: Job, folder: pathlib.Path) -> None:
    tiny.succeed(
        *ALONE,
        *asks(folder, 6),
        *("--episode.run", "tests.jobs.language.agents:talks", "--cluster.episode_workers", 1),
        *("--episode.max_tokens", 60, "--rollout.sampling.max_tokens", 4),
        *("--training.iterations", 2),
    )
    assert column(tiny, "turns") == [3.0, 3.0]
    assert min(column(tiny, "teacher_divergence")) > 0.0


@pytest.mark.parametrize("top_k", [0, "all"])
def test_a_resumed_run_learns_what_it_would_have_learnt(
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    folder: pathlib.Path,
    top_k: object,
) -> None:
    settings = (*ALONE, *asks(folder, top_k), "--actor.pipelined", "false")
    found = []
    for name in ("whole", "resumed"):
        (tmp_path / name).mkdir()
        job = Job(tmp_path / name, capsys, TINY)
        if name == "resumed":
            job.succeed(*settings, "--training.iterations", 2)
        job.succeed(*settings, *(("--resume",) if name == "resumed" else ()))
        found.append([column(job, one) for one in ("teacher_kl", "loss", "grad_norm")])
    np.testing.assert_allclose(found[0], found[1], atol=1e-5)


def test_a_resumed_run_does_not_go_on_with_another_teacher(
    tiny: Job, folder: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    tiny.succeed(*ALONE, *asks(folder), "--training.iterations", 2)
    other = save_checkpoint(tmp_path / "other", "qwen3", hidden_size=32)
    ended = tiny.train(*ALONE, *asks(other), "--resume")
    assert ended.code == 2
    assert "teacher.path: config.json differs" in ended.err


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_what_vllm_drew_is_learnt_from(tiny: Job, folder: pathlib.Path) -> None:
    tiny.succeed(
        *ALONE,
        *asks(folder, "all"),
        *("--rollout.backend", "vllm", "--cluster.backend", "process"),
        *("--training.iterations", 2, "--model.config.head_dim", 32),
    )
    assert min(column(tiny, "teacher_divergence")) > 0.0


def test_two_actors_and_two_inference_workers_share_the_work(
    tiny: Job, folder: pathlib.Path
) -> None:
    tiny.succeed(
        *ALONE,
        *asks(folder, 5),
        *("--cluster.backend", "process", "--cluster.actors", 2, "--cluster.inference_workers", 2),
        *("--training.iterations", 2, "--training.prompts", 8),
    )
    assert min(column(tiny, "teacher_divergence")) > 0.0


@pytest.mark.parametrize("top_k", [0, 5, "all"])
def test_megatron_learns_as_fsdp(
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    folder: pathlib.Path,
    top_k: object,
) -> None:
    """Two ranks that share each layer and the vocabulary, against one that has all of it."""
    pytest.importorskip("megatron.core")
    settings = (
        *("--training.iterations", 2, "--model.config.num_key_value_heads", 2),
        *("--actor.pipelined", "false", "--cluster.backend", "process", "--training.prompts", 8),
    )
    megatron = ("--actor.backend", "megatron", "--actor.tp", 2, "--cluster.actors", 2)
    found = []
    for name, others in (("fsdp", ()), ("megatron", megatron)):
        (tmp_path / name).mkdir()
        job = Job(tmp_path / name, capsys, TINY)
        job.succeed(*ALONE, *asks(folder, top_k), *settings, *others)
        found.append([column(job, one) for one in ("teacher_kl", "loss", "grad_norm")])
    np.testing.assert_allclose(found[0], found[1], atol=1e-4)


def test_a_trainer_that_computes_nothing_of_other_tokens_is_named(
    tiny: Job, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FSDP, "tells_distributions", False)
    ended = tiny.command("check", tiny.file, *ALONE, *asks(folder, 5))
    assert ended.code == 2, ended.out
    assert "teacher.top_k: it is 5, but the trainer 'fsdp' computes log-probs of the" in ended.err
    assert tiny.command("check", tiny.file, *ALONE, *asks(folder)).code == 0


REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    "a loss that learns nothing from it": (
        ("--data.verifier", LETTERS),
        "teacher.path: nothing is learnt from it by actor.loss.name = 'ppo': set that to 'distill'",
    ),
    "nobody to ask it": (
        (*ALONE, "--cluster.inference_workers", 0),
        "cluster.inference_workers: nobody asks the teacher: set it to at least 1",
    ),
    "both": (
        (*ALONE, "--actor.loss.teacher_coefficient", 0.5),
        "actor.loss: teacher_coefficient is 0.5, but 'distill' is the divergence",
    ),
    "a distribution of one token": (
        (*ALONE, "--actor.loss.divergence", "jsd"),
        "actor.loss.divergence: 'jsd' compares distributions, but with teacher.top_k = 0",
    ),
    "tokens outside of all": (
        (*ALONE, "--teacher.top_k", "all", "--actor.loss.divergence_outside", "left_out"),
        "actor.loss.divergence_outside: 'left_out' is about tokens that are not among",
    ),
    "a number below 0": (
        (*ALONE, "--teacher.top_k", -1),
        "teacher.top_k",
    ),
    "advantages that nobody uses": (
        (*ALONE, "--actor.advantage.name", "rloo"),
        "actor.advantage: 'distill' learns from the teacher alone, and uses no advantages",
    ),
    "a correction of what was not drawn": (
        (
            *(*ALONE, "--teacher.top_k", 5, "--training.max_staleness", 1),
            *("--actor.loss.proximal", "step", "--actor.loss.off_policy", "truncated"),
        ),
        "actor.loss.off_policy: 'truncated' weights tokens for having been drawn by another",
    ),
    "a correction of nothing": (
        (*ALONE, "--training.max_staleness", 1, "--actor.loss.off_policy", "truncated"),
        "actor.loss.off_policy: 'truncated' weights tokens by proximal / behaviour, but with",
    ),
    "an evaluation of nothing": (
        (*ALONE, "--evaluation.samples", 4),
        "evaluation.samples: no answer is right or wrong with data.verifier = 'none'",
    ),
    "a choice of nothing": (
        (*ALONE, "--training.group_size", 2, "--training.accept", "varied"),
        "training.accept: all groups are alike with data.verifier = 'none'",
    ),
    "a warm start without answers": (
        (*ALONE, "--warm_start.steps", 2, "--warm_start.batch_size", 4),
        "warm_start.steps: it imitates the answers of the data, which are not read with verifier",
    ),
    "rewards of nobody": (
        (*MIXED, "--data.verifier", "none"),
        "data.verifier: 'none' gives every answer a reward of 0, and 'ppo' learns from rewards",
    ),
    "a folder that is not there": (
        (*ALONE, "--teacher.path", "nowhere"),
        "teacher.path: nowhere has no config.json",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_check_names_what_cannot_be_learnt(tiny: Job, folder: pathlib.Path, what: str) -> None:
    settings, said = REFUSED[what]
    ended = tiny.command("check", tiny.file, *asks(folder), *settings)
    assert ended.code == 2, ended.out
    assert said in ended.err


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("--actor.loss.name", "distill"), "actor.loss.name: 'distill' compares with a teacher"),
        (
            ("--actor.loss.teacher_coefficient", 0.5),
            "actor.loss.teacher_coefficient: 0.5 compares with a teacher, and there is none",
        ),
        (("--actor.loss.divergence", "jsd"), "actor.loss.divergence: 'jsd' has no effect without"),
        (("--teacher.top_k", 5), "teacher.top_k: top_k is 5, but there is no teacher"),
    ],
)
def test_check_names_settings_of_a_teacher_that_is_not_there(
    tiny: Job, settings: tuple[object, ...], said: str
) -> None:
    ended = tiny.command("check", tiny.file, *settings)
    assert ended.code == 2, ended.out
    assert said in ended.err


def test_a_toy_learns_nothing_from_a_teacher(job: Job, folder: pathlib.Path) -> None:
    ended = job.command("check", job.file, *asks(folder), "--actor.loss.name", "distill")
    assert ended.code == 2, ended.out
    assert "teacher.path: actor.backend is 'toy', which has no weights" in ended.err


def test_a_teacher_of_another_tokenizer_is_refused_with_what_differs(
    tiny: Job, folder: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    other = save_checkpoint(tmp_path / "other", "qwen3")
    file = other / "tokenizer.json"
    described = json.loads(file.read_text(encoding="utf-8"))
    words = described["model"]["vocab"]
    words["+"], words["="] = words["="], words["+"]
    file.write_text(json.dumps(described), encoding="utf-8")
    ended = tiny.command("check", tiny.file, *ALONE, *asks(other))
    assert ended.code == 2, ended.out
    number = min(words["+"], words["="])
    assert "teacher.path: the tokenizer in" in ended.err
    assert "is not the model's: it has" in ended.err
    assert f"which is token {number} there and" in ended.err or f"and {number} here" in ended.err


def test_a_teacher_may_have_more_rows_than_its_tokenizer_has_tokens(
    tiny: Job, tmp_path: pathlib.Path
) -> None:
    """As models of one family are padded otherwise."""
    from rlinf_async.data.prompts import arithmetic_tokenizer

    tokens = len(arithmetic_tokenizer())
    for number, (more, top_k) in enumerate(itertools.product((5, 40), ("all", 6))):
        other = save_checkpoint(tmp_path / f"{number}", "qwen3", vocab_size=tokens + more)
        if number == 0:
            tiny.succeed(*ALONE, *asks(other, top_k), "--training.iterations", 1)
            assert column(tiny, "teacher_divergence")[0] > 0.0
        else:
            ended = tiny.command("check", tiny.file, *ALONE, *asks(other, top_k))
            assert ended.code == 0, ended.err
