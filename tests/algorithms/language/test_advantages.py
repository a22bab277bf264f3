"""Each advantage against its formula, computed by hand over plain lists."""

from __future__ import annotations

import math
import statistics
from typing import Any

import msgspec
import numpy as np
import pytest

from rlinf_async.algorithms.config import LanguageAdvantageConfig
from rlinf_async.algorithms.language.advantages import (
    advantage_moments,
    compute_group_advantages,
    whitened,
)
from rlinf_async.config.registry import UnknownName
from rlinf_async.messages.language import TrainingSample, TurnSpan
from tests.backends.language.kit import episode, episodes

REWARDS = [1.0, 0.0, 0.25, -2.0]


def sample(group: int, index: int, reward: float | None, tokens: int = 3, **more: Any) -> Any:
    """One response of ``tokens`` tokens; a reward of None is one that was not scored."""
    random = np.random.default_rng([group, index])
    return TrainingSample(
        group=group,
        index=index,
        prompt_ids=np.arange(2, dtype=np.int32),
        response_ids=np.arange(tokens, dtype=np.int32),
        loss_mask=np.full(tokens, reward is not None),
        log_prob=random.normal(size=tokens).astype(np.float32) - 1.0,
        version=np.zeros(tokens, np.int32),
        temperature=1.0,
        reward=math.nan if reward is None else reward,
        scored=reward is not None,
        **more,
    )


def group_of(rewards: list[float | None], group: int = 0) -> list[TrainingSample]:
    return [sample(group, index, reward, 2 + index) for index, reward in enumerate(rewards)]


def advantages(samples: list[TrainingSample], **config: Any) -> list[Any]:
    done = compute_group_advantages(samples, LanguageAdvantageConfig(**config))
    assert [(one.group, one.index) for one in done] == [(one.group, one.index) for one in samples]
    return [one.advantage for one in done]


def assert_spread(found: list[Any], expected: list[float]) -> None:
    """Every token of a sample has the sample's advantage."""
    for tokens, number in zip(found, expected, strict=True):
        np.testing.assert_allclose(tokens, np.full(len(tokens), number), rtol=2e-6, atol=1e-7)


def test_grpo_is_the_standard_score_of_a_reward_in_its_group() -> None:
    mean, deviation = statistics.mean(REWARDS), statistics.stdev(REWARDS)
    expected = [(reward - mean) / (deviation + 1e-6) for reward in REWARDS]
    assert_spread(advantages(group_of([*REWARDS]), name="grpo"), expected)


def test_grpo_without_std_only_takes_the_mean_off() -> None:
    mean = statistics.mean(REWARDS)
    found = advantages(group_of([*REWARDS]), name="grpo", divide_by_std=False)
    assert_spread(found, [reward - mean for reward in REWARDS])


def test_rloo_takes_off_the_mean_of_the_others() -> None:
    expected = [
        reward - statistics.mean(REWARDS[:at] + REWARDS[at + 1 :])
        for at, reward in enumerate(REWARDS)
    ]
    assert_spread(advantages(group_of([*REWARDS]), name="rloo"), expected)


def test_reinforce_plus_plus_with_baseline_takes_the_mean_off() -> None:
    mean = statistics.mean(REWARDS)
    found = advantages(group_of([*REWARDS]), name="reinforce++_baseline")
    assert_spread(found, [reward - mean for reward in REWARDS])


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_plus_plus_is_the_reward_to_go_less_the_kl(gamma: float) -> None:
    ref = np.array([-1.0, -0.5, -2.0, -0.1], np.float32)
    one = sample(0, 0, 0.7, 4, ref_log_prob=ref)
    [found] = advantages([one], name="reinforce++", gamma=gamma, kl_coefficient=0.3)
    rewards = [-0.3 * float(a - b) for a, b in zip(one.log_prob, ref, strict=True)]
    rewards[-1] += 0.7
    expected = [
        sum(gamma ** (later - at) * rewards[later] for later in range(at, 4)) for at in range(4)
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_gae_is_the_sum_of_discounted_temporal_differences() -> None:
    gamma, lam = 0.95, 0.8
    values = [np.array([0.3, -0.2, 0.5], np.float32), np.array([1.0, 0.1], np.float32)]
    group = [
        sample(0, at, reward, len(value), value=value)
        for at, (reward, value) in enumerate(zip([2.0, -1.0], values, strict=True))
    ]
    config = LanguageAdvantageConfig(name="gae", gamma=gamma, gae_lambda=lam)
    for one, done in zip(group, compute_group_advantages(group, config), strict=True):
        size = len(one.value)
        reward = [0.0] * (size - 1) + [one.reward]
        after = [*one.value[1:], 0.0]
        delta = [reward[t] + gamma * after[t] - one.value[t] for t in range(size)]
        expected = [
            sum((gamma * lam) ** (later - t) * delta[later] for later in range(t, size))
            for t in range(size)
        ]
        assert done.advantage is not None
        assert done.returns is not None
        np.testing.assert_allclose(done.advantage, expected, rtol=1e-5)
        np.testing.assert_allclose(done.returns, np.array(expected) + one.value, rtol=1e-5)


def test_kl_in_the_reward_prefers_the_log_probs_that_were_recomputed() -> None:
    tokens = [np.array(row, np.float32) for row in ([-1.0, -2.0], [-0.5, -1.5], [-3.0, -0.2])]
    log_prob, prev, ref = tokens
    one = sample(0, 0, 1.0, 2, prev_log_prob=prev, ref_log_prob=ref)
    one.log_prob = log_prob
    other = sample(0, 1, 1.0, 2, prev_log_prob=prev, ref_log_prob=prev)
    found = advantages([one, other], name="grpo", divide_by_std=False, kl_coefficient=0.5)
    penalised = 1.0 - 0.5 * float((prev - ref).sum())
    assert_spread(found, [(penalised - 1.0) / 2, (1.0 - penalised) / 2])


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce++_baseline"])
def test_equal_rewards_give_advantages_of_exactly_zero(name: str) -> None:
    group = group_of([0.1] * 7)  # the mean of seven 0.1 is not 0.1
    assert all(not tokens.any() for tokens in advantages(group, name=name))


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce++_baseline", "reinforce++"])
def test_samples_without_a_score_train_nothing_and_enter_no_baseline(name: str) -> None:
    config = LanguageAdvantageConfig(name=name)
    mixed = compute_group_advantages(group_of([1.0, None, 0.0, None]), config)
    alone = compute_group_advantages([sample(0, 0, 1.0, 2), sample(0, 2, 0.0, 4)], config)
    np.testing.assert_array_equal(mixed[0].advantage, alone[0].advantage)
    np.testing.assert_array_equal(mixed[2].advantage, alone[1].advantage)
    for one in (mixed[1], mixed[3]):
        assert one.advantage is not None
        assert not one.advantage.any()
        assert not one.loss_mask.any()


def test_a_group_without_any_score_gets_no_advantages() -> None:
    group = group_of([None, None])
    assert all(not tokens.any() for tokens in advantages(group, name="gae"))


def test_groups_are_compared_within_themselves_in_whatever_order_they_come() -> None:
    first, second = group_of([1.0, 0.0], 1), group_of([5.0, 2.0], 2)
    mixed = [second[0], first[1], first[0], second[1]]
    found = advantages(mixed, name="grpo", divide_by_std=False)
    assert_spread(found, [1.5, -0.5, 0.5, -1.5])


def test_an_advantage_that_is_there_already_is_left_alone() -> None:
    mine = np.array([7.0, 8.0, 9.0], np.float32)
    group = [sample(0, 0, 1.0, advantage=mine), sample(0, 1, 0.0), sample(0, 2, 1.0)]
    found = advantages(group, name="grpo", divide_by_std=False)
    np.testing.assert_array_equal(found[0], mine)
    assert_spread(found[1:], [-0.5, 0.5])


def test_tokens_that_are_not_trained_get_no_advantage() -> None:
    group = group_of([1.0, 0.0])
    group[0].loss_mask = np.array([True, False])
    found = advantages(group, name="grpo", divide_by_std=False)
    np.testing.assert_array_equal(found[0], [0.5, 0.0])


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce++_baseline"])
def test_a_sample_of_which_no_token_is_trained_enters_the_baseline_with_its_reward(
    name: str,
) -> None:
    group = group_of([3.0, 1.0, 0.0])
    whole = advantages(group, name=name)
    group[0].loss_mask = np.zeros(2, np.bool_)
    assert_spread(advantages(group, name=name), [0.0, whole[1][0], whole[2][0]])


def test_whitening_is_over_all_trained_tokens_of_all_ranks() -> None:
    ranks = [group_of([1.0, 0.0], 0), group_of([3.0, None], 1)]
    config = LanguageAdvantageConfig(name="reinforce++")
    parts = [compute_group_advantages(rank, config) for rank in ranks]
    totals = np.sum([advantage_moments(part) for part in parts], axis=0)
    moments = type(advantage_moments([]))(*totals)
    every = [1.0] * 2 + [0.0] * 3 + [3.0] * 2
    mean, deviation = statistics.mean(every), statistics.stdev(every)
    white = [whitened(part, moments) for part in parts]
    for part, rewards in zip(white, [[1.0, 0.0], [3.0]], strict=True):
        assert_spread(
            [one.advantage for one in part if one.scored],
            [(reward - mean) / deviation for reward in rewards],
        )
    unscored = white[1][1].advantage
    assert unscored is not None
    assert not unscored.any()


def test_whitening_equal_advantages_gives_zeros_and_not_rounding_errors() -> None:
    config = LanguageAdvantageConfig(name="reinforce++")
    part = compute_group_advantages(group_of([0.1] * 9), config)
    for one in whitened(part, advantage_moments(part)):
        assert one.advantage is not None
        assert not one.advantage.any()


def test_which_advantages_are_whitened() -> None:
    found = {
        name: LanguageAdvantageConfig(name=name).whitens
        for name in ("grpo", "rloo", "gae", "reinforce++", "reinforce++_baseline")
    }
    assert [name for name, whitens in found.items() if whitens] == [
        "gae",
        "reinforce++",
        "reinforce++_baseline",
    ]
    assert LanguageAdvantageConfig(name="grpo", normalize="batch").whitens
    assert not LanguageAdvantageConfig(name="gae", normalize="none").whitens


@pytest.mark.parametrize(
    ("samples", "config", "says"),
    [
        ([sample(3, 1, math.inf)], {}, r"sample 3/1 .* its reward is inf"),
        ([sample(3, 1, 1.0)], {"kl_coefficient": 0.1}, r"sample 3/1 has no ref_log_prob"),
        ([sample(3, 1, 1.0)], {"name": "gae"}, r"needs values"),
        ([sample(3, 1, 1.0)], {"name": "turn_grpo"}, r"turns of an episode, and a sample has none"),
    ],
)
def test_what_is_missing_is_named(samples: list[Any], config: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        advantages(samples, **config)


def test_an_unknown_advantage_is_an_error_that_helps() -> None:
    with pytest.raises(UnknownName, match=r"did you mean 'grpo'"):
        advantages(group_of([1.0]), name="grpoo")


@pytest.mark.parametrize("field", ["gamma", "gae_lambda", "kl_coefficient"])
def test_a_coefficient_that_is_no_number_is_refused(field: Any) -> None:
    with pytest.raises(ValueError, match=rf"{field} is nan"):
        LanguageAdvantageConfig(**{field: math.nan})  # type: ignore[arg-type]


NAMES = ("grpo", "turn_grpo", "rloo", "reinforce++", "reinforce++_baseline", "gae")


@pytest.mark.parametrize("kl", [0.0, 0.3])
@pytest.mark.parametrize("name", NAMES)
def test_tokens_that_were_given_are_as_if_they_were_not_there(name: str, kl: float) -> None:
    """From the last token of a turn the next one is the first of the next turn."""
    config = LanguageAdvantageConfig(name=name, kl_coefficient=kl, gamma=0.9, gae_lambda=0.8)
    whole = episodes()
    drawn = [without_given(one) for one in whole]
    for one, alone in zip(
        compute_group_advantages(whole, config),
        compute_group_advantages(drawn, config),
        strict=True,
    ):
        for found, expected in ((one.advantage, alone.advantage), (one.returns, alone.returns)):
            assert found is not None
            np.testing.assert_array_equal(found[one.drawn_mask], expected)
            assert not found[~one.drawn_mask].any()


def without_given(one: TrainingSample) -> TrainingSample:
    """The same tokens without those that were given."""
    drawn = one.drawn_mask
    at = np.concatenate([[0], np.cumsum(drawn)]).tolist()
    arrays = ("response_ids", "loss_mask", "log_prob", "version", "prev_log_prob", "ref_log_prob",
              "value")  # fmt: skip
    replace = msgspec.structs.replace
    return replace(
        one,
        drawn=None,
        branches=tuple(replace(each, start=at[each.start]) for each in one.branches),
        turns=tuple(replace(each, start=at[each.start], stop=at[each.stop]) for each in one.turns),
        **{name: getattr(one, name)[drawn] for name in arrays},
    )


@pytest.mark.parametrize("name", ["reinforce++", "gae"])
def test_each_branch_is_a_chain_of_its_own_that_ends_with_the_outcome(name: str) -> None:
    config = LanguageAdvantageConfig(name=name, gamma=0.9, gae_lambda=0.8)
    one = without_given(episode(0, 2, branches=3))
    parts = []
    for prompt, part in one.sequences:
        inside = [each for each in one.turns if part.start <= each.start < part.stop]
        moved = [
            msgspec.structs.replace(
                each, start=each.start - part.start, stop=each.stop - part.start
            )
            for each in inside
        ]
        arrays = ("response_ids", "loss_mask", "log_prob", "version", "value")
        parts.append(
            msgspec.structs.replace(
                one,
                prompt_ids=prompt,
                branches=(),
                turns=tuple(moved),
                **{field: getattr(one, field)[part] for field in arrays},
            )
        )
    [whole], apart = (compute_group_advantages(each, config) for each in ([one], parts))
    expected = np.concatenate([each.advantage for each in apart if each.advantage is not None])
    np.testing.assert_array_equal(whole.advantage, expected)


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce++_baseline"])
def test_a_reward_is_the_outcome_once_and_the_rewards_of_all_turns(name: str) -> None:
    group = episodes(1)
    returns = [one.reward + sum(turn.reward or 0.0 for turn in one.turns) for one in group]
    expected = advantages(group_of([*returns]), name=name)
    for one, found, right in zip(group, advantages(group, name=name), expected, strict=True):
        np.testing.assert_allclose(found[one.drawn_mask], right[0], rtol=1e-5)


def test_turn_grpo_without_rewards_of_turns_is_grpo() -> None:
    plain = [
        msgspec.structs.replace(one, turns=tuple(
            msgspec.structs.replace(turn, reward=None) for turn in one.turns))
        for one in episodes()
    ]  # fmt: skip
    for found, expected in zip(
        advantages(plain, name="turn_grpo"), advantages(plain, name="grpo"), strict=True
    ):
        np.testing.assert_array_equal(found, expected)


def test_turn_grpo_compares_what_a_turn_and_later_ones_earned_turn_by_turn() -> None:
    """Two samples: the second one has no second turn, but an outcome."""
    first, second = sample(0, 0, 1.0, 4), sample(0, 1, 0.0, 2)
    first.turns = (TurnSpan(start=0, stop=2, reward=0.5), TurnSpan(start=2, stop=4, reward=-3.0))
    second.turns = (TurnSpan(start=0, stop=2),)
    found = advantages([first, second], name="turn_grpo", divide_by_std=False)
    to_go = [(1.0 + 0.5 - 3.0, 0.0), (1.0 - 3.0, 0.0)]
    relative = [(mine - (mine + other) / 2, other - (mine + other) / 2) for mine, other in to_go]
    np.testing.assert_allclose(found[0], np.repeat([relative[0][0], relative[1][0]], 2))
    np.testing.assert_allclose(found[1], np.repeat([relative[0][1]], 2))
