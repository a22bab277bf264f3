"""What an evaluation reports: accuracy where answers are right or wrong, and of all answers."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_async.messages.language import Failed, Outcome, Rejected, Scored
from rlinf_async.runtime.jobs.language.config import EvaluationConfig
from rlinf_async.runtime.jobs.language.reports import Evaluated
from tests.jobs.language.kit import Job

VERIFIERS = "tests.jobs.language.verifiers"

UNSCORED: list[Outcome] = [Failed(error="no server"), Rejected(reason="no answer")]
right_or_wrong = st.sampled_from([0.0, 1.0]).map(lambda reward: Scored(reward=reward))
shaped = st.floats(-5, 5, allow_nan=False).map(lambda reward: Scored(reward=reward))
unscored = st.sampled_from(UNSCORED)


@given(st.lists(st.one_of(right_or_wrong, unscored), min_size=1))
def test_accuracy_is_the_share_of_right_ones_among_all_that_were_asked_for(
    outcomes: list[Outcome],
) -> None:
    found = Evaluated.of(outcomes)
    right = sum(one == Scored(reward=1.0) for one in outcomes)
    missing = sum(not isinstance(one, Scored) for one in outcomes)
    assert (found.samples, found.unscored) == (len(outcomes), missing)
    if missing == len(outcomes):
        assert found.accuracy is None
        assert found.reward is None
    else:
        assert found.accuracy == pytest.approx(float(Fraction(right, len(outcomes))))
    assert bool(found.why) == bool(missing)


@given(st.lists(st.one_of(right_or_wrong, shaped), min_size=1), st.data())
def test_an_answer_that_is_not_scored_raises_no_accuracy_and_reaches_no_target(
    outcomes: list[Outcome], data: st.DataObject
) -> None:
    whole = Evaluated.of(outcomes)
    at = data.draw(st.integers(0, len(outcomes) - 1))
    holed = Evaluated.of([*outcomes[:at], data.draw(unscored), *outcomes[at + 1 :]])
    if whole.accuracy is not None and holed.accuracy is not None:
        assert holed.accuracy <= whole.accuracy
    assert not holed.reaches(EvaluationConfig(target_reward=-1e9))
    if whole.accuracy is not None:
        assert whole.reaches(EvaluationConfig(target_accuracy=whole.accuracy))
    assert whole.reward is not None
    assert whole.reaches(EvaluationConfig(target_reward=whole.reward))


@given(st.lists(shaped, min_size=1))
def test_the_mean_of_shaped_rewards_is_no_accuracy(outcomes: list[Outcome]) -> None:
    found = Evaluated.of(outcomes)
    rewards = [one.reward for one in outcomes if isinstance(one, Scored)]
    assert found.reward == pytest.approx(sum(rewards) / len(rewards))
    assert (found.accuracy is None) == bool(set(rewards) - {0.0, 1.0})
    assert set(found.columns()) >= {"eval_reward", "eval_unscored"}


@pytest.mark.parametrize("verifier", ["sometimes", "rejects"])
def test_a_verifier_that_leaves_wrong_answers_unscored_makes_no_run_succeed(
    job: Job, verifier: str
) -> None:
    ended = job.train(
        *("--data.verifier", f"{VERIFIERS}:{verifier}", "--evaluation.target_accuracy", 0.9),
        *("--training.iterations", 1, "--data.held_out", 8, "--evaluation.samples", 8),
    )
    assert ended.code == 1
    summary = job.summary
    assert summary.outcome == "fell short"
    assert summary.evaluation_samples == 8
    assert summary.evaluation_unscored is not None
    assert 0 < summary.evaluation_unscored < 8
    assert summary.eval_accuracy == 1 - summary.evaluation_unscored / 8
    assert summary.eval_reward == 1.0
    said = f"{summary.evaluation_unscored} of 8 answers were not scored: they count as not right"
    assert ended.err.count(said) == 1
    assert "no server" in ended.err
    assert f"{summary.evaluation_unscored} of 8 not scored" in ended.out
    assert "of them not scored" in ended.out


def test_a_shaped_reward_has_a_mean_and_a_target_of_its_own(job: Job) -> None:
    less = ("--training.iterations", 1, "--data.verifier", f"{VERIFIERS}:letters")
    ended = job.train(*less, "--evaluation.target_accuracy", 0.1)
    assert (ended.code, job.summary.outcome) == (1, "fell short")
    assert "set evaluation.target_reward instead" in ended.err
    assert job.summary.eval_accuracy is None
    mean = job.summary.eval_reward
    assert mean is not None
    assert f"mean reward {mean:.2f} (before: " in ended.out
    assert "accuracy" not in ended.out
    again = ("--resume", *less, "--evaluation.target_reward")
    assert job.train(*again, mean).code == 0
    assert job.train(*again, mean + 0.01).code == 1


def test_held_out_prompts_that_are_all_too_long_are_refused_and_some_are_counted(job: Job) -> None:
    text = job.file.read_text()
    job.file.write_text(text.replace("[data]", '[data]\ntoo_long = "skip"\nmax_prompt_tokens = 1'))
    ended = job.train()
    assert ended.code == 2
    assert (
        "data.held_out: all 4 held-out prompts are longer than max_prompt_tokens = 1" in ended.err
    )
    job.file.write_text(text.replace("[data]", '[data]\ntoo_long = "skip"\nmax_prompt_tokens = 6'))
    skipped = job.succeed("--training.iterations", 1, "--data.held_out", 20).dropped
    assert skipped["held-out prompts that are too long"] > 0
