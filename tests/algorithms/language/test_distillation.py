"""Distillation against formulas that others have published, written out with plain torch."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rlinf_async.algorithms.config import LanguageLossConfig
from rlinf_async.algorithms.language.losses import TokenLossInputs, token_loss
from rlinf_async.algorithms.losses import clipped_surrogate

VOCABULARY = 23
TOKENS = 40


class Drawn(NamedTuple):
    """Random tokens, each with the logits of two models."""

    policy: Tensor
    """``[N, V]``"""
    teacher: Tensor
    """``[N, V]``"""
    token: Tensor
    """``[N]``: what was drawn"""


def drawn(seed: int) -> Drawn:
    random = torch.Generator().manual_seed(seed)
    policy, teacher = (
        2.0 * torch.randn((TOKENS, VOCABULARY), generator=random, dtype=torch.float64)
        for _ in range(2)
    )
    token = torch.multinomial(policy.softmax(-1), 1, generator=random)[:, 0]
    return Drawn(policy, teacher, token)


def ours(
    given: Drawn, config: LanguageLossConfig, k: int | None, **fields: Any
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Loss of each token, the gradient of the logits of their mean, and the metrics; ``k`` of the
    teacher's most likely tokens, 0: of the drawn one alone, None: of all."""
    logits = given.policy.clone().requires_grad_()
    policy, teacher = logits.log_softmax(-1), given.teacher.log_softmax(-1)
    ids = teacher.topk(k or VOCABULARY, -1).indices
    chosen = given.token[:, None]
    log_prob = policy.gather(-1, chosen)[:, 0]
    nothing = torch.zeros_like(log_prob).detach()
    inputs = TokenLossInputs(
        log_prob=log_prob,
        entropy=nothing,
        proximal_log_prob=log_prob.detach(),
        behaviour_log_prob=log_prob.detach(),
        ref_log_prob=None,
        advantage=nothing,
        sample=torch.zeros_like(given.token),
        samples=1,
        teacher_log_prob=teacher.gather(-1, chosen)[:, 0],
        teacher_likely=None if k == 0 else teacher.gather(-1, ids),
        likely=None if k == 0 else policy.gather(-1, ids),
        whole=k is None,
    )
    found = token_loss(inputs._replace(**fields), config)
    [gradient] = torch.autograd.grad(found.loss.mean(), logits)
    return found.loss.detach(), gradient, found.metrics


def distil(**fields: Any) -> LanguageLossConfig:
    return LanguageLossConfig(name="distill", **fields)


def same(found: tuple[Tensor, Tensor, Any], losses: Tensor, logits: Tensor) -> None:
    [gradient] = torch.autograd.grad(losses.mean(), logits)
    torch.testing.assert_close(found[0], losses.detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(found[1], gradient, rtol=0, atol=1e-12)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_over_the_whole_vocabulary_it_is_the_generalized_jsd_of_trl(seed: int, beta: float) -> None:
    """TRL's ``GKDTrainer.generalized_jsd_loss``: ``kl_div(student, teacher, log_target=True)`` for
    ``beta`` 0, ``kl_div(teacher, student, log_target=True)`` for 1, else ``beta kl_div(mixture,
    teacher) + (1 - beta) kl_div(mixture, student)`` with ``mixture = logsumexp(student + log(1 -
    beta), teacher + log(beta))``; summed, over the number of labels. The function of TRL 1.16.0
    itself gave the same to 2e-15, gradients to 5e-18, and in float32 to 1e-6."""
    given = drawn(seed)
    logits = given.policy.clone().requires_grad_()
    student, teacher = logits.log_softmax(-1), given.teacher.log_softmax(-1)

    def kl(one: Tensor, other: Tensor) -> Tensor:
        return F.kl_div(one, other, reduction="none", log_target=True).sum(-1)

    if beta == 0.0:
        config, losses = distil(divergence="forward"), kl(student, teacher)
    elif beta == 1.0:
        config, losses = distil(divergence="reverse"), kl(teacher, student)
    else:
        config, share = (
            distil(divergence="jsd", divergence_beta=beta),
            torch.tensor(beta, dtype=torch.float64),
        )
        parts = torch.stack([student + torch.log1p(-share), teacher + torch.log(share)])
        mixture = parts.logsumexp(0)
        losses = share * kl(mixture, teacher) + (1.0 - share) * kl(mixture, student)
    same(ours(given, config, None), losses, logits)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["forward", "reverse", "mixed"])
@pytest.mark.parametrize("k", [5, 20, None])
def test_over_the_most_likely_tokens_it_is_the_loss_of_nemo_rl(
    seed: int, kind: Any, k: int | None
) -> None:
    """NeMo RL's ``DistillationLossFn``, ``zero_outside_topk = false``: log-softmax over the
    teacher's top-k logits, and over the student's at the same tokens; ``p_T (log p_T - log p_S)``
    (forward), ``p_S (log p_S - log p_T)`` (reverse), or their mean weighted by
    ``mixed_kl_weight``; masked mean over tokens."""
    given = drawn(seed)
    logits = given.policy.clone().requires_grad_()
    best = given.teacher.topk(k or VOCABULARY, -1)
    teacher = best.values.log_softmax(-1)
    student = logits.gather(-1, best.indices).log_softmax(-1)
    forward = (teacher.exp() * (teacher - student)).sum(-1)
    reverse = (student.exp() * (student - teacher)).sum(-1)
    losses = {"forward": forward, "reverse": reverse, "mixed": 0.3 * forward + 0.7 * reverse}[kind]
    config = distil(
        divergence=kind,
        divergence_beta=0.3 if kind == "mixed" else 0.5,
        divergence_outside="left_out",
    )
    same(ours(given, config, k), losses, logits)


@pytest.mark.parametrize("kind", ["forward", "reverse", "mixed", "jsd"])
def test_other_tokens_together_count_as_one(kind: Any) -> None:
    """Then it is a lower bound, which more tokens raise; and what the policy gives to the others
    costs something, which it does not where they are left out."""
    given, config = drawn(7), distil(divergence=kind)
    whole = ours(given, config, None)[0]
    bounds = [ours(given, config, k)[0] for k in (1, 4, 12, VOCABULARY)]
    for lower, higher in zip(bounds, [*bounds[1:], whole], strict=True):
        assert bool((lower <= higher + 1e-9).all())
    torch.testing.assert_close(bounds[-1], whole, rtol=0, atol=1e-7)
    mass = ours(given, config, 4)[2]["teacher_mass"]
    best = given.teacher.softmax(-1).topk(4, -1).values.sum(-1)
    torch.testing.assert_close(mass, best, rtol=0, atol=1e-12)
    # A policy that is the teacher over its four tokens, and gives half of its mass to others.
    away = given.teacher.log_softmax(-1)
    others = torch.ones_like(away, dtype=torch.bool).scatter(-1, away.topk(4, -1).indices, False)
    away = torch.where(others, away + 3.0, away).log_softmax(-1)
    moved = given._replace(policy=away)
    assert float(ours(moved, config, 4)[0].min()) > 1e-3
    left_out = distil(divergence=kind, divergence_outside="left_out")
    torch.testing.assert_close(
        ours(moved, left_out, 4)[0], torch.zeros(TOKENS).double(), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("seed", range(3))
def test_of_the_drawn_token_it_is_a_policy_gradient(seed: int) -> None:
    """Thinking Machines, "On-Policy Distillation" (Lu et al. 2025): advantages ``-(log p - log q)``
    of each token, under the importance-sampling loss ``-ratio x advantage``."""
    given = drawn(seed)
    logits = given.policy.clone().requires_grad_()
    chosen = given.token[:, None]
    log_prob = logits.log_softmax(-1).gather(-1, chosen)[:, 0]
    teacher = given.teacher.log_softmax(-1).gather(-1, chosen)[:, 0]
    advantage = -(log_prob.detach() - teacher)
    losses = -(log_prob - log_prob.detach()).exp() * advantage
    found = ours(given, distil(), 0)
    same(found, losses, logits)
    torch.testing.assert_close(found[2]["teacher_kl"], -advantage, rtol=0, atol=1e-12)


def test_in_the_mean_over_draws_its_gradient_is_that_of_the_exact_reverse_kl() -> None:
    """Summed over all tokens that may be drawn, weighted by their probability."""
    given = drawn(3)
    expected = ours(given, distil(), None)[1]
    total = torch.zeros_like(expected)
    for token in range(VOCABULARY):
        one = given._replace(token=torch.full((TOKENS,), token))
        weight = given.policy.softmax(-1)[:, token, None]
        total += weight * ours(one, distil(log_ratio_limit=80.0), 0)[1]
    torch.testing.assert_close(total, expected, rtol=0, atol=1e-10)


def test_it_is_clipped_as_ppo_where_the_policy_has_moved() -> None:
    given = drawn(4)
    chosen = given.token[:, None]
    now = given.policy.log_softmax(-1).gather(-1, chosen)[:, 0]
    teacher = given.teacher.log_softmax(-1).gather(-1, chosen)[:, 0]
    before = now + torch.linspace(-1.0, 1.0, TOKENS).double()
    found = ours(given, distil(), 0, proximal_log_prob=before)[0]
    expected = clipped_surrogate((now - before).exp(), teacher - now, LanguageLossConfig()).loss
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("k", [0, 5, None])
def test_with_a_coefficient_it_is_added_to_another_loss(k: int | None) -> None:
    given = drawn(5)
    advantage = torch.linspace(-1.0, 1.0, TOKENS).double()
    mixed = LanguageLossConfig(name="reinforce", teacher_coefficient=0.3)
    loss, gradient, metrics = ours(given, mixed, k, advantage=advantage)
    plain = ours(given, LanguageLossConfig(name="reinforce"), k, advantage=advantage)
    alone = ours(given, distil(), k)
    torch.testing.assert_close(loss, plain[0] + 0.3 * alone[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(gradient, plain[1] + 0.3 * alone[1], rtol=0, atol=1e-12)
    torch.testing.assert_close(metrics["policy_loss"], plain[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("k", [0, None])
def test_off_policy_weights_are_of_what_is_estimated_on_the_drawn_token(k: int | None) -> None:
    given = drawn(6)  # without an advantage: all of the loss is the teacher's
    chosen = given.token[:, None]
    behaviour = given.policy.log_softmax(-1).gather(-1, chosen)[:, 0] - 0.5
    mixed = LanguageLossConfig(
        name="reinforce", teacher_coefficient=1.0, proximal="step", off_policy="truncated"
    )
    found = ours(given, mixed, k, behaviour_log_prob=behaviour)[0]
    expected = ours(given, distil(), k)[0] * (torch.tensor(0.5).exp() if k == 0 else 1.0)
    torch.testing.assert_close(found, expected.double(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["forward", "reverse", "mixed", "jsd"])
@pytest.mark.parametrize("k", [5, None])
def test_tokens_that_neither_may_draw_add_nothing(kind: Any, k: int | None) -> None:
    """Top-k and top-p leave minus infinity in the place of log-probs."""
    given, config = drawn(8), distil(divergence=kind)
    gone = torch.zeros(TOKENS, VOCABULARY, dtype=torch.bool)
    gone[::2, 3:] = True
    gone[:, 22] = True
    hidden = given._replace(
        policy=given.policy.masked_fill(gone, -torch.inf),
        teacher=given.teacher.masked_fill(gone, -torch.inf),
        token=given.token.clamp(max=2),
    )
    found = ours(hidden, config, k)
    assert bool(torch.isfinite(found[1]).all())
    low = given._replace(
        policy=given.policy.masked_fill(gone, -200.0),
        teacher=given.teacher.masked_fill(gone, -200.0),
        token=given.token.clamp(max=2),
    )
    expected = ours(low, config, k)
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-7)
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=1e-7)


def test_samples_without_a_teacher_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no log-probs of one: set teacher\.path"):
        ours(drawn(0), distil(), 0, teacher_log_prob=None)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"name": "distill", "teacher_coefficient": 0.5}, "is the divergence from the teacher its"),
        ({"teacher_coefficient": -0.5}, "teacher_coefficient is -0.5; it must be at least 0"),
        ({"name": "distill", "divergence": "jsd", "divergence_beta": 1.0}, "must be below 1"),
        ({"name": "distill", "divergence_beta": 0.1}, "divergence is 'reverse': set that to 'jsd'"),
    ],
)
def test_coefficients_that_mean_nothing_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        LanguageLossConfig(**fields)
