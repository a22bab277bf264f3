r"""What an agent has asked in one episode: which of its messages are answers that the model drew.

An agent sends its whole conversation each time, as text. It is looked up here, message by message,
so that what the model drew stays as tokens and nothing is encoded anew that need not be:

::

    sent            s u A1 t        looked up: s u A1 is known, t is new
                         |
    recorded    s u ---- A1 ---- ...          t goes on in the chat of A1, if A1 is its last turn
                   \                          and nobody asks there; else in a fork after A1
                    `--- A1'                  (asked twice, n = 2)

    sent            s u' t'         no answer of ours: a chat of its own, rendered anew
                                    (the agent has compacted or edited its context)

A text is ours where its words are, the identifiers of its calls, and, if they are sent at all, the
thoughts. Whatever an agent sends, tokens that were drawn are those of the engine.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import hashlib
import re
import secrets
import time
from collections import defaultdict
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np

from rlinf_async.episodes.endpoint.ask import Answer, Answers, Ask, Kind, Policy, Refused
from rlinf_async.episodes.episode import (
    Chat,
    Episode,
    EpisodeError,
    EpisodeOver,
    LimitReached,
    Turn,
)
from rlinf_async.episodes.parsing import thoughts_and_rest
from rlinf_async.episodes.template import Message, Rewrites, TemplateError, as_answer

REMEMBERED: Final = 64
"""answers of an episode that can be told again"""
_Key = tuple[Any, ...]


FLOAT: Final = re.compile(rb"[0-9](\.0|e)")
"""what JSON has in it that holds a float without a fraction; may be a text, too"""


class _Node:
    """A message of a conversation, and those that have followed it."""

    __slots__ = ("chat", "children", "thoughts", "turn")

    def __init__(self) -> None:
        self.children = defaultdict[_Key, _Node](_Node)
        self.chat: Chat | None = None
        """branch whose turn this is; None: the model did not say it"""
        self.turn: Turn | None = None
        self.thoughts = ""


class Record:
    """The conversations of an agent with the model in one episode."""

    def __init__(self, episode: Episode, policy: Policy) -> None:
        self.episode = episode
        self.policy = policy
        self.context = contextvars.copy_context()
        """context of the episode's coroutine, in which its answers are drawn"""
        self.asking: set[asyncio.Future[Any]] = set()
        """questions that are not answered yet"""
        self._claimed: set[Chat] = set()
        """branches in which somebody asks"""
        self._roots = defaultdict[bytes, _Node](_Node)
        """by the tools of the conversation, which the prompt has"""
        self._responses: dict[str, list[Message]] = {}
        """conversations up to responses, by their identifiers"""
        self._answered: dict[bytes, Answers] = {}
        """the newest answers, by a digest of what was asked"""
        self._undelivered: set[str] = set()
        """identifiers of answers whose client had gone away when they were there"""

    async def answers(self, ask: Ask, *, again: bool = False) -> Answers:
        """Have the model answer; what it has answered already to the same question, where the
        client says that it asks ``again``, or has not got that answer.

        Raises:
            Refused: a limit is reached, the template refuses the messages, the agent goes on from a
                response that it was not given, or the answers cannot be had.
        """
        asked = hashlib.blake2b(msgspec.json.encode(ask), digest_size=16).digest()
        found = self._answered.get(asked)
        if found is not None and (again or found.id in self._undelivered):
            self._undelivered.discard(found.id)
            return found
        answers = self._answered[asked] = await self._new_answers(ask)
        while len(self._answered) > REMEMBERED:
            self._undelivered.discard(self._answered.pop(next(iter(self._answered))).id)
        return answers

    def lost(self, answers: Answers) -> None:
        """Note that the client had gone away before it got its answers."""
        self._undelivered.add(answers.id)

    async def _new_answers(self, ask: Ask) -> Answers:
        messages = self._whole(ask)
        keys = [_key(one) for one in messages]
        root = self._roots[msgspec.json.encode(ask.tools)]
        if self.episode.limits.turns - self.episode.turns < ask.n:
            reached = LimitReached("turns", self.episode.limits.turns)
            self.episode.reached = self.episode.refused(reached)
            raise _too_many_turns(self.episode, ask.n)
        claimed: list[Chat] = []
        try:
            turns = await self._asked(_longest(root, messages, keys), messages, ask, claimed)
            answers = self._answers(ask, claimed[0], turns)
            node = functools.reduce(lambda node, key: node.children[key], keys, root)
            self._remember(node, messages, list(zip(claimed, turns, strict=True)), answers, ask)
        except LimitReached as reached:
            self.episode.reached = reached
            raise _limit(self.episode, reached) from reached
        except TemplateError as error:
            raise Refused(str(error), field="messages") from error
        except EpisodeError as error:
            kind: Kind = "key" if isinstance(error, EpisodeOver) else "invalid"
            raise Refused(str(error), kind) from error
        finally:
            self._claimed.difference_update(claimed)
        return answers

    def count(self, ask: Ask) -> int:
        """Return the number of tokens of a conversation; raises `Refused`."""
        try:
            return len(self.episode.template.opening(self._whole(ask), ask.tools))
        except TemplateError as error:
            raise Refused(str(error), field="messages") from error

    def _whole(self, ask: Ask) -> list[Message]:
        """Return all messages of a conversation, also those before its last response."""
        messages = ask.messages
        if ask.previous:
            before = self._responses.get(ask.previous)
            if before is None:
                raise Refused(
                    f"there is no response {ask.previous!r} in this episode, or it was not stored",
                    field="previous_response_id",
                )
            instructions = int(ask.instructions)
            messages = [*messages[:instructions], *before, *messages[instructions:]]
        if not messages:
            raise Refused("messages is empty: there is nothing to answer", field="messages")
        if messages[-1]["role"] == "assistant":
            raise Refused(
                "the last message is the assistant's own: it cannot be told how its answer begins, "
                "what is trained has to be what was sampled; end with a user's or tool's message",
                field="messages",
            )
        return _with_names(messages)

    async def _asked(
        self,
        longest: tuple[_Node | None, int],
        messages: Sequence[Message],
        ask: Ask,
        claimed: list[Chat],
    ) -> list[Turn]:
        """Ask in a branch for each answer; where the template does not let a conversation go on, in
        one that is rendered anew. ``claimed``: filled with the branches."""
        node, known = longest
        if node is not None:
            chat, turn = node.chat, node.turn
            assert chat is not None
            if chat.last is not turn or chat in self._claimed:
                chat = chat.fork(turn)
            for message in messages[known:]:
                chat.say(**message)
            try:
                return await self._drawn(chat, ask, claimed)
            except Rewrites:
                raise
            except TemplateError as error:
                claimed.clear()
                self.episode.rendered_anew += 1
                self.policy.warn(
                    f"the conversation cannot go on: {error}. It is rendered anew, as a branch "
                    "with a prompt of its own, now and wherever the template does not let one go "
                    "on (column rendered_anew of the metrics)",
                    once="rendered anew",
                )
        return await self._drawn(self.episode.chat(ask.tools, messages), ask, claimed)

    async def _drawn(self, chat: Chat, ask: Ask, claimed: list[Chat]) -> list[Turn]:
        chats = [chat] if ask.n == 1 else [chat.fork() for _ in range(ask.n)]
        if ask.n > 1:
            chat.unsay()  # it is theirs
        claimed.extend(chats)
        self._claimed.update(chats)
        last = self.episode.last
        try:
            if ask.n == 1:
                return [await self._turn(chat, ask)]
            return await _together([self._turn(one, ask) for one in chats])
        except BaseException:
            if ask.n == 1:
                chat.unsay()
            else:  # also those that have their answer, which nobody is told
                self.episode.chats = [one for one in self.episode.chats if one not in chats]
                if any(self.episode.last in one.turns for one in chats):
                    self.episode.last = last
            self._claimed.difference_update(chats)
            raise

    def _turn(self, chat: Chat, ask: Ask) -> Coroutine[Any, Any, Turn]:
        return chat.turn(ask.max_tokens, stop=ask.stop, seed=ask.seed)

    def _answers(self, ask: Ask, chat: Chat, turns: Sequence[Turn]) -> Answers:
        return Answers(
            id=secrets.token_hex(12),
            created=int(time.time()),
            model=ask.model,
            choices=[self._answer(turn, ask) for turn in turns],
            prompt_tokens=len(chat.tokens) - len(turns[0].drawn.token_ids),
            temperature=self.policy.sampling.temperature,
            top_p=self.policy.sampling.top_p,
        )

    def _answer(self, turn: Turn, ask: Ask) -> Answer:
        """Return an answer as an agent is told it: calls that cannot be read are text."""
        text, thoughts, calls = turn.text, turn.thoughts, turn.tool_calls
        if calls and (not ask.calls or any(call.problem for call in calls)):
            thoughts, text = thoughts_and_rest(self.episode.written(turn.drawn, turn.stopped))
            text = text.strip()
            calls = ()
        return Answer(
            text=text,
            thoughts=thoughts,
            calls=turn.told_calls if calls else [],
            drawn=turn.drawn,
            stopped=turn.stopped,
            tokens=self._tokens(turn) if ask.logprobs else (),
        )

    def _tokens(self, turn: Turn) -> list[str]:
        ids = turn.drawn.token_ids
        return [self.episode.decode(np.asarray([one], np.int32)) for one in ids]

    def _remember(
        self,
        node: _Node,
        messages: Sequence[Message],
        turns: Sequence[tuple[Chat, Turn]],
        answers: Answers,
        ask: Ask,
    ) -> None:
        """Let the answers, which follow ``node``, be known when they are sent back."""
        # Two choices may have the same text: then it is the first one that the agent goes on from.
        if self.episode.last in [turn for _, turn in turns]:
            self.episode.last = turns[0][1]  # which an agent takes that wants one
        for (chat, turn), answer in reversed(list(zip(turns, answers.choices, strict=True))):
            message = as_answer(answer.text, calls=answer.calls)
            turn.message = message  # as the agent has it, in later renderings
            found = node.children[_key(message)]
            found.chat, found.turn, found.thoughts = chat, turn, answer.thoughts
            if ask.kept:
                after = messages[int(ask.instructions) :]
                self._responses[f"resp_{answers.id}"] = [*after, message]


async def _together(turns: Sequence[Coroutine[Any, Any, Turn]]) -> list[Turn]:
    """Return all turns; where one fails, the others are given up."""
    drawing = [asyncio.ensure_future(one) for one in turns]
    try:
        return await asyncio.gather(*drawing)
    except BaseException:
        for one in drawing:
            one.cancel()
        await asyncio.gather(*drawing, return_exceptions=True)
        raise


def _longest(
    root: _Node, messages: Sequence[Message], keys: Sequence[_Key]
) -> tuple[_Node | None, int]:
    """Return the last answer of the model in a conversation, and how many messages end with it;
    ``keys``: of the messages."""
    found, known = None, 0
    node = root
    for at, (message, key) in enumerate(zip(messages, keys, strict=True), 1):
        following = node.children.get(key)
        if following is None:
            break
        node = following
        if node.chat is None:
            continue
        thoughts = message.get("reasoning_content", node.thoughts)
        if thoughts.strip() != node.thoughts.strip():
            break  # edited: so is whatever follows
        found, known = node, at
    return found, known


def _key(message: Message) -> _Key:
    """Return what makes two messages the same."""
    role, content = message["role"], message["content"]
    if role != "assistant":
        return role, content, message.get("tool_call_id")
    calls = message.get("tool_calls")
    written = msgspec.json.encode(calls, order="sorted") if calls else b""
    if FLOAT.search(written):
        written = msgspec.json.encode(_as_javascript(calls), order="sorted")
    return role, content.strip(), written


def _as_javascript(value: Any) -> Any:
    """Return a value of JSON in which 1.0 is 1, as agents in JavaScript send it back."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {name: _as_javascript(one) for name, one in value.items()}
    return [_as_javascript(one) for one in value] if isinstance(value, list | tuple) else value


def _with_names(messages: list[Message]) -> list[Message]:
    """Return messages whose results of tools have the tool's name; `Refused` where nobody called
    it."""
    names: dict[str, str] = {}
    found: list[Message] = []
    for message in messages:
        call_id = message.get("tool_call_id")
        if call_id is not None:
            if call_id not in names:
                raise Refused(
                    f"a message has the result of the call {call_id!r}, which no message before it "
                    "makes",
                    field="messages",
                )
            message = {**message, "name": names[call_id]}
        for call in message.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
        found.append(message)
    return found


def _limit(episode: Episode, reached: LimitReached) -> Refused:
    if reached.limit == "turns":
        return _too_many_turns(episode, 1)
    return Refused(
        f"This model's maximum context length is {episode.limits.tokens} tokens in this episode, "
        "and the prompt is too long to leave room for an answer (max_tokens of the run)",
        "context",
        "messages",
    )


def _too_many_turns(episode: Episode, wanted: int) -> Refused:
    limit, made = episode.limits.turns, episode.turns
    return Refused(
        f"the episode has made {made} of its {limit} turns (max_turns of the run), and this "
        f"request would make {wanted}",
        "turns",
    )
