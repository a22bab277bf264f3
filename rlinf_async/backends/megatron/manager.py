"""`MegatronModelManager`: one rank's part of a language model, and the steps that change it.

::

    Hugging Face weights --held--> this rank's slices --stage--> gradients --optimizer--> slices
                                                                   ^
                          data ranks: summed       tensor ranks: parts       stages: own layers
"""

from __future__ import annotations

import logging
import math
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlinf_async.backends.building import building
from rlinf_async.backends.language_training.describing import describing_files
from rlinf_async.backends.language_training.hugging_face import build_language_model
from rlinf_async.backends.megatron.architecture import architecture_of, layout_of
from rlinf_async.backends.megatron.config import MegatronConfig
from rlinf_async.backends.megatron.feed import Feed
from rlinf_async.backends.megatron.grid import Grid, make_grid
from rlinf_async.backends.megatron.library import of_megatron
from rlinf_async.backends.megatron.model import Options, build_stage
from rlinf_async.backends.megatron.optimizer import Sharding, make_optimizer, with_gradients
from rlinf_async.backends.megatron.schedule import Schedule
from rlinf_async.backends.megatron.weights import (
    held_weights,
    load_weights,
    own_slices,
)
from rlinf_async.backends.optimizer_config import lr_factor
from rlinf_async.parallel import DataRank, GlobalTensor, Strategy, StrategyError

log = logging.getLogger(__name__)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class MegatronModelManager:
    """Builds, optimises and gathers one model on one rank. torch.distributed is up.

    Args:
        cfg: how the model is cut and optimised.
        world_size: of the launched ranks, all of which train.
        rank: of this one.
        seed: of random weights.

    Raises:
        StrategyError: the ranks do not make up the strategy, or it does not divide the model.
        ModelMismatch: an architecture that Megatron's layers would compute wrongly.
        MegatronUnavailable: megatron-core is not installed, or in another version.
    """

    def __init__(self, cfg: MegatronConfig, world_size: int, rank: int, seed: int) -> None:
        self.cfg = cfg
        self.rank, self.world_size = rank, world_size
        self.strategy = strategy_of(cfg, world_size)
        self.device = torch.device(cfg.device)
        if not dist.is_initialized():
            collectives: Any = dist
            collectives.init_process_group(
                "gloo", store=collectives.HashStore(), rank=0, world_size=1
            )
        self.steps = 0
        """optimizer steps taken"""
        self.skipped_steps = 0
        """optimizer steps skipped because the gradient norm was not finite"""
        self.weights_offloaded = False
        self.optimizer_offloaded = False
        self.kept: dict[str, dict[str, Tensor]] = {}
        """other weights (the reference policy's), by tag: this rank's part, on the CPU"""
        with building(seed):
            whole, _ = build_language_model(cfg.model)
        self.model_files = describing_files(cfg.model, whole)
        config: Any = whole.config
        self.architecture = architecture_of(config.to_dict())
        layout_of(self.architecture, self.strategy)  # refuses what does not divide, first of all
        self.grid: Grid = make_grid(self.strategy)
        self.feed = Feed(self.grid.feed)
        options = Options(
            dtype=DTYPES[cfg.precision],
            sequence_parallel=cfg.sequence_parallel,
            recompute=cfg.model.activation_checkpointing,
        )
        self.stage: nn.Module = build_stage(self.architecture, self.grid, options).to(self.device)
        self.held = held_weights(self.stage, self.architecture, self.grid)
        load_weights(self.held, whole.state_dict().__getitem__)
        self._language_class, self._language_config = type(whole), config
        del whole
        self._sharding = Sharding(distributed=cfg.distributed_optimizer, overlap=cfg.overlap)
        self.model: Any = with_gradients(self.stage, self.grid, self._sharding)
        self.optimizer = make_optimizer(self.model, self.grid, cfg.optimizer, self._sharding)
        vocabulary = self.architecture.decoder.vocabulary
        self.training = Schedule(self.model, self.stage, self.grid, vocabulary)
        self.inference = Schedule(self.stage, self.stage, self.grid, vocabulary)
        finalize = of_megatron("distributed").finalize_model_grads
        stage_config: Any = self.stage.config
        stage_config.finalize_model_grads_func = partial(_finalize, finalize)

    @property
    def tensors(self) -> tuple[GlobalTensor, ...]:
        """The tensors of a checkpoint of this model."""
        return layout_of(self.architecture, self.strategy).tensors

    @property
    def data_rank(self) -> DataRank:
        """Which samples this rank trains on."""
        place = self.grid.place
        assert place is not None
        return DataRank(place.dp, self.strategy.dp, self.grid.is_io)

    # ---- one optimizer step

    def zero_grad(self) -> None:
        """Zero all gradients."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()

    def optimizer_step(self, gradient_factor: float) -> tuple[float, float]:
        """Scale, clip and step; return the gradient norm before clipping and the learning rate.
        Collective.

        A norm that is not finite skips the step.
        """
        self.model.scale_gradients(gradient_factor)
        lr = self.lr
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        if math.isfinite(norm):
            self.optimizer.step()
            self.steps += 1
        else:
            self.skipped_steps += 1
            log.warning(
                "gradient norm is %s after %d steps: this optimizer step is skipped (%d so far)",
                norm, self.steps, self.skipped_steps,
            )  # fmt: skip
        self.zero_grad()
        return norm, lr

    @property
    def lr(self) -> float:
        """Learning rate of the next optimizer step."""
        return self.cfg.optimizer.lr * lr_factor(self.steps, self.cfg.scheduler)

    # ---- where weights and moments are

    def offload_weights(self) -> None:
        """Move the weights to the CPU. On a CPU there is nothing to free."""
        if not self.weights_offloaded and self._on_device:
            self.gather_parameters()
            for buffer in self._buffers():
                buffer.offload_to_cpu(move_params=True, move_grads=False)
            torch.cuda.empty_cache()
        self.weights_offloaded = True

    def load_weights(self) -> None:
        """Take the weights back to the device."""
        if self.weights_offloaded and self._on_device:
            for buffer in self._buffers():
                buffer.reload_from_cpu(move_params=True, move_grads=False)
        self.weights_offloaded = False

    def offload_optimizer(self) -> None:
        """Move the optimizer's state to the CPU, and free the memory of the gradients."""
        if not self.optimizer_offloaded and self._on_device:
            self.gather_parameters()
            self.optimizer.offload_to_cpu()
            for buffer in self._buffers():
                buffer.offload_to_cpu(move_params=False, move_grads=True)
            torch.cuda.empty_cache()
        self.optimizer_offloaded = True

    def load_optimizer(self) -> None:
        """Take the optimizer's state back to the device, with gradients of 0."""
        if self.optimizer_offloaded and self._on_device:
            for buffer in self._buffers():
                buffer.reload_from_cpu(move_params=False, move_grads=True)
            self.optimizer.restore_from_cpu()
        self.optimizer_offloaded = False

    @property
    def _on_device(self) -> bool:
        return self.device.type != "cpu"

    def _buffers(self) -> list[Any]:
        return [*self.model.buffers, *self.model.expert_parallel_buffers]

    # ---- among ranks

    def sum_over_data(self, row: Tensor) -> None:
        """Add up over the ranks that train on other samples with the same part of the model."""
        if self.strategy.dp > 1:
            dist.all_reduce(row, group=self.grid.data)

    def largest_over_data(self, count: int) -> int:
        """Return the largest count of the data ranks. Collective among those."""
        found = torch.tensor([count], device=self.device)
        if self.strategy.dp > 1:
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self.grid.data)
        return int(found)

    def from_last_stage(self, value: Any) -> Any:
        """Return the value of the last stage's rank. Collective among the ranks of one model."""
        strategy, place = self.strategy, self.grid.place
        assert place is not None
        source = strategy.tp * (place.dp + strategy.dp * (strategy.pp - 1))
        return self.feed.broadcast(value, source)

    def gather_parameters(self) -> None:
        """Have the last step's parameters of all data ranks, where they are gathered as the next
        forward pass needs them. Collective among the data ranks."""
        if self.cfg.overlap and self.cfg.distributed_optimizer:
            self.model.start_param_sync(force_sync=True)

    def live_weights(self) -> dict[str, Tensor]:
        """Return this rank's part of the weights in the model, by name: the memory itself.
        Collective among the data ranks."""
        self.gather_parameters()
        return {one.name: one.parameter.detach() for one in self.held}

    def settle_checkpoint(self) -> None:
        """Return at once: a checkpoint is copied before it is written."""

    def whole_weights(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the weights by their names in a checkpoint on rank 0, ``{}`` elsewhere.
        Collective; one slice travels at a time."""
        layout = layout_of(self.architecture, self.strategy)
        self.gather_parameters()
        place, found = self.grid.place, dict[str, Tensor]()
        assert place is not None
        shapes = {one.name: tuple(one.shape) for one in layout.tensors}
        mine = list(own_slices(self.held))
        for stage in range(self.strategy.pp):
            for tp in range(self.strategy.tp):
                source = tp + self.strategy.tp * self.strategy.dp * stage
                if self.rank == source != 0:
                    for _, data in mine:
                        dist.send(data.to(dtype).contiguous(), 0)
                if self.rank != 0:
                    continue
                if source == 0:
                    slices = [(piece, data.to(dtype)) for piece, data in mine]
                else:
                    slices = []
                    for buffer in layout.of_rank(source):
                        for piece in buffer.pieces:
                            data = torch.empty(piece.size, dtype=dtype, device=self.device)
                            dist.recv(data, source)
                            slices.append((piece, data))
                for piece, data in slices:
                    if piece.tensor not in found:
                        found[piece.tensor] = torch.zeros(shapes[piece.tensor], dtype=dtype)
                    box = tuple(
                        slice(start, start + size)
                        for start, size in zip(piece.start, piece.size, strict=True)
                    )
                    found[piece.tensor][box] = data.cpu()
        return found

    def language_model(self) -> nn.Module:
        """Return the model of transformers, without memory, to be written with weights."""
        make: Any = self._language_class
        with torch.device("meta"):
            model: nn.Module = make(self._language_config)
        return model


def strategy_of(cfg: MegatronConfig, world_size: int) -> Strategy:
    """Return the strategy of so many ranks. Raises `StrategyError` where they do not make it up."""
    part = cfg.tp * cfg.pp
    if world_size % part:
        near = [size for size in (world_size // part * part, -(-world_size // part) * part) if size]
        nearest = ", ".join(map(str, near))
        fault = f"tp={cfg.tp} x pp={cfg.pp} does not divide {world_size} ranks; nearest: {nearest}"
        raise StrategyError([fault])
    return Strategy(tp=cfg.tp, pp=cfg.pp, dp=world_size // part)


def _finalize(finalize: Any, model: Any, tokens: Any, **groups: Any) -> None:
    finalize(model, None, **groups)
