"""`FSDPModelManager`: one model on one rank, the steps that change it, and its checkpoints.

::

    micro-batch -> forward -> backward -> gradients, added up    (again and again)
                                              |
                           unscale -> clip -> step -> schedule -> zero     (or skip: not finite)

Names are those of RLinf's manager; ``docs/coming-from-rlinf.md`` has what they mean. World size 1
needs no process group. How the number of ranks changes: `rlinf_async.backends.fsdp.rescale`.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from rlinf_async.backends.base import (
    FirstWeights,
    IdleRank,
    NotSetUp,
    OffloadedError,
    lr_factor,
    made_by,
)
from rlinf_async.backends.building import one_at_a_time
from rlinf_async.backends.checkpoint import collectives
from rlinf_async.backends.checkpoint.collectives import Counters
from rlinf_async.backends.checkpoint.writing import CheckpointWriter, ModelFiles
from rlinf_async.backends.fsdp import beginning, checkpoint
from rlinf_async.backends.fsdp import sharding as offload
from rlinf_async.backends.fsdp.adamw import PlainAdamW
from rlinf_async.backends.fsdp.checkpoint import LossScaler, parameter_groups
from rlinf_async.backends.fsdp.config import FSDPConfig, ShardingConfig
from rlinf_async.backends.fsdp.sharding import (
    Groups,
    ShardMemory,
    add_first_moments,
    add_moments,
    meta_copy,
    place_parameters,
)
from rlinf_async.backends.fsdp.state import Shards, full_model_state, local_shard, shard
from rlinf_async.backends.policies.base import find_policy
from rlinf_async.parallel import FSDP2, Strategy


class GradientBuffer:
    """Lays the gradients of ``parameters`` back to back; each ``.grad`` is a view of ``flat``.

    Measuring and scaling them is then one call for the whole group instead of one for each tensor:
    for a tiny policy that saves a tenth of the update.

    Invariant: after `attach` every gradient is a view, and autograd adds into it in place.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        first = self._parameters[0]
        sizes = [parameter.numel() for parameter in self._parameters]
        self.flat = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
        self._views: list[Tensor] = [
            piece.view(parameter.shape)
            for piece, parameter in zip(
                torch.split(self.flat, sizes), self._parameters, strict=True
            )
        ]

    def attach(self) -> None:
        """Zero the buffer and make it the gradient of every parameter."""
        self.flat.zero_()
        for parameter, view in zip(self._parameters, self._views, strict=True):
            if parameter.grad is not view:
                parameter.grad = view

    def collect(self) -> None:
        """Copy in gradients that were made outside the buffer."""
        for parameter, view in zip(self._parameters, self._views, strict=True):
            if parameter.grad is view:
                continue
            if parameter.grad is None:
                view.zero_()
            else:
                view.copy_(parameter.grad)
            parameter.grad = view

    def detach(self) -> None:
        """Remove the gradients, so that an optimizer skips these parameters."""
        for parameter in self._parameters:
            parameter.grad = None


class Gradients:
    """The gradients of one optimizer's parameters on one rank.

    A sharded model's are those of FSDP; others lie in a `GradientBuffer` for each parameter group.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, sharded: bool) -> None:
        self._optimizer, self._sharded = optimizer, sharded
        self._buffers: dict[str, GradientBuffer] = {}
        """buffers by parameter group"""

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups

    def zero(self) -> None:
        """Zero all gradients."""
        if self._sharded:
            self._optimizer.zero_grad(set_to_none=True)
            return
        for group in self._groups:
            buffer = self._buffers.get(group["name"])
            if buffer is None:
                buffer = self._buffers[group["name"]] = GradientBuffer(group["params"])
            buffer.attach()

    def pending(self) -> bool:
        """Whether gradients were added up since they were zeroed."""
        if self._sharded:
            return any(one.grad is not None for group in self._groups for one in group["params"])
        return any(bool(buffer.flat.any()) for buffer in self._buffers.values())

    def drop(self) -> None:
        """Free the gradients' memory; call `zero` before the next backward pass."""
        self._buffers.clear()
        self._optimizer.zero_grad(set_to_none=True)

    def release_buffers(self) -> None:
        """Forget the buffers, whose memory is on the device that the model leaves."""
        self._buffers.clear()

    def rebuild_buffers(self) -> None:
        """Copy the gradients that the parameters have into new buffers."""
        if self._sharded:
            return
        self._buffers = {group["name"]: GradientBuffer(group["params"]) for group in self._groups}
        for buffer in self._buffers.values():
            buffer.collect()

    def clip(
        self, model: nn.Module, max_norm: float | None, factor: float, scaler: LossScaler
    ) -> float:
        """Unscale, multiply by ``factor`` and clip to ``max_norm``; return the norm before.

        Gradients of frozen parameter groups are removed first. Collective where sharded. ``model``
        is the one with these parameters.
        """
        frozen = [group for group in self._groups if group["frozen"]]
        if not self._sharded:
            return self._clip_buffers({group["name"] for group in frozen}, max_norm, factor, scaler)
        for group in frozen:
            for parameter in group["params"]:
                parameter.grad = None
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        _rescale(gradients, factor, scaler)
        return _clip_sharded(model, max_norm)

    def _clip_buffers(
        self, frozen: set[str], max_norm: float | None, factor: float, scaler: LossScaler
    ) -> float:
        trained = [buffer for name, buffer in self._buffers.items() if name not in frozen]
        for name in frozen:
            self._buffers[name].detach()
        for buffer in trained:
            buffer.collect()
        flats = [buffer.flat for buffer in trained]
        _rescale(flats, factor, scaler)
        norm = math.hypot(*(torch.linalg.vector_norm(flat).item() for flat in flats))
        if max_norm is not None and max_norm < norm < math.inf:
            for flat in flats:
                flat.mul_(max_norm / (norm + 1e-6))
        return norm


@contextlib.contextmanager
def gradient_sync(model: nn.Module, *, enabled: bool) -> Iterator[None]:
    """Reduce gradients over the ranks after the backward passes inside, or only add them up."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(enabled)
        yield
    elif isinstance(model, FullyShardedDataParallel) and not enabled:
        with model.no_sync():
            yield
    else:
        yield


def _rescale(gradients: Sequence[Tensor], factor: float, scaler: LossScaler) -> None:
    scaler.unscale(gradients)
    if factor != 1.0:
        for gradient in gradients:
            gradient.mul_(factor)


def _clip_sharded(model: nn.Module, max_norm: float | None) -> float:
    limit = float("inf") if max_norm is None else max_norm
    if isinstance(model, FullyShardedDataParallel):
        return float(model.clip_grad_norm_(limit))
    norm = nn.utils.clip_grad_norm_(model.parameters(), limit)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def load_pretrained(folder: str) -> nn.Module:
    """Return the causal language model in ``folder``, float32.

    Raises `ValueError` when the folder holds no model and `ModuleNotFoundError` when the
    ``transformers`` package is missing.
    """
    if not (Path(folder) / "config.json").is_file():
        raise ValueError(
            f"pretrained is {folder!r}: there is no config.json in that folder; give the folder of "
            "a Hugging Face model, or leave it out to use a registered policy"
        )
    try:
        transformers = importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"pretrained is {folder!r}, but the package 'transformers' is not installed: "
            "pip install transformers"
        ) from error
    with one_at_a_time:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if not isinstance(model, nn.Module):
        raise ValueError(f"transformers made a {type(model).__name__} of {folder!r}, not a module")
    return model


logger = logging.getLogger(__name__)

ModelProvider = Callable[[], nn.Module]
"""returns a new model, on the CPU"""

SETUP = "setup_model_and_optimizer()"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class FSDPModelManager:
    """Builds, shards, optimises, offloads, saves and loads one model on one rank.

    At world size 1 the model is a plain module (see `sharding`). Methods marked collective must be
    called by all ranks.

    Args:
        cfg: how the model is sharded and optimised.
        world_size: number of launched ranks, all of which are active at first.
        rank: number of this rank.
        model_provider: builds the model; without it ``cfg`` is a `FSDPConfig`, which names a
            policy. What is built in it may have a method ``value_parameter_names``: the names of
            the parameters that only the value uses.

    Raises `ValueError` for a rank outside the world and a device that does not exist. What needs
    the model raises `NotSetUp` before `setup_model_and_optimizer`. torch.distributed is up already.
    """

    model: nn.Module = made_by(SETUP)
    optimizer: torch.optim.AdamW = made_by(SETUP)
    lr_scheduler: LambdaLR = made_by(SETUP)
    grad_scaler: LossScaler = made_by(SETUP)
    gradients: Gradients = made_by(SETUP)

    def __init__(
        self,
        cfg: ShardingConfig,
        world_size: int,
        rank: int,
        model_provider: ModelProvider | None = None,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank is {rank}; with world_size {world_size} it must lie below that")
        self.cfg = cfg
        self.world_size = world_size
        """number of active ranks, which share the model: 0 .. world_size - 1"""
        self.rank = rank
        self.group: dist.ProcessGroup | None = None
        """process group of the active ranks; None is torch's default group"""
        self.groups = Groups(world_size)
        self.device = offload.existing_device(offload.rank_device(cfg.device, world_size, rank))
        self.steps = 0
        """optimizer steps taken"""
        self.skipped_steps = 0
        """optimizer steps skipped because the gradient norm was not finite"""
        self.param_offloaded = False
        self.optimizer_offloaded = False
        self.kept: dict[str, Shards] = {}
        """other weights (the reference policy's), by name: this rank's shards, on the CPU"""
        self.model_files: ModelFiles = {}
        """files that a checkpoint keeps beside the tensors, to export the model from"""
        self.shard_memory: ShardMemory | None = None
        """memory of the shards where the number of active ranks can change"""
        self.checkpoints = CheckpointWriter()
        self._provider = model_provider
        self._value_names: set[str] = set()

    @property
    def active(self) -> bool:
        """Whether this rank holds a part of the model, and trains."""
        return self.rank < self.world_size

    @property
    def strategy(self) -> Strategy:
        """The strategy that is in force."""
        return Strategy(dp=self.world_size, sharding=FSDP2())

    def check_active(self, doing: str) -> None:
        """Raise `IdleRank` on a rank that is not active, `NotSetUp` before there is a model."""
        if "model" not in vars(self):
            raise NotSetUp(f"{doing} before there is a model: call {SETUP} first")
        if not self.active:
            raise IdleRank(
                f"{doing} on rank {self.rank}, which is idle: {self.world_size} of "
                f"{self.groups.launched} ranks are active"
            )

    def check_loaded(self, doing: str) -> None:
        """Raise `OffloadedError` while the weights are offloaded, `IdleRank` on an idle rank."""
        self.check_active(doing)
        if self.param_offloaded:
            raise OffloadedError(f"{doing} while the model is offloaded: call onload() first")

    # -- building -----------------------------------------------------------------------------

    def model_provider_func(self) -> nn.Module:
        """Return a new model, on the CPU. Raises what `load_pretrained` does."""
        if self._provider is not None:
            return self._provider()
        if not isinstance(self.cfg, FSDPConfig):
            raise ValueError(
                f"there is no model to build: pass model_provider, or a FSDPConfig, which names a "
                f"policy, instead of a {type(self.cfg).__name__}"
            )
        if self.cfg.pretrained is not None:
            return load_pretrained(self.cfg.pretrained)
        return find_policy(self.cfg.policy.name)(self.cfg.policy)

    def setup_model_and_optimizer(self) -> None:
        """Build the model, shard it, and build optimizer, LR scheduler and loss scaler. Collective.

        All ranks start from the weights of rank 0.
        """
        module = self.model_provider_func().to(self.device)
        collectives.broadcast_module(module, self.world_size)
        self._value_names = getattr(module, "value_parameter_names", set)()
        if self.world_size > 1 and self.cfg.strategy == "fsdp2":  # their number can change
            self.shard_memory = ShardMemory(meta_copy(module), self.rank)
            self.group = self.groups.launch()
        model = shard(module, self.cfg.strategy, self.world_size, self.device, self.group)
        if self.shard_memory is not None:
            place_parameters(model, self.shard_memory, self.world_size, self.device)
        optimizer = self.build_optimizer(model, self.cfg.critic_warmup_steps > 0)
        self.take(model, optimizer, self.build_lr_scheduler(optimizer))
        self.grad_scaler = self.build_grad_scaler(self.cfg.precision == "float16")
        self.zero_grad()

    def take(self, model: nn.Module, optimizer: torch.optim.AdamW, lr_scheduler: LambdaLR) -> None:
        """Make these the ones that train, on the present number of active ranks."""
        self.model, self.optimizer, self.lr_scheduler = model, optimizer, lr_scheduler
        self.gradients = Gradients(optimizer, sharded=self.world_size > 1)

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
        made = PlainAdamW if PlainAdamW.covers(model) else torch.optim.AdamW
        return made(
            groups, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay, fused=True
        )

    def restart_optimizer(self) -> None:
        """Begin anew with optimizer, schedule and counters; the weights stay as they are."""
        optimizer = self.build_optimizer(self.model, self.cfg.critic_warmup_steps > 0)
        self.take(self.model, optimizer, self.build_lr_scheduler(optimizer))
        self.grad_scaler = self.build_grad_scaler(self.cfg.precision == "float16")
        self.steps = self.skipped_steps = 0
        self.zero_grad()

    def build_lr_scheduler(self, optimizer: torch.optim.Optimizer) -> LambdaLR:
        """Return a constant, linear or cosine schedule with warm-up, counted in optimizer steps."""
        return LambdaLR(optimizer, lambda step: lr_factor(step, self.cfg.scheduler))

    def build_grad_scaler(self, enabled: bool) -> LossScaler:
        """Return the loss scaler; one that is not enabled changes nothing."""
        return LossScaler(enabled=enabled)

    # -- one optimizer step -------------------------------------------------------------------

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
        """Scale the loss and add its gradients to those of earlier micro-batches.

        Raises `OffloadedError` while offloaded, `IdleRank` on an idle rank.
        """
        self.check_loaded("backward()")
        torch.autograd.backward(self.grad_scaler.scale(loss))

    def zero_grad(self) -> None:
        """Zero all gradients."""
        self.gradients.zero()

    def optimizer_step(self, gradient_factor: float = 1.0) -> tuple[float, list[float]]:
        """Unscale, clip, step, schedule, and zero the gradients. Collective.

        Gradients are multiplied by ``gradient_factor`` first: one over the size of their sum, where
        that was unknown while they were added up.

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
        lrs = [group["lr"] for group in self.optimizer.param_groups]
        max_norm = self.cfg.optimizer.max_grad_norm
        grad_norm = self.gradients.clip(self.model, max_norm, gradient_factor, self.grad_scaler)
        finite = math.isfinite(grad_norm)
        if finite:
            if self.shard_memory is not None:
                add_first_moments(self.model, self.optimizer, self.shard_memory, self.world_size)
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

    def _advance(self) -> None:
        self.steps += 1
        if self.cfg.scheduler.kind != "constant" or self.steps <= self.cfg.scheduler.warmup_steps:
            self.lr_scheduler.step()
        if self.steps == self.cfg.critic_warmup_steps:
            for group in self.optimizer.param_groups:
                group["frozen"] = False

    @property
    def counters(self) -> Counters:
        """Counters of the training's progress."""
        scaler = self.grad_scaler
        return Counters(self.steps, self.skipped_steps, scaler.factor, scaler.good_steps)

    @counters.setter
    def counters(self, counters: Counters) -> None:
        self.steps, self.skipped_steps = counters.steps, counters.skipped_steps
        self.grad_scaler.factor = counters.scaler_factor
        self.grad_scaler.good_steps = counters.scaler_good_steps

    def resume_at(self, counters: Counters) -> None:
        """Set the counters, and schedule and critic warm-up to where they are at that step.

        The learning rates are those of this run's configuration.
        """
        self.counters = counters
        self.lr_scheduler.last_epoch = self.steps
        factor = lr_factor(self.steps, self.cfg.scheduler)
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
            group["frozen"] = (
                group["name"] == "policy" and self.steps < self.cfg.critic_warmup_steps
            )

    # -- where weights and moments are --------------------------------------------------------

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
        self.gradients.release_buffers()
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
        if load_grad:
            self.gradients.rebuild_buffers()
        else:
            self.zero_grad()

    def offload_optimizer(self) -> None:
        """Move the optimizer's moments to the CPU, if it has any yet."""
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

    # -- checkpoints --------------------------------------------------------------------------

    def save_checkpoint(self, path: str | Path, extra: Mapping[str, Any] | None = None) -> None:
        """Write a checkpoint folder, each rank its own shard, also while offloaded. Collective.

        ``extra`` (tensors and plain values) is this rank's own and comes back from
        `load_checkpoint`. The folder appears when it is complete. Raises the `OSError` of this
        rank, or `CheckpointError` naming the rank that failed; then the folder before is kept.
        """
        if self.active:
            checkpoint.save(self, self.checkpoints, Path(path), self._source(extra))

    def begin_checkpoint(
        self, path: str | Path, extra: Mapping[str, Any] | None = None
    ) -> Future[Path]:
        """Start writing what `save_checkpoint` writes, as it is now, and return. Collective.

        Waits for the checkpoint before, if it is still being written, and raises its error. The
        future ends, or has the error, when this rank's part is on the disk; when all ranks' are,
        the folder exists. Optimizer steps wait for the copy automatically; before changing
        parameters in another way, call `settle_checkpoint`.
        """
        if self.active:
            return checkpoint.begin(self, self.checkpoints, Path(path), self._source(extra))
        return self.checkpoints.idle(Path(path))

    def _source(self, extra: Mapping[str, Any] | None) -> checkpoint.SavedModel:
        return checkpoint.SavedModel(
            self.model, self.optimizer, self.counters, extra or {}, self.model_files
        )

    def live_weights(self) -> Shards:
        """Return this rank's part of the weights that are trained, by name: the memory itself."""
        return {
            name: local_shard(one).detach()
            for name, one in self.model.named_parameters()
            if one.requires_grad
        }

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
        zero_moments = partial(
            add_moments, self.optimizer, memory=self.shard_memory, ranks=self.world_size
        )
        own = checkpoint.load(
            self, self.checkpoints, Path(path), self.model, self.optimizer, zero_moments
        )
        if self.optimizer_offloaded:
            offload.move_optimizer(self.optimizer, torch.device("cpu"))
        self.resume_at(own[0].counters)
        if restore_rng:
            torch.set_rng_state(own[self.rank % len(own)].rng.clone())
        return [one.extra for one in own]

    def take_weights(self, first: FirstWeights) -> None:
        """Begin with weights of another run, under any world size. Collective.

        Raises `CheckpointError` when the folder is damaged, or a tensor does not fit.
        """
        self.check_active("take_weights()")
        beginning.take(self.model, first)
