"""What the tokens of a micro-batch were drawn from, and logits restricted to it.

A token that was drawn under top-k or top-p has the log-prob of the distribution over the tokens
that were kept. They are constants: no gradient goes through which ones these are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlinf_async.messages.language import Kept


class KeptTokens(NamedTuple):
    """Of ``N`` tokens."""

    bounds: Tensor
    """``[N + 1]``, int64: of each one's part of ``ids``; an empty part is the whole vocabulary"""
    ids: Tensor
    """int64"""

    def restrict(self, logits: Tensor, first: int = 0, start: int = 0) -> None:
        """Make logits ``[n, V]`` minus infinity outside of what was kept, in place.

        Args:
            logits: of ``n`` of the tokens, for a part of the vocabulary.
            first: of the tokens.
            start: of this part of the vocabulary.
        """
        bounds = self.bounds[first : first + len(logits) + 1]
        ids = self.ids[int(bounds[0]) : int(bounds[-1])] - start
        sizes = bounds.diff()
        rows = torch.arange(len(logits), device=logits.device).repeat_interleave(sizes)
        inside = (ids >= 0) & (ids < logits.shape[-1])
        outside = (sizes > 0)[:, None].expand_as(logits).contiguous()
        outside[rows[inside], ids[inside]] = False
        logits.masked_fill_(outside, -torch.inf)


def pack_kept(
    samples: Sequence[Any], chosen: Sequence[NDArray[np.int64]], device: torch.device
) -> KeptTokens | None:
    """Return what the chosen tokens of each sample ``[R]`` were drawn from; None: all of them from
    the whole vocabulary.

    Raises `ValueError`, naming sample and token, where one is not among those that were kept.
    """
    if all(sample.kept is None for sample in samples):
        return None
    sizes: list[NDArray[np.int64]] = []
    ids: list[NDArray[Any]] = []
    for sample, places in zip(samples, chosen, strict=True):
        if sample.kept is None:
            sizes.append(np.zeros(len(places), np.int64))
            continue
        _check_kept(sample)
        kept: Kept = sample.kept
        counts = kept.counts.astype(np.int64)
        wanted = np.zeros(len(counts), np.bool_)
        wanted[places] = True
        sizes.append(counts[places])
        ids.append(kept.token_ids[np.repeat(wanted, counts)].astype(np.int64))
    bounds = np.concatenate([[0], np.cumsum(np.concatenate(sizes))])
    all_ids = np.concatenate([np.empty(0, np.int64), *ids])
    return KeptTokens(torch.from_numpy(bounds).to(device), torch.from_numpy(all_ids).to(device))


def _check_kept(sample: Any) -> None:
    """Refuse a token that was not kept: its log-prob would be minus infinity."""
    kept: Kept = sample.kept
    name, tokens = f"sample {sample.group}/{sample.index}", sample.response_ids
    if len(kept.counts) != len(tokens):
        raise ValueError(
            f"{name} has {len(tokens)} response tokens, but says of {len(kept.counts)} what they "
            "were drawn from"
        )
    counts = kept.counts.astype(np.int64)
    drawn = kept.token_ids == np.repeat(tokens, counts)
    found = np.bincount(np.repeat(np.arange(len(tokens)), counts)[drawn], minlength=len(tokens))
    for at in np.flatnonzero((found != 1) & (counts > 0))[:1]:
        raise ValueError(
            f"{name}: token {at} ({tokens[at]}) is {found[at]} times among the {counts[at]} that "
            "it was drawn from: the engine told another set than it drew from"
        )
