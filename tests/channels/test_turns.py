"""Receivers that wait are served in turn: what a lane does is what a list of lists would."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rlinf_async.channels.lanes import Lane

ENDS = st.integers(1, 4)


class Wait:
    """What a lane looks at of a get."""

    def __init__(self, end: int, number: int) -> None:
        self.end = end
        self.number = number

    def __repr__(self) -> str:
        return f"{self.end}.{self.number}"


class Turns(RuleBasedStateMachine):
    """The model: the gets of each receiver, receivers in the order of their turns."""

    def __init__(self) -> None:
        super().__init__()
        self.lane: Any = Lane(None)
        self.model: list[list[Wait]] = []
        self.count = 0

    def of(self, end: int) -> list[Wait] | None:
        return next((waits for waits in self.model if waits[0].end == end), None)

    @rule(end=ENDS, times=st.integers(1, 3))
    def wait(self, end: int, times: int) -> None:
        for _ in range(times):
            self.count += 1
            wait = Wait(end, self.count)
            if self.lane.getters:
                self.lane.wait_in_turn(wait)
            else:
                self.lane.getters.append(wait)
            if (waits := self.of(end)) is None:
                self.model.append([wait])
            else:
                waits.append(wait)

    @precondition(lambda self: self.model)
    @rule()
    def serve(self) -> None:
        wait = self.lane.getters.popleft()
        if self.lane.further:
            self.lane.served(wait)
        waits = self.model.pop(0)
        assert wait is waits.pop(0)
        if waits:
            self.model.append(waits)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        wait = data.draw(st.sampled_from([wait for waits in self.model for wait in waits]))
        assert self.lane.drop(wait)
        assert not self.lane.drop(wait)
        waits = self.of(wait.end)
        assert waits is not None
        waits.remove(wait)
        self.model = [waits for waits in self.model if waits]

    @rule(end=ENDS)
    def close(self, end: int) -> None:
        assert self.lane.drop_all(end) == (self.of(end) or [])
        self.model = [waits for waits in self.model if waits[0].end != end]

    @rule()
    def fail(self) -> None:
        assert {*self.lane.drop_all(None)} == {wait for waits in self.model for wait in waits}
        self.model.clear()

    @invariant()
    def is_as_modelled(self) -> None:
        lane, model = self.lane, self.model
        assert [*lane.gets][:1] == [waits[0] for waits in model[:1]]
        assert {*lane.gets} == {wait for waits in model for wait in waits}
        assert lane.waiting_gets == sum(map(len, model))
        assert lane.idle == (not model)
        if len(model) > 1:
            assert [*lane.getters] == [waits[0] for waits in model]
            assert [[*(lane.further[waits[0].end] or ())] for waits in model] == [
                waits[1:] for waits in model
            ]
        else:
            assert not lane.further
            assert [[*lane.getters]] == (model or [[]])


TestTurns = Turns.TestCase
