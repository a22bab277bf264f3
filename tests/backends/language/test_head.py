"""The hand-written gradient of log-probs and entropies against autograd's, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rlinf_async.backends.fsdp.language.network import token_statistics
from rlinf_async.backends.language_training.objective import (
    AskedTokens,
    BiasedTokens,
    KeptTokens,
    LogitBias,
)

TOKENS, SIZE, VOCABULARY = 7, 5, 11


def inputs(bias: bool) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(2)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    return {
        "hidden": normal(TOKENS, SIZE).requires_grad_(),
        "weight": normal(VOCABULARY, SIZE).requires_grad_(),
        "bias": normal(VOCABULARY).requires_grad_() if bias else None,
        "targets": torch.randint(VOCABULARY, (TOKENS,), generator=draw),
        "scale": normal(TOKENS).exp(),
    }


def plainly(given: dict[str, Any], softcap: float | None) -> tuple[Tensor, Tensor]:
    logits = torch.nn.functional.linear(given["hidden"], given["weight"], given["bias"])
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_p = (logits * given["scale"][:, None]).log_softmax(-1)
    return log_p.gather(-1, given["targets"][:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def slopes(given: dict[str, Any], log_prob: Tensor, entropy: Tensor, part: str) -> list[Tensor]:
    factors = torch.arange(1.0, TOKENS + 1)
    total = torch.zeros(())
    if part != "entropy":
        total = total + (log_prob * factors).sum()
    if part != "log_prob":
        total = total + (entropy * factors.flip(0)).sum()
    leaves = [tensor for tensor in given.values() if tensor is not None and tensor.requires_grad]
    return list(torch.autograd.grad(total, leaves))


@pytest.mark.parametrize("rows", [100, 3, 1], ids=["one chunk", "chunks", "single rows"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("part", ["both", "log_prob", "entropy"])
def test_numbers_and_gradients_are_those_of_autograd(
    rows: int, bias: bool, softcap: float | None, part: str
) -> None:
    given = inputs(bias)
    found = token_statistics(**given, softcap=softcap, chunk_bytes=rows * VOCABULARY * 4)
    expected = plainly(given, softcap)
    torch.testing.assert_close(found[:2], expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        slopes(given, *found[:2], part), slopes(given, *expected, part), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("rows", [100, 3], ids=["one chunk", "chunks"])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("part", ["both", "log_prob", "entropy"])
@pytest.mark.parametrize("biased", [False, True])
def test_over_what_was_kept_they_are_those_of_autograd_over_these_tokens(
    rows: int, softcap: float | None, part: str, biased: bool
) -> None:
    """Also where logits had biases: other ones of the first tokens than of the last."""
    given = inputs(bias=True)
    inverse = 0.5 * given["scale"]  # the model scales its logits as well
    biases = torch.zeros(TOKENS, VOCABULARY)
    added: list[BiasedTokens] = []
    for first, end, ids, values in ((0, 2, [3, 7], [1.5, -2.0]), (4, 7, [9, 1], [0.7, 2.0])):
        if biased:
            part_of = BiasedTokens(first, end, torch.tensor(ids), torch.tensor(values))
            added.append(part_of)
            biases[first:end, ids] = inverse[first:end, None] * part_of.values
    sets = [[], [3, 4, 10], [0], list(range(11)), [2, 5], [], [1, 9]]
    for at, kept in enumerate(sets):
        given["targets"][at] = kept[len(kept) // 2] if kept else 7
    bounds = torch.tensor([0, *map(len, sets)]).cumsum(0)
    kept_ids = torch.tensor([token for kept in sets for token in kept])
    found = token_statistics(
        **given,
        kept=KeptTokens(bounds, kept_ids),
        bias_of_logits=LogitBias(added, inverse) if biased else None,
        softcap=softcap,
        chunk_bytes=rows * VOCABULARY * 4,
    )
    logits = torch.nn.functional.linear(given["hidden"], given["weight"], given["bias"])
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_probs, entropies = [], []
    for at, kept in enumerate(sets):
        allowed = kept or list(range(VOCABULARY))
        log_p = (logits[at] * given["scale"][at] + biases[at])[allowed].log_softmax(-1)
        log_probs.append(log_p[allowed.index(int(given["targets"][at]))])
        entropies.append(-(log_p.exp() * log_p).sum())
    expected = torch.stack(log_probs), torch.stack(entropies)
    torch.testing.assert_close(found[:2], expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        slopes(given, *found[:2], part), slopes(given, *expected, part), rtol=1e-4, atol=1e-5
    )
    assert (found.log_prob[2].item(), found.entropy[2].item()) == (0.0, 0.0)


@pytest.mark.parametrize("rows", [100, 3], ids=["one chunk", "chunks"])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("which", ["some", "first", "all"])
@pytest.mark.parametrize("alone", [False, True])
def test_log_probs_of_other_tokens_are_those_of_autograd(
    rows: int, softcap: float | None, which: str, alone: bool
) -> None:
    """With the log-probs and entropies of the targets, and alone."""
    given = inputs(bias=True)
    draw = torch.Generator().manual_seed(5)
    ids = torch.stack([torch.randperm(VOCABULARY, generator=draw)[:4] for _ in range(TOKENS)])
    asked = {
        "some": AskedTokens(4, ids),
        "first": AskedTokens(4),
        "all": AskedTokens(VOCABULARY),
    }[which]
    found = token_statistics(
        **given, asked=asked, softcap=softcap, chunk_bytes=rows * VOCABULARY * 4
    )
    logits = torch.nn.functional.linear(given["hidden"], given["weight"], given["bias"])
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_p = (logits * given["scale"][:, None]).log_softmax(-1)
    expected = log_p.gather(-1, ids) if which == "some" else log_p[:, : asked.number]
    assert found.asked is not None
    assert found.vocabulary == VOCABULARY
    torch.testing.assert_close(found.asked, expected, rtol=1e-5, atol=1e-6)
    factors = torch.randn(expected.shape, generator=draw)
    leaves = [given[name] for name in ("hidden", "weight", "bias")]

    def slopes_of(others: Tensor, log_prob: Tensor, entropy: Tensor) -> Any:
        total = (others * factors).sum()
        if not alone:
            total = total + (log_prob * factors[:, 0]).sum() + (entropy * factors[:, 1]).sum()
        return torch.autograd.grad(total, leaves)

    torch.testing.assert_close(
        slopes_of(found.asked, *found[:2]),
        slopes_of(expected, *plainly(given, softcap)),
        rtol=1e-4,
        atol=1e-5,
    )


def test_the_most_likely_tokens_are_told_with_their_numbers() -> None:
    given = inputs(bias=True)
    with torch.no_grad():
        found = token_statistics(**given, asked=AskedTokens(3, likely_of=8), chunk_bytes=100)
        logits = torch.nn.functional.linear(given["hidden"], given["weight"], given["bias"])
        log_p = (logits * given["scale"][:, None]).log_softmax(-1)
    best = log_p[:, :8].topk(3, -1)
    assert found.asked is not None
    assert found.asked_ids is not None
    torch.testing.assert_close(found.asked, best.values, rtol=1e-5, atol=1e-6)
    assert found.asked_ids.equal(best.indices)


def test_no_tokens_are_no_error_and_have_a_gradient_of_zero() -> None:
    given = inputs(bias=True)
    for name in ("hidden", "targets", "scale"):
        given[name] = given[name][:0]
    found = token_statistics(**given)
    assert len(found.log_prob) == 0
    [grad] = torch.autograd.grad(found.log_prob.sum(), [given["weight"]])
    assert not grad.any()


def test_under_autocast_log_probs_stay_float32() -> None:
    given = inputs(bias=False)
    with torch.autocast("cpu", torch.bfloat16):
        found = token_statistics(**given)
    assert found.log_prob.dtype == torch.float32
    torch.testing.assert_close(found.log_prob, plainly(given, None)[0], rtol=0.05, atol=0.05)
    found.log_prob.sum().backward()  # type: ignore[no-untyped-call]
    assert given["hidden"].grad.dtype == torch.float32
