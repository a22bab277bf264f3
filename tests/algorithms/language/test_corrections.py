"""Losses and corrections against formulas of others, each with its source, on random batches."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlinf_async.algorithms.config import LanguageLossConfig, share_of
from rlinf_async.algorithms.language.losses import TokenLossInputs, token_loss
from rlinf_async.algorithms.off_policy import is_left_out, leave_out
from rlinf_async.messages.language import TrainingSample

BATCH, LENGTH = 6, 12
SEEDS = range(5)


class Padded:
    """A batch as padded libraries have it: ``[batch, length]`` and a mask; float32."""

    def __init__(self, seed: int) -> None:
        draw = np.random.default_rng(seed)
        self.mask = torch.arange(LENGTH)[None] < torch.from_numpy(
            draw.integers(1, LENGTH + 1, size=(BATCH, 1))
        )

        def normal(scale: float) -> Tensor:
            return torch.from_numpy(draw.normal(scale=scale, size=(BATCH, LENGTH))).float()

        self.old = normal(1.0) - 2.0
        self.new = (self.old + normal(0.5)).requires_grad_()
        self.rollout = self.old + normal(0.5)
        self.advantage = normal(1.0)[:, :1].expand(BATCH, LENGTH)

    def packed(self) -> TokenLossInputs:
        mask = self.mask
        return TokenLossInputs(
            log_prob=self.new[mask],
            entropy=torch.zeros(int(mask.sum())),
            proximal_log_prob=self.old[mask],
            behaviour_log_prob=self.rollout[mask],
            ref_log_prob=None,
            advantage=self.advantage[mask],
            sample=torch.arange(BATCH)[:, None].expand(BATCH, LENGTH)[mask],
            samples=BATCH,
        )

    def gradient(self, loss: Tensor) -> Tensor:
        [found] = torch.autograd.grad(loss, self.new)
        return found


def compare(batch: Padded, config: LanguageLossConfig, theirs: Tensor) -> None:
    """``theirs``: the loss of each token, ``[batch, length]``. Values, and gradients of the sum."""
    ours = token_loss(batch.packed(), config).loss
    expected = theirs[batch.mask]
    assert torch.allclose(ours, expected, rtol=1e-6, atol=1e-6)
    found, wanted = batch.gradient(ours.sum()), batch.gradient(expected.sum())
    assert torch.allclose(found, wanted, rtol=1e-6, atol=1e-6)
    assert wanted.abs().max() > 0.01


@pytest.mark.parametrize("seed", SEEDS)
def test_cispo_is_that_of_trl(seed: int) -> None:
    """TRL's ``loss_type = "cispo"``: ``-clamp(ratio, max=epsilon_high).detach() x advantage x
    log-prob``, with ``epsilon_high = 1.5`` here."""
    batch = Padded(seed)
    ratio = (batch.new - batch.old).exp()
    theirs = -ratio.clamp(max=1.5).detach() * batch.advantage * batch.new
    compare(batch, LanguageLossConfig(name="cispo", clip_low=1.0, clip_high=0.5), theirs)


@pytest.mark.parametrize("seed", SEEDS)
def test_cispo_is_that_of_verl(seed: int) -> None:
    """verl's policy loss ``cispo``: the ratio is clipped on both sides."""
    batch = Padded(seed)
    held = torch.clamp((batch.new - batch.old).exp(), 1 - 0.3, 1 + 0.2).detach()
    theirs = -held * batch.advantage * batch.new
    compare(batch, LanguageLossConfig(name="cispo", clip_low=0.3, clip_high=0.2), theirs)


@pytest.mark.parametrize("seed", SEEDS)
def test_sapo_is_that_of_trl(seed: int) -> None:
    """TRL's ``get_sapo_token_loss``: ``sigmoid(t (ratio - 1)) x 4 / t``, with t = 1.0 for positive
    advantages and 1.05 for others."""
    batch = Padded(seed)
    ratio = (batch.new - batch.old).exp()
    gates = {t: torch.sigmoid(t * (ratio - 1.0)) * 4.0 / t for t in (1.0, 1.05)}
    gate = torch.where(batch.advantage > 0, gates[1.0], gates[1.05])
    compare(batch, LanguageLossConfig(name="sapo"), -gate * batch.advantage)


def test_at_ratio_1_sapo_has_the_gradient_of_ppo() -> None:
    batch = Padded(0)
    batch.old = batch.new.detach().clone()
    losses = [token_loss(batch.packed(), LanguageLossConfig(name=one)) for one in ("sapo", "ppo")]
    gradients = [batch.gradient(one.loss.sum()) for one in losses]
    torch.testing.assert_close(*gradients)


def of_verl(batch: Padded, level: str, threshold: float) -> Tensor:
    """verl's ``rollout_is``: truncated weights of tokens, or of the whole sequence; log-ratios are
    clamped to 20 first."""
    difference = batch.old - batch.rollout
    if level == "sequence":
        difference = (difference * batch.mask).sum(-1, keepdim=True).expand_as(difference)
    return difference.clamp(-20, 20).exp().clamp(max=threshold)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("name", "level"), [("truncated", "token"), ("truncated_sequence", "sequence")]
)
def test_truncated_weights_are_those_of_verl(name: Any, level: str, seed: int) -> None:
    batch = Padded(seed)
    config = LanguageLossConfig(off_policy=name, off_policy_cap=1.5)
    plain = torch.zeros(BATCH, LENGTH)
    plain[batch.mask] = token_loss(batch.packed(), LanguageLossConfig()).loss
    compare(batch, config, plain * of_verl(batch, level, 1.5))


@pytest.mark.parametrize("seed", SEEDS)
def test_icepop_leaves_out_tokens_on_both_sides(seed: int) -> None:
    """IcePop (Ling team 2025): ``w`` within ``[alpha, beta]``, else 0."""
    batch = Padded(seed)
    config = LanguageLossConfig(off_policy="icepop", off_policy_floor=0.7, off_policy_cap=1.4)
    weight = (batch.old - batch.rollout).exp()
    weight = torch.where((weight >= 0.7) & (weight <= 1.4), weight, 0.0)
    plain = torch.zeros(BATCH, LENGTH)
    plain[batch.mask] = token_loss(batch.packed(), LanguageLossConfig()).loss
    compare(batch, config, plain * weight)
    capped = token_loss(batch.packed(), config).metrics["off_policy_capped"]
    assert torch.equal(capped == 1.0, weight[batch.mask] == 0.0)
    assert 0.0 < capped.mean() < 1.0


MASKS = [
    {"off_policy_geometric": (0.95, 1.05)},
    {"off_policy_product": (0.5, 2.0)},
    {"off_policy_veto": 0.4},
    {"off_policy_geometric": (0.8, 1.2), "off_policy_product": (0.5, 2.0), "off_policy_veto": 0.4},
]


@pytest.mark.parametrize("masks", MASKS, ids=lambda one: "+".join(one))
def test_whole_samples_are_left_out_as_verl_rejects_them(masks: dict[str, Any]) -> None:
    """verl's ``rollout_rs``: a sequence whose ratio ("sequence": product, "geometric": its root by
    the number of tokens) is out of bounds is rejected; a token below the veto rejects it, too."""
    config = LanguageLossConfig(proximal="step", **masks)
    left, kept = 0, 0
    for seed in range(20):
        batch = Padded(seed)
        for row in range(BATCH):
            mask = batch.mask[row]
            ratios = (batch.old - batch.rollout)[row][mask].double()
            rejected = False
            if "off_policy_product" in masks:
                low, high = masks["off_policy_product"]
                rejected |= not low <= ratios.sum().exp() <= high
            if "off_policy_geometric" in masks:
                low, high = masks["off_policy_geometric"]
                rejected |= not low <= (ratios.sum() / mask.sum()).exp() <= high
            if "off_policy_veto" in masks:
                rejected |= bool((ratios.exp() < masks["off_policy_veto"]).any())
            old, rollout = (one[row][mask].numpy() for one in (batch.old, batch.rollout))
            assert is_left_out(old, rollout, config) == rejected
            left, kept = left + rejected, kept + (not rejected)
    assert left > 10
    assert kept > 10


def sample(log_prob: list[float], previous: list[float], **fields: Any) -> TrainingSample:
    size = len(log_prob)
    values: dict[str, Any] = {
        "group": 0,
        "index": 0,
        "prompt_ids": np.zeros(2, np.int32),
        "response_ids": np.zeros(size, np.int32),
        "loss_mask": np.ones(size, np.bool_),
        "log_prob": np.array(log_prob, np.float32),
        "version": np.zeros(size, np.int32),
        "temperature": 1.0,
        "reward": 1.0,
        "scored": True,
        "prev_log_prob": np.array(previous, np.float32),
    }
    return TrainingSample(**(values | fields))


def test_a_sample_that_is_left_out_trains_no_token_and_is_counted() -> None:
    config = LanguageLossConfig(proximal="step", off_policy_product=(0.5, 2.0))
    near, far = sample([-1.0, -1.0], [-1.1, -1.0]), sample([-1.0, -1.0], [-3.0, -1.0])
    given = sample([-1.0, -9.0], [-1.0, -1.0], loss_mask=np.array([True, False]))
    unscored = sample([-1.0, -1.0], [-3.0, -1.0], scored=False, reward=math.nan)
    assert leave_out([near, far, given, unscored], config) == 1
    assert [one.loss_mask.tolist() for one in (near, far, given)] == [
        [True, True],
        [False, False],
        [True, False],
    ]
    assert leave_out([near, far, given, unscored], config) == 0


def test_without_masks_nothing_is_left_out() -> None:
    far = sample([-1.0], [-30.0])
    assert leave_out([far], LanguageLossConfig(off_policy="truncated")) == 0
    assert far.loss_mask.all()


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"aggregation_length": 8}, "set that to 'sequence-mean-token-sum'"),
        ({"off_policy_geometric": (0.9, 1.1)}, "off_policy_geometric leaves out .* 'step'"),
        ({"off_policy_veto": 0.1, "proximal": "current"}, "off_policy_veto leaves out .* 'step'"),
        ({"off_policy_product": (1.1, 2.0), "proximal": "step"}, r"is \[1.1, 2.0\]; it must be"),
        ({"off_policy_product": (0.5, math.nan), "proximal": "step"}, "it must be"),
        ({"off_policy": "icepop", "off_policy_floor": 3.0}, "below off_policy_cap"),
        ({"off_policy": "icepop", "off_policy_floor": 0.0}, "above 0"),
    ],
    ids=str,
)
def test_bounds_that_mean_nothing_are_refused(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        LanguageLossConfig(**fields)


@pytest.mark.parametrize("seed", SEEDS)
def test_dr_grpo_divides_by_the_longest_response_as_trl_does(seed: int) -> None:
    """TRL's ``loss_type = "dr_grpo"``: the sum over all tokens, divided by the number of samples
    times ``max_completion_length``."""
    batch = Padded(seed)
    loss = LanguageLossConfig(aggregation="sequence-mean-token-sum", aggregation_length=LENGTH)
    shares = [share_of(int(row.sum()), loss) for row in batch.mask]
    tokens = torch.zeros(BATCH, LENGTH)
    tokens[batch.mask] = token_loss(batch.packed(), loss).loss.detach()
    ours = sum(
        float(row.sum()) * share.weight for row, share in zip(tokens, shares, strict=True)
    ) / sum(share.units for share in shares)
    assert ours == pytest.approx(float(tokens.sum()) / (BATCH * LENGTH), rel=1e-6)
