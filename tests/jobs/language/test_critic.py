"""PPO with a critic: values stream to the groups, actor and critic learn side by side."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from rlinf_async.backends.fsdp.language.trainer import (
    CriticTrainer,
    FSDPLanguageTrainer,
    PolicyTrainer,
)
from rlinf_async.backends.language import MicroBatch
from tests.jobs.language.kit import Job
from tests.jobs.language.test_resumed import whole_and_killed

LETTERS = ("--data.verifier", "tests.jobs.language.verifiers:letters")
GAE = ("--actor.advantage.name", "gae", "--cluster.critics", 1, "--critic.optimizer.lr", 1e-2)
PROCESS = ("--cluster.backend", "process")


def column(job: Job, name: str) -> list[float]:
    return [float(row[name]) for row in job.iterations if row.get(name)]


@pytest.mark.parametrize("placement", ["disaggregated", "collocated"])
def test_a_critic_learns_from_what_its_actor_learns_from(tiny: Job, placement: str) -> None:
    settings = (*GAE, *LETTERS, "--critic.value_clip", 10.0)
    summary = tiny.succeed(*settings, "--cluster.placement", placement)
    assert summary.samples == 32
    values = column(tiny, "critic_value")
    assert values[0] == 0.0  # its head begins there
    assert values[-1] > 0.0  # every reward is above 0
    for row in tiny.iterations:
        assert math.isfinite(float(row["policy_loss"]))
        assert float(row["critic_loss"]) == pytest.approx(float(row["critic_value_error"]) / 2)
    assert summary.staleness is not None
    assert summary.staleness.max == 0


def test_actors_and_critics_of_several_processes_are_paired_by_rank(tiny: Job) -> None:
    two = ("--cluster.actors", 2, "--actor.micro_batch_size", 2, "--actor.epochs", 2)
    summary = tiny.succeed(
        *GAE, *LETTERS, *PROCESS, *two, "--cluster.critics", 2, "--training.iterations", 2
    )
    assert summary.samples == 16
    assert len(column(tiny, "critic_loss")) == 2


class Cut:
    """How many samples each micro-batch has that actor and critic train on; as they arrive."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.of: dict[type, set[int]] = {}
        step = FSDPLanguageTrainer.training_step

        def counted(trainer: FSDPLanguageTrainer, micro: Iterable[MicroBatch]) -> Any:
            def seen() -> Iterator[MicroBatch]:
                for one in micro:
                    self.of.setdefault(type(trainer), set()).add(len(one.samples))
                    yield one

            return step(trainer, seen())

        patch.setattr(FSDPLanguageTrainer, "training_step", counted)


@pytest.mark.parametrize("pipelined", ["true", "false"])
@pytest.mark.parametrize(
    ("settings", "actor", "critic"),
    [
        ((), {4}, {4}),
        (("--critic.micro_batch_size", 2), {4}, {2}),
        (("--critic.micro_batch_size", 8), {4}, {8}),
    ],
)
def test_a_critic_has_the_actors_micro_batches_or_its_own(
    tiny: Job,
    monkeypatch: pytest.MonkeyPatch,
    pipelined: str,
    settings: tuple[str | int, ...],
    actor: set[int],
    critic: set[int],
) -> None:
    cut = Cut(monkeypatch)
    once = ("--training.iterations", 1, "--actor.pipelined", pipelined)
    tiny.succeed(*GAE, *LETTERS, *once, *settings)
    assert cut.of == {PolicyTrainer: actor, CriticTrainer: critic}


def test_a_critic_has_fixed_micro_batches_where_the_actors_have_so_many_tokens(
    tiny: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = Cut(monkeypatch)
    tiny.file.write_text(tiny.file.read_text().replace("micro_batch_size = 4", "max_tokens = 1000"))
    window = ("--actor.balance_window", 8, "--critic.micro_batch_size", 2)
    tiny.succeed(*GAE, *LETTERS, "--training.iterations", 1, *window)
    assert cut.of == {PolicyTrainer: {8}, CriticTrainer: {2}}


def test_while_the_critic_warms_up_the_actor_stays_as_it_is(tiny: Job) -> None:
    tiny.succeed(*GAE, *LETTERS, "--critic.warmup_iterations", 2, "--actor.optimizer.lr", 1e-2)
    assert len(column(tiny, "critic_loss")) == 4
    assert len(column(tiny, "policy_loss")) == 2
    assert [row["version"] for row in tiny.iterations] == ["1", "2", "3", "4"]
    assert [row["staleness_max"] for row in tiny.iterations] == ["0"] * 4


def test_the_kl_to_the_reference_is_part_of_the_reward(tiny: Job) -> None:
    settings = (*GAE, *LETTERS, "--cluster.inference_workers", 1, "--training.iterations", 3)
    tiny.succeed(*settings, "--actor.advantage.kl_coefficient", 10.0, "--actor.optimizer.lr", 3e-2)
    # The policy runs away from the reference: what that costs makes the returns, which the critic
    # learns, smaller than any reward.
    assert column(tiny, "critic_value_error")[-1] > 1.0


def test_a_resumed_run_has_the_critic_that_it_had(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = (*GAE, *LETTERS, "--training.iterations", 5, "--actor.pipelined", "false")
    whole, killed = whole_and_killed(tmp_path, capsys, 3, *settings)
    killed.succeed(*settings, "--resume")
    for name in ("critic_loss", "critic_value", "critic_grad_norm", "policy_loss", "reward"):
        assert column(killed, name) == pytest.approx(column(whole, name), abs=1e-6), name


def test_a_run_without_a_critic_is_not_resumed_with_one(tiny: Job) -> None:
    tiny.succeed("--training.iterations", 2, *LETTERS)
    ended = tiny.train("--resume", "--training.iterations", 4, *GAE, *LETTERS)
    assert ended.code == 2
    assert "actor.advantage.name (grpo in the run, gae now)" in ended.err
    assert "Traceback" not in ended.err


def test_toys_pass_groups_through_a_critic_too(job: Job) -> None:
    assert job.succeed(*GAE, "--training.max_staleness", 1).samples == 32
