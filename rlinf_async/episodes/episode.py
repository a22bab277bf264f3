"""An episode: a coroutine in which a language model acts, in one turn or several.

::

    async def run(episode: Episode) -> float | None:
        chat = episode.chat(tools=[calculate])
        while (turn := await chat.turn()).tool_calls:
            await chat.answer(turn)
        return float(turn.text.strip() == episode.task.reference)

What it returns is its reward; None: the verifier of the data judges the last answer. Each `Chat` is
one branch: its tokens are those that were drawn and those that were given, in their order, and are
trained as they are. An episode has one outcome, whatever number of branches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from rlinf_async.episodes.conversation import Conversation
from rlinf_async.episodes.parsing import Parser, ToolCall
from rlinf_async.episodes.template import ChatTemplate, Message
from rlinf_async.episodes.tools import Tool, ToolResult, run_all
from rlinf_async.messages.language import Generated, Tokens


class EpisodeError(Exception):
    """The episode cannot go on."""


class LimitReached(EpisodeError):
    """The episode has made as many turns, or as many tokens, as it may."""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What an episode is about: one record of the data."""

    index: int
    """position in the data, counted over epochs"""
    messages: tuple[dict[str, Any], ...]
    """system and user messages that the conversation begins with"""
    reference: str
    """right answer, or JSON of the verifier's own"""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """How long an episode may be."""

    turns: int
    tokens: int
    """tokens of the longest branch, prompt included"""


class Model(Protocol):
    """What draws the answers of an episode."""

    async def draw(self, context: Tokens, most: int) -> Generated:
        """Draw up to ``most`` tokens after ``context`` ``[P]``."""


class Turn:
    """One answer of the model."""

    def __init__(self, text: str, thoughts: str, calls: tuple[ToolCall, ...], drawn: Generated):
        self.text = text
        """what the model said, without thoughts and calls"""
        self.thoughts = thoughts
        self.tool_calls = calls
        self.drawn = drawn
        """its tokens, as the engine drew them"""
        self.reward: float | None = None
        """reward of this turn alone, beside the episode's; set it where credit is given by turn"""

    @property
    def cut(self) -> bool:
        """Whether the answer was longer than it could be."""
        return self.drawn.finish == "length"


class Chat:
    """One branch of an episode: a conversation with the model. Made by `Episode.chat`."""

    def __init__(
        self,
        episode: Episode,
        conversation: Conversation,
        messages: Sequence[Message],
        tools: Sequence[Tool],
    ) -> None:
        self._episode = episode
        self._conversation = conversation
        self._tools = {one.name: one for one in tools}
        self._schemas = [one.schema for one in tools]
        self._unsaid: list[Message] = []
        self._last: Turn | None = None
        self.messages: list[Message] = list(messages)
        """the conversation as text, for people; what is trained are its tokens"""
        self.turns: list[Turn] = []
        """turns of this branch, oldest first"""

    @property
    def tokens(self) -> Tokens:
        """``[P + R]``, as the model reads them at its next turn, but for what was not sent yet."""
        return self._conversation.tokens

    async def turn(self, max_tokens: int | None = None) -> Turn:
        """Let the model answer.

        Args:
            max_tokens: of this answer; by default what the episode may still have.

        Raises:
            LimitReached: no turn, or no token, is left.
            Rewrites: the template would write earlier answers otherwise (see `ChatTemplate`).
        """
        if self._last is not None and not self._unsaid:
            raise EpisodeError("the model spoke last: answer its turn, or say something")
        given = self._following()
        room = self._episode.room(len(self._conversation) + len(given))
        most = room if max_tokens is None else min(room, max_tokens)
        if len(given):
            self._conversation.give(given)
        self._unsaid.clear()
        drawn = await self._episode.draw(self._conversation.tokens, most)
        self._conversation.answer(drawn)
        turn = self._episode.read(drawn)
        self._last = turn
        self.turns.append(turn)
        self.messages.append(_as_message(turn))
        return turn

    def say(self, content: str, role: str = "user", **fields: Any) -> None:
        """Append a message, which the model reads at its next turn."""
        message = {"role": role, "content": content, **fields}
        self._unsaid.append(message)
        self.messages.append(message)

    async def answer(self, turn: Turn) -> list[ToolResult]:
        """Carry out the tools that a turn calls, all at once, and tell the model what they say.

        Raises:
            ToolFailed: a tool failed, and the run is configured so that this ends the episode.
        """
        results = await run_all(turn.tool_calls, self._tools)
        for at, result in enumerate(results):
            self._episode.count(result)
            self.say(result.text, "tool", name=result.call.name, tool_call_id=_call_id(at))
        return results

    def fork(self) -> Chat:
        """Return a branch that goes on from here by itself: what was said so far is its prompt."""
        branch = Chat(
            self._episode, self._conversation.fork(), self.messages, list(self._tools.values())
        )
        branch._unsaid = list(self._unsaid)
        branch._last = self._last
        self._episode.chats.append(branch)
        return branch

    def response(self) -> tuple[Tokens, Generated]:
        """Return prompt ``[P]`` and response ``[R]`` of this branch, as they are trained."""
        return self._conversation.prompt, self._conversation.response()

    def _following(self) -> Tokens:
        if self._last is None:
            return np.zeros(0, np.int32)
        return self._episode.template.following(
            self._episode.decode(self._last.drawn.token_ids),
            self._last.drawn.token_ids,
            self._unsaid,
            self._schemas,
            called=bool(self._last.tool_calls),
        )


class Episode:
    """One attempt at a task.

    Args:
        task: what it is about.
        model: draws answers.
        template: renders messages.
        parser: reads answers.
        decode: tokens -> text, special tokens of the end of a turn left out.
        limits: how long it may be.
    """

    def __init__(
        self,
        task: Task,
        model: Model,
        template: ChatTemplate,
        parser: Parser,
        decode: Callable[[Tokens], str],
        limits: Limits,
    ) -> None:
        self.task = task
        self.template = template
        self.decode = decode
        self.chats: list[Chat] = []
        """branches, oldest first"""
        self.turns = 0
        """turns of all branches"""
        self.metrics: dict[str, float] = {}
        """numbers of the user's own, which the run averages"""
        self.tool_calls: Counter[str] = Counter()
        self.tool_failures: Counter[tuple[str, str]] = Counter()
        """calls that failed, by tool and kind of failure"""
        self._model = model
        self._parser = parser
        self._limits = limits

    def chat(
        self,
        tools: Sequence[Tool] = (),
        messages: Sequence[Message] | None = None,
    ) -> Chat:
        """Begin a conversation.

        Args:
            tools: those that the model may call.
            messages: what it reads first; by default the task's.

        Raises:
            TemplateError: the template refuses a message, or leaves the tools out.
        """
        first = self.task.messages if messages is None else messages
        tokens = self.template.opening(first, [one.schema for one in tools])
        chat = Chat(self, Conversation(tokens), first, tools)
        self.chats.append(chat)
        return chat

    def room(self, tokens: int) -> int:
        """Return the number of tokens that a branch of so many may still get.

        Raises:
            LimitReached: none, or there was the last turn.
        """
        if self.turns >= self._limits.turns:
            raise LimitReached(f"max_turns = {self._limits.turns} turns are made")
        left = self._limits.tokens - tokens
        if left < 1:
            raise LimitReached(f"max_tokens = {self._limits.tokens} tokens are reached")
        return left

    async def draw(self, context: Tokens, most: int) -> Generated:
        """Have the model draw an answer."""
        self.turns += 1
        return await self._model.draw(context, most)

    def read(self, drawn: Generated) -> Turn:
        """Return an answer, read."""
        found = self._parser(self.decode(drawn.token_ids))
        return Turn(found.text, found.thoughts, found.tool_calls, drawn)

    def count(self, result: ToolResult) -> None:
        """Count a call of a tool."""
        self.tool_calls[result.call.name] += 1
        if result.failure:
            self.tool_failures[result.call.name, result.failure] += 1


RunEpisode = Callable[[Episode], Any]
"""The user's coroutine function"""


def _as_message(turn: Turn) -> Message:
    message: dict[str, Any] = {"role": "assistant", "content": turn.text}
    if turn.tool_calls:
        message["tool_calls"] = [_as_call(at, call) for at, call in enumerate(turn.tool_calls)]
    return message


def _as_call(at: int, call: ToolCall) -> Mapping[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": _call_id(at), "type": "function", "function": function}


def _call_id(at: int) -> str:
    return f"call{at:05d}"
