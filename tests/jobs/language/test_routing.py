"""Routing replay in whole runs: through the experts of the engine, or refused."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from rlinf_async.backends.transformers import engine as engines
from rlinf_async.backends.transformers.tensors import build_model
from tests.backends.language.routed import disturb
from tests.jobs.language.kit import LOSSES, TINY, Job
from tests.jobs.language.test_resumed import Killed, die_after

REPLAY = ("--rollout.sampling.routing_replay", "true")
EXPERTS = """\
model_type = "qwen3_moe"
num_experts = 4
num_experts_per_tok = 2
moe_intermediate_size = 32
initializer_range = 0.3
"""
DENSE = 'model_type = "qwen3"\n'


def mixture(folder: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> Job:
    folder.mkdir(exist_ok=True)
    text = TINY.replace(DENSE, EXPERTS).replace("num_hidden_layers = 1", "num_hidden_layers = 2")
    return Job(folder, capsys, text)


@pytest.fixture
def disturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that choose other experts than trainers."""

    def build(*of_model: Any) -> Any:
        model = build_model(*of_model)
        disturb(model)
        return model

    monkeypatch.setattr(engines, "build_model", build)


@pytest.mark.usefixtures("no_cluster")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("--rollout.backend", "vllm"), "'vllm' does not say that it honours routing_replay: leav"),
        (("--rollout.backend", "vllm"), "rollout.backend to one that does (transformers)"),
        (("--rollout.backend", "toy", "--actor.backend", "toy"), "the engine 'toy' does not say"),
        (("--actor.backend", "megatron"), "the trainer 'megatron' does not compute: it would tr"),
        (("--actor.backend", "megatron"), "out, or set actor.backend to one that does (fsdp)"),
    ],
)
def test_who_cannot_tell_or_replay_it_is_refused(
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    settings: tuple[str, ...],
    message: str,
) -> None:
    job = mixture(tmp_path / "run", capsys)
    ended = job.command("check", job.file, *REPLAY, *settings)
    assert ended.code == 2
    assert "rollout.sampling.routing_replay: " in ended.err
    assert message in ended.err
    assert len(ended.err.splitlines()) == 1


@pytest.mark.usefixtures("no_cluster")
def test_a_model_without_experts_is_refused(tiny: Job) -> None:
    ended = tiny.command("check", tiny.file, *REPLAY)
    assert ended.code == 2
    assert (
        "rollout.sampling.routing_replay: the experts that tokens go through are told" in ended.err
    )
    assert (
        "mixtral, olmoe, qwen2_moe, qwen3_moe, and this one is of the family 'qwen3'" in ended.err
    )


def exact(job: Job) -> None:
    for row in job.iterations:
        if row["engine_actor_difference"]:
            assert float(row["engine_actor_difference"]) < 1e-5
        assert float(row["routing_changed"]) > 0.05


@pytest.mark.usefixtures("disturbed")
def test_a_run_trains_the_experts_of_its_engine_and_is_resumed_with_those_under_way(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With inference workers, a reference, two global batches, two epochs and an evaluation."""
    settings = (
        *REPLAY,
        *("--training.iterations", 3, "--actor.pipelined", "false", "--actor.global_batches", 2),
        *("--actor.epochs", 2, "--actor.loss.kl_coefficient", 0.01, "--evaluation.every", 2),
        *("--cluster.inference_workers", 1, "--training.check_weights_tolerance", 100),
        *("--data.verifier", "tests.jobs.language.verifiers:letters"),
    )
    whole, killed = (mixture(tmp_path / name, capsys) for name in ("whole", "killed"))
    whole.succeed(*settings)
    exact(whole)
    with pytest.MonkeyPatch.context() as patch:
        die_after(patch, 2)
        with pytest.raises(Killed):
            killed.train(*settings)
    changed = killed.train(*settings[2:], "--resume")
    assert changed.code == 2
    assert "rollout.sampling.routing_replay" in changed.err
    killed.succeed(*settings, "--resume")
    for before, after in zip(whole.iterations, killed.iterations, strict=True):
        for name in (*LOSSES, "routing_changed"):
            assert float(after[name]) == pytest.approx(float(before[name]), abs=1e-6), name


@pytest.mark.usefixtures("disturbed")
def test_episodes_go_through_the_experts_of_their_turns(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = mixture(tmp_path / "run", capsys)
    job.succeed(
        *REPLAY,
        *("--episode.run", "tests.jobs.language.agents:forks", "--cluster.episode_workers", 1),
        *("--training.iterations", 2, "--training.check_weights_tolerance", 100),
        *("--training.max_staleness", 1, "--evaluation.samples", 0),
    )
    exact(job)
    assert any(row["engine_actor_difference"] for row in job.iterations)
