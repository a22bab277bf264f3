"""Another strategy while the run goes on: weights, optimizer and progress move.

::

    propose   all ranks were asked for the same, and may change   -- all agree --> process groups
    connect   process groups of the new strategy                                   will be made
    drain     no gradient is pending
    build     memory for the new shards, beside the old ones but for what stays in place
    move      old shards --buckets--> new shards                  (`backends.reshard`)
    verify    model, optimizer and progress of the new strategy are ready
              -- all agree, one decides for all --> commit: they become the trainer's

Every stage ends in an exchange of results (`transaction`). Until the commit nothing of the old
model, its optimizer or its groups is touched, so a failure or a timeout at any place on any rank
leaves all of them as they were; the commit itself does nothing that could fail. What a stage does
is the backend's: `Change`.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, cast

import msgspec
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store
from torch.multiprocessing.reductions import StorageWeakRef

from rlinf_async.backends.base import RescaleReport
from rlinf_async.backends.rescale.transaction import (
    RescaleError,
    RescaleUndecided,
    StageResult,
    Transaction,
)
from rlinf_async.backends.reshard import ExchangeReport, NotAgreed, PeerLost
from rlinf_async.parallel import Strategy, StrategyError


class Storages:
    """Weak references to the storages of some tensors, to see whether they are freed."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._storages: list[StorageWeakRef] = [
            StorageWeakRef(one.untyped_storage())  # type: ignore[no-untyped-call]
            for one in tensors
        ]

    @property
    def freed(self) -> bool:
        """Whether all of them are freed."""
        return all(one.expired() for one in self._storages)  # type: ignore[no-untyped-call]


def collect_unless_freed(storages: Storages) -> None:
    """Run a full garbage collection if storages that should be freed are still referred to.

    That is by a cycle that the backend did not break, or by the caller of a rescale.
    """
    if not storages.freed:
        gc.collect()


def trim_heap() -> None:
    """Return freed memory to the system, where the C library can.

    glibc keeps freed blocks of up to some tens of megabytes, such as an optimizer's moments, for
    later allocations; new shards are mapped, and do not come from there.
    """
    with contextlib.suppress(OSError, TypeError, AttributeError):  # another library
        ctypes.CDLL(None).malloc_trim(0)


def new_group(
    ranks: Sequence[int], limit: timedelta
) -> tuple[dist.ProcessGroup | None, RuntimeError | None]:
    """Make a process group with this limit of one collective, in the order given.

    torch's error is returned, to be raised later: all ranks have to ask for the same number of
    groups. Where this rank is not in the group, torch returns a number that its collectives know.
    """
    ordered: dict[str, Any] = {} if list(ranks) == sorted(ranks) else {"sort_ranks": False}
    try:
        return cast(dist.ProcessGroup, dist.new_group(list(ranks), timeout=limit, **ordered)), None
    except RuntimeError as error:
        return None, error


class TransferGroup:
    """The process group of all launched ranks in which state is moved.

    No model computes in it: a timeout while waiting for a rank breaks the connections of the group
    in which that happened, and training must not depend on it. Every rank makes it at the same
    place of the program.
    """

    def __init__(self) -> None:
        self.group: dist.ProcessGroup | None = None
        self._limit = timedelta(0)

    def prepare(self, limit: timedelta) -> RuntimeError | None:
        """Make the group, if it is missing or has another limit. Collective.

        Returns torch's error when a rank cannot be reached, for the caller to raise when it has
        made all other groups: torch counts them. Another attempt may be made.
        """
        if self.group is not None and self._limit == limit:
            return None
        self.forget()
        self._limit = limit
        self.group, failed = new_group(range(dist.get_world_size()), limit)
        return failed

    def forget(self) -> None:
        """Destroy the group, which may be broken; `prepare` makes another. On all ranks."""
        broken, self.group = self.group, None
        if broken is not None:
            dist.destroy_process_group(broken)


class Change(ABC):
    """One rank's part in a change, as its backend does it. `Rescale` calls the stages in order.

    Invariant: until `commit`, the model that trains, its optimizer and its groups stay as they
    are, so that `roll_back` only drops what was made. `commit` does nothing that could fail.
    """

    @property
    @abstractmethod
    def transfer(self) -> TransferGroup:
        """The group in which state is moved; it lives as long as the model."""

    @property
    @abstractmethod
    def active(self) -> bool:
        """Whether this rank trains: under the old strategy, after `commit` under the new one."""

    @abstractmethod
    def propose(self) -> bytes:
        """Return what the other ranks have to know of this one; raises where it cannot change."""

    @abstractmethod
    def connect(self, proposals: Sequence[bytes], limit: timedelta) -> None:
        """Make the process groups of the new strategy; ``proposals`` are those of all ranks.

        If any rank comes here, all do. Each makes as many groups as the others, also when it
        raises: torch counts them.
        """

    @abstractmethod
    def drain(self) -> None:
        """Leave nothing in flight that the move would lose: gradients, a copy being made."""

    @abstractmethod
    def build(self) -> None:
        """Plan, and make what the state will be moved into."""

    @abstractmethod
    def move(self, bucket_bytes: int, limit: timedelta) -> ExchangeReport:
        """Fill what was built. Collective in `transfer`."""

    @abstractmethod
    def verify(self) -> None:
        """Have the new model and optimizer ready to train; after this only `commit` is left."""

    @abstractmethod
    def commit(self) -> None:
        """Train with the new model from now on, and free the old one."""

    @abstractmethod
    def roll_back(self) -> None:
        """Drop what was made, and train on with the old model. May be called at any stage."""


_attempts = itertools.count()
"""Number of the next rescale of this process. Like torch's groups: models share one store, and all
ranks rescale them in the same order."""


class Proposal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Strategy that one rank was asked for, and what it contributes."""

    strategy: Strategy
    bucket_bytes: int
    content: bytes
    """content of the backend: `Change.propose`"""
    extra: bytes


def rescale_together(
    check: Callable[[], None],
    change: Callable[[], Change],
    old: Strategy,
    new: Strategy,
    launched: int,
    *,
    timeout: float,
    bucket_bytes: int,
    extra: bytes,
    objection: str,
) -> RescaleReport:
    """Train under another strategy from now on. Called by all launched ranks.

    Args:
        check: raises `StrategyError` for a strategy that the backend cannot change to.
        change: makes what the backend does.
        old: strategy in force.
        new: strategy that this rank was asked for.
        launched: number of ranks; one alone has nothing to change.
        timeout: see `Rescale`.
        bucket_bytes: likewise.
        extra: likewise.
        objection: likewise.

    Raises what ``check`` does, on this rank, and what `Rescale.run` does.
    """
    refusal: StrategyError | None = None
    try:
        check()
    except StrategyError as error:
        refusal = error
    if launched == 1:
        if refusal is not None:
            raise refusal
        return RescaleReport(old, old, True, 0.0, 0, 0, 0, 0, (extra,))
    return Rescale(
        change(),
        old,
        new,
        timeout=timeout,
        bucket_bytes=bucket_bytes,
        extra=extra,
        objection=refusal or objection,
    ).run()


class Rescale:
    """One attempt, on one rank. `run` goes through the stages.

    Args:
        change: what the backend does.
        old: strategy in force.
        new: strategy that this rank was asked for.
        timeout: seconds, waiting for other ranks included.
        bucket_bytes: memory for buckets.
        extra: bytes of the old active ranks, which come to all in the report.
        objection: why this rank cannot change; no rank changes then. An error is raised on this
            rank as it is. It takes part all the same: the others would wait for it in vain, and
            count one attempt more than it does.
    """

    def __init__(
        self,
        change: Change,
        old: Strategy,
        new: Strategy,
        *,
        timeout: float,
        bucket_bytes: int,
        extra: bytes = b"",
        objection: str | StrategyError = "",
    ) -> None:
        self.change = change
        self.old, self.new = old, new
        self._objection = objection
        self._timeout, self._bucket_bytes, self._extra = timeout, bucket_bytes, extra
        self._began = time.monotonic()
        self._rank = dist.get_rank()
        store = PrefixStore(f"rescale/{next(_attempts)}", _get_default_store())
        self._transaction = Transaction(
            store, self._rank, dist.get_world_size(), self._began + timeout
        )
        self._proposals: list[Proposal] = []
        self._moved: ExchangeReport | None = None
        self._ready = False

    def run(self) -> RescaleReport:
        """Go through all stages. Called by all launched ranks, between two optimizer steps.

        Raises `RescaleError` when a rank failed, `reshard.PeerLost` when one died or needed more
        than ``timeout`` seconds, and this rank's objection where that is an error. Whatever it is,
        every rank that lives is as it was. Raises `RescaleUndecided` when that cannot be known any
        more.
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
                self._run_stage(name, stage)
            self.decide()
        except BaseException as error:
            if self._abort(error):
                self._disconnect(error)
                self.change.roll_back()
                if isinstance(self._objection, StrategyError):
                    raise self._objection from error
                if isinstance(error, RescaleError | PeerLost) or not isinstance(error, Exception):
                    raise
                raise RescaleError(f"on this rank ({self._rank}): {error!r}") from error
        self.change.commit()
        return self._report()

    # -- the stages ---------------------------------------------------------------------------

    def propose(self) -> bytes:
        """Return this rank's `Proposal`; raises where it cannot change."""
        if isinstance(self._objection, StrategyError):
            raise self._objection
        if self._objection:
            raise RescaleError(self._objection)
        content = self.change.propose()
        return msgspec.msgpack.encode(Proposal(self.new, self._bucket_bytes, content, self._extra))

    def connect(self) -> None:
        """Make the process groups. If any rank comes here, all do: torch counts groups."""
        limit = timedelta(seconds=self._timeout)
        failed = self.change.transfer.prepare(limit)
        self.change.connect([one.content for one in self._proposals], limit)
        if failed is not None:
            raise failed

    def drain(self) -> None:
        """Leave nothing in flight."""
        self.change.drain()

    def build(self) -> None:
        """Plan, and allocate the new shards."""
        self.change.build()

    def move(self) -> None:
        """Fill the new shards."""
        limit = timedelta(seconds=self._transaction.seconds_left)
        self._moved = self.change.move(self._bucket_bytes, limit)

    def verify(self) -> None:
        """Have model and optimizer of the new strategy ready to train."""
        self.change.verify()
        self._ready = True

    def decide(self) -> None:
        """Commit, unless a rank has given up."""
        self._transaction.decide()

    # -- around them --------------------------------------------------------------------------

    def _agree_on_proposal(self) -> None:
        """Decide on the proposal of all ranks, after which every rank comes to `connect`."""
        self._take_proposals(self._run_stage("propose", self.propose))
        _check_same(self._proposals)
        self._transaction.decide()

    def _take_proposals(self, contents: list[bytes]) -> None:
        self._proposals = [msgspec.msgpack.decode(one, type=Proposal) for one in contents]

    def _run_stage(self, name: str, stage: Callable[[], bytes | None]) -> list[bytes]:
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
            what = f"stage {name!r} failed on this rank ({self._rank}): {reason}"
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
            self.change.transfer.forget()

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
            if not self._ready:  # no rank can commit without this rank's result of `verify`
                return True
            raise RescaleUndecided(
                f"rank {self._rank} was ready for {self.new.sizes} when it lost the store "
                f"of the process group ({gone}), after {error!r}: whether the others changed is "
                "not known. End this rank and go on from a checkpoint"
            ) from gone

    def _report(self) -> RescaleReport:
        moved = self._moved
        assert moved is not None
        return RescaleReport(
            old_strategy=self.old,
            new_strategy=self.new,
            active=self.change.active,
            seconds=time.monotonic() - self._began,
            sent_bytes=moved.sent_bytes,
            received_bytes=moved.received_bytes,
            peak_bytes=moved.peak_bytes,
            kept_bytes=moved.kept_bytes,
            extras=tuple(one.extra for one in self._proposals[: self.old.world_size]),
        )


def _check_same(proposals: Sequence[Proposal]) -> None:
    """Raise `RescaleError` unless all ranks were asked for the same."""
    for field in ("strategy", "bucket_bytes"):
        asked = [getattr(one, field) for one in proposals]
        if any(one != asked[0] for one in asked):
            told = [one.sizes if isinstance(one, Strategy) else str(one) for one in asked]
            raise RescaleError(f"the ranks were asked for different {field}: {', '.join(told)}")
