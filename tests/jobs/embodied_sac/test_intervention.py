"""Runs with a person who may act in place of the policy: who acted in which transition is counted,
kept and drawn once, whoever was killed."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

from rlinf_async.messages.embodied import Verdict
from rlinf_async.runtime.jobs.embodied import intervening
from tests.jobs.embodied.test_beginning import newest, weights
from tests.jobs.embodied_sac.kit import STEPS, Job
from tests.jobs.embodied_sac.test_runs import MEMORY, PROCESS, Killer
from tests.jobs.killing import nothing_left_behind
from tests.jobs.processes import Start

OWN = np.float32(0.123)
"""the person's action, which the policy never takes"""
PERSON = ("--intervention.person", f"{__name__}:holds_up", "--intervention.deadline", 60)
FOUR = ("--training.total_steps", 4 * STEPS)


def holds_up(observation: Any, proposed: Any) -> Any:
    """Acts while the pendulum is in the upper half."""
    return np.array([OWN]) if observation[0] > 0 else None


def judges(observation: Any, proposed: Any) -> Any:
    """Ends an episode as a success where the pendulum swings fast one way, as a failure where it
    does the other way."""
    return Verdict(bool(observation[2] > 0)) if abs(observation[2]) > 1 else None


def presses_right(observation: Any, proposed: Any) -> Any:
    """Acts in CartPole while the cart is left of the middle."""
    return 1 if observation[0] < 0 else None


def says_nothing(observation: Any, proposed: Any) -> None:
    return None


def wrong(observation: Any) -> None:
    return None


def is_gone(observation: Any, proposed: Any) -> None:
    """Never answers."""
    threading.Event().wait()


async def is_gone_too(observation: Any, proposed: Any) -> None:
    await asyncio.Event().wait()


def presses_another(observation: Any, proposed: Any) -> Any:
    return 7


CHOOSING = ("--env.id", "CartPole-v1", "--env.actions", "clip")


def column(job: Job, name: str, *shape: int, folder: str = "") -> Any:
    """A column of the store's files: all slots, in the order in which transitions came."""
    return np.fromfile(job.out / "replay" / folder / f"{name}.bin", np.float32).reshape(-1, *shape)


def check_who_acted(job: Job, iterations: int) -> None:
    """The person's are exactly the transitions in which they wanted to act: in the store, in the
    part that is drawn as demonstrations, and in the metrics."""
    count, store = iterations * STEPS, job.store
    action, seen = column(job, "action"), column(job, "observation", 3)
    slots = np.arange(max(0, count - 80), count) % len(action)
    theirs = action[slots] == OWN
    np.testing.assert_array_equal(theirs, seen[slots][:, 0] > 0)
    assert theirs.any()
    assert not theirs.all()
    shares = [float(row["intervention_share"]) for row in job.iterations]
    acted = [round(share * STEPS) for share in shares]
    assert sum(acted) == store.intervened
    assert sum(acted[-2:]) == theirs[-2 * STEPS :].sum()
    drawn = column(job, "observation", 3, folder="intervened")
    last = np.arange(store.intervened - theirs[-2 * STEPS :].sum(), store.intervened)
    mine = seen[slots][-2 * STEPS :][theirs[-2 * STEPS :]]
    np.testing.assert_array_equal(drawn[last % len(drawn)], mine)
    for name in ("intervention_late", "intervention_unanswered"):
        assert {float(row[name]) for row in job.iterations} == {0.0}
    so_far = np.minimum(np.cumsum(acted), 80)
    assert [float(row["intervention_demonstrations"]) for row in job.iterations] == [*so_far]
    for row in job.iterations:
        assert float(row["demonstrations_share"] or 0.5) == 0.5


def test_what_a_person_does_is_executed_stored_and_drawn(job: Job) -> None:
    job.succeed(*PERSON, *FOUR)
    job.check_books(4)
    check_who_acted(job, 4)
    job.succeed(*PERSON, "--cluster.rollout_workers", 1, "--resume")
    job.check_books(6)
    check_who_acted(job, 6)


def test_choices_of_a_person_in_memory_are_in_the_checkpoints(job: Job) -> None:
    person = ("--intervention.person", f"{__name__}:presses_right", "--intervention.deadline", 60)
    job.succeed(*CHOOSING, *person, *MEMORY, *FOUR)
    acted = job.store.intervened
    assert 0 < acted < 4 * STEPS
    kept = job.out / "checkpoints" / job.note["checkpoint"] / "replay/intervened"
    np.testing.assert_array_equal(np.load(kept / "action.npy"), np.ones(acted, np.int64))
    assert (np.load(kept / "observation.npy")[:, 0] < 0).all()
    job.succeed(*CHOOSING, *person, *MEMORY, "--resume")
    job.check_books(6)
    assert job.store.intervened > acted


def test_a_person_may_come_and_go_when_a_run_is_resumed(job: Job) -> None:
    job.succeed("--training.total_steps", 3 * STEPS)
    job.succeed(*PERSON, *FOUR, "--resume")
    assert "intervention_share" in job.iterations[-1]
    acted = job.store.intervened
    assert acted > 0
    job.succeed("--intervention.person", f"{__name__}:says_nothing", "--resume")
    job.check_books(6)
    assert job.store.intervened == acted


def test_what_a_person_has_done_outlasts_a_start_without_them(job: Job) -> None:
    job.succeed(*PERSON, *MEMORY, "--training.total_steps", 3 * STEPS)
    acted = job.store.intervened
    assert acted > 0
    job.succeed(*MEMORY, *FOUR, "--resume")
    assert job.store.intervened == acted
    job.succeed(*PERSON, *MEMORY, "--resume")
    job.check_books(6)
    assert job.store.intervened > acted


@pytest.mark.parametrize("person", ["is_gone", "is_gone_too"])
def test_a_person_who_never_answers_holds_up_no_end(
    job: Job, person: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intervening, "GRACE", 0.01)
    named = ("--intervention.person", f"{__name__}:{person}", "--intervention.deadline", 0.01)
    job.succeed(*named, *FOUR)
    job.check_books(4)
    assert job.store.intervened == 0


def test_a_choice_that_there_is_not_is_named(job: Job) -> None:
    named = ("--intervention.person", f"{__name__}:presses_another", "--intervention.deadline", 60)
    ended = job.train(*CHOOSING, *named, *FOUR)
    assert ended.code == 1
    assert f"'{__name__}:presses_another' returned 7; choices are 0 to 1" in ended.err


def test_transitions_of_a_person_may_stay_own_experience_alone(job: Job) -> None:
    job.succeed(*PERSON, "--intervention.demonstrates", "false", *FOUR)
    assert not (job.out / "replay/intervened").exists()
    assert job.store.intervened == 0
    assert float(job.iterations[-1]["intervention_share"]) > 0
    assert "demonstrations_share" not in job.iterations[-1]
    ended = job.command("check", job.file, *PERSON, "--intervention.demonstrates", "true")
    assert ended.code == 0, ended.err


def test_a_person_and_recorded_demonstrations_are_drawn_together(job: Job) -> None:
    script = "tests.jobs.embodied_sac.test_demonstrations:expert"
    shown = ("--demonstrations.policy", script, "--demonstrations.episodes", 1)
    job.succeed(*PERSON, *shown, *FOUR)
    job.check_books(4)
    check_who_acted(job, 4)


def test_a_page_that_nobody_opens_costs_nothing(job: Job) -> None:
    page = ("--intervention.person", "page", "--intervention.deadline", 60)
    ended = job.train(
        *page, "--env.envs", 1, "--env.stages", 1, "--training.steps_per_iteration", 32
    )
    assert ended.code == 0, ended.err
    assert "small: to step in, open http://127.0.0.1:" in ended.out
    job.check_books(6)
    for name in ("intervention_share", "intervention_unanswered"):
        assert {float(row[name]) for row in job.iterations} == {0.0}


@pytest.mark.parametrize("critics", [0, 2])
def test_what_a_person_only_says_is_cloned_and_not_executed(job: Job, critics: int) -> None:
    alone = ("--actor.sac.cloning", 1.0, "--actor.sac.critics", critics)
    dagger = ("--intervention.acts", "false", *alone)
    job.succeed(*PERSON, *dagger, *FOUR)
    job.check_books(4)
    count, said = 4 * STEPS, job.store.intervened
    action, seen = column(job, "action"), column(job, "observation", 3)
    assert not (action[:count] == OWN).any()
    upper = seen[:count][seen[:count, 0] > 0]
    assert 0 < said == len(upper) < count
    np.testing.assert_array_equal(column(job, "observation", 3, folder="intervened")[:said], upper)
    assert (column(job, "action", folder="intervened")[:said] == OWN).all()
    assert sum(float(row["intervention_share"]) * STEPS for row in job.iterations) == said
    job.succeed(*PERSON, *dagger, "--resume")
    job.check_books(6)


def test_a_person_who_never_acts_leaves_a_policy_without_critics_as_it_is(job: Job) -> None:
    alone = ("--actor.sac.cloning", 1.0, "--actor.sac.critics", 0)
    job.succeed("--intervention.person", f"{__name__}:says_nothing", *alone, *FOUR)
    job.check_books(4)
    assert {float(row["policy_loss"] or 0.0) for row in job.iterations} == {0.0}


def test_a_policy_without_critics_has_their_columns_no_more_and_others_begin_with_it(
    job: Job,
) -> None:
    alone = (*PERSON, "--actor.sac.cloning", 1.0, "--actor.sac.critics", 0)
    job.succeed(*alone, *FOUR)
    header = {*job.iterations[0]}
    assert {"policy_loss", "demonstrations_share", "intervention_share"} <= header
    assert not header & {"critic_loss", "value", "entropy_coefficient", "value_own", "error_own"}
    ended = job.command("check", job.file, *alone, "--training.stop_at", "value > 0")
    assert ended.code == 2
    assert "training.stop_at: " in ended.err
    cloned = weights(newest(job.out))
    found = job.command("check", job.file, "--model.path", job.out)
    assert found.code == 2
    assert "'critic.weights.0' is not there" in " ".join(found.err.split()), found.err
    begins = ("--model.path", job.out, "--model.partial", "true", "--training.learning_starts")
    job.out = job.out.parent / "next"
    job.succeed(*begins, 5 * STEPS)
    learnt = weights(newest(job.out))
    assert {*cloned} < {*learnt}


def test_a_verdict_ends_an_episode_of_training_and_says_nothing_of_evaluations(job: Job) -> None:
    job.succeed("--intervention.person", f"{__name__}:judges", *PERSON[2:], *FOUR)
    job.check_books(4)
    count = job.store.count
    speed, reward, discount = (
        column(job, name, *shape)[:count]
        for name, shape in (("observation", (3,)), ("reward", ()), ("discount", ()))
    )
    speed = speed[:, 2]
    judged = np.abs(speed) > 1
    assert {*reward[judged & (speed > 0)]} == {1.0}
    assert {*reward[judged & (speed < 0)]} == {0.0}
    np.testing.assert_array_equal(discount == 0, judged)
    assert (reward[~judged] < 0).all()  # the pendulum's own
    last = job.iterations[-1]
    assert 0.0 < float(last["success_rate"]) < 1.0
    assert int(last["episodes"]) == judged.sum()
    # Nobody judges evaluations, and a pendulum says nothing of success.
    assert job.summary.success_rate is None


def test_killed_workers_cost_no_step_of_the_person_and_count_none_twice(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    killer = Killer(monkeypatch)
    killer.victims = {1: "Person[0]", 2: "Env[0]", 3: "Replay[0]"}
    with nothing_left_behind():
        summary = job.succeed(*PROCESS, *PERSON)
    assert summary.restarts == {"Person[0]": 1, "Env[0]": 1, "Replay[0]": 1}
    job.check_books(6)
    check_who_acted(job, 6)
    assert killer.dead_letters == []


def test_a_killed_run_goes_on_with_what_the_person_has_done(job: Job, start_driver: Start) -> None:
    def booked() -> int:
        path = job.out / "metrics.csv"
        return path.read_text().count("\n") - 1 if path.exists() else 0

    arguments = ("train", job.file, "--out", job.out, "--resume", *PROCESS, *PERSON)
    driver = start_driver(*arguments, "--training.total_steps", 10**6 * STEPS)
    driver.until(lambda: booked() >= 5, "five iterations")
    driver.kill()
    assert driver.wait() == -9
    iterations = booked() + 4
    job.succeed(*PERSON, "--resume", "--training.total_steps", iterations * STEPS)
    job.check_books(iterations)
    check_who_acted(job, iterations)


@pytest.mark.usefixtures("no_cluster")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--intervention.deadline", 1.0),
            "intervention.deadline: 1.0 was given, but nobody is asked: name who",
        ),
        (
            ("--intervention.demonstrates", "false"),
            "intervention.demonstrates: False was given, but nobody is",
        ),
        (
            ("--intervention.person", "nowhere:nobody"),
            "intervention.person: 'nowhere:nobody': 'nowhere' cannot",
        ),
        (("--intervention.person", f"{__name__}:missing"), "intervention.person: "),
        (("--intervention.person", f"{__name__}:wrong"), "too many positional arguments"),
        ((*PERSON, "--intervention.deadline", 0), "deadline is 0.0; it must be above 0"),
        (
            (*PERSON, "--env.control.hz", 50, "--env.envs", 1, "--env.stages", 1),
            "intervention.deadline: 60 seconds, but in real time (env.control) the policy is asked",
        ),
        (
            (
                *PERSON,
                "--intervention.demonstrates",
                "false",
                *("--replay.demonstrated_share", 0.3),
            ),
            "replay.demonstrated_share: 0.3 was given, but there are no demonstrations",
        ),
        (
            ("--intervention.person", "page"),
            "'page' is one person, who cannot act in 4 environments",
        ),
        (
            ("--intervention.person", "page", "--cluster.backend", "ray"),
            "'page' is served on loopback, and Ray may start the person on any of its hosts",
        ),
        (
            (
                *PERSON[:1],
                "page",
                "--env.envs",
                1,
                "--env.stages",
                1,
                "--intervention.deadline",
                0.1,
            ),
            "intervention.deadline: 0.1 seconds, but while its page is open a person takes up to",
        ),
        ((*PERSON, "--replay.demonstrated_share", 0.01), "0.01 of a batch of 16 are 0"),
        ((*PERSON, "--actor.sac.critics", 0), "critics is 0; it must be at least 1: only a policy"),
        (
            (*PERSON, "--actor.sac.critics", 0, "--actor.sac.cloning", 1.0, "--replay.n_step", 3),
            "replay.n_step: 3, but with actor.sac.critics = 0 nothing learns from returns",
        ),
        (
            (
                *(*PERSON, "--actor.sac.critics", 0, "--actor.sac.cloning", 1.0),
                *("--replay.sampling", "prioritized"),
            ),
            "replay.sampling: 'prioritized', but with actor.sac.critics = 0 there are no errors",
        ),
        (
            (*PERSON, "--intervention.acts", "false"),
            "intervention.acts: false: the person says what they would do, which only a policy",
        ),
        (
            (
                *(*PERSON, "--intervention.acts", "false", "--actor.sac.cloning", 1.0),
                *("--intervention.demonstrates", "false", "--replay.demonstrations", "shown"),
            ),
            "intervention.acts: false: the person says what they would do, which only a policy",
        ),
    ],
)
def test_it_is_named(job: Job, words: tuple[Any, ...], message: str) -> None:
    for command in (("check", job.file), ("train", job.file, "--out", job.out)):
        ended = job.command(*command, *words)
        assert ended.code == 2, ended.err
        [line] = ended.err.splitlines()
        assert message in line
    assert not job.out.exists()


@pytest.mark.usefixtures("no_cluster")
def test_a_job_that_learns_from_what_the_policy_has_drawn_has_no_person(job: Job) -> None:
    ended = job.command("check", "examples/cartpole_ppo.toml", *PERSON)
    assert ended.code == 2
    assert "intervention: unknown name" in ended.err
