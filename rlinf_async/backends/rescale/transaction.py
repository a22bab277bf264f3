"""`Transaction`: ranks agree, through the store of their process group, that all or none of them
changes; and what can go wrong.

::

    a stage:      each rank writes its result           STAGE/RANK    -> waits for all the others'
    a decision:   the first to write decides for all    decision/N    -> "go on", or why not

              waits for                 unblocked by
    exchange  all ranks' results        their results; a failure at once; else the deadline
    decide    nothing                   the store answers

Invariant: no two ranks differ in what was decided. "go on" is only written by a rank that has the
result of every rank in every stage before; a rank that gives up writes why, if nothing is decided
yet. So a rank that is late learns what the others did, instead of doing something else. Nothing
here is a collective: those break when a rank is late, and the ranks may then disagree.
"""

from __future__ import annotations

import time
from typing import Any, Literal

import msgspec
from torch.distributed.distributed_c10d import Store

from rlinf_async.backends.base import StrategyUnknown
from rlinf_async.backends.reshard import PeerLost

GO_ON = b"go on"
"""decision that every rank goes on; any other value is the reason of the rank that gave up"""
LOST = b"lost: "
"""prefix of a reason that is the loss of a rank"""
SHORTEST_POLL, LONGEST_POLL = 0.0002, 0.01
"""seconds between two reads of the store: a tenth of the time waited so far"""
GRACE = 2.0
"""seconds that the other ranks have for their results after one rank has lost another"""


class RescaleError(Exception):
    """Another strategy was refused or failed; every rank trains on as before.

    The message names the stage, the rank, and the cause. A rank that was lost is a
    `reshard.PeerLost`.
    """


class RescaleUndecided(StrategyUnknown):
    """The outcome of a rescale is unknown. This rank was ready, so the others may have changed, and
    the store with the decision is gone.

    Its model may be the old or the new one: end the process, and go on from a checkpoint.
    """


class StageResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Result of a stage on one rank."""

    outcome: Literal["done", "failed", "peer failed"] = "done"
    """peer failed: because of another rank, which is dead or will report its own failure"""
    reason: str = ""
    content: bytes = b""
    """result of the stage, for the other ranks"""


class Transaction:
    """One rank's part in one attempt. All ranks go through the same stages.

    Args:
        store: store of this attempt alone, shared by all ranks.
        rank: this rank.
        ranks: their number.
        deadline: when to give up waiting for the others, by `time.monotonic`.
    """

    def __init__(self, store: Store, rank: int, ranks: int, deadline: float) -> None:
        self._store = store
        self._rank = rank
        self._ranks = ranks
        self._deadline = deadline
        self.decisions = 0
        """number of decisions to go on"""

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline; not below a hundredth."""
        return max(0.01, self._deadline - time.monotonic())

    def report(self, stage: str, result: StageResult) -> None:
        """Write this rank's result of a stage, and do not wait."""
        content: Any = msgspec.msgpack.encode(result)  # a str by its signature; bytes will do
        self._store.set(f"{stage}/{self._rank}", content)

    def exchange(self, stage: str, result: StageResult) -> list[bytes]:
        """Write this rank's result of a stage, and return the content of every rank's.

        Raises `RescaleError` when a rank failed and `PeerLost` when the result of one is missing
        at the deadline; nothing was decided then: call `abort`.
        """
        self.report(stage, result)
        results: dict[int, StageResult] = {}
        began = time.monotonic()
        while len(results) < self._ranks:
            # Before the results: a rank that gives up has written first at which stage, and why.
            refusal = self._refused()
            self._collect(stage, results)
            self._check_done(stage, results)
            if refusal is not None:
                raise refusal
            if len(results) == self._ranks:
                break
            if time.monotonic() > self._deadline:
                raise PeerLost(f"{self._missing(results)} did not finish stage {stage!r} in time")
            waited = time.monotonic() - began
            time.sleep(min(max(SHORTEST_POLL, waited / 10), LONGEST_POLL))
        return [results[rank].content for rank in range(self._ranks)]

    def contents(self, stage: str) -> list[bytes]:
        """Return the content of every rank's result of a stage that all have finished."""
        results: dict[int, StageResult] = {}
        self._collect(stage, results)
        return [results[rank].content for rank in range(self._ranks)]

    def decide(self) -> None:
        """Decide to go on; raises `RescaleError` with the reason of a rank that gave up before."""
        decided = self._write(GO_ON)
        if decided != GO_ON:
            raise _refusal(decided)
        self.decisions += 1

    def abort(self, error: BaseException) -> bool:
        """Decide not to go on; False where another rank has decided to, which then holds here."""
        kind = LOST if isinstance(error, PeerLost) else b""
        return self._write(kind + f"rank {self._rank} gave up: {error}".encode()) != GO_ON

    def _write(self, decision: bytes) -> bytes:
        found: bytes = self._store.compare_set(self._decision, "", decision.decode())
        return found

    @property
    def _decision(self) -> str:
        return f"decision/{self.decisions}"

    def _collect(self, stage: str, results: dict[int, StageResult]) -> None:
        """Add the results that were written meanwhile."""
        for rank in range(self._ranks):
            key = f"{stage}/{rank}"
            if rank not in results and self._store.check([key]):
                results[rank] = msgspec.msgpack.decode(self._store.get(key), type=StageResult)

    def _check_done(self, stage: str, results: dict[int, StageResult]) -> None:
        for rank, result in results.items():
            if result.outcome == "failed" and rank != self._rank:
                raise RescaleError(f"rank {rank} failed at stage {stage!r}: {result.reason}")
        with_lost_peer = {r: one for r, one in results.items() if one.outcome == "peer failed"}
        if with_lost_peer:
            self._deadline = min(self._deadline, time.monotonic() + GRACE)
        if with_lost_peer and len(results) == self._ranks:
            rank, result = with_lost_peer.popitem()
            raise PeerLost(f"rank {rank} lost another at stage {stage!r}: {result.reason}")

    def _refused(self) -> Exception | None:
        if not self._store.check([self._decision]):
            return None
        decided: bytes = self._store.get(self._decision)
        return None if decided == GO_ON else _refusal(decided)

    def _missing(self, results: dict[int, StageResult]) -> str:
        missing = [rank for rank in range(self._ranks) if rank not in results]
        return f"rank {missing[0]}" if len(missing) == 1 else f"ranks {missing}"


def _refusal(decided: bytes) -> Exception:
    if decided.startswith(LOST):
        return PeerLost(decided.removeprefix(LOST).decode())
    return RescaleError(decided.decode())
