"""Ranks agree, through the store of their process group, that all or none of them changes.

::

    a stage:      each rank writes how it went          STAGE/RANK    -> waits for all the others'
    a decision:   the first to write decides for all    decision/N    -> "go on", or why not

            waits for                 unblocked by
    agree   all ranks' word           their words; a failure at once; else the deadline
    decide  nothing                   the store answers

Invariant: no two ranks differ in what was decided. "go on" is only written by a rank that saw the
word of every rank in every stage before; whoever gives up writes why, if nothing is decided yet. So
a rank that is late learns what the others did, instead of doing something else. Nothing here is a
collective: those break when a rank is late, and the ranks may then disagree.
"""

from __future__ import annotations

import time
from typing import Any, Literal

import msgspec
from torch.distributed.distributed_c10d import Store

from rlinf_async.backends.fsdp.errors import RescaleError
from rlinf_async.backends.reshard import PeerLost

GO_ON = b"go on"
LOST = b"lost: "
SHORTEST_NAP, LONGEST_NAP = 0.0002, 0.01
"""seconds between two looks at the store: a tenth of what was waited so far"""
GRACE = 2.0
"""seconds after one rank has lost another, in which those that live say so"""


class Word(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one rank says at the end of a stage."""

    outcome: Literal["well", "failed", "elsewhere"] = "well"
    """elsewhere: it failed here because of another rank, which is dead or will say so itself"""
    reason: str = ""
    content: bytes = b""
    """what the others get to know with it"""


class Ballot:
    """One rank's part in one attempt. All ranks go through the same stages.

    Args:
        store: of this attempt alone; all ranks see it.
        deadline: by `time.monotonic`; when to give up waiting for the others.
    """

    def __init__(self, store: Store, rank: int, ranks: int, deadline: float) -> None:
        self._store = store
        self._rank = rank
        self._ranks = ranks
        self._deadline = deadline
        self.decisions = 0
        """how many were made to go on"""

    @property
    def left(self) -> float:
        """Seconds until the deadline; not below a hundredth."""
        return max(0.01, self._deadline - time.monotonic())

    def say(self, stage: str, word: Word) -> None:
        """Say how a stage went here, and do not wait."""
        content: Any = msgspec.msgpack.encode(word)  # bytes are as good as the str in its signature
        self._store.set(f"{stage}/{self._rank}", content)

    def agree(self, stage: str, word: Word) -> list[bytes]:
        """Say how a stage went here, and return the content of every rank's word.

        Raises `RescaleError` when a rank failed and `PeerLost` when one has not said anything until
        the deadline; nothing was decided then: call `abort`.
        """
        self.say(stage, word)
        words: dict[int, Word] = {}
        began = time.monotonic()
        while len(words) < self._ranks:
            self._hear(stage, words)
            self._check_well(stage, words)
            self._check_not_given_up()
            if len(words) == self._ranks:
                break
            if time.monotonic() > self._deadline:
                raise PeerLost(f"{self._missing(words)} did not finish stage {stage!r} in time")
            waited = time.monotonic() - began
            time.sleep(min(max(SHORTEST_NAP, waited / 10), LONGEST_NAP))
        return [words[rank].content for rank in range(self._ranks)]

    def heard(self, stage: str) -> list[bytes]:
        """Return the content of every rank's word in a stage that all have passed."""
        words: dict[int, Word] = {}
        self._hear(stage, words)
        return [words[rank].content for rank in range(self._ranks)]

    def decide(self) -> None:
        """Decide to go on, unless a rank gave up; raises `RescaleError` with its reason then."""
        decided = self._write(GO_ON)
        if decided != GO_ON:
            raise _refusal(decided)
        self.decisions += 1

    def abort(self, error: BaseException) -> bool:
        """Decide not to go on; False where another has decided to, which then holds here too."""
        kind = LOST if isinstance(error, PeerLost) else b""
        return self._write(kind + f"rank {self._rank} gave up: {error}".encode()) != GO_ON

    def _write(self, decision: bytes) -> bytes:
        found: bytes = self._store.compare_set(self._decision, "", decision.decode())
        return found

    @property
    def _decision(self) -> str:
        return f"decision/{self.decisions}"

    def _hear(self, stage: str, words: dict[int, Word]) -> None:
        """Collect the words that are there and were not."""
        for rank in range(self._ranks):
            key = f"{stage}/{rank}"
            if rank not in words and self._store.check([key]):
                words[rank] = msgspec.msgpack.decode(self._store.get(key), type=Word)

    def _check_well(self, stage: str, words: dict[int, Word]) -> None:
        for rank, word in words.items():
            if word.outcome == "failed" and rank != self._rank:
                raise RescaleError(f"rank {rank} failed at stage {stage!r}: {word.reason}")
        waiting = {rank: word for rank, word in words.items() if word.outcome == "elsewhere"}
        if waiting:
            self._deadline = min(self._deadline, time.monotonic() + GRACE)
        if waiting and len(words) == self._ranks:
            rank, word = waiting.popitem()
            raise PeerLost(f"rank {rank} lost another at stage {stage!r}: {word.reason}")

    def _check_not_given_up(self) -> None:
        if self._store.check([self._decision]):
            decided: bytes = self._store.get(self._decision)
            if decided != GO_ON:
                raise _refusal(decided)

    def _missing(self, words: dict[int, Word]) -> str:
        missing = [rank for rank in range(self._ranks) if rank not in words]
        return f"rank {missing[0]}" if len(missing) == 1 else f"ranks {missing}"


def _refusal(decided: bytes) -> Exception:
    if decided.startswith(LOST):
        return PeerLost(decided.removeprefix(LOST).decode())
    return RescaleError(decided.decode())
