"""`ShardedModelManager`: one model, its optimizer, where they are, and their checkpoints.

`FSDPModelManager` is the one whose model is a registered policy; for language models see
`language.manager`.

Names and semantics: SEMANTICS.md, "Actor over FSDP". World size 1 needs no process group.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from rlinf_async.backends.base import RescaleReport
from rlinf_async.backends.fsdp import offload, persistence, ranks
from rlinf_async.backends.fsdp.config import FSDPConfig, ShardingConfig
from rlinf_async.backends.fsdp.errors import IdleRank, OffloadedError
from rlinf_async.backends.fsdp.gradients import GradientBuffer
from rlinf_async.backends.fsdp.groups import Groups
from rlinf_async.backends.fsdp.optim import LossScaler, lr_factor, parameter_groups
from rlinf_async.backends.fsdp.pretrained import load_pretrained
from rlinf_async.backends.fsdp.rescale import Rescale
from rlinf_async.backends.fsdp.sharding import clip_gradients, gradient_sync, shard
from rlinf_async.backends.fsdp.skeleton import skeleton_of
from rlinf_async.backends.fsdp.state import full_model_state
from rlinf_async.backends.fsdp.writer import CheckpointWriter, ModelFiles
from rlinf_async.backends.policies.base import policies
from rlinf_async.backends.reshard.executor import DEFAULT_BUCKET_BYTES

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ShardedModelManager(ABC):
    """Builds, shards, optimises, offloads, saves and loads one model on one rank.

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
        self.kept: dict[str, dict[str, Tensor]] = {}
        """other weights (the reference's): this rank's shards, on the CPU, by parameter name"""
        self.device = offload.existing_device(offload.rank_device(cfg.device, world_size, rank))
        self.steps = 0
        """optimizer steps taken"""
        self.skipped_steps = 0
        """optimizer steps left out because the gradient norm was not finite"""
        self.param_offloaded = False
        self.optimizer_offloaded = False
        self.checkpoints = CheckpointWriter()
        self._buffers: dict[str, GradientBuffer] = {}

    @property
    def active(self) -> bool:
        """This rank holds a part of the model, and trains."""
        return self.rank < self.world_size

    def check_active(self, doing: str) -> None:
        """Raise `IdleRank` on a rank that is not active."""
        if not self.active:
            raise IdleRank(
                f"{doing} on rank {self.rank}, which is idle: {self.world_size} of "
                f"{self.groups.launched} ranks are active"
            )

    def rescale(
        self,
        world_size: int,
        *,
        timeout: float = 120.0,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        extra: bytes = b"",
        objection: str = "",
    ) -> RescaleReport:
        """Let the first ``world_size`` of the launched ranks train from now on.

        Weights, moments, learning rate, loss scaler and counters go on as they are. Called by all
        launched ranks, between two optimizer steps; ``extra`` of the old active ranks comes to all
        in the report. The others are idle then and hold no memory of the model. A rank with an
        ``objection`` keeps all from changing.

        Raises `ValueError` for a size that was not launched, `RescaleError` when a rank failed, and
        `reshard.PeerLost` when one died or needed more than ``timeout`` seconds. Whatever it is,
        every rank that lives is as it was. Raises `RescaleUndecided` when that cannot be known.
        """
        launched = self.groups.launched
        if not 1 <= world_size <= launched:
            raise ValueError(
                f"world_size is {world_size}; {launched} ranks were launched, so it must lie "
                f"between 1 and {launched}"
            )
        if launched == 1:
            return RescaleReport(1, 1, True, 0.0, 0, 0, 0, (extra,))
        return Rescale(
            self,
            world_size,
            timeout=timeout,
            bucket_bytes=bucket_bytes,
            extra=extra,
            objection=objection,
        ).run()

    @abstractmethod
    def model_provider_func(self) -> nn.Module:
        """Return a new model, on the CPU."""

    def setup_model_and_optimizer(self) -> None:
        """Build the model, shard it, and build optimizer, LR scheduler and loss scaler. Collective.

        All ranks start from the weights of rank 0.
        """
        module = self.model_provider_func().to(self.device)
        ranks.broadcast_module(module, self.world_size)
        if self.world_size > 1 and self.cfg.strategy == "fsdp2":
            self.skeleton = skeleton_of(module)
        self._value_names: set[str] = getattr(module, "value_parameter_names", set)()
        self.model = shard(module, self.cfg.strategy, self.world_size, self.device)
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

    def get_model_state_dict(self, everywhere: bool = False) -> dict[str, Tensor]:
        """Return the full state dict, on rank 0 or on all active ones, else ``{}``. Collective.

        The tensors may be the live ones: copy what must not change (`weights.pack` copies).
        """
        if not self.active:
            return {}
        state = full_model_state(self.model)
        return state if everywhere or self.rank == 0 else {}

    def offload_param_and_grad(self, offload_grad: bool = False) -> None:
        """Move parameters and buffers to the CPU; gradients follow, or are dropped."""
        if self.param_offloaded or not self.active:
            return
        self.settle_checkpoint()
        offload.check_strategy(self.cfg.strategy, self.world_size, self.device)
        if not offload_grad:
            self.optimizer.zero_grad(set_to_none=True)
        self._buffers.clear()  # they would hold the device's memory; gradients have moved out
        offload.move_model(self.model, torch.device("cpu"))
        self.param_offloaded = True

    def load_param_and_grad(
        self, device_id: int | str | torch.device | None = None, load_grad: bool = False
    ) -> None:
        """Move parameters and buffers back to ``device_id`` (the configured device when left out).

        Gradients come back only with ``load_grad`` and when they were offloaded; else they are 0.
        """
        if not self.param_offloaded:
            return
        offload.move_model(self.model, self._target(device_id))
        self.param_offloaded = False
        if not load_grad:
            self.zero_grad()
        elif self.world_size == 1:
            self._buffers = {group["name"]: _collected(group) for group in self._groups}

    def offload_optimizer(self) -> None:
        """Move the optimizer's moments to the CPU; nothing happens when there are none yet."""
        if not self.optimizer_offloaded and self.optimizer.state:
            self.settle_checkpoint()
            offload.move_optimizer(self.optimizer, torch.device("cpu"))
            self.optimizer_offloaded = True

    def load_optimizer(self, device_id: int | str | torch.device | None = None) -> None:
        """Move the optimizer's moments back to ``device_id``."""
        if self.optimizer_offloaded:
            offload.move_optimizer(self.optimizer, self._target(device_id))
            self.optimizer_offloaded = False

    def _target(self, device_id: int | str | torch.device | None) -> torch.device:
        if device_id is None or (isinstance(device_id, int) and self.device.type == "cpu"):
            return self.device
        return torch.device(device_id)

    def model_files(self) -> ModelFiles:
        """Return the files that a checkpoint keeps beside the tensors, to be exported from."""
        return {}

    def save_checkpoint(self, path: str | Path, extra: Mapping[str, Any] | None = None) -> None:
        """Write a checkpoint folder, each rank its own shard, also while offloaded. Collective.

        ``extra`` (tensors and plain values) is this rank's own and comes back from
        `load_checkpoint`. The folder appears when it is complete. Raises the `OSError` of this
        rank, or `CheckpointError` naming the rank that failed; then the folder before is kept.
        """
        if self.active:
            persistence.save(self, Path(path), extra or {})

    def begin_checkpoint(
        self, path: str | Path, extra: Mapping[str, Any] | None = None
    ) -> Future[Path]:
        """Start writing what `save_checkpoint` writes, as it is now, and go on. Collective.

        Waits for the checkpoint before, if it is still being written, and raises its error. The
        future ends, or has the error, when this rank's part is on the disk; when all ranks' are,
        the folder is there. Optimizer steps wait for the copy by themselves; before changing
        parameters in another way, call `settle_checkpoint`.
        """
        if self.active:
            return persistence.begin(self, Path(path), extra or {})
        return self.checkpoints.idle(Path(path))

    def settle_checkpoint(self) -> None:
        """Wait until parameters and moments are copied, if a checkpoint is being written."""
        self.checkpoints.settle()

    def load_checkpoint(
        self, path: str | Path, *, restore_rng: bool = False
    ) -> list[dict[str, Any]]:
        """Take model, optimizer and schedule from a checkpoint of any world size. Collective.

        Returns the ``extra`` of every rank that wrote. What was offloaded stays offloaded. With
        ``restore_rng`` torch's random numbers of this whole process go on as saved too: for a model
        that draws from them (dropout), alone in its process. Raises `CheckpointError` when the
        folder is damaged or of another model.
        """
        self.check_active("load_checkpoint()")
        return persistence.load(self, Path(path), restore_rng=restore_rng)


class FSDPModelManager(ShardedModelManager):
    """The manager of a registered policy."""

    cfg: FSDPConfig

    def __init__(self, cfg: FSDPConfig, world_size: int, rank: int) -> None:
        super().__init__(cfg, world_size, rank)

    def model_provider_func(self) -> nn.Module:
        """Return a new model: the registered policy, or a Hugging Face one where asked for."""
        if self.cfg.pretrained is not None:
            return load_pretrained(self.cfg.pretrained)
        return policies[self.cfg.policy.name](self.cfg.policy)


def _collected(group: dict[str, Any]) -> GradientBuffer:
    buffer = GradientBuffer(group["params"])
    buffer.collect()
    return buffer
