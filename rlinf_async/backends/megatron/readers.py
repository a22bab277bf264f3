"""What the ranks that read samples say to each other: one of each data rank.

They exchange numbers while they read a global batch, and at its end that each has all of it. Every
exchange is one of all of them, in the same order, so a rank that failed says so in the place of its
next one, and all have failed then: none goes on to collectives of a global batch that others have
given up.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlinf_async.backends.megatron.lane import Failure, Lane


class Readers:
    """The reading ranks, as one of them sees them; others do not call it."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._failure: Failure | None = None
        """of the global batch that is read; all know of it"""

    @property
    def alone(self) -> bool:
        """Whether no other rank reads."""
        return self._lane.alone

    def begin(self) -> None:
        """Begin a global batch."""
        self._failure = None

    def exchange(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return the numbers of all of them, by data rank. Collective among the ranks that read.

        Raises what `Failure.error` says if any of them failed.
        """
        every = self._exchange(list(numbers))
        if self._failure is not None:
            raise self._failure.error()
        return [one for one in every if not isinstance(one, Failure)]

    def fail(self, error: BaseException) -> Failure:
        """Have all of them fail, unless this error came from an exchange; return what all raise."""
        own = Failure.of(error)
        if self._failure is None:
            self._exchange(own)
        return self._failure or own

    def _exchange(self, own: list[float] | Failure) -> list[list[float] | Failure]:
        lane = self._lane
        every: list[list[float] | Failure] = [own]
        try:
            lane.send(own)
            others = {rank: lane.receive(list[float], rank) for rank in lane.others}
            lane.finish()
            every = [others.get(rank, own) for rank in lane.ranks] or [own]
        except RuntimeError as error:  # one of them is gone: this rank's model has to hear of it
            every = [Failure.of(error)]
        self._failure = next((one for one in every if isinstance(one, Failure)), None)
        return every
