"""Losses of tokens by name. ``N`` is the number of trained tokens of a micro-batch.

::

    named loss [N] x off-policy weight + KL to the reference + divergence from the teacher
      - entropy bonus = token loss [N]

A named loss is defined token by token (`Share` reduces it), so that samples can be divided into
micro-batches anywhere; means over a whole sample are taken through ``sample``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlinf_async.algorithms.config import (
    K3_LIMIT,
    LARGEST_LOG_RATIO,
    LOG_RATIO_LIMIT,
    KLEstimator,
    LanguageLossConfig,
    PairLossConfig,
)
from rlinf_async.algorithms.language.distillation import divergence
from rlinf_async.algorithms.losses import (
    OffPolicyWeights,
    clipped_surrogate,
    squared_error,
    truncated_weights,
)
from rlinf_async.config.registry import Registry


def off_policy_weights(
    inputs: TokenLossInputs, config: LanguageLossConfig
) -> OffPolicyWeights | None:
    """Return the weights ``[N]``, without gradients; None for ``off_policy = "none"``.

    The ratio's denominator is the *proximal* policy; with ``proximal = "step"`` the weights that
    the iteration begins with. Tokens were sampled by the *behaviour* policy: an engine with its own
    kernels, or older weights. Each token's loss is multiplied by a function of
    ``w = exp(proximal - behaviour)``:

    - ``truncated``: ``min(w, cap)`` (truncated importance sampling, Ionides 2008; for engine and
      trainer that disagree: Yao et al. 2025).
    - ``truncated_sequence``: ``min(product of the sample's w, cap)``.
    - ``decoupled``: ``w``, and 0 where it is above the cap (decoupled PPO, Hilton et al. 2022,
      equation 5; leaving tokens out: Fu et al. 2025, AReaL).
    - ``icepop``: ``w``, and 0 where it is above the cap or below the floor (IcePop, Ling team
      2025).
    """
    if config.off_policy == "none":
        return None
    with torch.no_grad():
        difference = inputs.proximal_log_prob - inputs.behaviour_log_prob
        if config.off_policy == "truncated_sequence":
            difference = _sample_sum(difference, inputs)
            difference = difference.clamp(max=LARGEST_LOG_RATIO)  # finite, and above any cap
        if config.off_policy.startswith("truncated"):
            return truncated_weights(difference, config.off_policy_cap)
        weight = difference.exp()
        capped = weight > config.off_policy_cap
        if config.off_policy == "icepop":
            capped |= weight < config.off_policy_floor
        return OffPolicyWeights(weight.masked_fill(capped, 0.0), capped.to(weight.dtype))


def kl_estimate(
    log_prob: Tensor,
    ref_log_prob: Tensor,
    estimator: KLEstimator,
    k3_limit: float = K3_LIMIT,
) -> Tensor:
    """Return an estimate of KL(policy, reference) from each sampled token, shaped like ``log_prob``
    (Schulman 2020, "Approximating KL divergence"); ``d = log_prob - ref_log_prob``.

    - ``k1``: ``d``. Unbiased; negative for half of the tokens or more.
    - ``k2``: ``d^2 / 2``. Biased; its gradient is that of the true KL when the token was sampled
      from the policy.
    - ``k3``: ``exp(-d) - 1 + d``, at most ``k3_limit``. Never negative; unbiased where the limit is
      not reached. As in verl, ``d`` is clamped to plus or minus 20 first, so that value and
      gradient are finite.
    """
    difference = log_prob - ref_log_prob
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference.square()
    difference = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return (torch.expm1(-difference) + difference).clamp(max=k3_limit)


class TokenLossInputs(NamedTuple):
    """The trained tokens of a micro-batch, sample after sample; all ``[N]``."""

    log_prob: Tensor
    """log-prob under the current weights, with its gradient"""
    entropy: Tensor
    """entropy of the current distribution of each token"""
    proximal_log_prob: Tensor
    """denominator of the ratio"""
    behaviour_log_prob: Tensor
    """log-prob of the engine, when the token was sampled"""
    ref_log_prob: Tensor | None
    advantage: Tensor
    sample: Tensor
    """int64: which of the ``samples`` each token belongs to"""
    samples: int
    teacher_log_prob: Tensor | None = None
    """log-prob of each token by a teacher"""
    teacher_likely: Tensor | None = None
    """``[N, k]``: log-probs by the teacher of the tokens that it holds most likely, or of the whole
    vocabulary; None where it was not asked"""
    likely: Tensor | None = None
    """``[N, k]``: log-probs of the same tokens under the current weights, with their gradient"""
    whole: bool = False
    """whether these are the whole vocabulary"""


class TokenLoss(NamedTuple):
    """Loss of each token, and its metrics; all ``[N]``."""

    loss: Tensor
    metrics: dict[str, Tensor]
    """metrics without gradients, of which the means over tokens are reported"""
    averaged: Mapping[str, Tensor] = {}
    """metrics without gradients that are averaged as the loss is: summed with the weights of
    `share_of` and divided by its units. With ``sequence-mean-token-sum`` a number of each sample
    that is spread over the sample's tokens has its exact mean over samples"""


class LanguageLoss(Protocol):
    """The signature of a registered loss: ``[N]`` from the micro-batch, alone or with metrics of
    its own."""

    def __call__(
        self, inputs: TokenLossInputs, config: LanguageLossConfig, /
    ) -> Tensor | TokenLoss: ...


language_losses: Registry[LanguageLoss] = Registry(
    "loss of a language model",
    group="rlinf_async.language_losses",
    called_with=("inputs", "config"),
)
register_language_loss = language_losses.register


@register_language_loss("ppo")
def ppo(inputs: TokenLossInputs, config: LanguageLossConfig) -> Tensor:
    """Return the clipped surrogate of each token (Schulman et al. 2017, equation 7), negated.

    ``clip_high`` above ``clip_low`` is DAPO's clip-higher (Yu et al. 2025, equation 10);
    ``dual_clip`` bounds it for negative advantages (Ye et al. 2020, equation 5).
    """
    return clipped_surrogate(_log_ratio(inputs, config).exp(), inputs.advantage, config).loss


@register_language_loss("gspo")
def gspo(inputs: TokenLossInputs, config: LanguageLossConfig) -> Tensor:
    """Return the clipped surrogate with the ratio of the whole sample: the geometric mean of its
    tokens' ratios. Each token gets its part of the gradient (Zheng et al. 2025, equation 13)."""
    mean = _sample_mean(inputs.log_prob.detach() - inputs.proximal_log_prob, inputs)
    log_ratio = mean + inputs.log_prob - inputs.log_prob.detach()
    log_ratio = log_ratio.clamp(-config.log_ratio_limit, config.log_ratio_limit)
    return clipped_surrogate(log_ratio.exp(), inputs.advantage, config).loss


@register_language_loss("cispo")
def cispo(inputs: TokenLossInputs, config: LanguageLossConfig) -> Tensor:
    """Return ``-clipped ratio x advantage x log-prob``, the ratio without a gradient (MiniMax-M1
    2025, equations 4 and 5): every token keeps its gradient, whatever its ratio.

    MiniMax, and TRL, clip from above alone: ``clip_low = 1``. TRL's ``epsilon_high`` is
    ``1 + clip_high``.
    """
    ratio = _log_ratio(inputs, config).detach().exp()
    held = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    return -held * inputs.advantage * inputs.log_prob


@register_language_loss("sapo")
def sapo(inputs: TokenLossInputs, config: LanguageLossConfig) -> Tensor:
    """Return the surrogate behind a soft gate (Gao et al. 2025, "Soft Adaptive Policy
    Optimization", equations 5 and 6), negated: ``4 / t x sigmoid(t (ratio - 1)) x advantage``; the
    temperature ``t`` depends on the sign of the advantage. At ratio 1 the gradient is that of
    ``ppo``, and it fades with the distance from 1 instead of being cut off."""
    ratio = _log_ratio(inputs, config).exp()
    positive = inputs.advantage > 0.0
    temperature = torch.where(positive, config.sapo_positive, config.sapo_negative).to(ratio.dtype)
    gate = torch.sigmoid(temperature * (ratio - 1.0)) * 4.0 / temperature
    return -gate * inputs.advantage


@register_language_loss("reinforce")
def reinforce(inputs: TokenLossInputs, config: LanguageLossConfig) -> Tensor:
    """Return ``-advantage x log-prob`` (Williams 1992, equation 4)."""
    return -inputs.advantage * inputs.log_prob


@register_language_loss("supervised")
def supervised(inputs: TokenLossInputs, config: LanguageLossConfig) -> Tensor:
    """Return the cross-entropy ``-log-prob`` of each token; advantages are ignored."""
    return -inputs.log_prob


@register_language_loss("distill")
def distill(inputs: TokenLossInputs, config: LanguageLossConfig) -> TokenLoss:
    """Return the divergence of the policy from its teacher at each token; advantages are ignored.
    See `teacher_loss`."""
    return teacher_loss(inputs, config)


def teacher_loss(inputs: TokenLossInputs, config: LanguageLossConfig) -> TokenLoss:
    """Return the divergence of the policy from its teacher at each token.

    Where the teacher tells what it holds of other tokens, it is the exact one over the next token
    (`divergence`). Otherwise the reverse KL is estimated on the sampled token ``t``: its gradient
    ``E[(log p(t) - log q(t)) grad log p(t)]`` is that of a policy gradient with the advantage ``log
    q(t) - log p(t)`` (Lu et al. 2025, "On-Policy Distillation", Thinking Machines), for which the
    clipped surrogate stands, as in ``ppo``. Raises `ValueError` for samples without a teacher's
    log-probs.
    """
    teacher = inputs.teacher_log_prob
    if teacher is None:
        raise ValueError(
            "the loss compares with a teacher, and samples have no log-probs of one: set "
            "teacher.path, and cluster.inference_workers"
        )
    difference = inputs.log_prob.detach() - teacher
    metrics = {"teacher_kl": difference}
    if inputs.likely is None or inputs.teacher_likely is None:
        ratio = _log_ratio(inputs, config).exp()
        advantage = -difference.clamp(-config.log_ratio_limit, config.log_ratio_limit)
        return TokenLoss(clipped_surrogate(ratio, advantage, config).loss, metrics)
    found = divergence(inputs.likely, inputs.teacher_likely, config, whole=inputs.whole)
    metrics["teacher_divergence"] = found.detach()
    if not inputs.whole:
        metrics["teacher_mass"] = inputs.teacher_likely.exp().sum(-1)
    return TokenLoss(found, metrics)


@register_language_loss("dpo")
def dpo(inputs: TokenLossInputs, config: LanguageLossConfig) -> TokenLoss:
    """Return the loss of pairs (Rafailov et al. 2023, "Direct Preference Optimization", equation
    7); with label smoothing, the conservative one (Mitchell 2023, equation 3).

    ::

        reward = beta x sum over the sample's tokens of (log-prob - reference's)
        margin = reward of sample 2k - reward of sample 2k + 1
        loss   = -(1 - smoothing) x log sigmoid(margin) - smoothing x log sigmoid(-margin)

    Each pair's loss stands at both of its samples, spread over their tokens, so that
    ``sequence-mean-token-sum`` is the mean over pairs; and so do its metrics. Raises `ValueError`
    for samples without reference log-probs, and half a pair.
    """
    if not isinstance(config, PairLossConfig):
        raise ValueError("dpo needs the settings of a PairLossConfig: use job = 'dpo'")
    if inputs.ref_log_prob is None:
        raise ValueError("dpo compares with reference log-probs, and samples have no ref_log_prob")
    counts = _counts(inputs)
    if inputs.samples % 2 or not bool((counts > 0).all()):
        raise ValueError(
            f"dpo learns from pairs of answers: a micro-batch holds {inputs.samples} samples, of "
            f"which {int((counts > 0).sum())} have tokens in the loss"
        )
    change = inputs.log_prob - inputs.ref_log_prob
    reward = config.beta * change.new_zeros(inputs.samples).index_add(0, inputs.sample, change)
    chosen, rejected = reward[0::2], reward[1::2]
    margin, smoothing = chosen - rejected, config.label_smoothing
    loss = -(1.0 - smoothing) * logsigmoid(margin) - smoothing * logsigmoid(-margin)

    def spread(of_pairs: Tensor) -> Tensor:
        return (of_pairs.repeat_interleave(2) / counts)[inputs.sample]

    with torch.no_grad():
        found = {
            "reward_chosen": chosen,
            "reward_rejected": rejected,
            "reward_margin": margin,
            "reward_accuracy": (margin > 0.0).to(margin.dtype),
        }
        averaged = {name: spread(numbers.detach()) for name, numbers in found.items()}
    return TokenLoss(spread(loss), {}, averaged)


def token_loss(inputs: TokenLossInputs, config: LanguageLossConfig) -> TokenLoss:
    """Return the whole loss of each token, and its metrics.

    Raises `ValueError` if ``kl_coefficient`` is set and there are no reference log-probs.
    """
    metrics = _ratio_metrics(inputs, config)
    going = None
    if config.early_stop_ratio is not None:
        going = _still_training(inputs, config, config.early_stop_ratio)
        inputs = _with_ratio_1(inputs, going)
        metrics["early_stopped"] = 1.0 - going
    named = language_losses.named(config.name)(inputs, config)
    if not isinstance(named, TokenLoss):
        named = TokenLoss(named, {})
    loss = policy = named.loss
    taught = teacher_loss(inputs, config) if config.teacher_coefficient else None
    of_drawn = inputs.likely is None  # then it is weighted as the named loss is
    if taught is not None and of_drawn:
        loss = loss + config.teacher_coefficient * taught.loss
    weights = off_policy_weights(inputs, config)
    if weights is not None:
        loss = loss * weights.weight
        metrics |= weights.columns
    if config.kl_coefficient:
        if inputs.ref_log_prob is None:
            raise ValueError(
                f"loss.kl_coefficient is {config.kl_coefficient}, but samples have no "
                "ref_log_prob: run an inference worker that computes reference log-probs, or set "
                "it to 0"
            )
        kl = kl_estimate(inputs.log_prob, inputs.ref_log_prob, config.kl_estimator, config.k3_limit)
        loss = loss + config.kl_coefficient * kl
        metrics["ref_kl"] = kl.detach()
    if taught is not None:
        metrics |= taught.metrics
        if not of_drawn:
            loss = loss + config.teacher_coefficient * taught.loss
    if config.entropy_coefficient:
        loss = loss - config.entropy_coefficient * inputs.entropy
    if going is not None:
        loss = loss * going
    metrics |= {"policy_loss": policy.detach(), "entropy": inputs.entropy.detach()}
    return TokenLoss(loss, metrics | named.metrics, named.averaged)


def token_value_loss(
    value: Tensor, old_value: Tensor, returns: Tensor, clip: float | None
) -> Tensor:
    """Return half the squared error of each token's value, all ``[N]``; see `value_loss`."""
    return 0.5 * squared_error(value, old_value, returns, clip)


def _log_ratio(inputs: TokenLossInputs, config: LanguageLossConfig) -> Tensor:
    """Return ``log_prob - proximal_log_prob``, clamped so that its exponential stays finite."""
    log_ratio = inputs.log_prob - inputs.proximal_log_prob
    return log_ratio.clamp(-config.log_ratio_limit, config.log_ratio_limit)


def _sample_sum(tokens: Tensor, inputs: TokenLossInputs) -> Tensor:
    """Replace each token's value by the sum over its sample's tokens."""
    return tokens.new_zeros(inputs.samples).index_add(0, inputs.sample, tokens)[inputs.sample]


def _sample_mean(tokens: Tensor, inputs: TokenLossInputs) -> Tensor:
    """Replace each token's value by the mean over its sample's tokens."""
    return _sample_sum(tokens, inputs) / _counts(inputs)[inputs.sample]


def _counts(inputs: TokenLossInputs) -> Tensor:
    """Return the number of trained tokens of each sample."""
    ones = torch.ones_like(inputs.log_prob)
    return ones.new_zeros(inputs.samples).index_add(0, inputs.sample, ones)


def _still_training(inputs: TokenLossInputs, config: LanguageLossConfig, limit: float) -> Tensor:
    """Return ``[N]``: 0 for the tokens of samples whose mean ratio is above the limit, else 1."""
    with torch.no_grad():
        ratio = _log_ratio(inputs, config).exp()
        stopped = _sample_mean(ratio, inputs) > limit  # False for NaN
        return 1.0 - stopped.to(ratio.dtype)


def _with_ratio_1(inputs: TokenLossInputs, going: Tensor) -> TokenLossInputs:
    """Replace the log-probs of stopped samples, so that metrics do not show their large ratios."""
    log_prob = torch.where(going > 0.0, inputs.log_prob, inputs.proximal_log_prob)
    return inputs._replace(log_prob=log_prob)


def _ratio_metrics(inputs: TokenLossInputs, config: LanguageLossConfig) -> dict[str, Tensor]:
    with torch.no_grad():
        log_ratio = _log_ratio(inputs, config)
        ratio = log_ratio.exp()
        outside = (ratio < 1.0 - config.clip_low) | (ratio > 1.0 + config.clip_high)
        return {
            "ratio": ratio,
            "clip_fraction": outside.to(ratio.dtype),
            "approx_kl": torch.expm1(log_ratio) - log_ratio,
        }
