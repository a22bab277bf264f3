"""Drawing a token for each row of a batch, and attention of one new token for each row.

The log-prob that comes with a token is that of the distribution it was drawn from: of the logits
that a grammar allows, after bias, penalty, temperature, min-p, then top-k, then top-p (vLLM's
order), renormalised; of
equally likely tokens at the border the first in the order of the sort are kept. Greedy rows
(temperature 0) take the most likely token; their log-probs are those at temperature 1 of the whole
vocabulary.

A row's random number at each position follows from its seed alone, so what is drawn depends neither
on the other rows nor on where the response was interrupted.

The library's attention repeats each key head for all of its query heads, in every step and layer.
In `attend` the query heads of a group stand where new positions would: ``[rows, key heads, group,
size]``. On one core that takes a third of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rlinf_async.messages.language import Sampling

NOTHING: Final = np.empty(0, np.int32)
"""the set of a token that was drawn from the whole vocabulary"""


class Rules(NamedTuple):
    """Sampling rules of each row of a batch. Tensors are ``[rows, 1]`` where nothing else is said;
    None where no row asks for it."""

    temperature: Tensor | None
    greedy: Tensor | None
    top_k: Tensor | None
    top_p: Tensor | None
    min_p: Tensor | None = None
    bias: tuple[Tensor, Tensor, Tensor] | None = None
    """rows, tokens, and what is added to their logits; each ``[biases]``"""
    penalty: Tensor | None = None

    @classmethod
    def of(cls, rows: Sequence[Sampling], device: torch.device) -> Rules:
        """Collect the rules of all rows."""

        def column(values: list[float], off: float, dtype: torch.dtype) -> Tensor | None:
            if all(value == off for value in values):
                return None
            return torch.tensor(values, dtype=dtype, device=device).unsqueeze(1)

        return cls(
            temperature=column([row.temperature or 1.0 for row in rows], 1.0, torch.float32),
            greedy=column([row.temperature == 0.0 for row in rows], False, torch.bool),
            top_k=column([row.truncates * row.top_k for row in rows], 0, torch.int64),
            top_p=column([row.top_p if row.truncates else 1.0 for row in rows], 1.0, torch.float64),
            min_p=column([row.truncates * row.min_p for row in rows], 0.0, torch.float64),
            bias=_biases(rows, device),
            penalty=column([row.repetition_penalty for row in rows], 1.0, torch.float32),
        )


def _biases(rows: Sequence[Sampling], device: torch.device) -> tuple[Tensor, Tensor, Tensor] | None:
    found = [(at, token, bias) for at, row in enumerate(rows) for token, bias in row.logit_bias]
    if not found:
        return None
    places, tokens, added = zip(*found, strict=True)
    return (
        torch.tensor(places, device=device),
        torch.tensor(tokens, device=device),
        torch.tensor(added, dtype=torch.float32, device=device),
    )


def uniforms(seed: int, count: int) -> NDArray[np.float64]:
    """Return the random numbers ``[count]`` in [0, 1) of a response's positions."""
    return np.random.default_rng(seed).random(count)


class Drawn(NamedTuple):
    """A token for each row."""

    tokens: Tensor
    """``[rows]``"""
    log_probs: Tensor
    """``[rows]``, float32"""
    kept: Tensor | None
    """``[rows, vocabulary]``: what each was drawn from; None: no row truncates"""


def draw(
    logits: Tensor,
    rules: Rules,
    random: Tensor,
    seen: Tensor | None = None,
    allowed: Tensor | None = None,
) -> Drawn:
    """Draw one token for each row. None has probability 0.

    Args:
        logits: ``[rows, vocabulary]``
        rules: rules of each row.
        random: ``[rows]`` in [0, 1), float64: in float32 a number near 1 would be 1, which lies
            behind the last token.
        seen: ``[rows, vocabulary]``: tokens of the prompt and the response so far, where a row has
            a penalty.
        allowed: ``[rows, vocabulary]``: tokens that the format of a row's response allows, at
            least one; None: all.
    """
    logits = logits.float()
    if allowed is not None:
        logits = logits.masked_fill(~allowed, float("-inf"))
    if rules.bias is not None:
        logits = logits.index_put(rules.bias[:2], rules.bias[2], accumulate=True)
    if rules.penalty is not None and seen is not None:
        divided = torch.where(logits > 0.0, logits / rules.penalty, logits * rules.penalty)
        logits = torch.where(seen, divided, logits)
    if rules.temperature is not None:
        logits = logits / rules.temperature
    kept = allowed
    if not (rules.top_k is None and rules.top_p is None and rules.min_p is None):
        kept = _kept(logits, rules) if allowed is None else _kept(logits, rules) & allowed
        logits = logits.masked_fill(~kept, float("-inf"))
    log_probs = logits.log_softmax(-1)
    # In double: over a large vocabulary, sums of float32 end visibly off 1.
    sums = log_probs.exp().cumsum(-1, dtype=torch.float64)
    at = random.unsqueeze(1) * sums[:, -1:]
    tokens = torch.searchsorted(sums, at, right=True).clamp_(max=logits.shape[-1] - 1)
    chosen = log_probs.gather(1, tokens)
    # A GPU adds up in parts, so that sums may grow, by their last bit, where nothing was added.
    instead = chosen.exp() == 0.0
    if rules.greedy is not None:
        instead |= rules.greedy
    if instead.any():
        tokens = torch.where(instead, logits.argmax(-1, keepdim=True), tokens)
        chosen = log_probs.gather(1, tokens)
    return Drawn(tokens.squeeze(1), chosen.squeeze(1), kept)


def kept_sets(kept: Tensor) -> list[NDArray[np.int32]]:
    """Return the tokens in each row of ``kept``; none where it is the whole vocabulary.

    Each in memory of its own: a row keeps its sets until it is finished, and with a view those of
    all rows.
    """
    rows, tokens = (kept & ~kept.all(-1, keepdim=True)).nonzero(as_tuple=True)
    ends = kept.new_tensor(range(1, len(kept)), dtype=rows.dtype)
    bounds = torch.searchsorted(rows, ends).tolist()
    every = tokens.int().cpu().numpy()
    return [one.copy() for one in np.split(every, bounds)]


def _kept(logits: Tensor, rules: Rules) -> Tensor:
    """Return which tokens are within min-p, top-k and top-p: at least the most likely one."""
    ordered, places = logits.sort(-1, descending=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if rules.min_p is not None:
        keep &= ordered >= ordered[:, :1].double() + rules.min_p.log()
        ordered = ordered.masked_fill(~keep, float("-inf"))
    if rules.top_k is not None:
        rank = torch.arange(ordered.shape[-1], device=logits.device)
        keep &= (rank < rules.top_k) | (rules.top_k == 0)
        ordered = ordered.masked_fill(~keep, float("-inf"))
    if rules.top_p is not None:
        probs = ordered.softmax(-1, dtype=torch.float64)
        before = probs.cumsum(-1) - probs
        keep &= (before < rules.top_p) | (rules.top_p >= 1.0)
    keep[:, 0] = True
    return torch.zeros_like(keep).scatter_(1, places, keep)


NAME: Final = "rlinf_async_rows"


def register() -> str:
    """Register this attention with the library; return its name."""
    from transformers import AttentionInterface

    interface: Any = AttentionInterface
    interface.register(NAME, attend)
    return NAME


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend from ``query`` ``[rows, heads, new, size]``; ``[rows, new, heads, size]``."""
    rows, heads, new, size = query.shape
    groups = key.shape[1]
    if new > 1 or heads == groups:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        library: Any = sdpa_attention_forward
        found: tuple[Tensor, None] = library(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return found
    grouped = query.reshape(rows, groups, heads // groups, size)
    output = scaled_dot_product_attention(
        grouped, key, value, attn_mask=attention_mask, scale=scaling
    )
    return output.reshape(rows, 1, heads, value.shape[-1]), None
