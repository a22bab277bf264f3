"""Agents of episodes, for the toy engine, and what is none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from rlinf_async.episodes import Episode, Parsed, ToolCall, Turn, tool

WITH_TOOLS = (
    "{% if tools %}<system>{{ tools[0].function.name }}{% endif %}"
    "{% for message in messages %}<{{ 'user' if message.role == 'tool' else message.role }}>"
    "{{ message.content }}{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""a chat template that has tools"""


@tool
async def look(where: str) -> str:
    """Look somewhere."""
    return where


async def talks(episode: Episode) -> float:
    """Three turns; the reward depends on all that was drawn."""
    chat = episode.chat()
    drawn = 0
    for _ in range(3):
        turn = await chat.turn()
        drawn += int(turn.drawn.token_ids.sum())
        chat.say("and?")
    episode.metrics["drawn"] = float(drawn)
    return float(drawn % 2)


@tool(seconds=600)
async def search(seconds: float) -> str:
    """Look for a long time."""
    await asyncio.sleep(seconds)
    return "nothing"


async def searches(episode: Episode) -> float:
    """A turn, and what takes long: a tool, of every second task the agent itself."""
    chat = episode.chat(tools=[search])
    turn = await chat.turn()
    if episode.task.index % 2:
        await asyncio.sleep(300.0)
    await chat.answer(turn)
    return 1.0


def always_searches(text: str) -> Parsed:
    """Each answer is a call."""
    return Parsed(text=text, tool_calls=(ToolCall(name="search", arguments={"seconds": 300.0}),))


async def pauses(episode: Episode) -> float:
    """Three turns, with a wait in between in which no request of it is anywhere."""
    chat = episode.chat()
    for _ in range(3):
        await chat.turn()
        await asyncio.sleep(0.05)
        chat.say("and?")
    return float(chat.turns[-1].drawn.token_ids.sum() % 2)


async def calls(episode: Episode) -> float:
    """A turn that calls a tool, if the parser reads it so, and one more."""
    chat = episode.chat(tools=[look])
    await chat.answer(await chat.turn())
    return float(len((await chat.turn()).drawn.token_ids))


def always_looks(text: str) -> Parsed:
    """Each answer is a call."""
    return Parsed(text=text, tool_calls=(ToolCall(name="look", arguments={"where": "here"}),))


async def forks(episode: Episode) -> float:
    """Two turns, and one in a branch; what each is worth depends on what was drawn."""
    chat = episode.chat()
    await chat.turn(4)
    chat.say("and?")
    branch = chat.fork()
    for each in (chat, branch):
        turn = await each.turn(4)
        turn.reward = float(turn.drawn.token_ids[0] % 3)
    episode.metrics["drawn"] = float(sum(len(one.drawn.token_ids) for one in every(episode)))
    return float(turn.drawn.token_ids.sum() % 2)


def every(episode: Episode) -> list[Turn]:
    """The turns of all branches."""
    return [turn for chat in episode.chats for turn in chat.turns]


async def answers(episode: Episode) -> None:
    """One turn, which the verifier judges."""
    await episode.chat().turn()


async def looks(episode: Episode) -> float:
    """With a tool, which a template may leave out."""
    await episode.chat(tools=[look]).turn()
    return 1.0


async def says_a_word(episode: Episode) -> str:
    """What is no reward."""
    return (await episode.chat().turn()).text


def at_once(episode: Episode) -> float:
    """No coroutine."""
    return 1.0


async def streams(episode: Episode) -> AsyncIterator[float]:
    """No coroutine either."""
    yield 1.0


async def of_two(episode: Episode, more: int) -> float:
    """Other arguments."""
    return float(more)


class Agent:
    """An object that can be awaited when it is called."""

    async def __call__(self, episode: Episode) -> float:
        """As a coroutine function."""
        await episode.chat().turn()
        return 1.0


agent = Agent()
