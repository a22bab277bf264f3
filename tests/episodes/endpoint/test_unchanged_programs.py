"""Agents from PyPI, unchanged, each in a virtualenv of its own: they work, and what is trained is
what the engine drew. The virtualenvs are made once, in ``.peers``, and kept."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from benchmarks.harness.peers import PeerMissing, default_store
from rlinf_async.episodes.command import command
from tests.episodes.endpoint.kit import CALL, served
from tests.episodes.endpoint.programs import PACKAGES

pytestmark = pytest.mark.slow


class Program(NamedTuple):
    """A program that makes turns with an agent of others, and says whether that has worked."""

    package: str
    """in whose virtualenv it runs; empty: in ours"""
    answers: Sequence[str] | Callable[[str], str]
    turns: Sequence[int]
    """turns of the branches that come of it"""
    text: str


def bash(line: str) -> str:
    return (
        f'well\n<tool_call>\n{{"name": "bash", "arguments": {{"command": "{line}"}}}}\n</tool_call>'
    )


ADD = """
import json, os, sys

messages = json.loads(sys.stdin.readline())["messages"]

def add(a: int, b: int) -> str:
    "Add two numbers."
    return str(a + b)

schema = {
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
}
tool = {"type": "function", "function": {"name": "add", "parameters": schema}}
"""

PROGRAMS: dict[str, Program] = {
    "openai": Program(
        "", [CALL, "3"], [2],
        """
        import openai
        client = openai.OpenAI()
        while True:
            chunks = client.chat.completions.create(
                model="gpt-9", messages=messages, tools=[tool], stream=True
            )
            text, calls = "", []
            for chunk in chunks:
                delta = chunk.choices[0].delta
                text += delta.content or ""
                calls += delta.tool_calls or []
            if not calls:
                break
            message = {"role": "assistant", "content": text, "tool_calls": [
                {"id": one.id, "type": "function", "function": one.function.model_dump()}
                for one in calls
            ]}
            messages.append(message)
            for one in calls:
                result = add(**json.loads(one.function.arguments))
                messages.append({"role": "tool", "tool_call_id": one.id, "content": result})
        assert text == "3"
        """,
    ),
    "anthropic": Program(
        "", [CALL, "3"], [2],
        """
        import anthropic
        client = anthropic.Anthropic()
        tools = [{"name": "add", "description": "Add.", "input_schema": schema}]
        while True:
            with client.messages.stream(
                model="claude-9", messages=messages, tools=tools, max_tokens=500
            ) as stream:
                answer = stream.get_final_message()
            if answer.stop_reason != "tool_use":
                break
            results = [
                {"type": "tool_result", "tool_use_id": one.id, "content": add(**one.input)}
                for one in answer.content if one.type == "tool_use"
            ]
            messages.append({"role": "assistant", "content": answer.content})
            messages.append({"role": "user", "content": results})
        assert answer.content[0].text == "3"
        """,
    ),
    "openai-agents": Program(
        "openai-agents", [CALL, "3"], [2],
        """
        from agents import Agent, Runner, function_tool, set_tracing_disabled
        set_tracing_disabled(True)
        agent = Agent(name="adder", instructions="Add.", tools=[function_tool(add)])
        assert Runner.run_sync(agent, messages).final_output == "3"
        """,
    ),
    "openai-agents, streamed": Program(
        "openai-agents", [CALL, "3"], [2],
        """
        import asyncio
        from agents import Agent, Runner, function_tool, set_tracing_disabled
        set_tracing_disabled(True)
        agent = Agent(name="adder", instructions="Add.", tools=[function_tool(add)])

        async def main():
            result = Runner.run_streamed(agent, messages)
            async for _ in result.stream_events():
                pass
            assert result.final_output == "3"

        asyncio.run(main())
        """,
    ),
    "openai-agents, chat completions, a hand-off": Program(
        "openai-agents",
        ['<tool_call>{"name": "transfer_to_adder", "arguments": {}}</tool_call>', CALL, "3"],
        [1, 2],  # another agent has other tools, so another prompt
        """
        from agents import (
            Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled
        )
        set_default_openai_api("chat_completions")
        set_tracing_disabled(True)
        adder = Agent(name="adder", instructions="Add.", tools=[function_tool(add)])
        clerk = Agent(name="clerk", instructions="Ask others.", handoffs=[adder])
        assert Runner.run_sync(clerk, messages).final_output == "3"
        """,
    ),
    "pydantic-ai, chat completions": Program(
        "pydantic-ai", [CALL, "3"], [2],
        """
        from pydantic_ai import Agent
        agent = Agent("openai-chat:gpt-9", instructions="Add.", tools=[add])
        assert agent.run_sync(messages[0]["content"]).output == "3"
        """,
    ),
    "pydantic-ai, responses": Program(
        "pydantic-ai", [CALL, "<think>1 and 2</think>3", "4"], [3],
        """
        from pydantic_ai import Agent
        agent = Agent("openai-responses:gpt-9", instructions="Add.", tools=[add])
        first = agent.run_sync(messages[0]["content"])
        assert first.output == "3"
        again = agent.run_sync("and one more?", message_history=first.all_messages())
        assert again.output == "4"
        """,
    ),
    "pydantic-ai, messages, streamed": Program(
        "pydantic-ai", [CALL, "3"], [2],
        """
        import asyncio
        from pydantic_ai import Agent
        agent = Agent("anthropic:claude-9", instructions="Add.", tools=[add])

        async def main():
            async with agent.run_stream(messages[0]["content"]) as result:
                assert await result.get_output() == "3"

        asyncio.run(main())
        """,
    ),
    "mini-swe-agent": Program(
        "mini-swe-agent",
        [bash("echo one"), "no call", bash("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo 3")],
        [2, 1],  # it takes an answer without a call back, and says what is wrong with it
        """
        import tempfile
        os.environ["MSWEA_COST_TRACKING"] = "ignore_errors"
        os.environ["MSWEA_GLOBAL_CONFIG_DIR"] = tempfile.mkdtemp()
        os.environ["MSWEA_SILENT_STARTUP"] = "1"
        from minisweagent.agents.default import DefaultAgent
        from minisweagent.environments.local import LocalEnvironment
        from minisweagent.models.litellm_model import LitellmModel
        agent = DefaultAgent(
            LitellmModel(
                model_name="openai/gpt-9",
                cost_tracking="ignore_errors",
                model_kwargs={"drop_params": True, "temperature": 0.0},
            ),
            LocalEnvironment(),
            system_template="Use bash.",
            instance_template="{{task}}",
        )
        result = agent.run(messages[0]["content"])
        assert result["exit_status"] == "Submitted", result
        assert result["submission"].strip() == "3", result
        """,
    ),
    "verifiers": Program(
        "verifiers", [CALL, "3", CALL, "3", CALL, "3"], [2, 2, 2],
        """
        import asyncio
        from verifiers.v1.clients.client import resolve_client
        from verifiers.v1.configs.client import EvalClientConfig
        from verifiers.v1.dialects import AnthropicDialect, ChatDialect, ResponsesDialect
        from verifiers.v1.types import SamplingConfig

        responses_tool = {"type": "function", "name": "add", "parameters": schema}
        anthropic_tool = {"name": "add", "description": "Add.", "input_schema": schema}

        def chat(raw):
            message = raw["choices"][0]["message"]
            call = message["tool_calls"][0]["id"]
            return [message, {"role": "tool", "tool_call_id": call, "content": "3"}]

        def responses(raw):
            call = raw["output"][0]
            output = {"type": "function_call_output", "call_id": call["call_id"], "output": "3"}
            return [call, output]

        def anthropic(raw):
            result = {"type": "tool_result", "tool_use_id": raw["content"][0]["id"], "content": "3"}
            return [
                {"role": "assistant", "content": raw["content"]},
                {"role": "user", "content": [result]},
            ]

        async def main():
            config = EvalClientConfig(
                base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY"
            )
            client = resolve_client(config)
            for dialect, field, one, after in (
                (ChatDialect(), "messages", tool, chat),
                (ResponsesDialect(), "input", responses_tool, responses),
                (AnthropicDialect(), "messages", anthropic_tool, anthropic),
            ):
                body = {"model": "m", field: list(messages), "tools": [one]}
                if field == "messages":
                    body["max_tokens"] = 500
                first = await client.get_response(dialect, body, SamplingConfig())
                assert first.message.tool_calls[0].name == "add", first
                body[field] += after(first.raw)
                second = await client.get_response(dialect, body, SamplingConfig())
                assert second.message.content == "3", second
            await client.close()

        asyncio.run(main())
        """,
    ),
}  # fmt: skip


@pytest.fixture(params=sorted(PROGRAMS))
def program(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Program, str]:
    """A program, and the command that runs it."""
    found = PROGRAMS[request.param]
    python: object = sys.executable
    if found.package:
        try:
            python = default_store().python(PACKAGES[found.package])
        except PeerMissing as missing:
            pytest.skip(str(missing))
    script = tmp_path / "agent.py"
    score = 'open(os.environ["EPISODE_SCORE_FILE"], "w").write("1")'
    script.write_text(f"{ADD}{textwrap.dedent(found.text)}\n{score}\n")
    return found, f"{python} {script}"


async def test_an_unchanged_program_works_and_its_tokens_are_exact(
    program: tuple[Program, str],
) -> None:
    expected, line = program
    async with served(expected.answers) as (episode, model):
        assert await command(line)(episode) == 1.0
        assert len(model.draws) == sum(expected.turns)
        assert [len(chat.turns) for chat in episode.chats if chat.turns] == expected.turns
