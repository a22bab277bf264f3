"""Advantages of samples by name. ``R`` is the number of a sample's response tokens.

::

    reward, KL per token --> token rewards [R] --named function--> advantage, returns [R]
                                          --whitened over the global batch--> advantage

A function gets one group: all samples of one prompt that were *scored*. Samples that were not
scored have no reward and get no advantage; they train no token and are in no baseline.

In the formulas ``r_i`` is the reward of sample ``i`` of a group of ``G`` scored samples, with those
of its turns, less the KL of its tokens. Without a critic every token of a sample gets the sample's
advantage, except with ``reinforce++`` and ``turn_grpo``. In a group of one that is 0, as nothing is
left to compare with (verl: the raw reward).

A token is one that the model drew: from the last one of a turn the next one is the first of the
next turn. Each branch of an episode is a chain of tokens of its own, which ends with the outcome
that all of them share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from rlinf_async.algorithms.advantages import AdvantageInputs, gae
from rlinf_async.algorithms.config import AdvantageConfig, LanguageAdvantageConfig
from rlinf_async.algorithms.language.losses import kl_estimate
from rlinf_async.config.registry import Registry
from rlinf_async.messages.embodied import Floats
from rlinf_async.messages.language import TrainingSample


class ScoredTokens(NamedTuple):
    """Trained tokens of one scored sample; all ``[R]``."""

    reward: Floats
    """reward of each token: the sample's reward at the last one of each branch, a turn's at the
    last one of the turn, less each token's KL where asked for"""
    value: Floats | None
    """value of the state before each token, with a critic"""
    total: float
    """the sample's reward, once, and those of its turns, less the KL of its tokens; also set if
    none of its tokens is trained"""
    outcome: float
    """the sample's reward alone"""
    branches: Sequence[slice]
    """tokens of each branch, in order; one where there are no others"""
    turns: Mapping[tuple[int, int], slice]
    """tokens of each turn, by number of its branch and its number there, both from 0 on; empty
    where the sample is not of an episode"""


class TokenAdvantages(NamedTuple):
    """Advantages and returns of one sample's tokens, both ``[R]``, float32."""

    advantage: Floats
    returns: Floats


class GroupAdvantage(Protocol):
    """The signature of a registered advantage: one result for each sample of a group."""

    def __call__(
        self, group: Sequence[ScoredTokens], config: LanguageAdvantageConfig, /
    ) -> list[TokenAdvantages]: ...


group_advantages: Registry[GroupAdvantage] = Registry(
    "advantage of a language model",
    group="rlinf_async.language_advantages",
    called_with=("group", "config"),
)
register_group_advantage = group_advantages.register


class AdvantageMoments(NamedTuple):
    """Moments of the advantages of trained tokens, as sums that ranks can add up."""

    tokens: float
    total: float
    squares: float


def compute_group_advantages(
    samples: Sequence[TrainingSample], config: LanguageAdvantageConfig
) -> list[TrainingSample]:
    """Return the samples of one or several groups with ``advantage`` and ``returns``, in order.

    A sample that has an advantage already is unchanged, and is in no baseline. Raises
    `ValueError`, naming the sample, if log-probs or values that the configuration needs are
    missing, or the reward of a scored sample is not finite.
    """
    function = group_advantages.named(config.name)
    answers: dict[int, TrainingSample] = {}
    for members in _groups(samples):
        scored = [at for at in members if samples[at].scored]
        tokens = [_scored_tokens(samples[at], config) for at in scored]
        found = dict(zip(scored, function(tokens, config), strict=True)) if scored else {}
        for at in members:
            answers[at] = _with_advantage(samples[at], found.get(at))
    return [answers.get(at, sample) for at, sample in enumerate(samples)]


def advantage_moments(samples: Sequence[TrainingSample]) -> AdvantageMoments:
    """Return count, sum and sum of squares of the trained tokens' advantages."""
    trained = [one.advantage[one.loss_mask] for one in samples if one.advantage is not None]
    every = np.concatenate([np.zeros(0), *trained]).astype(np.float64)
    return AdvantageMoments(float(len(every)), float(every.sum()), float(np.square(every).sum()))


def whitened(
    samples: Sequence[TrainingSample], moments: AdvantageMoments, eps: float = 1e-8
) -> list[TrainingSample]:
    """Return the samples with advantages normalised to mean 0 and standard deviation 1.

    ``moments`` are those of all trained tokens of the batch; other tokens stay at 0. The deviation
    is unbiased, and ``eps`` is added to it. (verl adds 1e-8 to the variance.)
    """
    if moments.tokens < 2:
        return list(samples)
    mean = moments.total / moments.tokens
    variance = max(moments.squares / moments.tokens - mean * mean, 0.0)
    deviation = math.sqrt(variance * moments.tokens / (moments.tokens - 1)) + eps
    # Equal advantages differ from their mean by rounding only, which must not be scaled up.
    scale = 0.0 if math.sqrt(variance) <= 1e-6 * abs(mean) else 1.0 / deviation

    def white(one: TrainingSample) -> TrainingSample:
        if one.advantage is None:
            return one
        advantage = np.where(one.loss_mask, (one.advantage - mean) * scale, 0.0)
        return msgspec.structs.replace(one, advantage=advantage.astype(np.float32))

    return [white(one) for one in samples]


def _groups(samples: Sequence[TrainingSample]) -> list[list[int]]:
    groups: dict[int, list[int]] = {}
    for at, sample in enumerate(samples):
        if sample.advantage is None:
            groups.setdefault(sample.group, []).append(at)
    return list(groups.values())


def _scored_tokens(sample: TrainingSample, config: LanguageAdvantageConfig) -> ScoredTokens:
    if not math.isfinite(sample.reward):
        raise ValueError(
            f"sample {sample.group}/{sample.index} is marked as scored, but its reward is "
            f"{sample.reward}: mark it as not scored, or give it a number"
        )
    trained, outcome = sample.loss_mask, float(np.float32(sample.reward))
    places = np.flatnonzero(trained)
    reward = np.zeros(len(places), np.float32)
    branches = [_at(places, part.start, part.stop) for _, part in sample.sequences]
    turns = [(_at(places, one.start, one.stop), one.reward) for one in sample.turns]
    if len(reward):
        reward[-1] = outcome
        for tokens, credit in turns:
            reward[max(tokens.stop - 1, 0)] += np.float32(credit or 0.0)
        if config.kl_coefficient:
            reward -= np.float32(config.kl_coefficient) * _kl(sample, config)[trained]
    value = None if sample.value is None else sample.value[trained].astype(np.float32)
    total = float(reward.sum(dtype=np.float64)) if len(reward) else sample.reward
    for branch in branches:  # the last one has it already
        if branch.start < branch.stop < len(reward):
            reward[branch.stop - 1] += np.float32(outcome)
    by_number = _numbered([tokens for tokens, _ in turns], branches)
    return ScoredTokens(reward, value, total, outcome, branches, by_number)


def _at(places: NDArray[np.int64], start: int, stop: int) -> slice:
    """Return which of the places ``[R]`` lie from ``start`` to ``stop``."""
    first, last = np.searchsorted(places, [start, stop]).tolist()
    return slice(first, last)


def _numbered(turns: Sequence[slice], branches: Sequence[slice]) -> dict[tuple[int, int], slice]:
    """Return the turns by number of their branch and their number there."""
    found: dict[tuple[int, int], slice] = {}
    for number, branch in enumerate(branches):
        inside = [one for one in turns if branch.start <= one.start < one.stop <= branch.stop]
        found |= {(number, at): one for at, one in enumerate(inside)}
    return found


def _kl(sample: TrainingSample, config: LanguageAdvantageConfig) -> Floats:
    if sample.ref_log_prob is None:
        raise ValueError(
            f"advantage.kl_coefficient is {config.kl_coefficient}, but sample "
            f"{sample.group}/{sample.index} has no ref_log_prob: run an inference worker that "
            "computes reference log-probs, or set it to 0"
        )
    policy = sample.log_prob if sample.prev_log_prob is None else sample.prev_log_prob
    estimate = kl_estimate(
        torch.from_numpy(policy),
        torch.from_numpy(sample.ref_log_prob),
        config.kl_estimator,
        config.k3_limit,
    )
    return estimate.numpy()


def _with_advantage(sample: TrainingSample, found: TokenAdvantages | None) -> TrainingSample:
    advantage = np.zeros(len(sample.response_ids), np.float32)
    returns = np.zeros(len(sample.response_ids), np.float32)
    if found is None:
        nothing = np.zeros(len(sample.response_ids), np.bool_)
        return msgspec.structs.replace(
            sample, advantage=advantage, returns=returns, loss_mask=nothing
        )
    advantage[sample.loss_mask] = found.advantage
    returns[sample.loss_mask] = found.returns
    return msgspec.structs.replace(sample, advantage=advantage, returns=returns)


Rewards = NDArray[np.float64]

EPS = 1e-6
"""added to the standard deviation of a group"""


@register_group_advantage("grpo")
def grpo(group: Sequence[ScoredTokens], config: LanguageAdvantageConfig) -> list[TokenAdvantages]:
    """``(r_i - mean(r)) / (std(r) + 1e-6)``, std unbiased (Shao et al. 2024, equation 4.1.1).

    Without ``divide_by_std`` only the mean is subtracted (Liu et al. 2025, Dr. GRPO). Equal rewards
    give exactly 0.
    """
    return _spread(group, _standardised(_totals(group), config))


@register_group_advantage("turn_grpo")
def turn_grpo(
    group: Sequence[ScoredTokens], config: LanguageAdvantageConfig
) -> list[TokenAdvantages]:
    """``grpo`` of the reward to go of each turn: the outcome, and the rewards of this turn and of
    later ones, less the KL of their tokens, compared over the samples of the group.

    A token gets what its turn and later ones earned, as in process supervision (Shao et al. 2024,
    4.1.3), normalised turn by turn, as in MT-GRPO (Zeng et al. 2025, which has two turns). A sample
    without a turn of this number is in its baseline with its outcome, which is all that was still
    to come: where no turn has a reward, this is ``grpo``. Turns are numbered within their branch.

    Raises `ValueError` if a sample has no turns.
    """
    if any(len(one.reward) and not one.turns for one in group):
        raise ValueError(
            "advantage 'turn_grpo' gives credit to the turns of an episode, and a sample has none: "
            "choose an advantage of whole samples (grpo, rloo, reinforce++)"
        )
    found = [np.zeros(len(one.reward), np.float32) for one in group]
    to_go = [_rewards_to_go(one, 1.0) for one in group]
    for turn in dict.fromkeys(turn for one in group for turn in one.turns):
        there = [one.turns.get(turn) for one in group]
        rewards = [
            one.outcome if tokens is None else float(rest[tokens.start])
            for one, rest, tokens in zip(group, to_go, there, strict=True)
        ]
        standard = _standardised(np.array(rewards, np.float64), config)
        for advantage, tokens, number in zip(found, there, standard, strict=True):
            if tokens is not None:
                advantage[tokens] = number
    return [TokenAdvantages(one, one) for one in found]


@register_group_advantage("rloo")
def rloo(group: Sequence[ScoredTokens], config: LanguageAdvantageConfig) -> list[TokenAdvantages]:
    """``r_i`` less the mean of the *others* (Ahmadian et al. 2024, equation 7).

    A sample without others has no baseline and gets 0.
    """
    size = len(group)
    centred = _centred(_totals(group))
    return _spread(group, centred * (size / (size - 1)) if size > 1 else centred)


@register_group_advantage("reinforce++_baseline")
def reinforce_plus_plus_baseline(
    group: Sequence[ScoredTokens], config: LanguageAdvantageConfig
) -> list[TokenAdvantages]:
    """``r_i - mean(r)``, whitened over the global batch afterwards (Hu et al. 2025, 3.2)."""
    return _spread(group, _centred(_totals(group)))


@register_group_advantage("reinforce++")
def reinforce_plus_plus(
    group: Sequence[ScoredTokens], config: LanguageAdvantageConfig
) -> list[TokenAdvantages]:
    """Reward to go ``sum_{s >= t} gamma^(s - t) r_s``, no baseline; whitened over the global batch
    afterwards (Hu et al. 2025, equations 7 and 8)."""
    answers = []
    for one in group:
        to_go = _rewards_to_go(one, config.gamma)
        answers.append(TokenAdvantages(to_go, to_go))
    return answers


def _rewards_to_go(one: ScoredTokens, gamma: float) -> Floats:
    return np.concatenate([_to_go(one.reward[branch], gamma) for branch in one.branches])


def _standardised(rewards: Rewards, config: LanguageAdvantageConfig) -> Rewards:
    centred = _centred(rewards)
    if config.divide_by_std and len(rewards) > 1:
        centred = centred / (np.linalg.norm(centred) / np.sqrt(len(rewards) - 1) + EPS)
    return centred


def _totals(group: Sequence[ScoredTokens]) -> Rewards:
    return np.array([one.total for one in group], np.float64)


def _centred(rewards: Rewards) -> Rewards:
    # The mean of equal numbers may differ from them in the last bit; their advantage is 0.
    if rewards.max() == rewards.min():
        return np.zeros_like(rewards)
    centred: Rewards = rewards - rewards.mean()
    return centred


def _spread(group: Sequence[ScoredTokens], advantages: Rewards) -> list[TokenAdvantages]:
    answers = []
    for one, advantage in zip(group, advantages, strict=True):
        tokens = np.full(len(one.reward), advantage, np.float32)
        answers.append(TokenAdvantages(tokens, tokens))
    return answers


def _to_go(reward: Floats, gamma: float) -> Floats:
    if gamma == 1.0:
        return np.cumsum(reward[::-1], dtype=np.float64)[::-1].astype(np.float32)
    to_go = np.zeros(len(reward), np.float32)
    running = 0.0
    for at in range(len(reward) - 1, -1, -1):
        running = float(reward[at]) + gamma * running
        to_go[at] = running
    return to_go


@register_group_advantage("gae")
def token_gae(
    group: Sequence[ScoredTokens], config: LanguageAdvantageConfig
) -> list[TokenAdvantages]:
    """Return `algorithms.gae` over tokens: a token is a step, and the last one of a branch is
    terminal.

    Schulman et al. 2016, equation 16. Raises `ValueError` if a sample has no values.
    """
    if any(one.value is None for one in group):
        raise ValueError(
            "advantage 'gae' needs values, and a sample has none: run a critic, or choose an "
            "advantage without one (grpo, rloo, reinforce++)"
        )
    branches = [(one, tokens) for one in group for tokens in one.branches]
    lengths = [tokens.stop - tokens.start for _, tokens in branches]
    # Branches are columns; elements below the last token of a shorter one are never read.
    shape = (max(lengths), len(branches))
    reward, value = np.zeros(shape, np.float32), np.zeros((shape[0] + 1, shape[1]), np.float32)
    ended = np.zeros(shape, np.bool_)
    for column, ((one, tokens), length) in enumerate(zip(branches, lengths, strict=True)):
        assert one.value is not None
        reward[:length, column] = one.reward[tokens]
        value[:length, column] = one.value[tokens]
        ended[length - 1 : length, column] = True
    nothing = np.zeros(shape, np.float32)
    inputs = AdvantageInputs(reward, value, ended, np.zeros_like(ended), nothing)
    found = gae(inputs, AdvantageConfig(gamma=config.gamma, gae_lambda=config.gae_lambda))
    there = np.arange(shape[0]) < np.array(lengths)[:, None]
    ends = np.cumsum([len(one.reward) for one in group])[:-1]
    advantages, returns = (np.split(every.T[there], ends) for every in found)
    return list(map(TokenAdvantages, advantages, returns))
