"""`examples/llm_judge.py` against a server: many requests at a time, busy replies, grades."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from examples.llm_judge import DOLLARS_PER_TOKEN
from rlinf_async.messages.language import Failed, JudgeUse, Outcome, Scored
from rlinf_async.rewards import Answer, ScoringPool, repeating
from rlinf_async.rewards.repeating import Judges

OPEN = 64


class Server:
    """Replies once ``together`` requests are open, the first one of each answer with a 429."""

    def __init__(self, together: int, busy: bool) -> None:
        self.together = together
        self.busy = busy
        self.asked: list[dict[str, Any]] = []
        self.most_open = self.open = 0
        self.refused = set[str]()
        self.all_there = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                assert head.startswith("POST /v1/chat/completions ")
                assert "authorization: Bearer s3cret" in head.replace(
                    "Authorization", "authorization"
                )
                lines = dict(line.lower().split(": ", 1) for line in head.splitlines()[1:] if line)
                body = json.loads(await reader.readexactly(int(lines["content-length"])))
                status, reply = await self.reply(body)
                text = json.dumps(reply).encode()
                writer.write(
                    f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nRetry-After: 0\r\n"
                    f"Content-Length: {len(text)}\r\n\r\n".encode()
                    + text
                )
                await writer.drain()
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()

    async def reply(self, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        self.asked.append(body)
        said = body["messages"][0]["content"]
        if self.busy and said not in self.refused:
            self.refused.add(said)
            return "429 Too Many Requests", {}
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        if self.open == self.together:
            self.all_there.set()
        await self.all_there.wait()
        self.open -= 1
        answer = said.split("Answer to grade: ")[1].splitlines()[0]
        grade = f"Fine.\nGrade: {answer}" if answer.isdigit() else "No idea."
        return "200 OK", {
            "choices": [{"message": {"content": grade}}],
            "usage": {"total_tokens": 1000},
        }


@asynccontextmanager
async def judges(
    server: Server, monkeypatch: pytest.MonkeyPatch, retries: int
) -> AsyncIterator[Judges]:
    monkeypatch.setattr(repeating, "FIRST_PAUSE", 0.0)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0, backlog=OPEN)
    port = listening.sockets[0].getsockname()[1]
    monkeypatch.setenv("JUDGE_URL", f"http://127.0.0.1:{port}/v1")
    monkeypatch.setenv("JUDGE_KEY", "s3cret")
    named = ("JUDGE_URL", "JUDGE_KEY")
    async with ScoringPool(processes=1, time_limit=60.0, environment=named) as pool:
        yield Judges(pool, retries=retries, cache=0)
    listening.close()


async def grade(judges: Judges, text: str, use: JudgeUse | None = None) -> Outcome:
    answer = Answer(prompt="2+2=", text=text, reference="4")
    return await judges.judge("examples/llm_judge.py:graded", answer, use or JudgeUse())


async def test_one_process_has_many_requests_open_and_asks_a_busy_server_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Server(together=OPEN, busy=True)
    uses = [JudgeUse() for _ in range(OPEN)]
    async with judges(server, monkeypatch, retries=1) as made:
        graded = await asyncio.gather(*(grade(made, str(at), use) for at, use in enumerate(uses)))
    for at, outcome in enumerate(graded):
        assert isinstance(outcome, Scored)
        assert outcome.reward == min(at, 10) / 10
        assert outcome.cost == pytest.approx(1000 * DOLLARS_PER_TOKEN)
    assert server.most_open == OPEN
    assert uses == [JudgeUse(calls=2, retries=1)] * OPEN
    assert len(server.asked) == 2 * OPEN


async def test_no_grade_and_a_busy_server_are_failures_and_no_rewards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Server(together=1, busy=False)
    async with judges(server, monkeypatch, retries=0) as made:
        failed = await grade(made, "hm")
        assert isinstance(failed, Failed)
        assert "ValueError: the judge gave no grade" in failed.error
        server.busy = True
        failed = await grade(made, "7")
        assert isinstance(failed, Failed)
        assert "Retry: HTTP 429" in failed.error
        graded = await grade(made, "7")
        assert isinstance(graded, Scored)
        assert graded.reward == 0.7
        assert graded.cost == pytest.approx(1000 * DOLLARS_PER_TOKEN)
