"""Language runs whose samples are episodes of several turns."""

from __future__ import annotations

import pathlib
from collections import Counter
from collections.abc import Iterator
from functools import partial

import pytest

from benchmarks.harness.peers import PeerMissing, default_store
from rlinf_async.config import Document
from rlinf_async.runtime.jobs.language.samples import load_language_progress, load_unfinished
from rlinf_async.simulate import SimulationConfig
from tests.episodes.endpoint.programs import PACKAGES
from tests.interpreters import OURS, make_python, packages_of
from tests.jobs.killing import nothing_left_behind
from tests.jobs.language.killing import Killer
from tests.jobs.language.kit import Job
from tests.jobs.language.test_killed_driver import ENDLESS, booked
from tests.jobs.processes import Start

PROCESS = ("--cluster.backend", "process")
AGENTS = "tests.jobs.language.agents"
TALKS = ("--episode.run", f"{AGENTS}:talks", "--cluster.episode_workers", 1)
LEARNT = ("reward", "response_tokens", "given_tokens", "episode_drawn", "turns")


def columns(job: Job) -> list[tuple[str, ...]]:
    """What each iteration was trained on."""
    return [tuple(row[name] for name in LEARNT) for row in job.iterations]


def check_records(job: Job, iterations: int) -> None:
    """Every episode was trained once, whatever died."""
    summary = job.summary
    assert summary.outcome == "finished"
    assert summary.iterations == iterations
    assert summary.samples == summary.outcomes["scored"] == 8 * iterations
    assert [row["iteration"] for row in job.iterations] == [str(n) for n in range(iterations)]


def test_episodes_of_several_turns_are_trained_and_evaluated(job: Job) -> None:
    summary = job.succeed(*TALKS)
    check_records(job, 4)
    assert summary.evaluation_samples == 4
    assert summary.evaluation_unscored == 0
    assert summary.eval_accuracy is not None
    assert {float(row["turns"]) for row in job.iterations} == {3.0}
    assert all(float(row["episode_drawn"]) > 0 for row in job.iterations)
    assert summary.dropped == {"second samples": 0}


@pytest.mark.parametrize("more", [(), ("--training.max_staleness", 1, "--rollout.toy.slots", 3)])
def test_a_run_with_inference_workers_and_two_of_each_role(
    job: Job, more: tuple[object, ...]
) -> None:
    two = ("--cluster.episode_workers", 2, "--cluster.rollout_workers", 2)
    job.succeed(*TALKS, *two, "--cluster.inference_workers", 1, *more)
    check_records(job, 4)
    idle = [float(row["idle_for_tools"]) for row in job.iterations]
    assert 0.0 <= min(idle) <= max(idle) < 1.0
    moved = [float(row["turns_moved"]) for row in job.iterations]
    assert more or sum(moved) / len(moved) < 0.75  # of two; 1 would be chance


def test_what_the_verifier_judges_is_the_last_answer(job: Job) -> None:
    letters = ("--data.verifier", "tests.jobs.language.verifiers:letters")
    job.succeed("--episode.run", f"{AGENTS}:answers", "--cluster.episode_workers", 1, *letters)
    check_records(job, 4)


def test_a_run_whose_agent_scores_itself_is_calibrated(job: Job) -> None:
    job.succeed(*TALKS)
    found = job.command("calibrate", job.out)
    assert found.code == 0, found.err
    config = Document("printed", found.out).to(SimulationConfig)
    assert set(config.episode.turns) == {3}


def test_an_environment_makes_its_own_tasks(job: Job) -> None:
    own = ("--data.path", "", "--data.verifier", "", "--data.environment_tasks", 40)
    guess = ("--episode.environment.id", "tests.episodes.environments.worlds:Guess-v0")
    job.succeed("--episode.run", "gymnasium", *guess, *own, "--cluster.episode_workers", 1)
    check_records(job, 4)
    for row in job.iterations:
        assert float(row["turns"]) > 1.0
        assert float(row["episode_return"]) == pytest.approx(-0.25 * float(row["turns"]))


@pytest.mark.slow
def test_episode_workers_have_a_python_of_their_own(job: Job, tmp_path: pathlib.Path) -> None:
    try:
        peer = default_store().python(PACKAGES["textarena"])
    except PeerMissing as missing:
        pytest.skip(str(missing))
    python = make_python(tmp_path / "games", packages_of(peer.parents[1]), OURS)
    own = ("--data.path", "", "--data.verifier", "", "--data.environment_tasks", 40)
    game = ("--episode.run", "textarena", "--episode.environment.id", "GuessTheNumber-v0")
    workers = (*PROCESS, "--cluster.episode_workers", 1)
    ended = job.train(*own, *game, *workers)  # it is not installed here
    assert ended.code == 2
    assert "pip install 'rlinf-async[textarena]'" in ended.err
    role = ("--cluster.placement.episode.python", python)
    job.succeed(*own, *game, *workers, *role)
    check_records(job, 4)
    assert {float(row["episode_invalid_move"]) for row in job.iterations} == {1.0}
    wrong = ("--episode.environment.id", "GuessTheNumbr-v0")
    ended = job.train(*own, *game, *workers, *role, *wrong)
    assert ended.code == 2
    assert "did you mean 'GuessTheNumber-v0" in ended.err


def test_an_agent_that_returns_no_reward_ends_the_run_with_the_reason(job: Job) -> None:
    ended = job.train("--episode.run", f"{AGENTS}:says_a_word", "--cluster.episode_workers", 1)
    assert ended.code == 1
    assert f"episode '{AGENTS}:says_a_word' returned " in ended.err
    assert "(a str), not a number" in ended.err
    assert "Traceback" not in ended.err


TRUNCATED = ("--rollout.sampling.top_k", 5, "--rollout.sampling.temperature", 0.8)


@pytest.mark.parametrize("sampling", [(), TRUNCATED], ids=["plain", "truncated"])
@pytest.mark.parametrize("advantage", ["grpo", "turn_grpo", "gae"])
def test_a_model_is_trained_on_what_it_drew_in_all_turns_and_branches(
    tiny: Job, advantage: str, sampling: tuple[object, ...]
) -> None:
    forks = ("--episode.run", f"{AGENTS}:forks", "--cluster.episode_workers", 1)
    critics = ("--cluster.critics", int(advantage == "gae"), "--cluster.inference_workers", 1)
    loss = ("--actor.loss.kl_coefficient", 0.01, "--actor.advantage.name", advantage)
    tiny.succeed(*forks, *critics, *loss, *sampling)
    check_records(tiny, 4)
    for row in tiny.iterations:
        assert float(row["engine_actor_difference"]) < 1e-5
        assert float(row["engine_actor_tokens"]) > 0.0
        assert float(row["response_tokens"]) == float(row["episode_drawn"])
        assert float(row["given_tokens"]) > 0.0
        assert float(row["branches"]) == 2.0
        assert float(row["turns"]) == 3.0
        assert float(row["staleness_max"]) == 0.0


# ---- what dies


@pytest.fixture
def killer(monkeypatch: pytest.MonkeyPatch) -> Killer:
    return Killer(monkeypatch)


@pytest.fixture
def nothing_left(job: Job) -> Iterator[None]:
    with nothing_left_behind():  # after `job`: its folder must not be made in the one here
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_left")
def test_an_environment_is_played_again_over_the_recorded_answers(job: Job, killer: Killer) -> None:
    victims = 3 * ["Episode[0]", "Rollout[0]", "Episode[1]"]
    killer.victims = dict(enumerate(victims, 1))
    own = ("--data.path", "", "--data.verifier", "", "--data.environment_tasks", 40)
    guess = ("--episode.environment.id", "tests.episodes.environments.worlds:Guess-v0")
    ahead = ("--training.max_staleness", 1, "--training.iterations", 12)
    workers = ("--cluster.episode_workers", 2, "--cluster.max_restarts", 100)
    summary = job.succeed("--episode.run", "gymnasium", *guess, *own, *PROCESS, *ahead, *workers)
    assert summary.restarts == Counter(victims)
    check_records(job, 12)
    for row in job.iterations:
        assert float(row["episode_return"]) == pytest.approx(-0.25 * float(row["turns"]))
    assert killer.dead_letters == []


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_left")
def test_killed_episode_and_rollout_workers_are_replaced_and_every_episode_is_trained_once(
    job: Job, killer: Killer
) -> None:
    victims = 8 * ["Episode[0]", "Rollout[0]", "Episode[1]"]
    killer.victims = dict(enumerate(victims, 1))
    ahead = ("--training.max_staleness", 1, "--training.iterations", 30)
    workers = ("--cluster.episode_workers", 2, "--cluster.max_restarts", 100)
    summary = job.succeed(*TALKS, *PROCESS, *ahead, *workers)
    assert summary.restarts == Counter(victims)
    check_records(job, 30)
    assert killer.dead_letters == []


@pytest.mark.slow
def test_a_killed_driver_goes_on_with_the_turns_that_were_made(
    job: Job, start_driver: Start
) -> None:
    slow = ("--rollout.toy.seconds_per_step", 0.02)
    ahead = ("--training.max_staleness", 1, "--training.checkpoint_every", 1)
    command = ("train", job.file, "--out", job.out, "--resume", *TALKS, *PROCESS, *slow, *ahead)
    start = partial(start_driver, *command, "--training.iterations")
    driver = start(ENDLESS)
    driver.until(lambda: booked(job) > 4, "four iterations and the evaluation before them")
    driver.kill()
    assert driver.wait() == -9
    checkpoints = job.out / "checkpoints"
    progress = load_language_progress(checkpoints)
    assert progress is not None
    waiting = load_unfinished(checkpoints, progress).waiting
    names = [one.request.name for one in waiting.turns]
    assert names == sorted(set(names), key=names.index)
    assert all(one.request.turn for one in waiting.turns)
    iterations = booked(job) + 4
    assert start(iterations).wait() == 0
    check_records(job, iterations)


def test_a_checkpoint_has_the_turns_of_open_episodes_and_a_resumed_run_takes_them_up(
    job: Job, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ahead = ("--training.max_staleness", 2, "--training.checkpoint_every", 1)
    slow = ("--rollout.toy.slots", 2, "--actor.toy.seconds_per_step", 0.0)
    job.succeed(*TALKS, *ahead, *slow, "--training.iterations", 3)
    job.succeed(*TALKS, *ahead, *slow, "--training.iterations", 6, "--resume")
    check_records(job, 6)
    (tmp_path / "whole").mkdir()
    whole = Job(tmp_path / "whole", capsys)
    whole.succeed(*TALKS, *ahead, *slow, "--training.iterations", 6)
    assert columns(job) == columns(whole)
