"""Another number of active ranks under FSDP2: its part in the transaction of `backends.rescale`.

::

    connect   the group of the new active ranks
    drain     no gradient is pending, no parameter unsharded
    build     memory for the new shards                           (`shards.NewShards`)
    verify    a copy of the meta model holds them; optimizer and schedule go on
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from rlinf_async.backends.base import OffloadedError, RescaleReport
from rlinf_async.backends.checkpoint.collectives import Counters
from rlinf_async.backends.fsdp.config import FSDPError
from rlinf_async.backends.fsdp.manager import FSDPModelManager
from rlinf_async.backends.fsdp.sharding import (
    NewShards,
    RankShards,
    ShardMemory,
    break_cycles,
    build_from_shards,
    shards_of,
    storages_of,
)
from rlinf_async.backends.fsdp.state import MOMENTS, Shards, moment_shards, reshard, set_moments
from rlinf_async.backends.rescale.rescale import (
    Change,
    TransferGroup,
    collect_unless_freed,
    rescale_together,
    trim_heap,
)
from rlinf_async.backends.reshard import ExchangeReport
from rlinf_async.backends.reshard.executor import DEFAULT_BUCKET_BYTES
from rlinf_async.parallel import FSDP2, Replicated, Strategy, StrategyError


def check_strategy(strategy: Strategy, launched: int) -> None:
    """Raise `StrategyError` for strategies to which FSDP2 on ``launched`` ranks cannot change."""
    faults = [
        f"{field}={size}: FSDP shards over dp alone, so {field} must be 1"
        for field in ("tp", "pp", "cp", "ep", "virtual_stages")
        if (size := getattr(strategy, field)) != 1
    ]
    if strategy.sharding not in (Replicated(), FSDP2()):
        faults.append(f"sharding={strategy.sharding}: only FSDP2() can change while it trains")
    if strategy.dp > launched:
        faults.append(f"dp={strategy.dp}: only {launched} ranks were launched")
    if faults:
        raise StrategyError(faults)


def rescale(
    manager: FSDPModelManager,
    strategy: Strategy,
    *,
    timeout: float = 120.0,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    extra: bytes = b"",
    objection: str = "",
) -> RescaleReport:
    """Let the first ``strategy.dp`` of the launched ranks train from now on.

    Weights, moments, learning rate, loss scaler and counters go on as they are. Called by all
    launched ranks, between two optimizer steps; ``extra`` of the old active ranks comes to all in
    the report. The others are idle then and hold no memory of the model. A rank with an
    ``objection`` keeps all from changing.

    Raises `StrategyError` for what `check_strategy` refuses, and what `Rescale.run` does.
    """
    launched = manager.groups.launched
    return rescale_together(
        lambda: check_strategy(strategy, launched),
        lambda: FSDPChange(manager, strategy.dp),
        manager.strategy,
        Strategy(dp=strategy.dp, sharding=FSDP2()),
        launched,
        timeout=timeout,
        bucket_bytes=bucket_bytes,
        extra=extra,
        objection=objection,
    )


class FSDPProgress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """State of an active rank besides its shards, equal on all of them; new ranks take that of rank
    0."""

    counters: Counters
    groups: list[dict[str, Any]]
    """the optimizer's parameter groups, without their parameters"""
    schedule: dict[str, Any]
    optimizer_steps: dict[str, float]
    """optimizer steps by the name of a parameter that has moments"""
    kept: list[str]
    """names of the kept weights"""


class ProposedState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """State that one rank tells the others."""

    groups: list[int]
    """the sizes for which it has a process group"""
    progress: FSDPProgress | None
    """state beside the shards; None from an idle rank"""


class _Ready(NamedTuple):
    """All that makes up an active or idle rank of the new size."""

    model: nn.Module
    optimizer: torch.optim.AdamW
    lr_scheduler: LambdaLR
    kept: Mapping[str, Shards]


class FSDPChange(Change):
    """A change to ``new`` active ranks, on one rank."""

    def __init__(self, manager: FSDPModelManager, new: int) -> None:
        self._manager = manager
        self._old, self._new = manager.world_size, new
        self._states: list[ProposedState] = []
        self._new_shards: NewShards | None = None
        self._ready: _Ready | None = None

    @property
    def transfer(self) -> TransferGroup:
        """See `Change`."""
        return self._manager.groups.transfer

    @property
    def active(self) -> bool:
        """See `Change`."""
        return self._manager.active

    def propose(self) -> bytes:
        """Return this rank's `ProposedState`; raises `FSDPError` where it cannot change."""
        manager = self._manager
        if manager.cfg.strategy != "fsdp2":
            raise FSDPError(
                f"strategy {manager.cfg.strategy!r} cannot change its number of ranks while it "
                "trains: use strategy 'fsdp2', or a checkpoint, which any number can load"
            )
        if manager.param_offloaded or manager.optimizer_offloaded:
            raise OffloadedError(
                "rescale() while model or optimizer is offloaded: call load_param_and_grad() and "
                "load_optimizer() first"
            )
        progress = _progress_of(manager) if manager.active else None
        return msgspec.msgpack.encode(ProposedState(manager.groups.sizes, progress))

    def connect(self, proposals: Sequence[bytes], limit: timedelta) -> None:
        """Make the group of the new active ranks."""
        self._states = [msgspec.msgpack.decode(one, type=ProposedState) for one in proposals]
        known = all(self._new in one.groups for one in self._states)
        self._manager.groups.prepare(self._new, known=known)

    def drain(self) -> None:
        """Leave no gradient pending, and no parameter unsharded."""
        manager = self._manager
        if not manager.active:
            return
        if manager.gradients.pending():
            raise FSDPError(
                "rescale() between a backward pass and its optimizer step would lose gradients: "
                "call it after optimizer_step() or zero_grad()"
            )
        manager.gradients.drop()
        manager.settle_checkpoint()
        reshard(manager.model)

    def build(self) -> None:
        """Plan, and allocate the new shards."""
        new = NewShards(self._memory, self._manager.device, self._old, self._new)
        self._new_shards = new
        progress = self._progress
        held = _held_shards(self._manager, progress.kept)
        new.make(held, frozenset(progress.optimizer_steps))

    def move(self, bucket_bytes: int, limit: timedelta) -> ExchangeReport:
        """Fill the new shards."""
        assert self._new_shards is not None
        return self._new_shards.fill(self.transfer.group, bucket_bytes, limit)

    def verify(self) -> None:
        """Build model and optimizer of the new size, ready to train."""
        assert self._new_shards is not None
        manager, shards, progress = self._manager, self._new_shards.shards, self._progress
        joins = manager.rank < self._new
        model = self._memory.meta_model
        if joins:
            group = manager.groups.active(self._new)
            model = build_from_shards(model, shards.weights, self._new, group, manager.device)
        optimizer = manager.build_optimizer(model, manager.cfg.critic_warmup_steps > 0)
        scheduler = manager.build_lr_scheduler(optimizer)
        if joins:
            _fill_optimizer(optimizer, model, progress, shards.moments)
        scheduler.load_state_dict(progress.schedule)
        self._ready = _Ready(model, optimizer, scheduler, shards.kept)

    def commit(self) -> None:
        """Make the new model the manager's, and free the old one."""
        ready, new, manager = self._ready, self._new_shards, self._manager
        assert ready is not None  # every rank was done with `verify`
        assert new is not None
        new.release()
        before = storages_of(manager.model, manager.optimizer)
        break_cycles(manager.model, manager.optimizer)
        manager.world_size, manager.group = self._new, manager.groups.active(self._new)
        manager.take(ready.model, ready.optimizer, ready.lr_scheduler)
        manager.kept = dict(ready.kept)
        manager.counters = self._progress.counters
        collect_unless_freed(before)
        if manager.active:
            self._memory.reserved.mark_free()
            manager.zero_grad()
        else:
            self._memory.reserved.give_back()
        trim_heap()

    def roll_back(self) -> None:
        """Drop the new shards."""
        manager = self._manager
        if self._new_shards is not None:
            self._new_shards.release()
        self._ready = None
        if manager.shard_memory is not None and manager.active:
            manager.shard_memory.reserved.mark_free()
        elif manager.shard_memory is not None:
            manager.shard_memory.reserved.give_back()
        if manager.active and not manager.param_offloaded and not manager.gradients.pending():
            manager.zero_grad()

    @property
    def _memory(self) -> ShardMemory:
        memory = self._manager.shard_memory
        assert memory is not None  # strategy fsdp2, on several ranks
        return memory

    @property
    def _progress(self) -> FSDPProgress:
        progress = self._states[0].progress
        assert progress is not None  # rank 0 is always active
        return progress


def _progress_of(manager: FSDPModelManager) -> FSDPProgress:
    state = manager.optimizer.state
    return FSDPProgress(
        counters=manager.counters,
        groups=[
            {key: value for key, value in group.items() if key != "params"}
            for group in manager.optimizer.param_groups
        ],
        schedule=manager.lr_scheduler.state_dict(),
        optimizer_steps={
            name: float(state[parameter]["step"])
            for name, parameter in manager.model.named_parameters()
            if parameter in state
        },
        kept=list(manager.kept),
    )


def _held_shards(manager: FSDPModelManager, names: Sequence[str]) -> RankShards:
    """Return what a rank has; of kept weights those with these names, which active ranks have."""
    kept = {name: manager.kept.get(name, {}) for name in names}
    if not manager.active:
        return RankShards({}, {}, kept)
    moments = {kind: moment_shards(manager.model, manager.optimizer, kind) for kind in MOMENTS}
    return RankShards(shards_of(manager.model), moments, kept)


def _fill_optimizer(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    progress: FSDPProgress,
    moments: Mapping[str, Mapping[str, Tensor]],
) -> None:
    """Give an optimizer the settings of `FSDPProgress`, and these shards of moments."""
    for group, settings in zip(optimizer.param_groups, progress.groups, strict=True):
        group |= settings
        group["betas"] = tuple(group["betas"])
    for name, parameter in model.named_parameters():
        if name in progress.optimizer_steps:
            shards = {kind: of_kind[name] for kind, of_kind in moments.items()}
            set_moments(optimizer, parameter, progress.optimizer_steps[name], shards)
