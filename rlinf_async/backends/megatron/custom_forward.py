"""A padded batch ``[B, S]`` through one stage, packed on the way: for code that brings its own
batches and its own use of logits.

::

    [B, S] --pack--> one row of tokens --stage--> hidden states --> the next stage
                                             \\--> (last stage) logits [T, V / tp] or values [T]
                                                    --processor--> [T, ...] --unpack--> [B, S, ...]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from rlinf_async.backends.language_training.packing import Packed
from rlinf_async.backends.megatron.forward import SelectRows, run_stage
from rlinf_async.backends.megatron.grid import Grid

LogitsProcessor = Callable[..., Mapping[str, Tensor]]
"""called with logits ``[T, V / tp]`` and, by name, its packed arguments; returns ``[T, ...]`` by
name"""


class PaddedBatch(NamedTuple):
    """Samples of different lengths."""

    input_ids: Tensor
    """``[B, S]``, int64"""
    attention_mask: Tensor
    """``[B, S]``, bool: the tokens that are there, of each sample one behind another"""
    position_ids: Tensor
    """``[B, S]``, int64"""


def custom_forward(
    model: nn.Module,
    grid: Grid,
    batch: PaddedBatch,
    *,
    sequence_parallel: bool,
    value_model: bool,
    pack_seqs: bool,
    logits_processor: LogitsProcessor | None,
    logits_processor_args: Mapping[str, Any],
    temperature: float,
    max_batch_seqlen: int,
) -> Tensor | dict[str, Tensor]:
    """Return hidden states of a stage, and on the last one what is made of logits. Collective.

    Args:
        model: a chunk, as Megatron's schedule gives it; may be wrapped.
        grid: its process groups.
        batch: padded samples; without ``pack_seqs`` padding is computed, too.
        sequence_parallel: as the model was built; another value is an error.
        value_model: the model is a critic: values ``[B, S]`` are returned. Another value than the
            model was built with is an error, on every stage.
        pack_seqs: leave padding out of the computation.
        logits_processor: what becomes of logits; they are returned as they are when left out. A
            critic has none.
        logits_processor_args: by name: tensors ``[B, S, ...]`` are packed as the tokens are, and
            others passed as they are.
        temperature: divides logits, once, on the last stage. A critic has none.
        max_batch_seqlen: largest number of tokens of a sample.

    Returns:
        On the last stage logits ``[B, S, V / tp]``, or ``[B, S, ...]`` by name, 0 at padding; on
        others the hidden states ``[T, 1, D]`` that the next stage takes.

    Raises:
        ValueError: a sample is longer, the model was built for something else, or the batch has
            several shapes.
    """
    stage = _unwrapped(model)
    _check_kind(stage, value_model, logits_processor, temperature)
    _check_batch(batch, max_batch_seqlen)
    config = cast(Any, stage).config
    if sequence_parallel != bool(config.sequence_parallel):
        raise ValueError(
            f"sequence_parallel is {sequence_parallel}, but the model was built with "
            f"{bool(config.sequence_parallel)}"
        )
    there = batch.attention_mask
    mask = there if pack_seqs else torch.ones_like(there)
    last = bool(cast(Any, stage).post_process)
    select = SelectRows.of(cast(Any, stage).output_layer, grid) if last else None
    output = run_stage(model, stage, _packed(batch, mask), grid, select)
    if not last:
        return output
    if value_model:
        return _unpacked(output[0, :, 0].float(), mask, there)
    logits = output[0] / temperature
    if logits_processor is None:
        return _unpacked(logits, mask, there)
    arguments = {
        name: one[mask] if _is_of_tokens(one, mask) else one
        for name, one in logits_processor_args.items()
    }
    found = logits_processor(logits, **arguments)
    return {name: _unpacked(one, mask, there) for name, one in found.items()}


def _check_kind(
    stage: nn.Module, value_model: bool, processor: LogitsProcessor | None, temperature: float
) -> None:
    """Raise `ValueError` unless the model computes what is asked for."""
    critic = getattr(stage, "computes_values", None)
    if critic is None:
        raise ValueError(
            f"custom_forward() takes a model chunk of a MegatronModelManager, not a "
            f"{type(stage).__name__}: give one of its models or chunks"
        )
    if value_model != critic:
        has = "a critic: it has a value head and no logits" if critic else "a policy: it has logits"
        raise ValueError(f"value_model is {value_model}, but the model was built as {has}")
    if critic and processor is not None:
        raise ValueError("logits_processor was given, but a critic has no logits: leave it out")
    if critic and temperature != 1.0:
        raise ValueError(f"temperature is {temperature}, but values have none: leave it out")
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; it must be more than 0")


def _check_batch(batch: PaddedBatch, max_batch_seqlen: int) -> None:
    """Raise `ValueError` for several shapes, and a sample that is longer."""
    shapes = {tuple(one.shape) for one in batch}
    if len(shapes) > 1 or batch.input_ids.dim() != 2:
        raise ValueError(
            "input_ids, attention_mask and position_ids have to be of one shape [B, S]; they are "
            f"{', '.join(str(list(one.shape)) for one in batch)}"
        )
    longest = int(batch.attention_mask.sum(1).max())
    if longest > max_batch_seqlen:
        raise ValueError(
            f"a sample has {longest} tokens, more than max_batch_seqlen = {max_batch_seqlen}"
        )


def _packed(batch: PaddedBatch, mask: Tensor) -> Packed:
    """Return the tokens in the mask; what attends to itself alone are those of each sample, and,
    where all are in it, each padding."""
    ids, there = batch.input_ids[mask], batch.attention_mask
    lengths = _segments(there) if bool(mask.all()) else there.sum(1).tolist()
    rows = torch.arange(len(ids), device=ids.device)
    return Packed(
        ids[None], batch.position_ids[mask][None], lengths, rows, ids, torch.ones_like(rows)
    )


def _is_of_tokens(value: Any, mask: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape[:2] == mask.shape


def _segments(there: Tensor) -> list[int]:
    """Return the lengths of what attends to itself alone: the tokens of each sample, and its
    padding apart from them."""
    return [
        length
        for row in there
        for length in torch.unique_consecutive(row, return_counts=True)[1].tolist()
    ]


def _unpacked(packed: Tensor, mask: Tensor, there: Tensor) -> Tensor:
    """Return ``[B, S, ...]`` of ``[T, ...]``, which are computed where ``mask`` is; 0 at padding,
    with its gradient."""
    padded = packed.new_zeros(*mask.shape, *packed.shape[1:])
    more = [1] * (packed.dim() - 1)
    filled = padded.masked_scatter(mask.view(*mask.shape, *more).expand_as(padded), packed)
    return filled.masked_fill(~there.view(*there.shape, *more), 0)


def _unwrapped(model: nn.Module) -> nn.Module:
    inner = getattr(model, "module", None)
    return _unwrapped(inner) if isinstance(inner, nn.Module) else model
