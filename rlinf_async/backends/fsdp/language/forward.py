"""Log-probs and values of any number of samples, without gradients.

Samples are divided into forward passes by tokens. Every rank of a sharded model takes part in
every forward pass, so the ranks agree on their number; one without samples passes a single token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rlinf_async.backends.fsdp import ranks
from rlinf_async.backends.fsdp.manager import FSDPModelManager
from rlinf_async.backends.fsdp.sharding import reshard
from rlinf_async.backends.language_training.packing import (
    Packed,
    by_tokens,
    pack_samples,
    whole_response,
)
from rlinf_async.messages.embodied import Floats
from rlinf_async.messages.language import TrainingSample


def largest(manager: FSDPModelManager, count: int) -> int:
    """Return the largest count of all ranks. Collective."""
    found = torch.tensor([count], device=manager.device)
    ranks.all_reduce(manager, found, dist.ReduceOp.MAX)
    return int(found)


def token_answers(
    manager: FSDPModelManager,
    samples: Sequence[TrainingSample],
    limit: int,
    answer: Callable[[Packed], Tensor],
) -> list[Floats]:
    """Return ``[R]`` of each sample, in order; ``answer`` gives ``[N]`` of a micro-batch.

    Collective. Raises `OffloadedError` while the model is offloaded.
    """
    manager.check_loaded("a forward pass")
    parts = by_tokens([sample.tokens for sample in samples], limit)
    # Agreed on before the first pass: its collectives must not meet those of a forward pass.
    idle = largest(manager, len(parts)) - len(parts)
    found: dict[int, Floats] = {}
    with torch.no_grad(), manager.autocast():
        for part in parts:
            chosen = [samples[at] for at in part]
            packed = pack_samples(chosen, [whole_response(one) for one in chosen], manager.device)
            numbers = answer(packed).float().cpu().numpy()
            ends = np.cumsum([len(one.response_ids) for one in chosen])[:-1]
            found |= zip(part, np.split(numbers, ends), strict=True)
        for _ in range(idle):
            answer(_idle(manager))
    reshard(manager.model)
    return [found[at] for at in range(len(samples))]


def _idle(manager: FSDPModelManager) -> Packed:
    token = torch.zeros(1, dtype=torch.int64, device=manager.device)
    return Packed(token[None], token[None], [1], token, token, torch.ones(1, device=manager.device))
