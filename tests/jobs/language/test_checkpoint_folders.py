"""A checkpoint of the user's own is trained, whatever its architecture, and comes out as one."""

from __future__ import annotations

import importlib.util
import math
import pathlib
from typing import Any

import pytest
from transformers import AutoTokenizer

from rlinf_async.runtime.jobs.language.roles import Learners
from tests.jobs.language.checkpoints import load_checkpoint, save_checkpoint
from tests.jobs.language.kit import TINY, Job

LETTERS = "tests.jobs.language.verifiers:letters"
ONE = (
    *("--data.verifier", LETTERS, "--training.iterations", 1, "--training.prompts", 2),
    *("--training.group_size", 4, "--actor.optimizer.lr", 1e-3),
)
needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None,
    reason="vLLM is not installed: make test installs it",
)


def trains_checkpoint(folder: pathlib.Path) -> str:
    """The configuration of a small run that trains the checkpoint in this folder."""
    before, _, rest = TINY.partition("[model]")
    data = "[data]" + rest.partition("[data]")[2]
    return f"{before}[model]\npath = '{folder}'\n\n{data}"


@pytest.fixture
def run(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> Job:
    """Trains the checkpoint in ``checkpoint``."""
    return Job(tmp_path, capsys, trains_checkpoint(tmp_path / "checkpoint"))


@pytest.fixture
def checkpoint(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "checkpoint"


def check_trained(run: Job, checkpoint: pathlib.Path, iterations: int = 1) -> None:
    """It learnt, and what came out of it is loaded by transformers, with other weights."""
    row, *others = run.iterations
    assert 1 + len(others) == iterations
    assert math.isfinite(float(row["policy_loss"]))
    assert float(row["grad_norm"]) > 0.0
    before, after = load_checkpoint(checkpoint), load_checkpoint(run.out / "trained")
    assert before.keys() == after.keys()
    assert any(not before[name].equal(after[name]) for name in before)
    auto: Any = AutoTokenizer
    tokenizer = auto.from_pretrained(str(run.out / "trained"), local_files_only=True)
    assert tokenizer.decode(tokenizer("2+3=")["input_ids"]).endswith("2+3=")
    assert not (run.out / ".trained").exists()


@pytest.mark.parametrize(
    "model_type", ["qwen2", "qwen3", "llama", "mistral", "gemma", "gemma2", "gemma3_text"]
)
def test_every_architecture_is_trained_and_exported(
    run: Job, checkpoint: pathlib.Path, model_type: str
) -> None:
    save_checkpoint(checkpoint, model_type)
    run.succeed(*ONE)
    check_trained(run, checkpoint)


@needs_vllm
def test_vllm_answers_for_a_checkpoint_too(run: Job, checkpoint: pathlib.Path) -> None:
    save_checkpoint(checkpoint, "gemma3_text")  # `test_killed_engine` has Llama
    run.succeed(*ONE, "--rollout.backend", "vllm", "--cluster.backend", "process")
    check_trained(run, checkpoint)


def test_what_was_trained_can_be_trained_on_as_a_checkpoint(
    run: Job, checkpoint: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    save_checkpoint(checkpoint, "qwen3", tie_word_embeddings=True)
    run.succeed(*ONE)
    run.out.rename(tmp_path / "first")
    run.succeed(*ONE, "--model.path", tmp_path / "first" / "trained")
    check_trained(run, tmp_path / "first" / "trained")


def test_a_critic_may_begin_with_another_model_of_the_same_tokens(
    run: Job, checkpoint: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    save_checkpoint(checkpoint, "qwen3")
    other = save_checkpoint(tmp_path / "critic", "llama", num_hidden_layers=1)
    gae = ("--actor.advantage.name", "gae", "--cluster.critics", 1)
    run.succeed(*ONE, *gae, "--critic.path", other)
    check_trained(run, checkpoint)
    wrong = save_checkpoint(tmp_path / "wrong", "llama", vocab_size=99)
    run.out.rename(tmp_path / "first")
    ended = run.train(*ONE, *gae, "--critic.path", wrong)
    assert ended.code == 2
    assert "has 99 tokens, the actor's has" in ended.err


def test_an_export_that_fails_leaves_the_one_before_and_can_be_done_again(
    run: Job, checkpoint: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(checkpoint, "qwen3")
    run.succeed(*ONE)
    weights = (run.out / "trained" / "model.safetensors").read_bytes()
    more = (*ONE, "--training.iterations", 2, "--resume")

    async def break_down(self: Learners, path: pathlib.Path) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Learners, "export", break_down)
        assert run.train(*more).code == 1
    assert (run.out / "trained" / "model.safetensors").read_bytes() == weights
    run.succeed(*more)
    assert (run.out / "trained" / "model.safetensors").read_bytes() != weights
