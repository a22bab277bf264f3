"""The order in which a life of a worker is played again.

::

    a get of the worker     waits for        unblocked by
    a delivery              what the worker had put before it        its own puts
                            the weights that answered it             its loading of them
    a value of a `Latest`   answers under the weights before it      its own puts
    a call                  calls that had ended before it           their ends
    the end of a channel    everything that was recorded             its own puts

The recording has one order: that in which things passed the process that owns the channels. An
input is given to the worker as soon as everything that the worker had put before it was put again.
So what had an effect on what, has it again, whatever takes longer this time. Two things that the
recording says of its own accord go before that order: which weights answered a question, and which
values were answered by older weights than the worker was given at that time.

Where nobody can go on, the earliest input that the worker waits for is given to it, and is counted
(`Script.forced`): the worker then does something else than what was recorded, or two of its tasks
were told apart by less than the recording knows.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

from rlinf_async.channels.errors import EndOfChannel
from rlinf_async.channels.statistics import WaitFuture, current_party
from rlinf_async.replaying.history import (
    Input,
    Life,
    Output,
    answered_by,
    question_of,
    versions_of,
)

Transform = Callable[[Any], Any]
"""Changes an item before it is given to the worker."""


class Wanted:
    """A get of the worker that waits."""

    __slots__ = ("channel", "future", "given", "party")

    def __init__(self, channel: str, given: Input | None) -> None:
        self.channel = channel
        self.given = given
        """the input that it will get; None: the recording has no more"""
        self.party = current_party.get()
        self.future = WaitFuture()


class Done:
    """An item that the worker has put in the replay."""

    __slots__ = ("item", "key", "weight")

    def __init__(self, item: Any, key: Any, weight: int) -> None:
        self.item = item
        self.key = key
        self.weight = weight


class Script:
    """What is given to a worker, in which order, and what it has put.

    Args:
        life: the life that is played.
        transform: changes items before they are given.
    """

    def __init__(self, life: Life, transform: Transform = lambda item: item) -> None:
        self.life = life
        self.transform = transform
        self.changed = asyncio.Event()
        """set when a put, a get or a call may have let something else go on"""
        self.moves = 0
        """number of gets, puts and ends of calls so far"""
        self.forced = 0
        """inputs that were given before what was recorded to come before them"""
        self.put: dict[str, list[Done]] = defaultdict(list)
        """what the worker has put, by channel"""
        self._left = [one.number for one in life.inputs if one.version is None and one.certain]
        """numbers of the deliveries that were not given yet, of those that certainly were"""
        self.cut_off = set[str]()
        """channels in which the worker puts more than was recorded of a life that was cut off"""
        self._waiting: list[Wanted] = []
        self._queues: dict[tuple[str, Any], deque[Input]] = defaultdict(deque)
        self._latest: dict[str, deque[Input]] = defaultdict(deque)
        for given in life.inputs:
            if given.version is None:
                self._queues[given.channel, given.key].append(given)
            else:
                self._latest[given.channel].append(given)
        self._numbers: dict[str, list[int]] = defaultdict(list)
        """numbers of the recorded outputs, by channel"""
        for output in life.outputs:
            self._numbers[output.channel].append(output.number)
        self._loaded: dict[str, int] = {}
        """the newest version that the worker has asked to go beyond, by `Latest`"""
        self._order = _VersionOrder(life) if self._latest else None

    # ---- for the worker's ends

    async def take(self, channel: str, key: Any) -> Input:
        """The next delivery under a key, when it is due.

        Raises:
            EndOfChannel: there was none after it.
        """
        queue = self._queues[channel, key]
        wanted = Wanted(channel, queue.popleft() if queue else None)
        try:
            return await self._wait(wanted)
        except asyncio.CancelledError:
            if wanted.given is not None:
                queue.appendleft(wanted.given)
            raise

    def take_nowait(self, channel: str, key: Any) -> Input | None:
        """The next delivery under a key if it is due; else None."""
        queue = self._queues[channel, key]
        if not queue or not self._is_due(queue[0]):
            return None
        return self._given(queue.popleft())

    async def newer(self, channel: str, than: int) -> Input:
        """The next value of a `Latest` that is newer than this version, when it is due.

        Raises:
            EndOfChannel: there was none after it.
        """
        self._loaded[channel] = max(self._loaded.get(channel, 0), than)
        self.changed.set()
        queue = self._latest[channel]
        wanted = Wanted(channel, _next_newer(queue, than))
        try:
            return await self._wait(wanted)
        except asyncio.CancelledError:
            if wanted.given is not None:
                queue.appendleft(wanted.given)
            raise

    def newer_nowait(self, channel: str, than: int) -> Input | None:
        """The next value of a `Latest` if it is due; else None."""
        self._loaded[channel] = max(self._loaded.get(channel, 0), than)
        queue = self._latest[channel]
        if not queue or not self._is_due(queue[0]):
            return None
        return self._given(queue.popleft())

    async def done(self, channel: str, item: Any, key: Any, weight: int) -> None:
        """The worker has put an item, or published a value.

        Where its life was cut off in the recording and it puts more than was recorded, it waits, as
        for room: nobody knows what came of that.
        """
        await asyncio.sleep(0)
        put, recorded = self.put[channel], self._numbers[channel]
        if len(put) >= len(recorded) and self.life.died:
            self.cut_off.add(channel)
            self.changed.set()
            await WaitFuture()
        put.append(Done(item, key, weight))
        if self._order is not None:
            self._order.put(channel, item)
        self._moved()

    def done_nowait(self, channel: str, item: Any, key: Any, weight: int) -> None:
        """As `done`, for a put that does not wait."""
        self.put[channel].append(Done(item, key, weight))
        if self._order is not None:
            self._order.put(channel, item)
        self._moved()

    # ---- for whoever plays it

    def was_put_before(self, number: int) -> bool:
        """Whether everything was put again that had been put before this number."""
        return all(
            len(self.put[channel]) >= bisect_left(numbers, number)
            for channel, numbers in self._numbers.items()
        )

    def was_given_before(self, number: int) -> bool:
        """Whether everything was given that had certainly been given before this number."""
        return not self._left or self._left[0] >= number

    def published(self, channel: str) -> int:
        """The version in the `Latest` of what was published there last."""
        versions = [one.version for one in self.life.outputs if one.channel == channel]
        count = len(self.put[channel])
        return versions[count - 1] if count <= len(versions) else count

    def release(self) -> bool:
        """Give what is due; whether there was something."""
        found = False
        for wanted in sorted(self._waiting, key=_number):
            if wanted.given is not None and self._is_due(wanted.given):
                self._give(wanted)
                found = True
        return found

    def force(self) -> bool:
        """Give the earliest input that is waited for, before its time; whether there is one."""
        waiting = [one for one in self._waiting if one.given is not None]
        if not waiting:
            return False
        self.forced += 1
        self._give(min(waiting, key=_number))
        return True

    def end_channels(self, party: str, number: int) -> bool:
        """End the channels on which a party waits for what the recording does not have, or has only
        after this number; whether anybody waited there."""
        ending = [
            one
            for one in self._waiting
            if one.party == party and (one.given is None or one.given.number > number)
        ]
        for wanted in ending:
            self._waiting.remove(wanted)
            if not wanted.future.done():
                ended = EndOfChannel(f"channel {wanted.channel!r}: nothing more was recorded")
                wanted.future.set_exception(ended)
        if ending:
            self._moved()
        return bool(ending)

    # ---- inside

    async def _wait(self, wanted: Wanted) -> Input:
        await asyncio.sleep(0)
        if wanted.given is not None and self._is_due(wanted.given):
            return self._given(wanted.given)
        self._waiting.append(wanted)
        self.changed.set()
        try:
            await wanted.future
        finally:
            if wanted in self._waiting:
                self._waiting.remove(wanted)
        assert wanted.given is not None
        return wanted.given

    def _give(self, wanted: Wanted) -> None:
        self._waiting.remove(wanted)
        if not wanted.future.done() and wanted.given is not None:
            self._given(wanted.given)
            wanted.future.set_result(None)

    def _given(self, given: Input) -> Input:
        if given.version is None and given.certain and given.number in self._left:
            self._left.remove(given.number)
        self._moved()
        return given

    def _moved(self) -> None:
        self.moves += 1
        self.changed.set()

    def _is_due(self, given: Input) -> bool:
        if not self.was_put_before(given.due):
            return False
        if self._order is None:
            return True
        if given.version is not None:
            return self._order.may_load(given)
        return self._order.may_answer(given, self._loaded)


def _number(wanted: Wanted) -> int:
    return 2**63 if wanted.given is None else wanted.given.number


def _next_newer(queue: deque[Input], than: int) -> Input | None:
    """The next value of a queue that is newer; those before it are not wanted any more."""
    while queue:
        given = queue.popleft()
        if given.version is not None and given.version > than:
            return given
    return None


class _VersionOrder:
    """What the weights say of the order: a question is answered under the weights that answered it
    in the recording, where the items say which.

    The number of a version in a `Latest` is not that of the weights in it: the value says that.
    """

    def __init__(self, life: Life) -> None:
        self._weights: dict[tuple[str, int], int] = {}
        for given in life.inputs:
            if given.version is not None:
                version = versions_of(given.items[0].value())
                if version is not None:
                    self._weights[given.channel, given.version] = version[1]
        self._answers: dict[object, int] = {}
        """oldest version of the weights that answered a question, by the question"""
        self._newest: dict[str, list[int]] = defaultdict(list)
        self._put: dict[str, list[int]] = defaultdict(list)
        for output in life.outputs:
            self._learn(output)

    def _learn(self, output: Output) -> None:
        item = output.body.value()
        versions, question = versions_of(item), answered_by(item, output.key)
        if versions is None or question is None:
            return
        self._answers[question] = min(versions[0], self._answers.get(question, versions[0]))
        self._newest[output.channel].append(versions[1])

    def put(self, channel: str, item: Any) -> None:
        """The worker has put an item."""
        versions = versions_of(item)
        if versions is not None and channel in self._newest:
            self._put[channel].append(versions[1])

    def may_load(self, given: Input) -> bool:
        """Whether all answers under older weights were put."""
        version = self._weights.get((given.channel, given.version or 0))
        if version is None:
            return True
        return all(
            _below(self._put[channel], version) >= _below(newest, version)
            for channel, newest in self._newest.items()
        )

    def may_answer(self, given: Input, loaded: dict[str, int]) -> bool:
        """Whether the weights are loaded that answered these questions first."""
        questions = (question_of(body.value()) for body in given.items)
        needed = [self._answers[one] for one in questions if one in self._answers]
        if not needed:
            return True
        have = [self._weights.get(place, -1) for place in loaded.items()]
        return max(have, default=-1) >= min(needed)


def _below(versions: list[int], version: int) -> int:
    return sum(one < version for one in versions)
