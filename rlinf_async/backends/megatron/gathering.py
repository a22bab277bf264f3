"""The whole weights of a model on rank 0, from one copy of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from rlinf_async.backends.megatron.weights import Held, own_slices
from rlinf_async.parallel import Layout, Piece, Strategy


def on_first_rank(
    held: Sequence[Held], layout: Layout, strategy: Strategy, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return the weights by their names in a checkpoint on rank 0, on the CPU; ``{}`` elsewhere.

    Collective over the active ranks. One slice travels at a time, from the first data rank of each
    tensor rank and stage; tensors that two stages hold come from the last of them.

    Args:
        held: this rank's parameters.
        layout: of weights under the strategy.
        strategy: in force.
        dtype: of what is returned.
    """
    rank, found = dist.get_rank(), dict[str, Tensor]()
    shapes = {one.name: tuple(one.shape) for one in layout.tensors}
    mine = list(own_slices(list(held)))
    for stage in range(strategy.pp):
        for tp in range(strategy.tp):
            source = tp + strategy.tp * strategy.dp * stage
            if rank == source != 0:
                for _, data in mine:
                    dist.send(data.to(dtype).contiguous(), 0)
            if rank != 0:
                continue
            device = held[0].parameter.device
            slices = mine if source == 0 else _received(layout, source, dtype, device)
            for piece, data in slices:
                if piece.tensor not in found:
                    found[piece.tensor] = torch.zeros(shapes[piece.tensor], dtype=dtype)
                box = tuple(
                    slice(start, start + size)
                    for start, size in zip(piece.start, piece.size, strict=True)
                )
                found[piece.tensor][box] = data.to(dtype).cpu()
    return found


def _received(
    layout: Layout, source: int, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[Piece, Tensor]]:
    for buffer in layout.of_rank(source):
        for piece in buffer.pieces:
            data = torch.empty(piece.size, dtype=dtype, device=device)
            dist.recv(data, source)
            yield piece, data
