"""From hidden states to log-probs and entropies, without holding all logits at once.

With ``z = h W^T + b`` and, where the model caps them, ``c tanh(z / c)``, times the inverse
temperature: ``l``, and minus infinity where a token was not drawn from (`KeptTokens`). Then
``log p = l - logsumexp(l)``, and ``H = -sum p log p``. The gradients are written out::

    d log p_t / d l_j = [j = t] - p_j          d H / d l_j = -p_j (log p_j + H)

Logits that fit ``chunk_bytes`` are kept for the backward pass; more are computed chunk by chunk,
and again in the backward pass, so that memory does not grow with tokens x vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlinf_async.backends.language_training.kept_tokens import KeptTokens
from rlinf_async.backends.language_training.token_statistics import TokenStatistics

FLOAT_BYTES = 4


def token_statistics(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    scale: Tensor,
    *,
    kept: KeptTokens | None = None,
    softcap: float | None = None,
    chunk_bytes: int = 256 * 1024 * 1024,
) -> TokenStatistics:
    """Return log-probs and entropies.

    Args:
        hidden: ``[N, D]``.
        weight: ``[V, D]``.
        bias: ``[V]``, or None.
        targets: ``[N]``, int64.
        scale: ``[N]``: of the logits; 1 / temperature.
        kept: what each target was drawn from; None: the whole vocabulary.
        softcap: logits are held within it, smoothly.
        chunk_bytes: of float32 logits at a time.
    """
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    with torch.autocast(hidden.device.type, enabled=False):
        found = _Statistics.apply(  # type: ignore[no-untyped-call]
            hidden, weight, bias, targets, scale, kept, softcap, chunk_bytes
        )
    return TokenStatistics(*found)


class _Statistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        scale: Tensor,
        kept: KeptTokens | None,
        softcap: float | None,
        chunk_bytes: int,
    ) -> tuple[Tensor, Tensor]:
        rows = max(chunk_bytes // (FLOAT_BYTES * len(weight)), 1)
        log_prob = torch.empty_like(scale)
        entropy = torch.empty_like(scale)
        normalizer = torch.empty_like(scale)
        logits = None
        for start in range(0, len(hidden), rows):
            at = slice(start, start + rows)
            logits = _logits(hidden[at], weight, bias, scale[at], softcap)
            if kept is not None:
                kept.restrict(logits, start)
            normalizer[at] = logits.logsumexp(-1)
            chosen = logits.gather(-1, targets[at, None])[:, 0]
            log_prob[at] = chosen - normalizer[at]
            probability = (logits - normalizer[at, None]).exp_()
            finite = logits if kept is None else logits.masked_fill(logits == -torch.inf, 0.0)
            entropy[at] = normalizer[at] - (probability.mul_(finite)).sum(-1)
        held = logits if len(hidden) <= rows else None
        ctx.save_for_backward(hidden, weight, bias, targets, scale, normalizer, entropy, held)
        ctx.softcap, ctx.rows, ctx.kept = softcap, rows, kept
        return log_prob, entropy

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Any, ...]:
        grad_log_prob, grad_entropy = grad_outputs
        hidden, weight, bias, targets, scale, normalizer, entropy, held = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        # Sums over chunks, so in float32 whatever the arithmetic is.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        with_entropy = bool(grad_entropy.any())
        for start in range(0, len(hidden), ctx.rows):
            at = slice(start, start + ctx.rows)
            logits = held
            if logits is None:
                logits = _logits(hidden[at], weight, bias, scale[at], ctx.softcap)
                if ctx.kept is not None:
                    ctx.kept.restrict(logits, start)
            log_p = logits - normalizer[at, None]
            grad = log_p.exp()
            if with_entropy:
                by_entropy = (log_p + entropy[at, None]).mul_(grad_entropy[at, None])
                grad.mul_(by_entropy.add_(grad_log_prob[at, None]).neg_())
            else:
                grad.mul_(-grad_log_prob[at, None])
            grad.scatter_add_(-1, targets[at, None], grad_log_prob[at, None])
            if ctx.softcap is not None:
                capped = logits / (scale[at, None] * ctx.softcap)
                grad.mul_(1.0 - capped.square_())
            if ctx.kept is not None:
                grad.masked_fill_(logits == -torch.inf, 0.0)
            grad = grad.mul_(scale[at, None]).to(hidden.dtype)
            grad_hidden[at] = grad @ weight
            grad_weight += grad.t() @ hidden[at]
            if grad_bias is not None:
                grad_bias += grad.sum(0)
        grad_bias = None if bias is None or grad_bias is None else grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight.to(weight.dtype), grad_bias, *[None] * 5


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor, softcap: float | None
) -> Tensor:
    logits = torch.nn.functional.linear(hidden, weight, bias).float()
    if softcap is not None:
        logits = logits.div_(softcap).tanh_().mul_(softcap)
    return logits.mul_(scale[:, None])
