"""``[actor.lora]`` in whole runs: what is trained, served, resumed and left; what is refused."""

from __future__ import annotations

import importlib
import pathlib
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from rlinf_async.backends.language_training import lora
from rlinf_async.backends.language_training.lora import ADAPTER_FOLDER
from rlinf_async.backends.transformers import decoder, tensors
from tests.jobs.language.kit import LOSSES, TINY, Job
from tests.jobs.supervised.kit import DPO, SFT
from tests.jobs.supervised.kit import Job as SupervisedJob

LETTERS = ("--data.verifier", "tests.jobs.language.verifiers:letters")
RANK = ("--actor.lora.rank", 2, "--actor.optimizer.lr", 0.01)
WARM = ("--warm_start.steps", 2, "--warm_start.batch_size", 4)


def weights(run: pathlib.Path) -> dict[str, torch.Tensor]:
    return load_file(run / "trained" / "model.safetensors")


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=torch.arange(1, 9)[None]).logits
    return found


@pytest.mark.parametrize("placement", ["disaggregated", "collocated"])
def test_a_run_leaves_its_base_and_peft_loads_the_adapter_that_it_trained(
    tiny: Job, placement: str
) -> None:
    ahead = int(placement == "disaggregated")
    tiny.succeed(*RANK, *WARM, *LETTERS, "--cluster.placement", placement,
                 "--actor.global_batches", 2, "--actor.epochs", 2,
                 "--training.max_staleness", ahead,
                 "--training.check_weights_every", 1)  # fmt: skip
    base, trained = tiny.out / "model", tiny.out / "trained"
    before, after = load_file(base / "model.safetensors"), weights(tiny.out)
    changed = {name for name, one in after.items() if not torch.equal(one, before[name])}
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in changed} == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    }
    auto: Any = transformers.AutoModelForCausalLM
    peft: Any = importlib.import_module("peft")
    merged = auto.from_pretrained(trained)
    found = peft.PeftModel.from_pretrained(auto.from_pretrained(base), trained / ADAPTER_FOLDER)
    # In float64: two passes in float32 differ by as much as the merged weights were rounded.
    found, merged = found.double(), merged.double()
    torch.testing.assert_close(logits(found), logits(merged), atol=1e-5, rtol=0.0)
    # The command makes the same of the run's newest checkpoint.
    assert tiny.command("export", tiny.out, tiny.out / "exported").code == 0
    exported = load_file(tiny.out / "exported" / "model.safetensors")
    assert all(torch.equal(exported[name], one) for name, one in after.items())
    assert exported.keys() == after.keys()


def test_a_resumed_run_goes_on_to_the_last_bit(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = (*RANK, *LETTERS, "--actor.pipelined", "false")
    jobs = []
    for name in ("whole", "stopped"):
        (tmp_path / name).mkdir()
        jobs.append(Job(tmp_path / name, capsys, TINY))
    whole, stopped = jobs
    whole.succeed(*settings)
    stopped.succeed(*settings, "--training.iterations", 2)
    ended = stopped.train(*settings, "--actor.lora.rank", 4, "--resume")
    assert ended.code == 2
    assert "actor.lora.rank" in ended.err
    stopped.succeed(*settings, "--resume")
    for before, after in zip(whole.iterations, stopped.iterations, strict=True):
        assert [before[name] for name in LOSSES] == [after[name] for name in LOSSES]
    expected = weights(whole.out)
    assert all(torch.equal(one, expected[name]) for name, one in weights(stopped.out).items())


def test_the_reference_of_inference_workers_is_the_model_without_its_adapter(tiny: Job) -> None:
    tiny.succeed(*RANK, *LETTERS, "--actor.loss.kl_coefficient", 0.1,
                 "--cluster.inference_workers", 1, "--training.check_weights_every", 1)  # fmt: skip
    kl = [float(row["loss"]) - float(row["policy_loss"]) for row in tiny.iterations]
    assert abs(kl[0]) < 1e-6
    assert kl[-1] > 1e-6


def test_a_run_ends_where_the_engine_does_not_serve_the_merged_weights(
    tiny: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that leaves the update of a layer out, and still says that it took all bytes."""
    load = tensors.load_weights

    def halved(update: Any, model: Any, *others: Any) -> int:
        found = load(update, model, *others)
        if update.version:
            with torch.no_grad():
                model.model.layers[0].mlp.up_proj.weight.mul_(0.5)
        return found

    monkeypatch.setattr(decoder, "load_weights", halved)
    ended = tiny.train(*RANK, *LETTERS, "--training.check_weights_every", 1)
    assert ended.code == 1
    assert "the engine's log-prob" in ended.err


ADAPTER = ("--actor.lora.publish", "adapter")


@pytest.mark.parametrize("placement", ["disaggregated", "collocated"])
def test_engine_and_inference_worker_are_given_the_adapter_alone(
    tiny: Job, placement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[set[str]] = []
    load = lora.take_adapter

    def noted(arrived: Any, *others: Any) -> None:
        taken.append({name.rpartition(".lora_")[2] for name in arrived})
        load(arrived, *others)

    monkeypatch.setattr(tensors, "take_adapter", noted)
    settings = (
        *(*RANK, *ADAPTER, *WARM, *LETTERS, "--cluster.placement", placement),
        *("--actor.loss.kl_coefficient", 0.1, "--cluster.inference_workers", 1),
        *("--training.check_weights_every", 1),
    )
    tiny.succeed(*settings, "--training.iterations", 2)
    assert taken == [{"A.weight", "B.weight"}] * 3
    kl = [float(row["loss"]) - float(row["policy_loss"]) for row in tiny.iterations]
    assert abs(kl[0]) < 1e-6 < kl[-1]
    # Resumed, and what is published may change then.
    tiny.succeed(*settings, "--training.iterations", 3, "--resume")
    merged = [one for one in settings if one not in ADAPTER]
    tiny.succeed(*merged, "--resume")
    assert len(tiny.iterations) == 4


def test_a_run_learns_the_same_whichever_way_its_adapter_is_published(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for name, more in (("merged", ()), ("adapter", ADAPTER)):
        (tmp_path / name).mkdir()
        job = Job(tmp_path / name, capsys, TINY)
        job.succeed(*RANK, *WARM, *LETTERS, *more, "--training.iterations", 2)
        found.append((job.iterations, weights(job.out)))
    (rows, merged), (others, adapter) = found
    assert [row["response_tokens"] for row in rows] == [row["response_tokens"] for row in others]
    for name, one in merged.items():
        torch.testing.assert_close(adapter[name], one, atol=1e-4, rtol=0.0)


REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    "alpha alone": (("--actor.lora.alpha", 8.0), "actor.lora: alpha is 8.0, but rank is 0"),
    "targets alone": (("--actor.lora.targets", '["q_proj"]'), "actor.lora: targets is "),
    "a negative rank": (("--actor.lora.rank", -1), "actor.lora: rank is -1; it must be at least 0"),
    "fsdp1": ((*RANK, "--actor.strategy", "fsdp1"), "actor.strategy: fsdp1 cannot save an"),
    "megatron": (
        (*RANK, "--actor.backend", "megatron"),
        "actor.lora.rank: this backend trains all weights of a model, no adapter (LoRA): set",
    ),
    "no such layer": (
        (*RANK, "--actor.lora.targets", '["q_prj"]'),
        "actor.lora.targets: no layer of the model is called 'q_prj'; nearest: 'q_proj'",
    ),
    "no linear layer": (
        (*RANK, "--actor.lora.targets", '["embed_tokens"]'),
        "actor.lora.targets: 'embed_tokens' is a Embedding, but only linear layers can be adapted",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("kind", ["language_rl", "sft", "dpo"])
def test_check_names_what_is_wrong(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], kind: str, what: str
) -> None:
    settings, said = REFUSED[what]
    job: Job | SupervisedJob = Job(tmp_path, capsys, TINY)
    if kind != "language_rl":
        job = SupervisedJob(tmp_path, capsys, SFT if kind == "sft" else DPO)
    ended = job.command("check", job.file, *settings)
    assert ended.code == 2, ended.out
    assert said in ended.err


NOT_SERVED: dict[str, tuple[tuple[object, ...], str]] = {
    "no rank": (ADAPTER, "actor.lora: publish is 'adapter', but rank is 0"),
    "a base that is nowhere": (
        (*RANK, *ADAPTER),
        "actor.lora.publish: engines read the weights under the adapter from the model's folder",
    ),
    "an engine without weights": (
        (*RANK, *ADAPTER, *WARM, "--rollout.backend", "toy"),
        "actor.lora.publish: this engine takes whole weights alone: set it to 'merged'",
    ),
    "an engine that waits for one": (
        (*RANK, "--rollout.transformers.weights", "adapter"),
        "rollout.transformers.weights: the engine would wait for an adapter, but whole weights",
    ),
}


@pytest.mark.parametrize("what", NOT_SERVED)
def test_check_names_what_keeps_an_adapter_from_being_served(tiny: Job, what: str) -> None:
    settings, said = NOT_SERVED[what]
    ended = tiny.command("check", tiny.file, *settings)
    assert ended.code == 2, ended.out
    assert said in ended.err


@pytest.mark.parametrize("text", [SFT, DPO], ids=["sft", "dpo"])
def test_examples_publish_nothing(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    job = SupervisedJob(tmp_path, capsys, text)
    ended = job.command("check", job.file, "--actor.lora.rank", 2, *ADAPTER)
    assert ended.code == 2
    assert "actor.lora.publish" in ended.err


def test_a_toy_has_nothing_to_adapt(job: Job) -> None:
    ended = job.command("check", job.file, "--actor.lora.rank", 2)
    assert ended.code == 2
    assert "actor.lora.rank: this backend trains all weights" in ended.err


@pytest.mark.parametrize("text", [SFT, DPO], ids=["sft", "dpo"])
def test_examples_and_pairs_train_an_adapter(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    job = SupervisedJob(tmp_path, capsys, text)
    summary = job.succeed("--actor.lora.rank", 2)
    assert summary.eval_loss is not None
    assert summary.eval_loss_before is not None
    assert summary.eval_loss < summary.eval_loss_before
    assert (job.out / "trained" / ADAPTER_FOLDER / "adapter_model.safetensors").is_file()


def test_examples_go_on_with_their_adapter_to_the_last_bit(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for name, steps in (("whole", (5,)), ("stopped", (2, 5))):
        (tmp_path / name).mkdir()
        job = SupervisedJob(tmp_path / name, capsys, SFT)
        for at, step in enumerate(steps):
            resume = ("--resume",) if at else ()
            job.succeed("--actor.lora.rank", 2, "--training.steps", step, *resume)
        found.append(weights(job.out))
    whole, stopped = found
    assert all(torch.equal(stopped[name], one) for name, one in whole.items())
