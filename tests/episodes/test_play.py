"""Agents that are tested without a model."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest

from rlinf_async.episodes import Episode, tool
from rlinf_async.episodes.agents import load_agent
from rlinf_async.messages.language import Failed, Rejected, Scored
from rlinf_async.rewards.judging import Reject
from rlinf_async.testing import run
from rlinf_async.testing.episodes import NoMoreAnswers, call, play
from rlinf_async.workers.episode.config import EpisodeConfig

EXAMPLES = Path(__file__).parents[2] / "examples"


@tool(seconds=5)
async def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    await asyncio.sleep(3)
    return a * b


@tool(seconds=5)
async def sleeps() -> str:
    """Sleep."""
    await asyncio.sleep(3600)
    return ""


async def calculates(episode: Episode) -> float:
    chat = episode.chat(tools=[multiply, sleeps])
    while (turn := await chat.turn()).tool_calls:
        await chat.answer(turn)
    return float(turn.text.strip() == episode.task.reference)


def test_an_agent_calls_its_tool() -> None:
    answers = [call("multiply", a=6, b=7), "42"]
    played = run(play(calculates, answers, messages="6 times 7?", reference="42"))
    assert played.outcome == Scored(reward=1.0)
    assert played.tool_calls == {"multiply": 1}
    assert [turn.text for turn in played.turns] == ["", "42"]
    assert played.text == "42"
    assert not played.left
    assert "6 times 7?" in played.read[0]
    assert "multiply" in played.read[0]
    assert "42" not in played.read[0]
    assert "42" in played.read[1]
    # What was drawn is trained, and nothing else.
    drawn = played.sample.generated.drawn_tokens
    assert drawn == len(answers[0]) + 1 + len(answers[1]) + 1


def test_the_answers_may_be_a_function() -> None:
    def answer(read: str) -> str:
        return "42" if "tool\n" in read else call("multiply", a=6, b=7)

    assert run(play(calculates, answer, reference="41")).outcome == Scored(reward=0.0)


def test_a_tool_that_takes_too_long_costs_no_real_time() -> None:
    played = run(play(calculates, [call("sleeps"), "42"], reference="42"))
    assert played.record.tool_failures == {"sleeps/timeout": 1}
    assert played.outcome == Scored(reward=1.0)


async def raises(episode: Episode) -> float:
    await episode.chat().turn()
    raise KeyError("nothing")


async def rejects(episode: Episode) -> None:
    await episode.chat().turn()
    raise Reject("no reference")


async def talks(episode: Episode) -> None:
    chat = episode.chat()
    while True:
        await chat.turn()
        chat.say("go on")


@pytest.mark.parametrize(
    ("agent", "outcome", "cut"),
    [(raises, Failed, ""), (rejects, Rejected, ""), (talks, type(None), "turns")],
)
def test_how_an_episode_ends(agent: Any, outcome: type, cut: str) -> None:
    played = run(play(agent, ["one", "two", "three"], config=EpisodeConfig(max_turns=2)))
    assert isinstance(played.outcome, outcome)
    assert played.record.cut == cut
    assert played.left == (1 if cut else 2)


async def reads_its_state(episode: Episode) -> float:
    return float(episode.state or b"0")


async def resumes(episode: Episode) -> float:
    chat = await episode.resume()
    found = float(episode.state or b"0")
    await chat.turn()
    return found


@pytest.mark.parametrize("state", [b"", b"7"])
def test_the_state_is_read_after_resume_as_in_a_run(state: bytes) -> None:
    played = run(play(resumes, ["one"], state=state))
    assert played.outcome == Scored(reward=float(state or b"0"))
    failed = run(play(reads_its_state, ["one"], state=state)).outcome
    assert isinstance(failed, Failed)
    assert "await episode.resume()" in failed.error
    with pytest.raises(TypeError, match="'7' \\(a str\\), not bytes"):
        run(play(resumes, ["one"], state="7"))  # type: ignore[arg-type]


def test_there_may_be_no_end_of_answers() -> None:
    played = run(play(calculates, itertools.repeat("42"), reference="42"))
    assert played.outcome == Scored(reward=1.0)
    assert played.left == 1000


def test_a_single_text_is_no_list_of_answers() -> None:
    with pytest.raises(TypeError, match="'42', a single text: put it into a list"):
        run(play(calculates, "42"))


def test_an_agent_that_asks_for_more_is_told_what_it_had_said() -> None:
    with pytest.raises(
        NoMoreAnswers, match=r"(?s)answer 2, but the test has 1.*the user said this"
    ) as error:
        run(play(calculates, [call("multiply", a=6, b=7)], messages="the user said this"))
    assert "tool\n42" in str(error.value)


def test_an_agent_that_speaks_http_is_played_too() -> None:
    async def black_box(episode: Episode) -> None:
        from openai import AsyncOpenAI

        async with AsyncOpenAI(base_url=f"{episode.base_url}/v1", api_key=episode.key) as client:
            said = await client.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": "6 times 7?"}]
            )
        assert said.choices[0].message.content == "42"

    played = asyncio.run(play(black_box, ["42"]))
    assert played.outcome is None
    assert played.text == "42"


def test_the_agent_of_the_example_is_played() -> None:
    file = str(EXAMPLES / "calculator_agent.py")
    agent = load_agent(f"{file}:run")
    config = EpisodeConfig(tools=f"{file}:parse")
    played = run(play(agent, ["calc(12*12)", "144"], reference="144", config=config))
    assert played.outcome == Scored(reward=1.0)
    assert played.tool_calls == {"calc": 1}
    assert played.record.metrics == {"with_calculator": 1.0}
