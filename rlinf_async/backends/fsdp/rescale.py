"""Another number of active ranks while the run goes on: weights, optimizer and progress move.

::

    propose   all ranks were asked for the same, and may change   -- all agree --> process groups
    connect   process groups of the new size                                       will be made
    drain     no gradient is pending, no parameter unsharded
    build     memory for the new shards, beside the old ones but for what stays in place
    move      old shards --buckets--> new shards                  (`backends.reshard`)
    verify    model, optimizer and progress of the new size are ready
              -- all agree, one decides for all --> commit: they become the manager's

Every stage ends in an exchange of results (`transaction`). Until the commit nothing of the old
model, its optimizer or its groups is touched, so a failure or a timeout at any place on any rank
leaves all of them as they were; the commit itself does nothing that could fail.
"""

from __future__ import annotations

import itertools
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store
from torch.optim.lr_scheduler import LambdaLR

from rlinf_async.backends.base import RescaleReport
from rlinf_async.backends.fsdp.errors import (
    FSDPError,
    OffloadedError,
    RescaleError,
    RescaleUndecided,
)
from rlinf_async.backends.fsdp.manager import FSDPModelManager
from rlinf_async.backends.fsdp.meta_model import build_from_shards, shards_of
from rlinf_async.backends.fsdp.optim import Counters
from rlinf_async.backends.fsdp.release import (
    break_cycles,
    collect_unless_freed,
    storages_of,
    trim_heap,
)
from rlinf_async.backends.fsdp.sharding import Shards, reshard
from rlinf_async.backends.fsdp.shards import NewShards, RankShards, ShardMemory
from rlinf_async.backends.fsdp.state import MOMENTS, moment_shards, set_moments
from rlinf_async.backends.fsdp.transaction import StageResult, Transaction
from rlinf_async.backends.reshard import NotAgreed, PeerLost, Report
from rlinf_async.backends.reshard.executor import DEFAULT_BUCKET_BYTES

_attempts = itertools.count()
"""Of this process, like torch's groups: models share one store, and all ranks rescale them in the
same order."""


def rescale(
    manager: FSDPModelManager,
    world_size: int,
    *,
    timeout: float = 120.0,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    extra: bytes = b"",
    objection: str = "",
) -> RescaleReport:
    """Let the first ``world_size`` of the launched ranks train from now on.

    Weights, moments, learning rate, loss scaler and counters go on as they are. Called by all
    launched ranks, between two optimizer steps; ``extra`` of the old active ranks comes to all in
    the report. The others are idle then and hold no memory of the model. A rank with an
    ``objection`` keeps all from changing.

    Raises `ValueError` for a size that was not launched, `RescaleError` when a rank failed, and
    `reshard.PeerLost` when one died or needed more than ``timeout`` seconds. Whatever it is, every
    rank that lives is as it was. Raises `RescaleUndecided` when that cannot be known.
    """
    launched = manager.groups.launched
    if not 1 <= world_size <= launched:
        raise ValueError(
            f"world_size is {world_size}; {launched} ranks were launched, so it must lie between "
            f"1 and {launched}"
        )
    if launched == 1:
        return RescaleReport(1, 1, True, 0.0, 0, 0, 0, 0, (extra,))
    return Rescale(
        manager,
        world_size,
        timeout=timeout,
        bucket_bytes=bucket_bytes,
        extra=extra,
        objection=objection,
    ).run()


class Progress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an active rank has besides its shards: the same on each; rank 0's goes to new ones."""

    counters: Counters
    groups: list[dict[str, Any]]
    """the optimizer's parameter groups, without their parameters"""
    schedule: dict[str, Any]
    optimizer_steps: dict[str, float]
    """by the name of a parameter that has moments"""


class Proposal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one rank was asked for, and what it contributes."""

    world_size: int
    bucket_bytes: int
    groups: list[int]
    """the sizes for which it has a process group"""
    progress: Progress | None
    """None from an idle rank"""
    extra: bytes


class _Ready(NamedTuple):
    """All that makes up an active or idle rank of the new size."""

    model: nn.Module
    optimizer: torch.optim.AdamW
    lr_scheduler: LambdaLR
    kept: Mapping[str, Shards]


class Rescale:
    """One attempt, on one rank. `run` goes through the stages."""

    def __init__(
        self,
        manager: FSDPModelManager,
        world_size: int,
        *,
        timeout: float,
        bucket_bytes: int,
        extra: bytes = b"",
        objection: str = "",
    ) -> None:
        self._objection = objection
        self._manager = manager
        self._old, self._new = manager.world_size, world_size
        self._timeout, self._bucket_bytes, self._extra = timeout, bucket_bytes, extra
        self._began = time.monotonic()
        store = PrefixStore(f"rescale/{next(_attempts)}", _get_default_store())
        launched = manager.groups.launched
        self._transaction = Transaction(store, manager.rank, launched, self._began + timeout)
        self._proposals: list[Proposal] = []
        self._new_shards: NewShards | None = None
        self._moved: Report | None = None
        self._ready: _Ready | None = None

    def run(self) -> RescaleReport:
        """Go through all stages; raises `RescaleError` or `PeerLost` when nothing changed.

        Raises `RescaleUndecided` when that cannot be known any more.
        """
        stages: tuple[tuple[str, Callable[[], bytes | None]], ...] = (
            ("connect", self.connect),
            ("drain", self.drain),
            ("build", self.build),
            ("move", self.move),
            ("verify", self.verify),
        )
        try:
            self._agree_on_proposal()
            for name, stage in stages:
                self._through(name, stage)
            self.decide()
        except BaseException as error:
            if self._abort(error):
                self._disconnect(error)
                self._roll_back()
                if isinstance(error, RescaleError | PeerLost) or not isinstance(error, Exception):
                    raise
                raise RescaleError(f"on this rank ({self._manager.rank}): {error!r}") from error
        self._commit()
        return self._report()

    # -- the stages ---------------------------------------------------------------------------

    def propose(self) -> bytes:
        """Return this rank's `Proposal`; raises `FSDPError` where it cannot change."""
        manager = self._manager
        if self._objection:
            raise FSDPError(self._objection)
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
        return msgspec.msgpack.encode(
            Proposal(self._new, self._bucket_bytes, manager.groups.sizes, progress, self._extra)
        )

    def connect(self) -> None:
        """Make the process groups. If any rank comes here, all do: torch counts groups."""
        known = all(self._new in one.groups for one in self._proposals)
        limit = timedelta(seconds=self._timeout)
        self._manager.groups.prepare(self._new, limit, known=known)

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
        new.make(_held_shards(self._manager), frozenset(self._progress.optimizer_steps))

    def move(self) -> None:
        """Fill the new shards."""
        assert self._new_shards is not None
        limit = timedelta(seconds=self._transaction.seconds_left)
        group = self._manager.groups.transfer
        self._moved = self._new_shards.fill(group, self._bucket_bytes, limit)

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

    def decide(self) -> None:
        """Commit, unless a rank has given up."""
        self._transaction.decide()

    # -- around them --------------------------------------------------------------------------

    @property
    def _memory(self) -> ShardMemory:
        memory = self._manager.shard_memory
        assert memory is not None  # strategy fsdp2, on several ranks
        return memory

    @property
    def _progress(self) -> Progress:
        progress = self._proposals[0].progress
        assert progress is not None  # rank 0 is always active
        return progress

    def _agree_on_proposal(self) -> None:
        """After this every rank comes to `connect`."""
        self._take_proposals(self._through("propose", self.propose))
        _check_same(self._proposals)
        self._transaction.decide()

    def _take_proposals(self, contents: list[bytes]) -> None:
        self._proposals = [msgspec.msgpack.decode(one, type=Proposal) for one in contents]

    def _through(self, name: str, stage: Callable[[], bytes | None]) -> list[bytes]:
        """Run a stage, and exchange its result; return the content of every rank's."""
        try:
            result = StageResult(content=stage() or b"")
        except (PeerLost, NotAgreed) as error:
            self._disconnect(error)
            self._transaction.exchange(name, StageResult("peer failed", str(error)))
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            try:
                self._transaction.report(name, StageResult("failed", reason))
            finally:  # only then: a rank that finds this one gone waits little for its result
                self._disconnect(error)
            what = f"stage {name!r} failed on this rank ({self._manager.rank}): {reason}"
            raise RescaleError(what) from error
        return self._transaction.exchange(name, result)

    def _disconnect(self, error: BaseException) -> None:
        """Close this rank's connections of the transfer, so that no rank waits for it there.

        They are open as long as a frame of the error refers to the group.
        """
        failed: BaseException | None = error
        while failed is not None:
            traceback.clear_frames(failed.__traceback__)
            failed = failed.__cause__ or failed.__context__
        if self._transaction.decisions:
            self._manager.groups.forget_transfer()

    def _abort(self, error: BaseException) -> bool:
        """Return whether this attempt is over; False where the others have committed."""
        transaction = self._transaction
        try:
            if transaction.decisions > 1:
                return False
            if transaction.abort(error):
                return True
            if transaction.decisions == 1:
                return False
            # The others go on to make process groups, and will read there that this rank aborts.
            transaction.decide()
            self._take_proposals(transaction.contents("propose"))
            self.connect()
            return transaction.abort(error)
        except RuntimeError as gone:  # the store, or a rank
            if self._ready is None:  # no rank can commit without this rank's result of `verify`
                return True
            raise RescaleUndecided(
                f"rank {self._manager.rank} was ready for {self._new} ranks when it lost the store "
                f"of the process group ({gone}), after {error!r}: whether the others changed is "
                "not known. End this rank and go on from a checkpoint"
            ) from gone

    def _roll_back(self) -> None:
        manager = self._manager
        if self._new_shards is not None:
            self._new_shards.release()
        self._ready = None
        if not manager.active and manager.shard_memory is not None:
            manager.shard_memory.give_back()
        if manager.active and not manager.param_offloaded and not manager.gradients.pending():
            manager.zero_grad()

    def _commit(self) -> None:
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
        if manager.active:
            manager.zero_grad()
        else:
            self._memory.give_back()
        collect_unless_freed(before)
        trim_heap()

    def _report(self) -> RescaleReport:
        moved = self._moved
        assert moved is not None
        return RescaleReport(
            old_world_size=self._old,
            new_world_size=self._new,
            active=self._manager.active,
            seconds=time.monotonic() - self._began,
            sent_bytes=moved.sent_bytes,
            received_bytes=moved.received_bytes,
            peak_bytes=moved.peak_bytes,
            kept_bytes=moved.kept_bytes,
            extras=tuple(one.extra for one in self._proposals[: self._old]),
        )


def _check_same(proposals: Sequence[Proposal]) -> None:
    """Raise `RescaleError` unless all ranks were asked for the same."""
    for field in ("world_size", "bucket_bytes"):
        asked = [getattr(one, field) for one in proposals]
        if len(set(asked)) > 1:
            raise RescaleError(f"the ranks were asked for different {field}: {asked}")


def _progress_of(manager: FSDPModelManager) -> Progress:
    state = manager.optimizer.state
    return Progress(
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
    )


def _held_shards(manager: FSDPModelManager) -> RankShards:
    if not manager.active:
        return RankShards({}, {}, manager.kept)
    moments = {kind: moment_shards(manager.model, manager.optimizer, kind) for kind in MOMENTS}
    return RankShards(shards_of(manager.model), moments, manager.kept)


def _fill_optimizer(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    progress: Progress,
    moments: Mapping[str, Mapping[str, Tensor]],
) -> None:
    """Give an optimizer the settings of `Progress`, and these shards of moments."""
    for group, settings in zip(optimizer.param_groups, progress.groups, strict=True):
        group |= settings
        group["betas"] = tuple(group["betas"])
    for name, parameter in model.named_parameters():
        if name in progress.optimizer_steps:
            shards = {kind: of_kind[name] for kind, of_kind in moments.items()}
            set_moments(optimizer, parameter, progress.optimizer_steps[name], shards)
