"""Runs of ``sft`` and ``dpo``: what they learn, leave, and go on with."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest
import torch

from rlinf_async.data.prompts import arithmetic_tokenizer, split
from rlinf_async.observe.metrics import read_columns
from rlinf_async.runtime.jobs.supervised.run import REFERENCE, SupervisedRun
from tests.jobs.language.checkpoints import load_checkpoint, save_checkpoint
from tests.jobs.supervised.kit import DISTILL, DPO, SFT, Job

TEXTS = {"sft": SFT, "dpo": DPO, "distill": DISTILL}
COMPARED = (
    *("loss", "grad_norm", "eval_loss", "reward_margin", "eval_reward_margin"),
    *("teacher_divergence", "eval_cross_entropy"),
)


class Killed(BaseException):
    """What takes the place of SIGKILL inside this process."""


def curves(job: Job) -> dict[str, list[float]]:
    columns = read_columns(job.out / "metrics.csv")
    return {name: columns[name] for name in ("step", *COMPARED) if name in columns}


def test_answers_are_learnt_measured_and_exported(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job(tmp_path, capsys)
    summary = job.succeed("--training.steps", 40, "--training.evaluate_every", 20)
    assert summary.outcome == "finished"
    assert (summary.iterations, summary.examples, summary.evaluation_examples) == (40, 160, 4)
    assert summary.eval_loss_before is not None
    assert summary.eval_loss is not None
    assert summary.eval_loss < summary.eval_loss_before - 0.5
    columns = read_columns(job.out / "metrics.csv")
    measured = np.isfinite(columns["eval_loss"])
    assert np.asarray(columns["step"])[measured].tolist() == [0, 20, 40]
    assert job.iterations[-1]["epoch"] == "8"
    assert (job.out / "trained" / "tokenizer.json").is_file()
    assert (job.out / "learning_curve.png").is_file()
    assert load_checkpoint(job.out / "trained")["model.norm.weight"].shape == (32,)


def test_held_out_loss_is_the_mean_cross_entropy_by_transformers(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM

    factory: Any = AutoModelForCausalLM
    job = Job(tmp_path, capsys)
    summary = job.succeed("--training.steps", 2, "--data.held_out", 5)
    model, tokenizer = factory.from_pretrained(job.out / "trained"), arithmetic_tokenizer()
    losses = []
    for at in split(24, 5, 0)[1].tolist():
        prompt, answer = f"<user>{at}+{at + 1}=<assistant>", f"{2 * at + 1}<eos>"
        given, learnt = (tokenizer(one)["input_ids"] for one in (prompt, answer))
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([given + learnt])).logits[0]
        rows = logits[len(given) - 1 : -1].log_softmax(-1)
        losses.append(-rows.gather(-1, torch.tensor(learnt)[:, None])[:, 0])
    assert summary.eval_loss == pytest.approx(float(torch.cat(losses).mean()), abs=1e-5)


@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("die_in", [1, 3])
def test_losses_of_a_resumed_run_are_those_of_one_that_was_not_killed(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], kind: str, die_in: int
) -> None:
    whole, killed = (Job(tmp_path / one, capsys, TEXTS[kind]) for one in ("whole", "killed"))
    whole.succeed()
    put = SupervisedRun._put

    async def dying(run: SupervisedRun, flow: Any, step: int) -> None:
        await flow.checkpointer.finish()
        if step == die_in:
            raise Killed
        await put(run, flow, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SupervisedRun, "_put", dying)
        with pytest.raises(Killed):
            killed.train()
    assert killed.checkpoints == (["version-000002"] if die_in == 3 else [])
    killed.succeed("--resume")
    expected = curves(whole)
    assert len(expected["loss"]) == 6
    for name, numbers in curves(killed).items():
        np.testing.assert_allclose(numbers, expected[name], rtol=0, atol=1e-6, err_msg=name)
    assert killed.summary.eval_loss == pytest.approx(whole.summary.eval_loss, abs=1e-6)
    assert killed.summary.eval_loss_before == whole.summary.eval_loss_before


def test_preferences_are_learnt_from_the_folder_that_sft_left(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = Job(tmp_path, capsys)
    first.succeed("--training.steps", 2)
    text = DPO.partition("[model]")[0] + '[model]\npath = "{folder}/run/trained"\n\n[data]'
    job = Job(tmp_path / "dpo", capsys, text + DPO.partition("[data]")[2])
    (tmp_path / "dpo" / "run.toml").write_text(
        job.file.read_text().replace(f"{tmp_path}/dpo/run/trained", f"{first.out}/trained")
    )
    summary = job.succeed("--training.steps", 30, "--training.evaluate_every", 0)
    columns = read_columns(job.out / "metrics.csv")
    # Before the first step nothing differs from the reference: margin 0, loss log 2.
    assert columns["eval_loss"][0] == pytest.approx(np.log(2.0), abs=1e-6)
    assert columns["loss"][1] == pytest.approx(np.log(2.0), abs=1e-5)
    assert columns["eval_reward_margin"][0] == pytest.approx(0.0, abs=1e-6)
    assert columns["reward_margin"][-1] > 0.1
    assert summary.eval_reward_accuracy == 1.0
    with np.load(job.out / REFERENCE) as kept:
        assert sorted(kept["records"].tolist()) == list(range(24))


@pytest.mark.parametrize("divergence", ["forward", "reverse"])
def test_the_loss_is_the_divergence_by_transformers_of_the_model_from_its_teacher(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], divergence: str
) -> None:
    from transformers import AutoModelForCausalLM

    factory: Any = AutoModelForCausalLM
    student = save_checkpoint(tmp_path / "student", "qwen3", hidden_size=32)
    model = '[model]\npath = "{folder}/student"\n\n[data]'
    text = DISTILL.partition("[model]")[0] + model + DISTILL.partition("[data]")[2]
    job = Job(tmp_path, capsys, text)
    job.succeed(
        *("--training.steps", 30, "--training.batch_size", 20, "--teacher.top_k", "all"),
        *("--loss.divergence", divergence, "--training.evaluate_every", 0),
    )
    models = [factory.from_pretrained(one) for one in (student, tmp_path / "teacher")]
    tokenizer, losses = arithmetic_tokenizer(), []
    for at in split(24, 4, 0)[0].tolist():
        prompt, answer = f"<user>{at}+{at + 1}=<assistant>", f"{2 * at + 1}<eos>"
        given, learnt = (tokenizer(one)["input_ids"] for one in (prompt, answer))
        with torch.no_grad():
            ids = torch.tensor([given + learnt])
            rows = [one(input_ids=ids).logits[0, len(given) - 1 : -1] for one in models]
        one, other = (
            each.log_softmax(-1) for each in rows[:: 1 if divergence == "reverse" else -1]
        )
        losses.append((one.exp() * (one - other)).sum(-1))
    columns = read_columns(job.out / "metrics.csv")
    assert columns["loss"][1] == pytest.approx(float(torch.cat(losses).mean()), abs=1e-5)
    assert columns["loss"][30] < 0.5 * columns["loss"][1]
    assert columns["teacher_divergence"][1:] == pytest.approx(columns["loss"][1:], abs=1e-6)
    assert np.isfinite(columns["eval_cross_entropy"]).tolist()[0] is True


def test_a_run_does_not_go_on_with_another_teacher(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job(tmp_path, capsys, DISTILL)
    job.succeed("--training.steps", 2)
    save_checkpoint(tmp_path / "teacher", "qwen3", num_hidden_layers=1)
    ended = job.train("--training.steps", 4, "--resume")
    assert ended.code == 2
    assert "teacher.path: " in ended.err


def test_more_steps_than_there_are_reference_log_probs_for_are_refused(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job(tmp_path, capsys, DPO)
    job.succeed("--training.steps", 2)
    ended = job.train("--training.steps", 5, "--resume")
    assert ended.code == 2
    assert "has no log-probs of 12 records that further steps learn from" in ended.err
    assert job.succeed("--training.steps", 2, "--resume").iterations == 2


@pytest.mark.parametrize("kind", TEXTS)
def test_several_actors_learn_as_one_whoever_trains(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """Micro-batches, data ranks, and for DPO tensor ranks of Megatron, change only rounding."""
    text = TEXTS[kind].replace("evaluate_every = 2", "evaluate_every = 3")
    steps = ("--training.steps", 3)
    whole, cut = (Job(tmp_path / one, capsys, text) for one in ("whole", "cut"))
    whole.succeed(*steps, "--actor.micro_batch_size", 4)
    megatron: tuple[object, ...] = ()
    if kind == "dpo":
        pytest.importorskip("megatron.core")
        megatron = ("--actor.backend", "megatron", "--actor.tp", 2)
    cut.succeed(*steps, *megatron, "--cluster.backend", "process", "--cluster.actors", 2)
    expected = curves(whole)
    for name, numbers in curves(cut).items():
        np.testing.assert_allclose(numbers, expected[name], rtol=2e-4, atol=2e-5, err_msg=name)
