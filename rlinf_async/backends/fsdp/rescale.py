"""Another number of active ranks, while the run goes on: weights, optimizer and progress move.

::

    propose   everyone was asked for the same, and may         -- all agree --> no way back from
    connect   process groups of the new size                                    making groups
    drain     no gradient is left, no parameter is whole
    build     room for the new shards, beside the old ones but for what stays in place
    move      old shards --buckets--> new shards               (`backends.reshard`)
    verify    model, optimizer and progress of the new size stand ready
              -- all agree, one decides for all --> commit: names are put on what is ready

Every stage ends in a vote (`ballot`). Until the commit nothing of the old model, its optimizer or
its groups is touched, so a failure or a timeout at any place on any rank leaves all of them as they
were; the commit itself has nothing left to do that could fail.
"""

from __future__ import annotations

import itertools
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import torch
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store
from torch.distributed.fsdp import FSDPModule
from torch.optim.lr_scheduler import LambdaLR

from rlinf_async.backends.base import RescaleReport
from rlinf_async.backends.fsdp import skeleton
from rlinf_async.backends.fsdp.ballot import Ballot, Word
from rlinf_async.backends.fsdp.errors import (
    FSDPError,
    RescaleError,
    RescaleUndecided,
)
from rlinf_async.backends.fsdp.letting_go import (
    collect_unless_back,
    memory_of,
    return_to_system,
    take_apart,
)
from rlinf_async.backends.fsdp.progress import Progress, fill_optimizer
from rlinf_async.backends.fsdp.proposal import Proposal, check_same, proposal_of
from rlinf_async.backends.fsdp.rooms import Rooms, Shards
from rlinf_async.backends.reshard import NotAgreed, PeerLost, Report

if TYPE_CHECKING:
    from rlinf_async.backends.fsdp.manager import ShardedModelManager

_attempts = itertools.count()
"""Of this process, like torch's groups: models share one store, and all ranks rescale them in the
same order."""


class _Standing(NamedTuple):
    """All that makes up an active or idle rank of the new size."""

    model: nn.Module
    optimizer: torch.optim.AdamW
    lr_scheduler: LambdaLR
    kept: dict[str, Shards]


class Rescale:
    """One attempt, on one rank. `run` goes through the stages."""

    def __init__(
        self,
        manager: ShardedModelManager,
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
        self._ballot = Ballot(store, manager.rank, launched, self._began + timeout)
        self._proposals: list[Proposal] = []
        self._rooms = Rooms(manager, self._old, world_size)
        self._moved: Report | None = None
        self._standing: _Standing | None = None

    @property
    def _joins(self) -> bool:
        """This rank is active afterwards."""
        return self._manager.rank < self._new

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
            self._meet()
            for name, stage in stages:
                self._through(name, stage)
            self.decide()
        except BaseException as error:
            if self._give_up(error):
                self._hang_up(error)
                self._roll_back()
                if isinstance(error, RescaleError | PeerLost) or not isinstance(error, Exception):
                    raise
                raise RescaleError(f"on this rank ({self._manager.rank}): {error!r}") from error
        self._commit()
        return self._report()

    # -- the stages ---------------------------------------------------------------------------

    def propose(self) -> bytes:
        """Say what this rank was asked for, and what it brings along."""
        if self._objection:
            raise FSDPError(self._objection)
        proposal = proposal_of(self._manager, self._new, self._bucket_bytes, self._extra)
        return msgspec.msgpack.encode(proposal)

    def connect(self) -> None:
        """Make the process groups. Every rank comes here if any does: torch counts groups."""
        known = all(self._new in one.groups for one in self._proposals)
        limit = timedelta(seconds=self._timeout)
        self._manager.groups.prepare(self._new, limit, known=known)

    def drain(self) -> None:
        """Leave no gradient, and no parameter whole."""
        manager = self._manager
        if not manager.active:
            return
        if manager.has_gradients():
            raise FSDPError(
                "rescale() between a backward pass and its optimizer step would lose gradients: "
                "call it after optimizer_step() or zero_grad()"
            )
        manager.drop_gradients()
        manager.settle_checkpoint()
        for module in manager.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def build(self) -> None:
        """Plan, and make room for the new shards."""
        self._rooms.make(frozenset(self._agreed.optimizer_steps))

    def move(self) -> None:
        """Fill the new shards."""
        self._moved = self._rooms.fill(self._bucket_bytes, timedelta(seconds=self._ballot.left))

    def verify(self) -> None:
        """Put model and optimizer together, ready to train."""
        manager, rooms, progress = self._manager, self._rooms, self._agreed
        model = manager.skeleton
        if self._joins:
            group = manager.groups.active(self._new)
            model = skeleton.put_together(model, rooms.weights, self._new, group, manager.device)
        optimizer = manager.build_optimizer(model, manager.cfg.critic_warmup_steps > 0)
        scheduler = manager.build_lr_scheduler(optimizer)
        if self._joins:
            fill_optimizer(optimizer, model, progress, rooms.moments)
        scheduler.load_state_dict(progress.schedule)
        self._standing = _Standing(model, optimizer, scheduler, rooms.kept)

    def decide(self) -> None:
        """Commit, unless a rank has given up."""
        self._ballot.decide()

    # -- around them --------------------------------------------------------------------------

    def _meet(self) -> None:
        """Agree on what is asked for; after this every rank comes to `connect`."""
        self._take_in(self._through("propose", self.propose))
        check_same(self._proposals)
        self._ballot.decide()

    def _take_in(self, contents: list[bytes]) -> None:
        self._proposals = [msgspec.msgpack.decode(one, type=Proposal) for one in contents]

    def _through(self, name: str, stage: Callable[[], bytes | None]) -> list[bytes]:
        try:
            word = Word(content=stage() or b"")
        except (PeerLost, NotAgreed) as error:
            self._hang_up(error)
            self._ballot.agree(name, Word("elsewhere", str(error)))
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            try:
                self._ballot.say(name, Word("failed", reason))
            finally:  # only then: who finds this rank gone does not wait long for its word
                self._hang_up(error)
            what = f"stage {name!r} failed on this rank ({self._manager.rank}): {reason}"
            raise RescaleError(what) from error
        return self._ballot.agree(name, word)

    def _hang_up(self, error: BaseException) -> None:
        """Close this rank's connections of the transfer, so that nobody waits for it there.

        They are open as long as a frame of the error has the group.
        """
        failed: BaseException | None = error
        while failed is not None:
            traceback.clear_frames(failed.__traceback__)
            failed = failed.__cause__ or failed.__context__
        if self._ballot.decisions:
            self._manager.groups.forget_transfer()

    def _give_up(self, error: BaseException) -> bool:
        """Return whether this attempt is over; False where the others have committed."""
        try:
            if self._ballot.decisions > 1:
                return False
            if self._ballot.abort(error):
                return True
            if self._ballot.decisions == 1:
                return False
            # The others go on to make process groups, and will hear that this rank does not.
            self._ballot.decide()
            self._take_in(self._ballot.heard("propose"))
            self.connect()
            return self._ballot.abort(error)
        except RuntimeError as gone:  # the store, or a rank
            if self._standing is None:  # nobody can commit without this rank's word on `verify`
                return True
            raise RescaleUndecided(
                f"rank {self._manager.rank} was ready for {self._new} ranks when it lost the store "
                f"of the process group ({gone}), after {error!r}: whether the others changed is "
                "not known. End this rank and go on from a checkpoint"
            ) from gone

    def _roll_back(self) -> None:
        manager = self._manager
        self._rooms.forget()
        self._standing = None
        if not manager.active:
            manager.reserved.give_back()
        if manager.active and not manager.param_offloaded and not manager.has_gradients():
            manager.zero_grad()

    def _commit(self) -> None:
        standing, progress, manager = self._standing, self._agreed, self._manager
        assert standing is not None  # the vote on `verify` was well
        self._rooms.forget()
        before = memory_of(manager.model, manager.optimizer)
        take_apart(manager.model, manager.optimizer)
        manager.world_size, manager.group = self._new, manager.groups.active(self._new)
        manager.model, manager.optimizer, manager.lr_scheduler, manager.kept = standing
        manager.steps, manager.skipped_steps = progress.steps, progress.skipped_steps
        manager.grad_scaler.factor, manager.grad_scaler.good_steps = progress.scaler
        if manager.active:
            manager.zero_grad()
        else:
            manager.reserved.give_back()
        collect_unless_back(before)
        return_to_system()

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

    @property
    def _agreed(self) -> Progress:
        progress = self._proposals[0].progress
        assert progress is not None  # rank 0 is always active
        return progress
