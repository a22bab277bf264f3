"""Receivers that wait are served in turn: what `Turns` does is what a list of lists would."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rlinf_async.channels.key_queue import Turns

RECEIVERS = st.integers(1, 4)


class Wait:
    """What `Turns` looks at of a delivery."""

    def __init__(self, receiver: int, number: int) -> None:
        self.receiver = receiver
        self.number = number
        self.waiting = False

    def __repr__(self) -> str:
        return f"{self.receiver}.{self.number}"


class TurnsMachine(RuleBasedStateMachine):
    """The model: the gets of each receiver, receivers in the order of their turns."""

    def __init__(self) -> None:
        super().__init__()
        self.turns: Any = Turns()
        self.model: list[list[Wait]] = []
        self.count = 0

    def of(self, receiver: int) -> list[Wait] | None:
        return next((waits for waits in self.model if waits[0].receiver == receiver), None)

    @rule(receiver=RECEIVERS, times=st.integers(1, 3))
    def wait(self, receiver: int, times: int) -> None:
        for _ in range(times):
            self.count += 1
            wait = Wait(receiver, self.count)
            self.turns.add(wait)
            if (waits := self.of(receiver)) is None:
                self.model.append([wait])
            else:
                waits.append(wait)

    @precondition(lambda self: self.model)
    @rule()
    def serve(self) -> None:
        wait = self.turns.first
        self.turns.pop_first()
        assert not wait.waiting
        waits = self.model.pop(0)
        assert wait is waits.pop(0)
        if waits:
            self.model.append(waits)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        wait = data.draw(st.sampled_from([wait for waits in self.model for wait in waits]))
        assert self.turns.drop(wait)
        assert not self.turns.drop(wait)
        waits = self.of(wait.receiver)
        assert waits is not None
        waits.remove(wait)
        self.model = [waits for waits in self.model if waits]

    @rule(receiver=RECEIVERS)
    def close(self, receiver: int) -> None:
        assert self.turns.drop_all(receiver) == (self.of(receiver) or [])
        self.model = [waits for waits in self.model if waits[0].receiver != receiver]

    @precondition(lambda self: self.model)
    @rule()
    def pass_over(self) -> None:
        self.turns.pass_over()
        self.model.append(self.model.pop(0))

    @rule()
    def fail(self) -> None:
        assert {*self.turns.drop_all()} == {wait for waits in self.model for wait in waits}
        self.model.clear()

    @invariant()
    def is_as_modelled(self) -> None:
        turns, model = self.turns, self.model
        assert [*turns] == [wait for waits in model for wait in waits]
        assert all(wait.waiting for wait in turns)
        assert len(turns) == sum(map(len, model))
        assert turns.receivers == len(model)
        assert turns.first is (model[0][0] if model else None)


TestTurns = TurnsMachine.TestCase
