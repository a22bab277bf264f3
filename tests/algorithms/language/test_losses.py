"""Each loss against its formula, token by token in plain Python, and its gradient in numpy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlinf_async.algorithms.config import LanguageLossConfig, share_of
from rlinf_async.algorithms.language.losses import (
    TokenLossInputs,
    kl_estimate,
    off_policy_weights,
    token_loss,
    token_value_loss,
)

LENGTHS = [3, 1, 4]
TOKENS = sum(LENGTHS)


def inputs(**fields: Any) -> TokenLossInputs:
    """Three samples, float64; ratios on both sides of every clip."""
    draw = np.random.default_rng(5)

    def normal(scale: float = 1.0) -> Tensor:
        return torch.from_numpy(draw.normal(scale=scale, size=TOKENS))

    proximal = normal() - 2.0
    numbers: dict[str, Any] = {
        "log_prob": proximal + normal(0.6),
        "entropy": normal().abs(),
        "proximal_log_prob": proximal,
        "behaviour_log_prob": proximal + normal(0.6),
        "ref_log_prob": proximal + normal(0.6),
        "advantage": normal(),
        "sample": torch.repeat_interleave(torch.arange(3), torch.tensor(LENGTHS)),
        "samples": 3,
    }
    return TokenLossInputs(**(numbers | fields))


def lists(given: TokenLossInputs) -> list[list[float]]:
    named = (given.log_prob, given.proximal_log_prob, given.behaviour_log_prob, given.advantage)
    return [one.tolist() for one in named]


def surrogate(ratio: float, advantage: float, config: LanguageLossConfig) -> float:
    held = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
    objective = min(ratio * advantage, held * advantage)
    if config.dual_clip is not None and advantage < 0:
        objective = max(objective, config.dual_clip * advantage)
    return -objective


Vector = np.ndarray[Any, np.dtype[np.float64]]


def slopes(at: Vector, value: Callable[[Vector], float], step: float = 1e-6) -> Vector:
    """Central differences along each axis."""
    axes = step * np.eye(len(at))
    return np.array([(value(at + axis) - value(at - axis)) / (2 * step) for axis in axes])


def check(found: Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize(
    "options",
    [{}, {"clip_low": 0.1, "clip_high": 0.5}, {"dual_clip": 1.2}],
    ids=["clip", "clip-higher", "dual-clip"],
)
def test_ppo_is_the_clipped_surrogate_of_each_token(options: dict[str, float]) -> None:
    config = LanguageLossConfig(**options)  # type: ignore[arg-type]
    given = inputs()
    expected = [
        surrogate(math.exp(now - old), advantage, config)
        for now, old, _, advantage in zip(*lists(given), strict=True)
    ]
    check(token_loss(given, config).loss, expected)


def test_gspo_clips_the_geometric_mean_of_a_samples_ratios() -> None:
    config, given = LanguageLossConfig(name="gspo"), inputs()
    rows, expected, at = lists(given), [], 0
    for length in LENGTHS:
        ratios = [rows[0][t] - rows[1][t] for t in range(at, at + length)]
        ratio = math.exp(sum(ratios) / length)
        expected += [surrogate(ratio, rows[3][t], config) for t in range(at, at + length)]
        at += length
    check(token_loss(given, config).loss, expected)


def test_reinforce_and_supervised_are_log_probs_with_and_without_advantage() -> None:
    given = inputs()
    loss = token_loss(given, LanguageLossConfig(name="reinforce")).loss
    torch.testing.assert_close(loss, -given.advantage * given.log_prob)
    loss = token_loss(given, LanguageLossConfig(name="supervised")).loss
    torch.testing.assert_close(loss, -given.log_prob)


@pytest.mark.parametrize("correction", ["truncated", "decoupled"])
def test_off_policy_weights_multiply_the_surrogate(correction: Any) -> None:
    config = LanguageLossConfig(off_policy=correction, off_policy_cap=1.3)
    given = inputs()
    expected = []
    for now, proximal, behaviour, advantage in zip(*lists(given), strict=True):
        weight = math.exp(proximal - behaviour)
        if weight > 1.3:
            weight = 1.3 if correction == "truncated" else 0.0
        expected.append(weight * surrogate(math.exp(now - proximal), advantage, config))
    done = token_loss(given, config)
    check(done.loss, expected)
    above = (given.proximal_log_prob - given.behaviour_log_prob).exp() > 1.3
    assert 0 < above.sum() < TOKENS
    torch.testing.assert_close(done.metrics["off_policy_capped"], above.double())


@pytest.mark.parametrize(
    ("correction", "expected"),
    [("truncated", 2.0), ("truncated_sequence", 2.0), ("decoupled", 0.0), ("icepop", 0.0)],
)
def test_a_token_that_was_never_to_be_sampled_is_capped_like_others(
    correction: Any, expected: float
) -> None:
    never = torch.full((TOKENS,), -math.inf)
    given = inputs(proximal_log_prob=torch.zeros(TOKENS), behaviour_log_prob=never)
    found = off_policy_weights(given, LanguageLossConfig(off_policy=correction))
    assert found is not None
    assert found.weight.tolist() == [expected] * TOKENS
    assert found.capped.tolist() == [1.0] * TOKENS


def test_off_policy_weights_are_constants_to_the_gradient() -> None:
    given = inputs(proximal_log_prob=torch.zeros(TOKENS, requires_grad=True))
    found = off_policy_weights(given, LanguageLossConfig(off_policy="truncated"))
    assert found is not None
    assert not found.weight.requires_grad


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_to_the_reference_and_entropy_are_added_to_the_loss(estimator: Any) -> None:
    config = LanguageLossConfig(
        name="reinforce", kl_coefficient=0.3, kl_estimator=estimator, entropy_coefficient=0.2
    )
    given = inputs()
    assert given.ref_log_prob is not None
    expected = []
    for at in range(TOKENS):
        difference = float(given.log_prob[at] - given.ref_log_prob[at])
        kl = {
            "k1": difference,
            "k2": difference**2 / 2,
            "k3": math.exp(-difference) - 1 + difference,
        }[estimator]
        policy = -float(given.advantage[at] * given.log_prob[at])
        expected.append(policy + 0.3 * kl - 0.2 * float(given.entropy[at]))
    check(token_loss(given, config).loss, expected)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_are_unbiased_under_the_policy(estimator: Any) -> None:
    random = np.random.default_rng(0)
    policy, reference = (torch.from_numpy(random.dirichlet(np.ones(6))) for _ in range(2))
    exact = (policy * (policy / reference).log()).sum()
    estimates = kl_estimate(policy.log(), reference.log(), estimator, math.inf)
    torch.testing.assert_close((policy * estimates).sum(), exact)


def test_a_sample_whose_mean_ratio_is_too_high_trains_no_more_at_all() -> None:
    given = inputs(proximal_log_prob=inputs().log_prob - torch.tensor([0.5] * 3 + [0.0] * 5))
    config = LanguageLossConfig(early_stop_ratio=1.5, kl_coefficient=1.0, entropy_coefficient=1.0)
    done = token_loss(given, config)
    assert not done.loss[:3].any()
    assert done.loss[3:].abs().min() > 0
    assert done.metrics["early_stopped"].tolist() == [1.0] * 3 + [0.0] * 5


@pytest.mark.parametrize("difference", [-1000.0, -100.0, 100.0, 1000.0])
def test_k3_of_distant_policies_is_its_limit_and_has_no_gradient(difference: float) -> None:
    at = torch.tensor([difference], requires_grad=True)
    estimate = kl_estimate(at, torch.zeros(1), "k3")
    estimate.sum().backward()  # type: ignore[no-untyped-call]
    assert estimate.item() == 10.0
    assert at.grad is not None
    assert at.grad.item() == 0.0


@pytest.mark.parametrize("difference", [-2.0, -0.1, 0.0, 0.1, 9.0])
def test_k3_of_policies_that_are_near_is_not_limited(difference: float) -> None:
    at = torch.tensor([difference], dtype=torch.float64, requires_grad=True)
    estimate = kl_estimate(at, torch.zeros(1), "k3")
    estimate.sum().backward()  # type: ignore[no-untyped-call]
    assert at.grad is not None
    assert estimate.item() == pytest.approx(math.exp(-difference) - 1 + difference)
    assert at.grad.item() == pytest.approx(1 - math.exp(-difference))


def test_the_limit_of_k3_can_be_raised() -> None:
    estimate = kl_estimate(torch.tensor([-5.0]), torch.zeros(1), "k3", 1000.0)
    assert estimate.item() == pytest.approx(math.exp(5) - 6)


@pytest.mark.parametrize("name", ["ppo", "gspo"])
@pytest.mark.parametrize("dual_clip", [None, 3.0])
@pytest.mark.parametrize("log_ratio", [95.0, 1000.0, math.inf])
def test_a_log_ratio_beyond_its_limit_gives_a_finite_loss_and_no_gradient(
    name: str, dual_clip: float | None, log_ratio: float
) -> None:
    config = LanguageLossConfig(
        name=name, dual_clip=dual_clip, off_policy="truncated", kl_coefficient=0.1
    )
    at = torch.full((TOKENS,), -1.0, requires_grad=True)
    given = TokenLossInputs(
        log_prob=at,
        entropy=torch.ones(TOKENS),
        proximal_log_prob=torch.full((TOKENS,), -1.0 - log_ratio),
        behaviour_log_prob=torch.full((TOKENS,), -1.0 - log_ratio),
        ref_log_prob=torch.full((TOKENS,), -1.0 - log_ratio),
        advantage=torch.tensor([1.0, -1.0] * (TOKENS // 2)),
        sample=torch.zeros(TOKENS, dtype=torch.int64),
        samples=1,
    )
    if math.isinf(log_ratio):  # the difference of two infinite log-probs is NaN
        given = given._replace(behaviour_log_prob=torch.full((TOKENS,), -1.0))
    done = token_loss(given, config)
    done.loss.sum().backward()  # type: ignore[no-untyped-call]
    assert done.loss.isfinite().all()
    assert all(one.isfinite().all() for one in done.metrics.values())
    assert at.grad is not None
    assert not at.grad.any()


def test_a_log_ratio_within_its_limit_keeps_value_and_gradient() -> None:
    at = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    given = TokenLossInputs(
        log_prob=at,
        entropy=torch.ones(1),
        proximal_log_prob=torch.tensor([-20.9]).double(),
        behaviour_log_prob=torch.tensor([-20.9]).double(),
        ref_log_prob=None,
        advantage=torch.tensor([-1.0]).double(),
        sample=torch.zeros(1, dtype=torch.int64),
        samples=1,
    )
    done = token_loss(given, LanguageLossConfig())
    done.loss.sum().backward()  # type: ignore[no-untyped-call]
    assert at.grad is not None
    assert done.loss.item() == pytest.approx(math.exp(19.9), rel=1e-5)
    assert at.grad.item() == pytest.approx(math.exp(19.9), rel=1e-5)
    lower = token_loss(given, LanguageLossConfig(log_ratio_limit=2.0))
    assert lower.loss.item() == pytest.approx(math.exp(2.0))


@pytest.mark.parametrize("name", ["ppo", "gspo"])
def test_a_ratio_that_is_infinite_stops_its_sample_and_leaves_no_nan(name: str) -> None:
    config = LanguageLossConfig(name=name, early_stop_ratio=1.5, kl_coefficient=0.1)
    at = torch.tensor([900.0, 0.0], dtype=torch.float64, requires_grad=True)
    given = inputs(
        log_prob=at.repeat_interleave(torch.tensor([3, 5])),
        proximal_log_prob=torch.zeros(TOKENS, dtype=torch.float64),
    )
    loss = token_loss(given, config).loss
    loss.sum().backward()  # type: ignore[no-untyped-call]
    assert not loss[:3].any()
    assert at.grad is not None
    assert at.grad[0] == 0.0
    assert math.isfinite(at.grad[1])


def test_early_stop_does_not_hide_nan() -> None:
    given = inputs()
    given.log_prob[0] = math.nan
    loss = token_loss(given, LanguageLossConfig(early_stop_ratio=1.5)).loss
    assert loss[0].isnan()


@pytest.mark.parametrize("name", ["ppo", "reinforce", "supervised"])
def test_gradients_agree_with_finite_differences(name: str) -> None:
    config = LanguageLossConfig(
        name=name, kl_coefficient=0.3, kl_estimator="k3", off_policy="truncated"
    )
    given = inputs()
    at = given.log_prob.clone().requires_grad_()
    token_loss(given._replace(log_prob=at), config).loss.sum().backward()  # type: ignore[no-untyped-call]

    def value(log_prob: Vector) -> float:
        changed = given._replace(log_prob=torch.from_numpy(log_prob))
        return float(token_loss(changed, config).loss.sum())

    expected = slopes(given.log_prob.numpy(), value)
    assert at.grad is not None
    np.testing.assert_allclose(at.grad.numpy(), expected, atol=1e-7)


def test_the_gradient_of_gspo_is_that_of_the_sample_ratio_times_the_advantage() -> None:
    # One advantage for all tokens of a sample, as gspo has it, and no clipping.
    given = inputs(
        advantage=torch.repeat_interleave(
            torch.tensor([1.0, -2.0, 0.5]).double(), torch.tensor(LENGTHS)
        )
    )
    config = LanguageLossConfig(name="gspo", clip_low=0.99, clip_high=99.0)
    at = given.log_prob.clone().requires_grad_()
    shares = torch.tensor([1 / length for length in LENGTHS for _ in range(length)]).double()
    (token_loss(given._replace(log_prob=at), config).loss * shares).sum().backward()  # type: ignore[no-untyped-call]

    def value(log_prob: Vector) -> float:
        total, start = 0.0, 0
        ratios = log_prob - given.proximal_log_prob.numpy()
        for length, advantage in zip(LENGTHS, [1.0, -2.0, 0.5], strict=True):
            total -= advantage * math.exp(ratios[start : start + length].mean())
            start += length
        return total

    assert at.grad is not None
    np.testing.assert_allclose(at.grad.numpy(), slopes(given.log_prob.numpy(), value), atol=1e-7)


def test_the_value_loss_is_half_the_larger_squared_error() -> None:
    value, old, returns = (torch.tensor(row) for row in ([1.0, 3.0], [0.0, 2.9], [2.0, 0.0]))
    torch.testing.assert_close(
        token_value_loss(value, old, returns, None), torch.tensor([0.5, 4.5])
    )
    clipped = token_value_loss(value, old, returns, 0.2)
    torch.testing.assert_close(clipped, torch.tensor([0.5 * 1.8**2, 4.5]))


def test_shares_make_the_three_means() -> None:
    losses = [[1.0, 2.0, 3.0], [10.0], []]

    def total(aggregation: Any) -> float:
        shares = [share_of(len(one), LanguageLossConfig(aggregation=aggregation)) for one in losses]
        weighted = sum(s.weight * sum(one) for s, one in zip(shares, losses, strict=True))
        return weighted / sum(share.units for share in shares)

    assert total("token-mean") == pytest.approx(16 / 4)
    assert total("sequence-mean-token-mean") == pytest.approx((2.0 + 10.0) / 2)
    assert total("sequence-mean-token-sum") == pytest.approx((6.0 + 10.0) / 2)


def test_reference_log_probs_that_are_missing_are_an_error_that_says_what_to_do() -> None:
    config = LanguageLossConfig(kl_coefficient=0.1)
    with pytest.raises(ValueError, match=r"have no ref_log_prob: run an inference worker"):
        token_loss(inputs(ref_log_prob=None), config)


@pytest.mark.parametrize(
    ("field", "number"),
    [
        ("clip_low", 1.1),
        ("off_policy_veto", 1.0),
        ("sapo_positive", 0.0),
        ("clip_high", math.nan),
        ("dual_clip", 1.0),
        ("off_policy_cap", 0.0),
        ("early_stop_ratio", 0.0),
        ("k3_limit", 0.0),
        ("log_ratio_limit", math.nan),
        ("log_ratio_limit", 81.0),
        ("kl_coefficient", math.inf),
        ("entropy_coefficient", -0.1),
    ],
)
def test_coefficients_that_mean_nothing_are_refused(field: str, number: float) -> None:
    with pytest.raises(ValueError, match=rf"{field} is"):
        LanguageLossConfig(**{field: number})  # type: ignore[arg-type]
