"""Settings that cannot be carried out are refused by ``check``, with the setting named."""

from __future__ import annotations

import pathlib

import pytest

from tests.jobs.supervised.kit import DISTILL, DPO, SFT, Job

WRONG: dict[str, tuple[str, tuple[object, ...], str]] = {
    "no data": (SFT, ("--data.path", "nowhere.jsonl"), "data.path: there is no file or folder"),
    "no column": (SFT, ("--data.completion_column", "answer"), "column 'answer' is missing"),
    "no length": (SFT, ("--training.epochs", 1), "training: how long? give one of steps"),
    "a batch of too many": (
        SFT,
        ("--training.batch_size", 64),
        "training.batch_size: there are 20",
    ),
    "actors that do not divide it": (
        SFT,
        ("--cluster.actors", 3, "--cluster.backend", "process"),
        "training.batch_size: 4 records cannot be divided among 3 actors",
    ),
    "micro-batches that do not": (
        DPO,
        ("--actor.micro_batch_size", 3),
        "actor.micro_batch_size: a batch has 4 records on each actor",
    ),
    "both limits of a micro-batch": (SFT, ("--actor.max_tokens", 64), "actor.max_tokens: "),
    "tokens for pairs": (DPO, ("--actor.max_tokens", 64), "actor.max_tokens: "),
    "several actors in one process": (SFT, ("--cluster.actors", 2), "cluster.backend: several"),
    "an evaluation of nothing": (SFT, ("--data.held_out", 0), "training.evaluate_every: "),
    "a trainer without weights": (SFT, ("--actor.backend", "toy"), "actor.backend: 'toy' has no"),
    "a rate of values": (SFT, ("--actor.optimizer.value_lr", 0.1), "actor.optimizer.value_lr: "),
    "stages with fsdp": (SFT, ("--actor.pp", 2), "actor.pp: pp is 2, but the backend 'fsdp'"),
    "settings of another trainer": (
        SFT,
        ("--actor.megatron.virtual_stages", 2),
        "actor.megatron.virtual_stages: ",
    ),
    "a loss of the other job": (SFT, ("--loss.beta", 0.1), "loss"),
    "a smoothing without effect": (DPO, ("--loss.label_smoothing", 0.5), "loss: label_smoothing"),
    "a teacher that is asked for nothing": (
        DISTILL,
        ("--teacher.top_k", 0),
        "teacher.top_k: it is 0, but nothing can be estimated on answers",
    ),
    "a teacher that is not there": (
        DISTILL,
        ("--teacher.path", "nowhere"),
        "teacher.path: nowhere has no config.json",
    ),
    "nobody who holds it": (
        DISTILL,
        ("--cluster.inference_workers", 0),
        "cluster: inference_workers is 0; it must be at least 1",
    ),
    "tokens outside of all": (
        DISTILL,
        ("--teacher.top_k", "all", "--loss.divergence_outside", "left_out"),
        "loss.divergence_outside: 'left_out' is about tokens",
    ),
    "a weight without effect": (
        DISTILL,
        ("--loss.divergence_beta", 0.1),
        "loss: divergence_beta is 0.1, but divergence is 'forward'",
    ),
    "a teacher of sft": (SFT, ("--teacher.path", "nowhere"), "teacher"),
    "longer than the model": (
        SFT,
        ("--model.config.max_position_embeddings", 8),
        "data.max_tokens: the longest example has",
    ),
    "a model that is not there": (
        DPO,
        ("--model.path", "nowhere", "--model.tokenizer", "", "--model.config", "{}"),
        "model.path: the folder 'nowhere' is not there",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_check_names_what_is_wrong(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    text, settings, said = WRONG[what]
    ended = Job(tmp_path, capsys, text).command("check", tmp_path / "run.toml", *settings)
    assert ended.code == 2, ended.out
    assert said in ended.err


@pytest.mark.parametrize("text", [SFT, DPO, DISTILL], ids=["sft", "dpo", "distill"])
def test_check_accepts_what_runs(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    ended = Job(tmp_path, capsys, text).command("check", tmp_path / "run.toml")
    assert (ended.code, ended.err) == (0, "")
    assert "actor" in ended.out


def test_a_run_does_not_go_on_with_other_data(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job(tmp_path, capsys)
    job.succeed("--training.steps", 2)
    with (tmp_path / "sums.jsonl").open("a") as file:
        file.write('{"prompt": "1+1=", "completion": "2"}\n')
    ended = job.train("--training.steps", 4, "--resume")
    assert ended.code == 2
    assert "data.path: sums.jsonl differs" in ended.err
