"""`ShardedModelManager`: where one model and its optimizer are, on how many ranks, and their
checkpoints.

`FSDPModelManager` is the one whose model is a registered policy; for language models see
`language.manager`.

Names and semantics: SEMANTICS.md, "Actor over FSDP". World size 1 needs no process group.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlinf_async.backends.base import RescaleReport
from rlinf_async.backends.fsdp import offload, persistence
from rlinf_async.backends.fsdp.config import FSDPConfig, ShardingConfig
from rlinf_async.backends.fsdp.optimized import Optimized
from rlinf_async.backends.fsdp.pretrained import load_pretrained
from rlinf_async.backends.fsdp.rescale import Rescale
from rlinf_async.backends.fsdp.state import full_model_state
from rlinf_async.backends.fsdp.writer import CheckpointWriter, ModelFiles
from rlinf_async.backends.policies.base import policies
from rlinf_async.backends.reshard.executor import DEFAULT_BUCKET_BYTES


class ShardedModelManager(Optimized):
    """Builds, shards, optimises, offloads, saves and loads one model on one rank.

    For what builds and optimises see `Optimized`. Methods marked collective must be called by all
    ranks.
    """

    def __init__(self, cfg: ShardingConfig, world_size: int, rank: int) -> None:
        super().__init__(cfg, world_size, rank)
        self.kept: dict[str, dict[str, Tensor]] = {}
        """other weights (the reference's): this rank's shards, on the CPU, by parameter name"""
        self.checkpoints = CheckpointWriter()

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
            return RescaleReport(1, 1, True, 0.0, 0, 0, 0, 0, (extra,))
        return Rescale(
            self,
            world_size,
            timeout=timeout,
            bucket_bytes=bucket_bytes,
            extra=extra,
            objection=objection,
        ).run()

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
            self._buffer_gradients()

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
