"""Megatron's gradient buffers and optimizer for a stage."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlinf_async.backends.megatron.buffers import buffers_in, zero_gaps
from rlinf_async.backends.megatron.grid import Grid
from rlinf_async.backends.megatron.library import of_megatron
from rlinf_async.backends.optimizer_config import OptimizerConfig
from rlinf_async.backends.reshard.reserved import Empty, untouched


class Sharding(msgspec.Struct, frozen=True, kw_only=True):
    """How gradients and optimizer state are spread over data ranks."""

    distributed: bool = True
    """each data rank has a part of the optimizer state (ZeRO 1), instead of a copy of it"""
    overlap: bool = False
    """reduce gradients while the backward pass goes on, gather parameters while the forward pass
    does"""

    def bucket_elements(self, dp: int) -> int | None:
        """Return the elements from which a bucket of gradients is full; None: there is one."""
        return max(40_000_000, 1_000_000 * dp) if self.overlap else None

    def places(self, dp: int) -> tuple[int | None, int]:
        """Return what the places of parameters in Megatron's buffers depend on, besides them: the
        size of buckets, and what each is padded to a multiple of."""
        return self.bucket_elements(dp), math.lcm(dp, 128) if self.distributed else 1


def with_gradients(
    chunks: Sequence[nn.Module],
    grid: Grid,
    sharding: Sharding,
    reused: Iterable[Tensor] = (),
    empty: Empty = untouched,
) -> list[Any]:
    """Wrap each chunk of a stage in Megatron's data parallelism, which holds its gradients in
    float32.

    Args:
        chunks: of a stage.
        grid: of the ranks.
        sharding: whether parameters have buffers, too.
        reused: buffers to hold them in.
        empty: makes new buffers of parameters.
    """
    distributed = of_megatron("distributed")
    config = distributed.DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=sharding.overlap,
        overlap_param_gather=sharding.overlap and sharding.distributed,
        use_distributed_optimizer=sharding.distributed,
        average_in_collective=False,
        bucket_size=sharding.bucket_elements(grid.strategy.dp),
    )
    with buffers_in(reused, empty if sharding.distributed else None):
        wrapped = [
            distributed.DistributedDataParallel(
                chunk.config, config, chunk, pg_collection=grid.groups, disable_bucketing=number > 0
            )
            for number, chunk in enumerate(chunks)
        ]
    zero_gaps(wrapped)
    finalize = partial(_finalize, distributed.finalize_model_grads)
    for chunk in chunks:
        of_chunk: Any = chunk.config
        of_chunk.finalize_model_grads_func = finalize
        if sharding.overlap:  # reduced in the backward pass of the last micro-batch
            no_sync = [one.no_sync for one in wrapped]
            of_chunk.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    return wrapped


def _finalize(finalize: Any, model: Any, tokens: Any, **groups: Any) -> None:
    """Reduce the gradients, without dividing them by a number of tokens."""
    finalize(model, None, **groups)


def make_optimizer(
    wrapped: Sequence[Any], grid: Grid, config: OptimizerConfig, sharding: Sharding
) -> Any:
    """Return Megatron's optimizer (AdamW) for wrapped chunks."""
    optimizer = of_megatron("optimizer")
    params: Any = next(wrapped[0].parameters())
    settings = optimizer.OptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.betas[0],
        adam_beta2=config.betas[1],
        adam_eps=config.eps,
        clip_grad=config.max_grad_norm or 0.0,
        bf16=params.dtype == torch.bfloat16,
        params_dtype=params.dtype,
        use_distributed_optimizer=sharding.distributed,
        overlap_param_gather=sharding.overlap and sharding.distributed,
    )
    with _not_compared():
        return optimizer.get_megatron_optimizer(
            settings, list(wrapped), use_gloo_process_groups=False, pg_collection=grid.groups
        )


@contextmanager
def _not_compared() -> Iterator[None]:
    """Make an optimizer that is not compared with those of all other processes.

    Megatron gathers their kinds of parameters, for checkpoints of its own, which are not used here:
    idle ranks would have to take part, and a rank that is lost would block the others.
    """
    collectives: Any = dist
    gather = collectives.all_gather_object

    def own_alone(every: list[Any], own: Any, *_: Any) -> None:
        every[:] = [own] * len(every)

    collectives.all_gather_object = own_alone
    try:
        yield
    finally:
        collectives.all_gather_object = gather
