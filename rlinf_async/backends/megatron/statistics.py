"""Log-probs and entropies of logits whose vocabulary is cut over tensor ranks.

With ``l`` the logits times the inverse temperature, minus infinity where a token was not drawn from
(`KeptTokens`), ``log p_t = l_t - logsumexp(l)`` and ``H = logsumexp(l) - sum p l``. Each rank has
some rows of the vocabulary; only sums and maxima ``[N]`` cross the ranks. The gradients are written
out, as in the FSDP backend::

    d log p_t / d l_j = [j = t] - p_j          d H / d l_j = -p_j (log p_j + H)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlinf_async.backends.language_training.kept_tokens import KeptTokens
from rlinf_async.backends.language_training.token_statistics import TokenStatistics


def vocabulary_statistics(
    logits: Tensor,
    targets: Tensor,
    scale: Tensor,
    vocabulary: int,
    group: dist.ProcessGroup,
    kept: KeptTokens | None = None,
) -> TokenStatistics:
    """Return log-probs and entropies ``[N]``, equal on every tensor rank.

    Args:
        logits: ``[N, V / tp]``: of this rank's rows of the padded vocabulary.
        targets: ``[N]``, int64, in the whole vocabulary.
        scale: ``[N]``: of the logits; 1 / temperature.
        vocabulary: rows without padding.
        group: the tensor ranks.
        kept: what each target was drawn from; None: the whole vocabulary.
    """
    found = _Statistics.apply(  # type: ignore[no-untyped-call]
        logits, targets, scale, vocabulary, group, kept
    )
    return TokenStatistics(*found)


class _Statistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        scale: Tensor,
        vocabulary: int,
        group: dist.ProcessGroup,
        kept: KeptTokens | None,
    ) -> tuple[Tensor, Tensor]:
        rows = logits.shape[-1]
        start = dist.get_rank(group) * rows
        scaled = logits.float() * scale[:, None]
        if start + rows > vocabulary:  # what was added to make the vocabulary divide
            scaled[:, max(vocabulary - start, 0) :] = -torch.inf
        if kept is not None:
            kept.restrict(scaled, start=start)
        largest = scaled.max(-1).values
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        exponential = (scaled - largest[:, None]).exp()
        total = exponential.sum(-1)
        weighted = (exponential * scaled.masked_fill(scaled == -torch.inf, 0.0)).sum(-1)
        inside = (targets >= start) & (targets < start + rows)
        at = (targets - start).clamp(0, rows - 1)
        chosen = scaled.gather(-1, at[:, None])[:, 0].masked_fill(~inside, 0.0)
        sums = torch.stack([total, weighted, chosen])
        dist.all_reduce(sums, group=group)
        total, weighted, chosen = sums
        normalizer = largest + total.log()
        entropy = normalizer - weighted / total
        ctx.save_for_backward(scaled, at, inside, scale, normalizer, entropy)
        ctx.dtype = logits.dtype
        return chosen - normalizer, entropy

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Any, ...]:
        grad_log_prob, grad_entropy = grad_outputs
        scaled, at, inside, scale, normalizer, entropy = ctx.saved_tensors
        log_p = scaled - normalizer[:, None]
        grad = log_p.exp()
        if grad_entropy.any():
            by_entropy = (log_p + entropy[:, None]).mul_(grad_entropy[:, None])
            grad.mul_(by_entropy.add_(grad_log_prob[:, None]).neg_())
            grad.masked_fill_(scaled == -torch.inf, 0.0)
        else:
            grad.mul_(-grad_log_prob[:, None])
        grad.scatter_add_(-1, at[:, None], (grad_log_prob * inside)[:, None])
        return grad.mul_(scale[:, None]).to(ctx.dtype), *[None] * 5
