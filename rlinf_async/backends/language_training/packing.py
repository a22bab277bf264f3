"""Samples -> one row of tokens without padding.

::

    sample 0   p p p | r r r        row   p p p r r  p p r r r r     the last token of a sample is
    sample 1   p p | r r r r r      pos   0 1 2 3 4  0 1 2 3 4 5     only ever a target
                                    rows      * * *    * * * * *     where responses are predicted

Positions begin at 0 in every sample, and attention does not cross samples (`attention`): results
are those of the samples one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlinf_async.backends.language_training.kept_tokens import KeptTokens, pack_kept
from rlinf_async.messages.language import Kept, Tokens


class Tokenized(Protocol):
    """What packing needs of a sample."""

    group: int
    index: int
    prompt_ids: Tokens
    response_ids: Tokens
    temperature: float
    kept: Kept | None


class Packed(NamedTuple):
    """``T`` tokens of a micro-batch, ``N`` of them predict a response token."""

    input_ids: Tensor
    """``[1, T]``"""
    position_ids: Tensor
    """``[1, T]``"""
    lengths: list[int]
    """tokens of each sample in the row; their sum is ``T``"""
    rows: Tensor
    """``[N]``: positions in the row"""
    targets: Tensor
    """``[N]``: the response token that is predicted there"""
    inverse_temperature: Tensor
    """``[N]``, float32"""
    kept: KeptTokens | None = None
    """what each target was drawn from; None: the whole vocabulary"""


def pack_samples(
    samples: Sequence[Tokenized], masks: Sequence[NDArray[np.bool_]], device: torch.device
) -> Packed:
    """Pack samples; of each response, the tokens in its mask ``[R]`` are predicted.

    Raises `ValueError`, naming the sample, for a prompt without tokens.
    """
    ids: list[NDArray[np.int64]] = []
    positions: list[NDArray[np.int64]] = []
    rows: list[NDArray[np.int64]] = []
    targets: list[NDArray[np.int64]] = []
    inverse: list[NDArray[np.float32]] = []
    predicted: list[NDArray[np.int64]] = []
    lengths: list[int] = []
    start = 0
    for sample, mask in zip(samples, masks, strict=True):
        prompt = len(sample.prompt_ids)
        if prompt == 0:
            raise ValueError(
                f"sample {sample.group}/{sample.index} has a prompt without tokens: there is "
                "nothing to predict its first token from"
            )
        # With an empty response the row is the prompt, whose last token then stays.
        whole = np.concatenate([sample.prompt_ids, sample.response_ids]).astype(np.int64)
        length = max(len(whole) - 1, 1)
        chosen = np.flatnonzero(mask)
        ids.append(whole[:length])
        positions.append(np.arange(length))
        rows.append(start + prompt - 1 + chosen)
        targets.append(sample.response_ids[chosen].astype(np.int64))
        inverse.append(np.full(len(chosen), 1.0 / (sample.temperature or 1.0), np.float32))
        predicted.append(chosen)
        lengths.append(length)
        start += length

    def tensor(parts: list[NDArray[np.int64]] | list[NDArray[np.float32]]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(device)

    return Packed(
        tensor(ids)[None],
        tensor(positions)[None],
        lengths,
        tensor(rows),
        tensor(targets),
        tensor(inverse),
        pack_kept(samples, predicted, device),
    )


def whole_response(sample: Tokenized) -> NDArray[np.bool_]:
    """Return the mask of every response token."""
    return np.ones(len(sample.response_ids), np.bool_)


def by_tokens(lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Return indices in parts of at most ``limit`` tokens each (or a single sample), longest first.

    First fit on decreasing lengths, which needs at most 11/9 of the fewest parts (Johnson 1973).
    """
    parts: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda at: -lengths[at]):
        fitting = next((at for at, left in enumerate(room) if lengths[index] <= left), None)
        if fitting is None:
            parts.append([index])
            room.append(limit - lengths[index])
        else:
            parts[fitting].append(index)
            room[fitting] -= lengths[index]
    return parts
