"""The weights and moments of a rank's stage: where each tensor of a checkpoint lies in Megatron's
parameters, and what Megatron's optimizer keeps of them.

`parallel.layout` has the slices; Megatron numbers the layers of a stage from 0 on, the layout has
the numbers of the whole model. With the distributed optimizer a data rank has a range of each
parameter's elements, in float32; otherwise the moments of whole parameters, and with bfloat16 their
float32 copies.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlinf_async.backends.megatron.config import VALUE_HEAD, Architecture, layout_of
from rlinf_async.backends.megatron.cpu import of_megatron
from rlinf_async.backends.megatron.grid import Grid
from rlinf_async.parallel import Layout, ModelMismatch, Piece, Strategy
from rlinf_async.parallel.regions import cut_ranges

LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")


class HeldParameter(NamedTuple):
    """A parameter of this rank, and the boxes of the checkpoint's tensors in it."""

    name: str
    """name of the parameter in the whole model"""
    parameter: nn.Parameter
    pieces: tuple[Piece, ...]


def held_weights(
    chunks: Sequence[nn.Module], architecture: Architecture, grid: Grid
) -> list[HeldParameter]:
    """Return the parameters of this rank in the order of the layout.

    Raises:
        ModelMismatch: model and layout have different parameters: a defect of the name map.
    """
    assert grid.place is not None
    strategy = grid.strategy
    per_chunk = architecture.decoder.layers // (strategy.pp * strategy.virtual_stages)
    live = {
        _global_name(name, per_chunk * (number * strategy.pp + grid.place.stage)): one
        for number, chunk in enumerate(chunks)
        for name, one in chunk.named_parameters()
    }
    place = grid.place
    rank = place.tp + strategy.tp * (place.dp + strategy.dp * place.stage)
    buffers = {one.name: one for one in layout_of(architecture, strategy).of_rank(rank)}
    differing = sorted(
        name
        for name in live.keys() | buffers.keys()
        if name not in live
        or name not in buffers
        or tuple(live[name].shape) != tuple(buffers[name].shape)
    )
    if differing:
        raise ModelMismatch(
            f"Megatron's model and the name map differ in {len(differing)} parameters, the first: "
            f"{', '.join(differing[:4])}"
        )
    return [HeldParameter(name, live[name], one.pieces) for name, one in buffers.items()]


def load_weights(held: list[HeldParameter], tensor: Callable[[str], Tensor]) -> None:
    """Fill the parameters; ``tensor`` returns a whole tensor of the checkpoint by its name.

    Rows that were added to make the vocabulary divide become 0.
    """
    zero_padding(held)
    with torch.no_grad():
        for one in held:
            flat = one.parameter.view(-1)
            for piece in one.pieces:
                whole = tensor(piece.tensor)
                part = whole[_box(piece)].to(flat.dtype).reshape(-1)
                flat[piece.offset : piece.offset + part.numel()].copy_(part)


def zero_padding(held: list[HeldParameter]) -> None:
    """Zero the parameters that have more rows than the checkpoint."""
    with torch.no_grad():
        for one in held:
            if sum(_elements(piece) for piece in one.pieces) < one.parameter.numel():
                one.parameter.zero_()


def first_weights(whole: nn.Module) -> Callable[[str], Tensor]:
    """Return the weights of a model of transformers by name; those of a value head are 0."""
    state, hidden = whole.state_dict(), cast(Any, whole).config.hidden_size
    head = {"weight": torch.zeros(1, hidden), "bias": torch.zeros(1)}

    def tensor(name: str) -> Tensor:
        if name.startswith(VALUE_HEAD):
            return head[name.removeprefix(VALUE_HEAD)]
        found: Tensor = state[name]
        return found

    return tensor


def own_slices(held: list[HeldParameter]) -> Iterator[tuple[Piece, Tensor]]:
    """Yield each slice that this rank has, with its box in the tensor of the checkpoint."""
    for one in held:
        flat = one.parameter.detach().view(-1)
        for piece in one.pieces:
            yield piece, flat[piece.offset : piece.offset + _elements(piece)].view(piece.size)


def pieces_of_range(held: HeldParameter, start: int, count: int) -> Iterator[Piece]:
    """Yield the boxes of ``count`` elements of a flat parameter, from element ``start`` on; their
    offsets count from there."""
    for piece in held.pieces:
        size = np.array([piece.size], np.int64)
        bounds = np.array([start, start + count]) - piece.offset
        low, high = bounds.clip(0, size.prod())
        _, at, starts, sizes = cut_ranges(size, np.array([low]), np.array([high]))
        for first, inside, shape in zip(at.tolist(), starts, sizes.tolist(), strict=True):
            where = tuple((inside + piece.start).tolist())
            yield Piece(piece.tensor, where, tuple(shape), piece.offset + first - start)


def _global_name(name: str, first_layer: int) -> str:
    found = LAYER.match(name)
    if found is None:
        return name
    return f"decoder.layers.{int(found[1]) + first_layer}.{name[found.end() :]}"


def _box(piece: Piece) -> tuple[slice, ...]:
    return tuple(
        slice(start, start + size) for start, size in zip(piece.start, piece.size, strict=True)
    )


def _elements(piece: Piece) -> int:
    return torch.Size(piece.size).numel()


MOMENTS: Final = ("exp_avg", "exp_avg_sq")


class OptimizerPart(NamedTuple):
    """Elements of a parameter whose state the optimizer of this rank has."""

    optimizer: torch.optim.Optimizer
    main: Tensor
    """the elements that it steps, float32"""
    start: int
    """first of the elements in the flat parameter"""

    @property
    def state(self) -> dict[str, Any]:
        """The moments; empty before the first step."""
        found: dict[str, Any] = self.optimizer.state[self.main]
        return found


def kept_of(optimizer: Any, parameter: nn.Parameter) -> OptimizerPart | None:
    """Return what this rank's optimizer has of a parameter; None: other data ranks have all."""
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        places = getattr(one, "model_param_gbuf_map", None)
        if places is not None:
            if parameter in one.model_param_group_index_map:
                main = one._get_main_param_and_optimizer_states(parameter)["param"]
                start = one._get_model_param_range_map(parameter)["param"].start
                return OptimizerPart(one.optimizer, main, start)
            continue
        main = getattr(parameter, "main_param", parameter)
        if any(main is held for group in one.optimizer.param_groups for held in group["params"]):
            return OptimizerPart(one.optimizer, main, 0)
    return None


def set_state(
    optimizer: Any,
    parameter: nn.Parameter,
    whole: Mapping[str, Tensor],
    steps: int,
) -> None:
    """Take a whole flat parameter, and its moments if there are any, as this rank keeps them."""
    with torch.no_grad():
        parameter.view(-1).copy_(whole["param"])
    kept = kept_of(optimizer, parameter)
    if kept is None:
        return
    end = kept.start + kept.main.numel()
    with torch.no_grad():
        kept.main.view(-1).copy_(whole["param"][kept.start : end])
    moments = {
        name: torch.empty_like(kept.main, dtype=torch.float32).copy_(
            whole[name][kept.start : end].view(kept.main.shape)
        )
        for name in MOMENTS
        if name in whole
    }
    replace_moments(kept, moments, steps)


def replace_moments(kept: OptimizerPart, moments: Mapping[str, Tensor], steps: float) -> None:
    """Make these very tensors the optimizer's moments, after ``steps`` steps; without moments, it
    begins anew.

    The step counter is where Megatron's Adam has it: PyTorch's has one in the state of each
    parameter; that of Transformer Engine or Apex, which Megatron takes where one is installed, has
    one in each group of parameters.
    """
    state: dict[str, Any] = dict(moments)
    if of_megatron("optimizer").USING_PYTORCH_OPTIMIZER:
        if moments:
            state["step"] = torch.tensor(float(steps))
    else:
        for group in kept.optimizer.param_groups:
            if any(kept.main is held for held in group["params"]):
                group["step"] = int(steps) if moments else 0
    kept.optimizer.state[kept.main] = state


def torch_optimizers(optimizer: Any) -> Iterator[torch.optim.Optimizer]:
    """Yield PyTorch's optimizers inside of Megatron's."""
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        yield one.optimizer


def on_first_rank(
    held: Sequence[HeldParameter], layout: Layout, strategy: Strategy, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return the weights by their names in a checkpoint on rank 0, on the CPU; ``{}`` elsewhere.

    Collective over the active ranks. One slice travels at a time, from the first data rank of each
    tensor rank and stage; tensors that two stages hold come from the last of them.

    Args:
        held: this rank's parameters.
        layout: layout of weights under the strategy.
        strategy: strategy in force.
        dtype: dtype of the result.
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
                found[piece.tensor][_box(piece)] = data.to(dtype).cpu()
    return found


def _received(
    layout: Layout, source: int, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[Piece, Tensor]]:
    for buffer in layout.of_rank(source):
        for piece in buffer.pieces:
            data = torch.empty(piece.size, dtype=dtype, device=device)
            dist.recv(data, source)
            yield piece, data
