"""The language job with Megatron: by configuration alone, and the same run as with FSDP."""

from __future__ import annotations

import pathlib
from importlib.metadata import PackageNotFoundError

import pytest

from tests.jobs.language.kit import LOSSES, TINY, Job

pytest.importorskip("megatron.core")

SETTINGS = (
    *("--training.iterations", 2, "--actor.pipelined", "false", "--cluster.backend", "process"),
    *("--data.verifier", "tests.jobs.language.verifiers:letters"),
)
PPO = ("--actor.advantage.name", "gae", "--critic.optimizer.lr", 1e-2)
STAGES = TINY.replace("num_hidden_layers = 1", "num_hidden_layers = 2").replace(
    "num_key_value_heads = 1", "num_key_value_heads = 2"
)


TWO_LAYERS = ("--model.config.num_hidden_layers", 2)


TENSORS = ("--actor.tp", 2, "--cluster.actors", 4, "--actor.micro_batch_size", 2)
LONGER = ("--training.iterations", 4)


def run(folder: pathlib.Path, capsys: pytest.CaptureFixture[str], *settings: object) -> Job:
    folder.mkdir()
    job = Job(folder, capsys, STAGES)
    job.succeed(*SETTINGS, *settings)
    return job


def same(job: Job, expected: Job, names: tuple[str, ...] = tuple(LOSSES)) -> None:
    assert len(job.iterations) == len(expected.iterations) == 4
    for mine, theirs in zip(job.iterations, expected.iterations, strict=True):
        for name in names:
            assert float(mine[name]) == pytest.approx(float(theirs[name]), abs=1e-4), name


def test_a_run_trains_as_with_fsdp_and_goes_on_from_its_checkpoint_with_another_cut(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    megatron = ("--actor.backend", "megatron")
    expected = run(tmp_path / "fsdp", capsys, *LONGER)
    job = run(tmp_path / "megatron", capsys, *megatron, *TENSORS)
    job.succeed(*SETTINGS, *megatron, "--actor.pp", 2, *LONGER, "--resume")
    same(job, expected)


def test_actor_and_critic_of_megatron_learn_by_ppo_as_those_of_fsdp(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = run(tmp_path / "fsdp", capsys, *PPO, "--cluster.critics", 1, *LONGER)
    settings = (*PPO, "--actor.backend", "megatron")
    cut = ("--critic.tp", 2, "--cluster.critics", 2)
    job = run(tmp_path / "megatron", capsys, *settings, *cut)
    other = ("--critic.tp", 1, "--critic.pp", 2, "--cluster.critics", 2)
    job.succeed(*SETTINGS, *settings, *other, *LONGER, "--resume")
    assert float(job.iterations[-1]["critic_value"]) > 0.0  # every reward is above 0
    same(job, expected, ("critic_loss", "critic_value", "critic_grad_norm", *LOSSES))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("--actor.backend", "fsdp", "--actor.tp", 2), "tp is 2, but the backend 'fsdp' does not"),
        (("--actor.tp", 3), "actor.tp"),
        (("--actor.pp", 3), "actor.pp"),
        (("--actor.tp", 2, "--cluster.actors", 3), "3 actors are no multiple of actor.tp x actor"),
        (("--actor.tp", 2, "--cluster.backend", "local"), "several actors need a process each"),
        (("--actor.megatron.virtual_stages", 2), "virtual_stages is 2, but pp is 1: one stage has"),
        (
            (*TWO_LAYERS, "--actor.pp", 2, "--actor.megatron.virtual_stages", 2),
            "actor.megatron.virtual_stages: pp=2 x virtual_stages=2 does not divide",
        ),
        (
            ("--actor.megatron.cp", 2),
            "nearest that fit the model: tp=1, pp=1 with 2 x the data ranks",
        ),
        (("--actor.megatron.ep", 2), "ep=2: expert parallelism spreads experts, and this backend"),
        (
            ("--critic.backend", "fsdp", "--critic.tp", 2),
            "tp is 2, but the backend 'fsdp' does not",
        ),
        (
            (*PPO, "--cluster.actors", 1, "--cluster.critics", 2),
            "2 critics cannot be paired with 1 actors, each with",
        ),
        ((*PPO, "--cluster.critics", 2, "--critic.pp", 2), "critic.pp"),
        (("--model.config.model_type", "gpt2"), "does not train model_type 'gpt2'; it trains ll"),
    ],
)
@pytest.mark.usefixtures("no_cluster")
def test_what_megatron_cannot_train_is_named_before_anything_starts(
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    settings: tuple[object, ...],
    message: str,
) -> None:
    job = Job(tmp_path, capsys, TINY)
    ended = job.train(*SETTINGS, "--actor.backend", "megatron", *settings)
    assert ended.code == 2, ended.err
    assert message in ended.err
    assert not job.out.exists()


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (None, "needs megatron-core: pip install 'rlinf-async[megatron]'"),
        ("0.15.2", "megatron-core is installed in version 0.15.2; this backend is made for 0.16"),
        ("0.160.0", "installed in version 0.160.0"),
        ("0.dev0", "installed in version 0.dev0"),
    ],
)
@pytest.mark.usefixtures("no_cluster")
def test_megatron_in_another_version_or_none_is_named_before_anything_starts(
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    found: str | None,
    message: str,
) -> None:
    def version(name: str) -> str:
        if found is None:
            raise PackageNotFoundError(name)
        return found

    monkeypatch.setattr("rlinf_async.backends.megatron.cpu.version", version)
    job = Job(tmp_path, capsys, TINY)
    ended = job.train(*SETTINGS, "--actor.backend", "megatron")
    assert ended.code == 2, ended.err
    assert message in ended.err
    assert not job.out.exists()
