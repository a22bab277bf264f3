"""`Optimized`: one model on one rank, and the steps that change it.

::

    micro-batch -> forward -> backward -> gradients, added up    (again and again)
                                              |
                           unscale -> clip -> step -> schedule -> zero     (or skip: not finite)

World size 1 needs no process group.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from rlinf_async.backends.fsdp import offload, ranks, rooms
from rlinf_async.backends.fsdp.config import ShardingConfig
from rlinf_async.backends.fsdp.errors import IdleRank, OffloadedError
from rlinf_async.backends.fsdp.gradients import GradientBuffer
from rlinf_async.backends.fsdp.groups import Groups
from rlinf_async.backends.fsdp.optim import LossScaler, lr_factor, parameter_groups
from rlinf_async.backends.fsdp.sharding import (
    clip_gradients,
    gradient_sync,
    shard,
)
from rlinf_async.backends.fsdp.skeleton import skeleton_of
from rlinf_async.backends.reshard import Reservations

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Optimized(ABC):
    """Builds, shards and optimises one model on one rank.

    At world size 1 the model is a plain module (see `sharding`). Methods marked collective must be
    called by all ranks.
    """

    model: nn.Module
    optimizer: torch.optim.AdamW
    lr_scheduler: LambdaLR
    grad_scaler: LossScaler
    skeleton: nn.Module
    """the model without numbers, where the number of ranks can change; that of an idle rank"""

    def __init__(self, cfg: ShardingConfig, world_size: int, rank: int) -> None:
        """Keep the settings; `setup_model_and_optimizer` builds. torch.distributed is up already.

        Raises `ValueError` for a rank outside the world and a device that is not there.
        """
        if not 0 <= rank < world_size:
            raise ValueError(f"rank is {rank}; with world_size {world_size} it must lie below that")
        self.cfg = cfg
        self.world_size = world_size
        """of the active ranks, which share the model: 0 .. world_size - 1"""
        self.rank = rank
        self.group: dist.ProcessGroup | None = None
        """of the active ranks; None is torch's default group"""
        self.groups = Groups(world_size)
        self.device = offload.existing_device(offload.rank_device(cfg.device, world_size, rank))
        self.steps = 0
        """optimizer steps taken"""
        self.skipped_steps = 0
        """optimizer steps left out because the gradient norm was not finite"""
        self.param_offloaded = False
        self.optimizer_offloaded = False
        self.reserved = Reservations()
        """where shards on the CPU are"""
        self._buffers: dict[str, GradientBuffer] = {}

    @property
    def active(self) -> bool:
        """This rank holds a part of the model, and trains."""
        return self.rank < self.world_size

    @property
    def rescales(self) -> bool:
        """The number of active ranks can change."""
        return self.groups.launched > 1 and self.cfg.strategy == "fsdp2"

    def check_active(self, doing: str) -> None:
        """Raise `IdleRank` on a rank that is not active."""
        if not self.active:
            raise IdleRank(
                f"{doing} on rank {self.rank}, which is idle: {self.world_size} of "
                f"{self.groups.launched} ranks are active"
            )

    @abstractmethod
    def model_provider_func(self) -> nn.Module:
        """Return a new model, on the CPU."""

    def setup_model_and_optimizer(self) -> None:
        """Build the model, shard it, and build optimizer, LR scheduler and loss scaler. Collective.

        All ranks start from the weights of rank 0.
        """
        module = self.model_provider_func().to(self.device)
        ranks.broadcast_module(module, self.world_size)
        if self.rescales:
            self.skeleton = skeleton_of(module)
            self.group = self.groups.launch()
        self._value_names: set[str] = getattr(module, "value_parameter_names", set)()
        self.model = shard(module, self.cfg.strategy, self.world_size, self.device, self.group)
        if self.rescales:
            rooms.settle(self)
        self.optimizer = self.build_optimizer(self.model, self.cfg.critic_warmup_steps > 0)
        self.lr_scheduler = self.build_lr_scheduler(self.optimizer)
        self.grad_scaler = self.build_grad_scaler(self.cfg.precision == "float16")
        self.zero_grad()

    def build_optimizer(
        self, model: nn.Module, enable_critic_warmup: bool = False
    ) -> torch.optim.AdamW:
        """Return AdamW with the value's own parameters in a group of their own.

        During critic warm-up the other group is frozen: its gradients are dropped before each step.
        """
        config = self.cfg.optimizer
        groups = parameter_groups(
            model, self._value_names, config, freeze_rest=enable_critic_warmup
        )
        return torch.optim.AdamW(
            groups, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay, fused=True
        )

    def build_lr_scheduler(self, optimizer: torch.optim.Optimizer) -> LambdaLR:
        """Return a constant, linear or cosine schedule with warm-up, counted in optimizer steps."""
        return LambdaLR(optimizer, lambda step: lr_factor(step, self.cfg.scheduler))

    def build_grad_scaler(self, enabled: bool) -> LossScaler:
        """Return the loss scaler; one that is not enabled changes nothing."""
        return LossScaler(enabled=enabled)

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context in which to run the forward pass."""
        if self.cfg.precision == "float32":
            return nullcontext()
        return torch.autocast(self.device.type, DTYPES[self.cfg.precision])

    def before_micro_batch(
        self, model: nn.Module, is_last_micro_batch: bool
    ) -> AbstractContextManager[None]:
        """Return the context of one micro-batch: gradients cross the ranks only in the last."""
        return gradient_sync(model, enabled=is_last_micro_batch)

    def backward(self, loss: Tensor) -> None:
        """Scale the loss and add its gradients to those there are."""
        torch.autograd.backward(self.grad_scaler.scale(loss))

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def zero_grad(self) -> None:
        """Zero all gradients; at world size 1 they become views of one buffer a group."""
        if self.world_size > 1:
            self.optimizer.zero_grad(set_to_none=True)
            return
        for group in self._groups:
            buffer = self._buffers.get(group["name"])
            if buffer is None:
                buffer = self._buffers[group["name"]] = GradientBuffer(group["params"])
            buffer.attach()

    def has_gradients(self) -> bool:
        """Whether gradients were added up since they were zeroed."""
        if self.world_size > 1:
            return any(parameter.grad is not None for parameter in self.model.parameters())
        return any(bool(buffer.flat.any()) for buffer in self._buffers.values())

    def _buffer_gradients(self) -> None:
        """Take the gradients that the parameters have into buffers, at world size 1."""
        self._buffers = {group["name"]: GradientBuffer(group["params"]) for group in self._groups}
        for buffer in self._buffers.values():
            buffer.collect()

    def drop_gradients(self) -> None:
        """Give the gradients' memory back; `zero_grad` before the next backward pass."""
        self._buffers.clear()
        self.optimizer.zero_grad(set_to_none=True)

    def optimizer_step(self, gradient_factor: float = 1.0) -> tuple[float, list[float]]:
        """Unscale, clip, step, schedule, and zero the gradients. Collective.

        Gradients are multiplied by ``gradient_factor`` first: what divides a sum whose size was not
        known while it was added up.

        Returns the gradient norm before clipping and the learning rate that each group was stepped
        with. A norm that is not finite skips the step, logs a warning and counts in
        ``skipped_steps``. Raises `OffloadedError` while offloaded.
        """
        self.check_active("optimizer_step()")
        if self.param_offloaded or self.optimizer_offloaded:
            raise OffloadedError(
                "optimizer_step() while model or optimizer is offloaded: call "
                "load_param_and_grad() and load_optimizer() first"
            )
        lrs = [group["lr"] for group in self._groups]
        grad_norm = self._clip(gradient_factor)
        finite = math.isfinite(grad_norm)
        if finite:
            if self.rescales:
                rooms.first_moments(self)
            self.optimizer.step()
            self._advance()
        else:
            self.skipped_steps += 1
            logger.warning(
                "gradient norm is %s after %d steps: this optimizer step is skipped (%d so far)",
                grad_norm,
                self.steps,
                self.skipped_steps,
            )
        self.grad_scaler.update(finite=finite)
        self.zero_grad()
        return grad_norm, lrs

    def _clip(self, factor: float) -> float:
        limit = self.cfg.optimizer.max_grad_norm
        frozen = [group for group in self.optimizer.param_groups if group["frozen"]]
        if self.world_size > 1:
            for group in frozen:
                for parameter in group["params"]:
                    parameter.grad = None
            gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
            self._rescale(gradients, factor)
            return clip_gradients(self.model, limit)
        return self._clip_buffers({group["name"] for group in frozen}, limit, factor)

    def _rescale(self, gradients: Sequence[Tensor], factor: float) -> None:
        self.grad_scaler.unscale(gradients)
        if factor != 1.0:
            for gradient in gradients:
                gradient.mul_(factor)

    def _clip_buffers(self, frozen: set[str], limit: float | None, factor: float) -> float:
        active = [buffer for name, buffer in self._buffers.items() if name not in frozen]
        for name in frozen:
            self._buffers[name].detach()
        for buffer in active:
            buffer.collect()
        flats = [buffer.flat for buffer in active]
        self._rescale(flats, factor)
        norm = math.hypot(*(torch.linalg.vector_norm(flat).item() for flat in flats))
        if limit is not None and limit < norm < math.inf:
            for flat in flats:
                flat.mul_(limit / (norm + 1e-6))
        return norm

    def set_progress(self, steps: int) -> None:
        """Put schedule and critic warm-up where they are after ``steps`` optimizer steps.

        The rates are those of this run's configuration.
        """
        self.steps = steps
        self.lr_scheduler.last_epoch = steps
        factor = lr_factor(steps, self.cfg.scheduler)
        for group in self._groups:
            group["lr"] = group["initial_lr"] * factor
            group["frozen"] = group["name"] == "policy" and steps < self.cfg.critic_warmup_steps

    def _advance(self) -> None:
        self.steps += 1
        if self.cfg.scheduler.kind != "constant" or self.steps <= self.cfg.scheduler.warmup_steps:
            self.lr_scheduler.step()
        if self.steps == self.cfg.critic_warmup_steps:
            for group in self._groups:
                group["frozen"] = False
