"""The forward pass of a stage over packed samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rlinf_async.backends.language_training.packing import Packed
from rlinf_async.backends.language_training.token_statistics import TokenStatistics
from rlinf_async.backends.megatron.grid import Grid
from rlinf_async.backends.megatron.library import of_megatron
from rlinf_async.backends.megatron.statistics import vocabulary_statistics


class SelectRows:
    """A hook before the output layer: only hidden states that predict a token go through it.

    With sequence parallelism each tensor rank has a part of the hidden states: they are gathered
    first, so the output layer must not gather them again.
    """

    def __init__(self, output_layer: nn.Module, grid: Grid) -> None:
        self.rows: Tensor | None = None
        """``[N]``, of the micro-batch that is computed"""
        self._group = grid.groups.tp
        self._sequence_parallel = bool(output_layer.sequence_parallel)
        output_layer.sequence_parallel = False  # type: ignore[assignment]
        output_layer.register_forward_pre_hook(self._select)

    @classmethod
    def of(cls, output_layer: nn.Module, grid: Grid) -> SelectRows:
        """Return the hook of this layer, which has one."""
        for hook in output_layer._forward_pre_hooks.values():
            owner = getattr(hook, "__self__", None)
            if isinstance(owner, cls):
                return owner
        return cls(output_layer, grid)

    def _select(self, _: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, *others = inputs
        if self._sequence_parallel:
            gather = of_megatron("tensor_parallel").gather_from_sequence_parallel_region
            hidden = gather(hidden, tensor_parallel_output_grad=False, group=self._group)
        assert self.rows is not None
        return (hidden.index_select(0, self.rows), *others)


def run_stage(
    model: nn.Module, stage: nn.Module, packed: Packed, grid: Grid, select: SelectRows | None
) -> Tensor:
    """Return hidden states ``[T, 1, D]``, or on the last stage logits ``[1, N, V / tp]``.

    ``model`` is ``stage``, or wraps it.
    """
    packed = padded(packed, grid.strategy.tp) if _cuts_sequence(stage) else packed
    if select is not None:
        select.rows = packed.rows
    bounds = torch.tensor([0, *packed.lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    bounds = bounds.to(packed.input_ids.device)
    longest = max(packed.lengths)
    parameters = of_megatron("packed_seq_params").PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    output: Tensor = model(
        packed.input_ids, packed.position_ids, None, packed_seq_params=parameters
    )
    return output


Read = Callable[[Tensor, Packed], Any]
"""takes what a model says of the tokens of a micro-batch from the output of its last stage"""


def read_statistics(vocabulary: int, grid: Grid) -> Read:
    """Read log-probs and entropies ``[N]`` from logits."""

    def read(logits: Tensor, packed: Packed) -> TokenStatistics:
        return vocabulary_statistics(
            logits[0],
            packed.targets,
            packed.inverse_temperature,
            vocabulary,
            grid.groups.tp,
            packed.kept,
        )

    return read


def read_values(output: Tensor, packed: Packed) -> Tensor:
    """Read values ``[N]``, float32."""
    return output[0, :, 0].float().clone()


def padded(packed: Packed, multiple: int) -> Packed:
    """Add a sample of padding, so that the tensor ranks divide the tokens."""
    missing = -sum(packed.lengths) % multiple
    if not missing:
        return packed
    zeros = packed.input_ids.new_zeros(1, missing)
    return packed._replace(
        input_ids=torch.cat([packed.input_ids, zeros], 1),
        position_ids=torch.cat([packed.position_ids, zeros], 1),
        lengths=[*packed.lengths, missing],
    )


def _cuts_sequence(model: nn.Module) -> bool:
    config: Any = model.config
    return bool(config.sequence_parallel)
