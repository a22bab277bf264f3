"""A worker that handles several message types, in one process and between processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

import rlinf_async as ra


@dataclass
class Question:
    text: str


@dataclass
class Answer:
    text: str
    to: tuple[int, int]


class Asker(ra.Worker):
    async def run(self, out: ra.Sender[Question]) -> None:
        for text in ("a", "b"):
            await out.put(Question(text))


class Answerer(ra.Worker):
    async def run(
        self, into: ra.Receiver[Question | Answer | int], out: ra.Sender[Question | Answer]
    ) -> None:
        async for item in into:
            if isinstance(item, Question):
                await out.put(item)
                await out.put(Answer(item.text, (1, 2)))


@pytest.mark.parametrize("made", [ra.Cluster.local, ra.Cluster.process])
async def test_messages_of_a_union_go_through_workers_as_what_they_are(
    made: Callable[[], ra.Cluster],
) -> None:
    union: Any = Question | Answer
    async with made() as cluster:
        asked: ra.Channel[Any] = cluster.channel(union, name="asked")
        found: ra.Channel[Any] = cluster.channel(union, name="found")
        asker = await cluster.launch(Asker)
        answerer = await cluster.launch(Answerer)
        calls = [
            asker.call(Asker.run, asked.sender),
            answerer.call(Answerer.run, asked.receiver, found.sender),
        ]
        items = [item async for item in found.receiver]
        for call in calls:
            await call
    assert items == [
        Question("a"), Answer("a", (1, 2)), Question("b"), Answer("b", (1, 2)),
    ]  # fmt: skip
