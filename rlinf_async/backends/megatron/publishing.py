"""Published weights of a model that tensor ranks and stages share: each rank writes its slices.

The memory in which they are published counts as one more rank of a plan, which holds nothing yet.
So data ranks, and others that hold the same, share what there is to write.
"""

from __future__ import annotations

import torch

from rlinf_async.backends.language_training.publishing_in_place import Part, publish_in_place
from rlinf_async.backends.megatron.architecture import layout_of
from rlinf_async.backends.megatron.manager import MegatronModelManager
from rlinf_async.backends.reshard.buckets import window
from rlinf_async.messages.weights import Allocate, WeightUpdate
from rlinf_async.parallel import Strategy, layout, plan
from rlinf_async.parallel.decoders import huggingface


def publish_slices(
    manager: MegatronModelManager,
    dtype: torch.dtype,
    version: int,
    bucket_bytes: int,
    *,
    allocate: Allocate | None,
    previous: WeightUpdate | None,
) -> WeightUpdate | None:
    """Return what `publish_in_place` does, by the names of a checkpoint; None also for one rank.
    Collective over the active ranks, whose weights are on their devices."""
    ranks = manager.world_size
    if ranks == 1:
        return None
    architecture = manager.architecture
    published = layout(huggingface(architecture.decoder), Strategy(), ranks=(ranks,))
    moves = plan(layout_of(architecture, manager.strategy), published)
    live = manager.live_weights()
    tensors = {
        one.name: torch.empty(one.shape, dtype=dtype, device="meta")
        for one in published.of_rank(ranks)
    }
    parts: dict[str, list[Part]] = {name: [] for name in tensors}
    for run in moves.of_rank(manager.rank).sends:
        name, size, stride, offset = run.target
        source = window(live[run.source.buffer], run.source)
        parts[name].append(Part(source, size, stride, offset))
    return publish_in_place(
        manager, tensors, parts, version, bucket_bytes, allocate=allocate, previous=previous
    )
