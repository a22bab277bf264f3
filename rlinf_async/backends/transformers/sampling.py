"""Drawing a token for each row of a batch, with sampling settings and random numbers of its own.

The log-prob that comes with a token is that of the distribution it was drawn from: of the logits
after temperature, then top-k, then top-p, renormalised. Greedy rows (temperature 0) take the most
likely token; their log-probs are those at temperature 1.

A row's random number at each position follows from its seed alone, so what is drawn depends neither
on the other rows nor on where the response was interrupted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlinf_async.messages.language import Sampling


class Rules(NamedTuple):
    """How each row of a batch draws. Tensors are ``[rows, 1]``; None where no row asks for it."""

    temperature: Tensor | None
    greedy: Tensor | None
    top_k: Tensor | None
    top_p: Tensor | None

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
            top_k=column([row.top_k for row in rows], 0, torch.int64),
            top_p=column([row.top_p for row in rows], 1.0, torch.float32),
        )


def uniforms(seed: int, count: int) -> NDArray[np.float64]:
    """Return the random numbers ``[count]`` in [0, 1) of a response's positions."""
    return np.random.default_rng(seed).random(count)


def draw(logits: Tensor, rules: Rules, random: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token for each row.

    Args:
        logits: ``[rows, vocabulary]``
        rules: of each row.
        random: ``[rows]`` in [0, 1).

    Returns:
        tokens ``[rows]`` and their log-probs ``[rows]``, float32.
    """
    logits = logits.float()
    if rules.temperature is not None:
        logits = logits / rules.temperature
    if rules.top_k is not None or rules.top_p is not None:
        logits = _filtered(logits, rules.top_k, rules.top_p)
    log_probs = logits.log_softmax(-1)
    # In double: over a large vocabulary, sums of float32 end visibly off 1.
    sums = log_probs.exp().cumsum(-1, dtype=torch.float64)
    at = random.unsqueeze(1) * sums[:, -1:]
    tokens = torch.searchsorted(sums, at, right=True).clamp_(max=logits.shape[-1] - 1)
    if rules.greedy is not None:
        tokens = torch.where(rules.greedy, logits.argmax(-1, keepdim=True), tokens)
    return tokens.squeeze(1), log_probs.gather(1, tokens).squeeze(1)


def _filtered(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """Set the logits outside top-k and top-p to minus infinity; the most likely token stays."""
    ordered, places = logits.sort(-1, descending=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if top_k is not None:
        rank = torch.arange(ordered.shape[-1], device=logits.device)
        keep &= (rank < top_k) | (top_k == 0)
        ordered = ordered.masked_fill(~keep, float("-inf"))
    if top_p is not None:
        probs = ordered.softmax(-1)
        before = probs.cumsum(-1) - probs
        keep &= (before < top_p) | (top_p >= 1.0)
    keep[:, 0] = True
    kept = torch.zeros_like(keep).scatter_(1, places, keep)
    return logits.masked_fill(~kept, float("-inf"))
