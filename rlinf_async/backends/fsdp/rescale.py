"""Another number of active ranks, while the run goes on: weights, optimizer and progress move.

::

    propose   everyone was asked for the same, and may         -- all agree --> no way back from
    connect   process groups of the new size                                    making groups
    drain     no gradient is left, no parameter is whole
    build     room for the new shards, beside the old ones
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
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store
from torch.distributed.fsdp import FSDPModule
from torch.optim.lr_scheduler import LambdaLR

from rlinf_async.backends.base import RescaleReport
from rlinf_async.backends.fsdp import skeleton
from rlinf_async.backends.fsdp.ballot import Ballot, Word
from rlinf_async.backends.fsdp.errors import (
    FSDPError,
    OffloadedError,
    RescaleError,
    RescaleUndecided,
)
from rlinf_async.backends.fsdp.letting_go import collect_unless_back, memory_of, take_apart
from rlinf_async.backends.fsdp.progress import Progress, fill_optimizer, moments, progress_of
from rlinf_async.backends.fsdp.state import MOMENTS
from rlinf_async.backends.reshard import NotAgreed, PeerLost, Report, State, allocate, reshard
from rlinf_async.parallel import FSDP2, Layout, Model, Plan, Strategy, layout, plan

if TYPE_CHECKING:
    from rlinf_async.backends.fsdp.manager import ShardedModelManager

Shards = dict[str, Tensor]

_attempts = itertools.count()
"""Of this process, like torch's groups: models share one store, and all ranks rescale them in the
same order."""


class Proposal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one rank was asked for, and brings along."""

    world_size: int
    bucket_bytes: int
    groups: list[int]
    """the sizes for which it has a process group"""
    progress: Progress | None
    """None from an idle rank"""
    extra: bytes


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
        self._states: list[State] = []
        """weights, moments in the order of `MOMENTS` if there are any, then what is kept"""
        self._moves: dict[frozenset[str], tuple[Plan, list[State]]] = {}
        """by the names of the tensors that move"""
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
        progress = progress_of(manager) if manager.active else None
        groups = manager.groups.sizes
        proposal = Proposal(self._new, self._bucket_bytes, groups, progress, self._extra)
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
        manager = self._manager
        whole = skeleton.described(manager.skeleton)
        held = skeleton.shards_of(manager.model) if manager.active else {}
        self._room(whole, held, frozenset(one.name for one in whole.parameters))
        stepped = frozenset(self._agreed.optimizer_steps)
        if stepped:
            for key in MOMENTS:
                self._room(whole, moments(manager, key), stepped)
        for kept in manager.kept.values():
            trained = frozenset(name for name, _ in manager.skeleton.named_parameters())
            self._room(whole, kept, trained, torch.device("cpu"))

    def move(self) -> None:
        """Fill the new shards."""
        self._moved = reshard(
            *self._moves.values(),
            group=self._manager.groups.transfer,
            device=self._manager.device,
            bucket_bytes=self._bucket_bytes,
            timeout=timedelta(seconds=self._ballot.left),
        )

    def verify(self) -> None:
        """Put model and optimizer together, ready to train."""
        manager, rooms = self._manager, [state.new for state in self._states]
        progress = self._agreed
        model = manager.skeleton
        if self._joins:
            group = manager.groups.active(self._new)
            model = skeleton.put_together(model, rooms[0], self._new, group, manager.device)
        optimizer = manager.build_optimizer(model, manager.cfg.critic_warmup_steps > 0)
        scheduler = manager.build_lr_scheduler(optimizer)
        if self._joins:
            stepped = (
                dict(zip(MOMENTS, rooms[1:], strict=False)) if progress.optimizer_steps else {}
            )
            fill_optimizer(optimizer, model, progress, stepped)
        scheduler.load_state_dict(progress.schedule)
        kept = rooms[len(rooms) - len(manager.kept) :]
        by_name = {name: dict(one) for name, one in zip(manager.kept, kept, strict=True)}
        self._standing = _Standing(model, optimizer, scheduler, by_name)

    def decide(self) -> None:
        """Commit, unless a rank has given up."""
        self._ballot.decide()

    # -- around them --------------------------------------------------------------------------

    def _meet(self) -> None:
        """Agree on what is asked for; after this every rank comes to `connect`."""
        self._take_in(self._through("propose", self.propose))
        for field in ("world_size", "bucket_bytes"):
            asked = [getattr(one, field) for one in self._proposals]
            if len(set(asked)) > 1:
                raise RescaleError(f"the ranks were asked for different {field}: {asked}")
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
            self._hang_up(error)
            self._ballot.say(name, Word("failed", reason))
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
        self._forget_rooms()
        self._standing = None
        if manager.active and not manager.param_offloaded and not manager.has_gradients():
            manager.zero_grad()

    def _commit(self) -> None:
        standing, progress, manager = self._standing, self._agreed, self._manager
        assert standing is not None  # the vote on `verify` was well
        self._forget_rooms()
        before = memory_of(manager.model, manager.optimizer)
        take_apart(manager.model, manager.optimizer)
        manager.world_size, manager.group = self._new, manager.groups.active(self._new)
        manager.model, manager.optimizer, manager.lr_scheduler, manager.kept = standing
        manager.steps, manager.skipped_steps = progress.steps, progress.skipped_steps
        manager.grad_scaler.factor, manager.grad_scaler.good_steps = progress.scaler
        if manager.active:
            manager.zero_grad()
        collect_unless_back(before)

    def _forget_rooms(self) -> None:
        self._states.clear()
        self._moves.clear()

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
            extras=tuple(one.extra for one in self._proposals[: self._old]),
        )

    @property
    def _agreed(self) -> Progress:
        progress = self._proposals[0].progress
        assert progress is not None  # rank 0 is always active
        return progress

    def _room(
        self,
        whole: Model,
        held: Shards,
        names: frozenset[str],
        device: torch.device | None = None,
    ) -> None:
        """Make room for the new shards of what this rank holds of these tensors."""
        manager = self._manager
        if names not in self._moves:
            part = skeleton.only(whole, names)
            made = plan(sharded_over(part, self._old), sharded_over(part, self._new))
            self._moves[names] = made, []
        made, states = self._moves[names]
        new = allocate(made.new, manager.rank, device=device or manager.device)
        states.append(State(held, new))
        self._states.append(states[-1])


def sharded_over(model: Model, ranks: int) -> Layout:
    """Return who holds what on the first ranks."""
    return layout(model, Strategy(dp=ranks, sharding=FSDP2()))
