"""The forward pass of a stage over packed samples, and what is read from its output.

::

    packed row --`run_stage`--> hidden states --> the next stage
                          \\--> (last stage) logits [N, V / tp] or values --`Read`--> log-probs

    [B, S] --pack--> one row --`run_stage`--> logits [T, V / tp] --processor--> [T, ...]
                                                                      --unpack--> [B, S, ...]

`custom_forward` is for code that brings its own padded batches and its own use of logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rlinf_async.backends.language_training.objective import (
    AskedTokens,
    KeptTokens,
    LogitBias,
    PackedTokens,
    TokenStatistics,
)
from rlinf_async.backends.megatron.cpu import of_megatron
from rlinf_async.backends.megatron.grid import Grid


def vocabulary_statistics(
    logits: Tensor,
    targets: Tensor,
    scale: Tensor,
    vocabulary: int,
    group: dist.ProcessGroup,
    kept: KeptTokens | None = None,
    asked: AskedTokens | None = None,
    bias: LogitBias | None = None,
) -> TokenStatistics:
    """Return log-probs and entropies ``[N]``, equal on every tensor rank.

    With ``l`` the logits with their bias (`LogitBias`) times the inverse temperature, minus
    infinity where a token was not drawn from (`KeptTokens`), ``log p_t = l_t - logsumexp(l)`` and
    ``H = logsumexp(l) - sum p l``. Each rank has some rows of the vocabulary; only sums and maxima
    ``[N]`` cross the ranks. The gradients are written out, as in the FSDP backend::

        d log p_t / d l_j = [j = t] - p_j          d H / d l_j = -p_j (log p_j + H)

    Args:
        logits: ``[N, V / tp]``: of this rank's rows of the padded vocabulary.
        targets: ``[N]``, int64, in the whole vocabulary.
        scale: ``[N]``: of the logits; 1 / temperature.
        vocabulary: rows without padding.
        group: the tensor ranks.
        kept: what each target was drawn from; None: the whole vocabulary.
        asked: other tokens whose log-probs are returned, too; ``[N, k]`` more cross the ranks.
        bias: with which each target was drawn.
    """
    log_prob, entropy, of_asked = _Statistics.apply(  # type: ignore[no-untyped-call]
        logits, targets, scale, vocabulary, group, kept, asked, bias
    )
    if asked is None:
        return TokenStatistics(log_prob, entropy)
    return TokenStatistics(log_prob, entropy, of_asked, None, vocabulary)


class _Statistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        scale: Tensor,
        vocabulary: int,
        group: dist.ProcessGroup,
        kept: KeptTokens | None,
        asked: AskedTokens | None,
        bias: LogitBias | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        rows = logits.shape[-1]
        start = dist.get_rank(group) * rows
        scaled = logits.float() * scale[:, None]
        if bias is not None:
            bias.add(scaled, start=start)
        if start + rows > vocabulary:  # what was added to make the vocabulary divide
            scaled[:, max(vocabulary - start, 0) :] = -torch.inf
        if kept is not None:
            kept.restrict(scaled, start=start)
        largest = scaled.max(-1).values
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        exponential = (scaled - largest[:, None]).exp()
        total = exponential.sum(-1)
        weighted = (exponential * scaled.masked_fill(scaled == -torch.inf, 0.0)).sum(-1)
        inside = (targets >= start) & (targets < start + rows)
        at = (targets - start).clamp(0, rows - 1)
        chosen = scaled.gather(-1, at[:, None])[:, 0].masked_fill(~inside, 0.0)
        sums = torch.stack([total, weighted, chosen])
        dist.all_reduce(sums, group=group)
        total, weighted, chosen = sums
        normalizer = largest + total.log()
        entropy = normalizer - weighted / total
        others, at_others, of_asked = None, None, None
        if asked is not None:
            ids = asked.ids_of(len(targets), targets.device)
            others, at_others = (
                (ids >= start) & (ids < start + rows),
                (ids - start).clamp(0, rows - 1),
            )
            of_asked = scaled.gather(-1, at_others).masked_fill(~others, 0.0)
            dist.all_reduce(of_asked, group=group)
            of_asked -= normalizer[:, None]
        ctx.save_for_backward(scaled, at, inside, scale, normalizer, entropy, others, at_others)
        ctx.dtype = logits.dtype
        ctx.set_materialize_grads(False)
        return chosen - normalizer, entropy, of_asked

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor | None
    ) -> tuple[Any, ...]:
        grad_log_prob, grad_entropy, grad_asked = grad_outputs
        scaled, at, inside, scale, normalizer, entropy, others, at_others = ctx.saved_tensors
        # Of all log-probs together: each has the normalizer in it.
        total = torch.zeros_like(scale) if grad_log_prob is None else grad_log_prob
        if grad_asked is not None:
            total = total + grad_asked.sum(-1)
        log_p = scaled - normalizer[:, None]
        grad = log_p.exp()
        if grad_entropy is not None and grad_entropy.any():
            by_entropy = (log_p + entropy[:, None]).mul_(grad_entropy[:, None])
            grad.mul_(by_entropy.add_(total[:, None]).neg_())
            grad.masked_fill_(scaled == -torch.inf, 0.0)
        else:
            grad.mul_(-total[:, None])
        if grad_log_prob is not None:
            grad.scatter_add_(-1, at[:, None], (grad_log_prob * inside)[:, None])
        if grad_asked is not None:
            grad.scatter_add_(-1, at_others, grad_asked * others)
        return grad.mul_(scale[:, None]).to(ctx.dtype), *[None] * 7


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
    model: nn.Module, stage: nn.Module, packed: PackedTokens, grid: Grid, select: SelectRows | None
) -> Tensor:
    """Return hidden states ``[T, 1, D]``, or on the last stage logits ``[1, N, V / tp]``.

    ``model`` is ``stage``, or wraps it.
    """
    if cast(Any, stage).config.sequence_parallel:
        packed = padded(packed, grid.strategy.tp)
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


Read = Callable[[Tensor, PackedTokens], Any]
"""takes what a model says of the tokens of a micro-batch from the output of its last stage"""


def read_statistics(vocabulary: int, grid: Grid) -> Read:
    """Read log-probs and entropies ``[N]`` from logits."""

    def read(logits: Tensor, packed: PackedTokens) -> TokenStatistics:
        return vocabulary_statistics(
            logits[0],
            packed.targets,
            packed.inverse_temperature,
            vocabulary,
            grid.groups.tp,
            packed.kept,
            packed.asked,
            packed.bias,
        )

    return read


def read_values(output: Tensor, packed: PackedTokens) -> Tensor:
    """Read values ``[N]``, float32."""
    return output[0, :, 0].float().clone()


def padded(packed: PackedTokens, multiple: int) -> PackedTokens:
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
        grid: process groups of the model.
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


def _packed(batch: PaddedBatch, mask: Tensor) -> PackedTokens:
    """Return the tokens in the mask; what attends to itself alone are those of each sample, and,
    where all are in it, each padding."""
    ids, there = batch.input_ids[mask], batch.attention_mask
    lengths = _segments(there) if bool(mask.all()) else there.sum(1).tolist()
    rows = torch.arange(len(ids), device=ids.device)
    return PackedTokens(
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
