"""Figures of an evaluation against their definitions, published numbers, and simulations."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_async.observe.evaluations import Estimate, Evaluated, bootstrap, ks, pass_at_k, wilson


def interval(found: Estimate | None) -> tuple[float, float]:
    assert found is not None
    assert found.low is not None
    assert found.high is not None
    return found.low, found.high


@given(st.integers(1, 9), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(
    answers: int, data: st.DataObject
) -> None:
    right, k = data.draw(st.integers(0, answers)), data.draw(st.integers(1, answers))
    subsets = list(itertools.combinations([True] * right + [False] * (answers - right), k))
    share = sum(any(one) for one in subsets) / len(subsets)
    assert pass_at_k(answers, right, k) == pytest.approx(share, abs=1e-12)


@pytest.mark.parametrize(("answers", "k"), [(200, 1), (200, 10), (200, 100), (16, 16)])
def test_pass_at_k_equals_the_program_in_the_paper(answers: int, k: int) -> None:
    """Chen et al. 2021, figure 3: ``1 - prod(1 - k / (n - c + 1 ... n))``, 1 where n - c < k."""
    for right in range(answers + 1):
        stated: float = 1.0
        if answers - right >= k:
            stated = 1.0 - float(np.prod(1.0 - k / np.arange(answers - right + 1, answers + 1)))
        assert pass_at_k(answers, right, k) == pytest.approx(stated, abs=1e-12)


@pytest.mark.parametrize("chance", [0.0, 0.03, 0.5, 0.9, 1.0])
@pytest.mark.parametrize(("answers", "k"), [(1, 1), (4, 2), (10, 4), (10, 10)])
def test_pass_at_k_is_unbiased(answers: int, k: int, chance: float) -> None:
    """Its expectation over all numbers of right answers is the chance of one right among k."""
    expected = math.fsum(
        math.comb(answers, right)
        * chance**right
        * (1 - chance) ** (answers - right)
        * pass_at_k(answers, right, k)
        for right in range(answers + 1)
    )
    assert expected == pytest.approx(1 - (1 - chance) ** k, abs=1e-12)


def test_pass_at_k_needs_k_answers() -> None:
    with pytest.raises(ValueError, match="k is 5, but there are 4 answers"):
        pass_at_k(4, 1, 5)
    assert [ks(one) for one in (1, 2, 3, 4, 6)] == [[], [2], [2, 3], [2, 4], [2, 4, 6]]


@pytest.mark.parametrize(
    ("right", "asked", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611),
     (1, 29, 0.0061, 0.1718)],
)  # fmt: skip
def test_right_or_wrong_has_wilsons_interval(
    right: int, asked: int, low: float, high: float
) -> None:
    """The numbers are those of Newcombe 1998, Statistics in Medicine 17, table I, method 3."""
    found = wilson([1.0] * right + [0.0] * (asked - right))
    assert tuple(round(one, 4) for one in interval(found)) == (low, high)
    assert found.value == pytest.approx(right / asked)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=40))
def test_several_answers_to_a_prompt_count_as_its_written_out_formula(right: list[int]) -> None:
    shares = [one / 4 for one in right]
    found = wilson(shares, answers=4)
    prompts, mean = len(shares), sum(shares) / len(shares)
    trials = float(prompts)
    if prompts > 1 and len(set(shares)) > 1:
        squares = sum((one - mean) ** 2 for one in shares) / (prompts - 1)
        trials = min(max(mean * (1 - mean) / (squares / prompts), prompts), 4 * prompts)
    z = 1.959963984540054
    root = z * math.sqrt(mean * (1 - mean) / trials + z**2 / (4 * trials**2))
    bounds = [(mean + z**2 / (2 * trials) + one * root) / (1 + z**2 / trials) for one in (-1, 1)]
    low, high = interval(found)
    assert (low, high) == pytest.approx(bounds, abs=1e-9)
    assert 0.0 <= low <= found.value <= high <= 1.0


@pytest.mark.parametrize("middle", [0.1, 0.5, 0.95])
@pytest.mark.parametrize("answers", [1, 4])
@pytest.mark.parametrize("k", [1, 4])
def test_the_interval_of_a_share_holds_the_truth_in_95_of_100_evaluations(
    middle: float, answers: int, k: int
) -> None:
    """60 prompts, whose chances are drawn from a beta distribution, in 500 evaluations."""
    if k > answers:
        return
    random = np.random.default_rng(7)
    chances = random.beta(2 * middle, 2 * (1 - middle), size=(500, 60))
    right = random.binomial(answers, chances)
    truth = 1 - np.mean((1 - random.beta(2 * middle, 2 * (1 - middle), 10**5)) ** k)
    share = np.array([pass_at_k(answers, one, k) for one in range(answers + 1)])
    found = [interval(wilson(share[one].tolist(), answers)) for one in right]
    assert 0.92 <= np.mean([low <= truth <= high for low, high in found]) <= 0.99


def test_the_interval_of_a_mean_reward_holds_the_truth_in_95_of_100_evaluations() -> None:
    random = np.random.default_rng(3)
    rewards = random.exponential(size=(100, 60, 1)) + random.normal(0, 0.5, size=(100, 60, 3))
    found = [bootstrap(one.tolist()) for one in rewards]
    held = [low <= 1.0 <= high for low, high in map(interval, found)]
    assert 0.88 <= np.mean(held) <= 0.99


def test_the_bootstrap_is_over_prompts_and_always_the_same() -> None:
    random = np.random.default_rng(0)
    means = random.normal(size=100)
    alone = bootstrap([[one] for one in means.tolist()])
    again = bootstrap([[one] * 8 for one in means.tolist()])  # eight times the same: not more known
    assert alone is not None
    assert again is not None
    assert again.value == pytest.approx(alone.value)
    assert interval(again) == pytest.approx(interval(alone))
    error = 1.96 * means.std(ddof=1) / 10
    assert np.diff(interval(alone)) == pytest.approx(2 * error, rel=0.1)
    assert bootstrap([[one] for one in means.tolist()]) == alone
    assert bootstrap([[None], [None, None]]) is None
    assert bootstrap([[2.0, None]]) == Estimate(2.0)  # one prompt says nothing of others
    assert Estimate(2.0).columns("reward") == {"reward": 2.0}


def test_the_figures_of_a_set_are_those_of_its_answers() -> None:
    found = Evaluated.of([[1.0, 0.0, None, 1.0], [0.0] * 4, [1.0] * 4], name="math", version=3)
    assert (found.prompts, found.samples, found.unscored) == (3, 12, 1)
    assert found.accuracy is not None
    assert found.accuracy.value == pytest.approx(6 / 12)
    assert found.reward is not None
    assert found.reward.value == pytest.approx(6 / 11)
    assert found.pass_at[2].value == pytest.approx((1 - 1 / 6 + 0 + 1) / 3)
    assert found.pass_at[4].value == pytest.approx(2 / 3)
    columns = found.columns()
    assert columns["eval_math_version"] == 3
    assert columns["eval_math_pass_at_2"] == found.pass_at[2].value
    assert columns["eval_math_accuracy_low"] == found.accuracy.low
    assert "eval_math_reward_low" not in columns
    assert {"eval_accuracy", "eval_unscored"} <= Evaluated.of([[1.0]]).columns().keys()
    assert Evaluated.of([[0.5, 1.0]]).pass_at == {}
    assert {"eval_reward_low", "eval_reward_high"} <= Evaluated.of([[0.5], [0.5]]).columns().keys()
