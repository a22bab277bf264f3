"""What a replay found: `ReplayReport`, and the comparison of everything that a worker put with what
it had put in the recording.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from rlinf_async.channels.wire.codec import Decoder
from rlinf_async.recording.events import Returned
from rlinf_async.recording.values import NotFound, restored
from rlinf_async.replaying.compare import Comparison, Difference, Found, shown
from rlinf_async.replaying.history import Life, Output, iteration_of
from rlinf_async.replaying.playing import Play, PlayedCall
from rlinf_async.replaying.script import Done

MOST_SEARCHED: Final = 64
"""items of a channel among which the one is searched that another order has brought forward"""
ABSENT: Final = "nothing"


class Scores(msgspec.Struct, frozen=True, kw_only=True):
    """Rewards of the same samples: those of the recording, and those of another verifier."""

    verifier: str
    recorded: list[float]
    replayed: list[float]
    failed: tuple[int, int] = (0, 0)
    """samples without a reward, in the recording and now"""
    changed: int = 0
    """samples whose reward is another now"""
    last_failure: str = ""


class ReplayReport(msgspec.Struct, kw_only=True):
    """What came of a replay of one worker."""

    worker: str
    """name of the worker, such as ``"Actor[0]"``"""
    start: int
    """which start of the run was played: 1, 2, ..."""
    lives: int = 0
    """lives of the worker that were played: more than one where it was started again, or swapped"""
    calls: int = 0
    """calls that were made again"""
    items: int = 0
    """items that it has put, and that were compared"""
    compared: int = 0
    """numbers, texts and other single values that were compared"""
    first_difference: Difference | None = None
    differences: int = 0
    """items and results that are not the same"""
    largest: float = 0.0
    """largest difference of two numbers that was within the tolerance"""
    overlapped: int = 0
    """items that came in another order than in the recording and are the same, and results of
    calls beside others that differ: work side by side, which the recording does not put in order"""
    forced: int = 0
    """inputs that were given before their turn, since nobody could go on"""
    skipped: int = 0
    """items that were put before the iteration from which on is compared"""
    left_out: dict[str, int] = {}
    """fields that were not compared, by name: times that were measured"""
    scores: Scores | None = None
    """of another verifier: then rewards are not compared"""
    error: str = ""
    """the error with which the last call ended, in the recording too"""
    notes: list[str] = []
    """what was not as it was when it was recorded"""
    seconds: float = 0.0

    @property
    def equal(self) -> bool:
        """Whether something was compared, and all of it is the same."""
        return self.compared > 0 and self.first_difference is None


class Comparing:
    """Compares the lives of one worker with their recording, one after the other.

    Args:
        report: is filled in.
        comparison: compares values.
        since: number from which on things are compared.
        ignored: channels of which nothing is compared.
    """

    def __init__(
        self,
        report: ReplayReport,
        comparison: Comparison,
        since: int = 0,
        ignored: frozenset[str] = frozenset(),
    ) -> None:
        self._report = report
        self._comparison = comparison
        self._since = since
        self._ignored = ignored
        self._first: int | None = None
        """number in the recording of the first difference so far"""

    def add(self, play: Play) -> None:
        """Compare one life."""
        report = self._report
        report.lives += 1
        report.forced += play.script.forced
        by_channel: dict[str, list[Output]] = {}
        for output in play.life.outputs:
            by_channel.setdefault(output.channel, []).append(output)
        for channel in sorted({*by_channel, *play.script.put} - self._ignored):
            found = play.script.put.get(channel, [])
            self._channel(channel, by_channel.get(channel, []), found, play.life)
        for index, call in enumerate(play.calls, 1):
            self._call(call, index, play)

    def finish(self) -> None:
        """Put down the counts."""
        comparison = self._comparison
        self._report.compared = comparison.values
        self._report.largest = comparison.largest
        self._report.left_out = dict(comparison.left_out)

    # ---- channels

    def _channel(
        self, channel: str, recorded: Sequence[Output], replayed: Sequence[Done], life: Life
    ) -> None:
        before = sum(output.number < self._since for output in recorded)
        self._report.skipped += min(before, len(replayed))
        expected = list(enumerate(recorded, 1))[before:]
        left = [done for done in replayed[before:] if not self._match(expected, done)]
        where = f"channel {channel!r}"
        for (index, output), done in zip(expected, left, strict=False):
            self._unequal(where, index, output, done)
        missing, surplus = expected[len(left) :], left[len(expected) :]
        if missing:
            index, output = missing[0]
            self._note(where, index, "", output.number, output, ABSENT, len(missing))
        if surplus and not life.died:
            number = recorded[-1].number + 1 if recorded else life.launched.number
            index = len(recorded) + 1
            self._note(where, index, "", number, ABSENT, surplus[0].item, len(surplus))

    def _match(self, expected: list[tuple[int, Output]], done: Done) -> bool:
        """Take the recorded item out that is the same as one of the replay; whether there is one.

        The first one is meant, unless several tasks of the worker have finished in another order.
        """
        for at, (_, output) in enumerate(expected[:MOST_SEARCHED]):
            if (output.key, output.weight) != (done.key, done.weight):
                continue
            trial = Comparison(self._comparison.tolerance, self._comparison.ignored)
            try:
                trial.compare(output.body.value(), done.item)
            except Found:
                continue
            self._comparison.add(trial)
            self._report.items += 1
            self._report.overlapped += at > 0
            del expected[at]
            return True
        return False

    def _unequal(self, where: str, index: int, output: Output, done: Done) -> None:
        value = output.body.value()
        trial = Comparison(self._comparison.tolerance, self._comparison.ignored)
        self._report.items += 1
        try:
            trial.compare(value, done.item)
        except Found as found:
            self._comparison.add(trial)
            self._note(
                where, index, found.path, output.number, found.recorded, found.replayed, 1, value
            )
            return
        self._comparison.add(trial)
        pairs = [("key", output.key, done.key), ("weight", output.weight, done.weight)]
        for name, before, after in pairs:
            if before != after:
                self._note(where, index, f"its {name}", output.number, before, after, 1, value)
                return

    # ---- calls

    def _call(self, call: PlayedCall, index: int, play: Play) -> None:
        if call.invocation is not None:
            self._report.calls += 1
        ended = call.recorded.ended
        if ended is not None and ended.number < self._since:
            return
        returned = call.returns
        begun = call.recorded.begun
        where = f"call {index}, {begun.method}()"
        if returned is None:
            if isinstance(call.error, Exception) and not call.cut:  # else it was cancelled
                self._ended_otherwise(where, call, "that it went on until others ended it")
            return
        if call.cut or not call.ended:
            said = _first_line(returned.error) or "that it returned"
            self._note(where, 0, "", returned.number, said, "that it waits for ever", 1)
        elif returned.error:
            self._report.error = _first_line(returned.error)
            self._errors(where, call, returned.error, returned.number)
        elif call.error is not None:
            self._ended_otherwise(where, call, "that it returned")
        elif call.recorded.whole and not returned.details.get("unrecorded"):
            self._result(where, call, returned, play)

    def _errors(self, where: str, call: PlayedCall, recorded: str, number: int) -> None:
        if call.error is None:
            self._note(where, 0, "its end", number, _first_line(recorded), "that it returned", 1)
            return
        before, after = _first_line(recorded), _first_line(call.error_text)
        self._comparison.values += 1
        if before != after:
            self._note(where, 0, "its error", number, before, after, 1)

    def _ended_otherwise(self, where: str, call: PlayedCall, recorded: str) -> None:
        number = call.recorded.begun.number
        if call.recorded.ended is not None:
            number = call.recorded.ended.number
        self._note(where, 0, "its end", number, recorded, call.error_text, 1)

    def _result(self, where: str, call: PlayedCall, returned: Returned, play: Play) -> None:
        try:
            before = play.elsewhere(restored(Decoder(Any).decode(returned.body())))
        except NotFound as error:
            self._report.notes.append(f"{where}: its result was not compared: {error}")
            return
        trial = Comparison(self._comparison.tolerance, self._comparison.ignored)
        try:
            trial.compare(before, call.value)
        except Found as found:
            if call.recorded.inside:  # what it saw of the work of the other depends on the moment
                self._report.overlapped += 1
                return
            self._comparison.add(trial)
            self._note(
                f"the result of {where}",
                0,
                found.path,
                returned.number,
                found.recorded,
                found.replayed,
                1,
                before,
            )
        else:
            self._comparison.add(trial)

    # ---- differences

    def _note(
        self,
        where: str,
        index: int,
        path: str,
        number: int,
        recorded: object,
        replayed: object,
        count: int,
        item: Any = None,
    ) -> None:
        """Count differences, and keep the first of all."""
        self._report.differences += count
        if self._first is not None and self._first <= number:
            return
        self._first = number
        if isinstance(recorded, Output):
            recorded = item = recorded.body.value()
        self._report.first_difference = Difference(
            where=where,
            index=index,
            path=path,
            recorded=shown(_text(recorded)),
            replayed=shown(_text(replayed)),
            iteration=iteration_of(item),
        )


def _text(value: object) -> str:
    return str(value) if isinstance(value, str) else repr(value)


def _first_line(text: str) -> str:
    return text.split("\n", 1)[0]
