"""SFT and DPO against formulas that others have published, written out with plain torch."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rlinf_async.algorithms.config import LanguageLossConfig, PairLossConfig, share_of
from rlinf_async.algorithms.language.losses import TokenLossInputs, token_loss

VOCABULARY = 23


class Batch(NamedTuple):
    """Padded random samples, as TRL's trainers have them."""

    logits: Tensor
    """``[samples, length, V]``"""
    labels: Tensor
    """``[samples, length]``; -100 of what is not learnt"""
    reference: Tensor
    """``[samples, length]``: log-probs under the reference"""


def batch(samples: int, seed: int) -> Batch:
    random = torch.Generator().manual_seed(seed)
    length = 9
    labels = torch.randint(0, VOCABULARY, (samples, length), generator=random)
    learnt = torch.rand((samples, length), generator=random) < 0.6
    learnt[:, 0] = True
    logits = torch.randn((samples, length, VOCABULARY), generator=random, dtype=torch.float64)
    reference = torch.randn((samples, length), generator=random, dtype=torch.float64) - 3.0
    return Batch(logits, labels.where(learnt, -100), reference)


def ours(given: Batch, config: LanguageLossConfig) -> tuple[Tensor, dict[str, float], Tensor]:
    """Loss, metrics that are averaged as the loss is, and the gradient of the logits."""
    logits = given.logits.clone().requires_grad_()
    learnt = given.labels != -100
    chosen = given.labels.clamp(min=0)[..., None]
    log_prob = logits.log_softmax(-1).gather(-1, chosen)[..., 0][learnt]
    nothing = torch.zeros_like(log_prob).detach()
    counts = learnt.sum(1)
    inputs = TokenLossInputs(
        log_prob=log_prob,
        entropy=nothing,
        proximal_log_prob=log_prob.detach(),
        behaviour_log_prob=nothing,
        ref_log_prob=given.reference[learnt],
        advantage=nothing,
        sample=torch.repeat_interleave(counts),
        samples=len(counts),
    )
    found = token_loss(inputs, config)
    shares = [share_of(int(count), config) for count in counts]
    weights = torch.tensor([one.weight for one in shares]).double()[inputs.sample]
    units = sum(one.units for one in shares)
    loss = (found.loss * weights).sum() / units
    metrics = {name: float((one * weights).sum() / units) for name, one in found.averaged.items()}
    [gradient] = torch.autograd.grad(loss, logits)
    return loss.detach(), metrics, gradient


@pytest.mark.parametrize("seed", range(4))
def test_supervised_is_the_mean_cross_entropy_of_what_is_learnt(seed: int) -> None:
    """TRL's SFTTrainer: ``cross_entropy`` over labels that are not -100, summed and divided by
    their number in the batch (``num_items_in_batch``)."""
    given = batch(6, seed)
    logits = given.logits.clone().requires_grad_()
    expected = F.cross_entropy(logits.flatten(0, 1), given.labels.flatten(), ignore_index=-100)
    [gradient] = torch.autograd.grad(expected, logits)
    loss, _, found = ours(given, LanguageLossConfig(name="supervised", proximal="current"))
    torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(found, gradient, rtol=0, atol=1e-12)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("beta", [0.1, 0.7])
def test_dpo_is_that_of_trl(seed: int, smoothing: float, beta: float) -> None:
    """TRL's DPOTrainer, ``loss_type = "sigmoid"``: ``-logsigmoid(beta x logits) x (1 - smoothing) -
    logsigmoid(-beta x logits) x smoothing`` with ``logits = (chosen - ref_chosen) - (rejected -
    ref_rejected)`` of log-probs summed over the completion, mean over the batch; its metrics
    rewards/chosen, rewards/rejected, rewards/margins, rewards/accuracies."""
    given = batch(8, seed)
    logits = given.logits.clone().requires_grad_()
    learnt = given.labels != -100
    every = logits.log_softmax(-1).gather(-1, given.labels.clamp(min=0)[..., None])[..., 0]
    summed = (every * learnt).sum(1)
    reference = (given.reference * learnt).sum(1)
    chosen, rejected = (summed - reference)[0::2], (summed - reference)[1::2]
    difference = chosen - rejected
    losses = -F.logsigmoid(beta * difference) * (1.0 - smoothing)
    losses = losses - F.logsigmoid(-beta * difference) * smoothing
    [gradient] = torch.autograd.grad(losses.mean(), logits)

    config = PairLossConfig(beta=beta, label_smoothing=smoothing, proximal="current")
    loss, metrics, found = ours(given, config)
    torch.testing.assert_close(loss, losses.mean().detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(found, gradient, rtol=0, atol=1e-12)
    chosen, rejected, difference = chosen.detach(), rejected.detach(), difference.detach()
    assert metrics == pytest.approx(
        {
            "reward_chosen": float(beta * chosen.mean()),
            "reward_rejected": float(beta * rejected.mean()),
            "reward_margin": float(beta * difference.mean()),
            "reward_accuracy": float((difference > 0).double().mean()),
        },
        abs=1e-12,
    )


def test_half_a_pair_and_samples_without_a_reference_are_refused() -> None:
    given = batch(3, 0)
    with pytest.raises(ValueError, match="pairs of answers: a micro-batch holds 3 samples"):
        ours(given, PairLossConfig())
    nothing = torch.zeros(2)
    inputs = TokenLossInputs(
        log_prob=nothing,
        entropy=nothing,
        proximal_log_prob=nothing,
        behaviour_log_prob=nothing,
        ref_log_prob=None,
        advantage=nothing,
        sample=torch.tensor([0, 1]),
        samples=2,
    )
    with pytest.raises(ValueError, match="samples have no ref_log_prob"):
        token_loss(inputs, PairLossConfig())


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"beta": 0.0}, "beta is 0"),
        ({"beta": float("inf")}, "beta is inf"),
        ({"label_smoothing": 0.5}, "label_smoothing is 0.5"),
        ({"label_smoothing": -0.1}, "label_smoothing is -0.1"),
        ({"aggregation": "token-mean"}, "aggregation is 'token-mean'"),
    ],
)
def test_coefficients_that_mean_nothing_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        PairLossConfig(**fields)


def test_reinforcement_learning_has_no_pairs() -> None:
    with pytest.raises(ValueError, match="use a file of job = 'dpo'"):
        LanguageLossConfig(name="dpo")
