"""Runs with ``[scheduler]``: devices move between rollout workers and actors, by configuration."""

from __future__ import annotations

import pathlib
from collections import Counter

import pytest

from tests.jobs.killing import nothing_left_behind
from tests.jobs.language.killing import Killer
from tests.jobs.language.kit import LOSSES, TINY, TOY, Job

SCHEDULED = (
    TOY.replace("prompts = 4", "prompts = 8")
    .replace("[actor]\n", "[actor]\nglobal_batches = 4\n")
    .replace("seconds_per_step = 0.001", "seconds_per_step = 0.01\ntail = 1.0")
    .replace('backend = "local"', 'backend = "process"\nrollout_workers = 2')
    .replace("[evaluation]", '[scheduler]\npolicy = "tail"\n\n[evaluation]')
)


@pytest.fixture
def scheduled(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> Job:
    """A run of toys in processes: one actor, two rollout workers, the policy ``tail``."""
    return Job(tmp_path, capsys, SCHEDULED)


def test_a_scheduled_run_trains_every_sample_once_and_goes_on_when_it_is_resumed(
    scheduled: Job,
) -> None:
    critic = ("--actor.advantage.name", "gae", "--cluster.critics", 1, "--actor.epochs", 2)
    warmup = ("--critic.warmup_iterations", 1)
    summary = scheduled.succeed("--training.iterations", 2, *critic, *warmup)
    assert summary.samples == 2 * 16
    assert summary.scheduler is not None
    assert summary.scheduler["decisions"] == 9  # in the first iteration the critic alone learns
    summary = scheduled.succeed("--resume", *critic, *warmup)
    assert summary.staleness is not None
    assert (summary.samples, summary.staleness.max) == (4 * 16, 0)


def test_a_scheduled_run_corrects_for_staleness_over_its_mini_batches(scheduled: Job) -> None:
    summary = scheduled.succeed(
        *("--actor.loss.off_policy", "truncated", "--actor.loss.proximal", "step"),
        *("--training.max_staleness", 1, "--training.iterations", 4, "--actor.epochs", 2),
    )
    assert summary.samples == 4 * 16
    stale = [row for row in scheduled.iterations if float(row["staleness_mean"]) > 0]
    assert stale
    assert all(float(row["off_policy_change"]) > 1e-3 for row in stale)


@pytest.mark.parametrize("policy", ["tail", "greedy", "longest_first", "turns"])
def test_episodes_are_trained_while_devices_move(scheduled: Job, policy: str) -> None:
    """A turn that waits for its tool has no request: nothing of its episode is finished by that."""
    summary = scheduled.succeed(
        *("--episode.run", "tests.jobs.language.agents:pauses", "--cluster.episode_workers", 2),
        *("--scheduler.policy", policy, "--scheduler.guests", 1, "--training.iterations", 3),
        *("--rollout.toy.slots", 2, "--actor.toy.seconds_per_token", 0.001),
    )
    assert summary.samples == summary.outcomes["scored"] == 3 * 16
    assert summary.dropped == {"second samples": 0}
    assert {float(row["turns"]) for row in scheduled.iterations} == {3.0}
    assert summary.scheduler is not None
    assert summary.scheduler["policy_fault"] == ""
    assert summary.scheduler["unanswered"] == 0
    assert int(summary.scheduler["decisions"]) > 0


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["tail", "turns"])
def test_episodes_are_trained_once_while_devices_move_and_workers_are_killed(
    scheduled: Job, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    killer = Killer(monkeypatch)
    victims = 3 * ["Scheduler[0]", "Episode[0]", "Rollout[0]", "Episode[1]", "Rollout[1]"]
    killer.victims = dict(enumerate(victims, 1))
    iterations = len(victims) + 3
    with nothing_left_behind():
        summary = scheduled.succeed(
            *("--episode.run", "tests.jobs.language.agents:pauses", "--cluster.episode_workers", 2),
            *("--scheduler.policy", policy, "--scheduler.guests", 1),
            *("--training.iterations", iterations, "--cluster.max_restarts", 100),
        )
    assert summary.restarts == Counter(victims)
    assert summary.samples == summary.outcomes["scored"] == 16 * iterations
    assert [row["iteration"] for row in scheduled.iterations] == [*map(str, range(iterations))]
    assert killer.dead_letters == []
    assert summary.scheduler is not None
    assert summary.scheduler["policy_fault"] == ""


@pytest.mark.parametrize("policy", ["greedy", "longest_first"])
def test_policies_that_predict_decide_by_what_the_run_takes(scheduled: Job, policy: str) -> None:
    summary = scheduled.succeed(
        *("--scheduler.policy", policy, "--training.iterations", 3, "--evaluation.samples", 0),
        *("--rollout.toy.slots", 2, "--training.group_size", 8),
        *("--actor.toy.seconds_per_token", 0.002, "--training.export", "false"),
    )
    assert summary.samples == 3 * 64
    assert summary.scheduler is not None
    assert summary.scheduler["policy_fault"] == ""
    assert int(summary.scheduler["changes"]) > 0
    assert (int(summary.scheduler["ordered"]) > 0) == (policy == "longest_first")


@pytest.mark.parametrize("policy", ["tail", "turns"])
def test_actors_lend_their_device_at_the_beginning_of_each_iteration(
    scheduled: Job, policy: str
) -> None:
    summary = scheduled.succeed(
        *("--scheduler.policy", policy, "--scheduler.guests", 1, "--training.iterations", 2),
        *("--rollout.toy.slots", 2, "--training.group_size", 8),
    )
    assert summary.samples == 2 * 64
    assert summary.staleness is not None
    assert summary.staleness.max == 0
    assert summary.scheduler is not None
    assert summary.scheduler["policy_fault"] == ""
    assert summary.scheduler["lent"] == 2
    assert summary.scheduler["unanswered"] == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scheduler.policy": "static", "scheduler.guests": "1"}, "actors lend nothing"),
        ({"scheduler.guests": "2"}, "guests is 2, but there are only 1 actors"),
        ({"scheduler.guests": "-1"}, "guests is -1; it must be at least 0"),
        ({"scheduler.policy": "tale"}, "no scaling policy is called 'tale'; did you mean 'tail'?"),
        ({"scheduler.policy": "turns"}, "policy 'turns' lends the actors' devices to rollout"),
        ({"scheduler.answer_seconds": "0"}, "answer_seconds is 0.0; it must be above 0"),
        ({"cluster.rollout_workers": "1"}, "only 1 rollout worker, which has to serve"),
        ({"actor.global_batches": "1"}, "an iteration has 1: use 2 or more"),
        ({"training.prompts": "4"}, "no more than 1 of up to 2 actors can share 4 prompts in 4"),
    ],
)
def test_a_run_that_cannot_be_scheduled_is_refused_with_what_to_do(
    scheduled: Job, changes: dict[str, str], message: str
) -> None:
    ended = scheduled.train(*[part for name, to in changes.items() for part in (f"--{name}", to)])
    assert ended.code == 2
    assert message in ended.err
    assert not scheduled.out.exists()


def test_a_backend_that_cannot_change_its_ranks_is_refused(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = SCHEDULED.replace('[rollout]\nbackend = "toy"', '[rollout]\nbackend = "transformers"')
    text = text.replace(
        '[actor]\nglobal_batches = 4\nbackend = "toy"', "[actor]\nglobal_batches = 4\n"
    ).replace("toy = {{ seconds_per_token = 0.0, seconds_per_step = 0.0 }}", 'strategy = "fsdp1"')
    ended = Job(tmp_path, capsys, text).train()
    assert ended.code == 2
    assert "the ranks of actors while they train, which fsdp1 cannot" in ended.err


SETTINGS = (
    *("--training.iterations", 2, "--training.prompts", 8, "--actor.global_batches", 4),
    *("--data.verifier", "tests.jobs.language.verifiers:letters", "--actor.pipelined", "false"),
    *("--actor.micro_batch_size", 2, "--training.checkpoint_every", 0, "--evaluation.samples", 0),
    *("--training.export", "false"),
)
MOVED = ("--scheduler.policy", "tail", "--cluster.backend", "process")
PPO = ("--actor.advantage.name", "gae", "--critic.optimizer.lr", 1e-2, "--actor.epochs", 2)


def trained(
    folder: pathlib.Path, capsys: pytest.CaptureFixture[str], *settings: object
) -> tuple[Job, dict[str, int | str] | None]:
    folder.mkdir()
    job = Job(folder, capsys, TINY)
    return job, job.succeed(*SETTINGS, *settings).scheduler


def same(job: Job, expected: Job, names: tuple[str, ...], within: float) -> None:
    assert len(job.iterations) == len(expected.iterations) == 2
    for mine, theirs in zip(job.iterations, expected.iterations, strict=True):
        for name in names:
            assert float(mine[name]) == pytest.approx(float(theirs[name]), abs=within), name


def test_megatron_actors_grow_and_shrink_beside_a_critic_through_two_epochs_and_learn_the_same(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Against FSDP, on one rank, that never changes."""
    pytest.importorskip("megatron.core")
    ppo = (*PPO, "--cluster.critics", 1)
    megatron = ("--actor.backend", "megatron", "--critic.backend", "fsdp")
    workers = ("--cluster.rollout_workers", 2)
    job, scheduler = trained(tmp_path / "moved", capsys, *ppo, *megatron, *MOVED, *workers)
    assert scheduler is not None
    assert (scheduler["decisions"], scheduler["changes"]) == (2 * 9, 4)
    assert scheduler["unanswered"] == scheduler["failed"] == 0
    expected, nothing = trained(tmp_path / "static", capsys, *ppo)
    assert nothing is None
    same(job, expected, ("critic_loss", "critic_value", "critic_grad_norm", *LOSSES), 1e-4)


def test_a_guest_starts_its_engine_on_the_device_that_an_actor_has_lent(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lends = (
        *("--scheduler.policy", "turns", "--scheduler.guests", 1),
        # An engine takes some seconds to start: the scheduler waits for it.
        *("--scheduler.answer_seconds", 100, "--scheduler.stop_seconds", 100),
    )
    workers = ("--cluster.rollout_workers", 2, "--cluster.backend", "process")
    job, scheduler = trained(tmp_path / "lent", capsys, *lends, *workers)
    assert scheduler is not None
    assert scheduler["policy_fault"] == ""
    assert int(scheduler["lent"]) > 0  # not where all was generated before the actor began
    assert scheduler["unanswered"] == scheduler["failed"] == 0
    expected, _ = trained(tmp_path / "static", capsys)
    same(job, expected, LOSSES, 1e-4)
