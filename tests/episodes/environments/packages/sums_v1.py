"""A taskset of verifiers, and a harness that plays it: sums, in two turns."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf  # type: ignore[import-not-found]

PROGRAM = """
import sys
import openai

url, key, model, question = sys.argv[1:]
client = openai.OpenAI(base_url=url, api_key=key)
messages = [{"role": "user", "content": question}]
for _ in range(2):
    answer = client.chat.completions.create(model=model, messages=messages)
    messages.append({"role": "assistant", "content": answer.choices[0].message.content})
    messages.append({"role": "user", "content": "Are you sure?"})
"""

SLOW = 10
"""row that is read slowly"""
READING, OPEN = threading.Event(), threading.Event()
"""set: that row is being read; set: it may be"""
OPEN.set()


class SumData(vf.TaskData):  # type: ignore[misc]
    answer: str = ""


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):  # type: ignore[misc]
    @vf.reward  # type: ignore[untyped-decorator]
    async def right(self, trace: Any) -> float:
        """Whether the last answer is the sum."""
        if trace.last_reply == "raise":
            raise KeyError("board")
        return float(trace.last_reply == self.data.answer)


class SumTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):  # type: ignore[misc]
    def load(self) -> Iterator[SumTask]:
        """Twenty sums."""
        for at in range(20):
            if at == SLOW:
                READING.set()
                OPEN.wait()
            data = SumData(prompt=f"What is {at} + 1?", answer=str(at + 1))
            yield SumTask(data, self.config.task)


class SumHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]
    NEEDS_CONTAINER = False
    EXECUTES_CODE = False

    async def setup(self, runtime: Any) -> None:
        """Nothing to install."""

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
        tool_interception_url: str | None = None,
    ) -> Any:
        """Ask twice, by OpenAI's own client."""
        command = [sys.executable, "-c", PROGRAM, endpoint, secret, ctx.model, data.prompt]
        return await runtime.run_program(command, {})


__all__ = ["SumHarness", "SumTaskset"]
