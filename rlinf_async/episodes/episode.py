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

from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
import numpy as np

from rlinf_async.episodes.conversation import Conversation, cut_at, joined
from rlinf_async.episodes.parsing import Parser, ToolCall
from rlinf_async.episodes.template import (
    Answered,
    Called,
    ChatTemplate,
    Message,
    Reading,
    Rewrites,
    ToolSchema,
)
from rlinf_async.episodes.tools import OnFailure, Tool, ToolResult, by_name, ends_episode, run_all
from rlinf_async.messages.language import (
    Branch,
    EpisodeRecord,
    Generated,
    Sampling,
    Tokens,
    TurnSpan,
)

OnRewrite = Literal["fail", "branch", "keep"]
"""What is done where the template would write what came before otherwise: the episode fails; it
goes on in a branch, which the model reads as the template writes it now; or what the model has read
stays as it is."""


class EpisodeError(Exception):
    """The episode cannot go on."""


class LimitReached(EpisodeError):
    """The episode has made as many turns, or as many tokens, as it may. Raised out of the
    coroutine, it ends the episode, which is judged as it stands."""

    def __init__(self, limit: Literal["turns", "tokens"], most: int) -> None:
        super().__init__(f"the episode has reached its limit: max_{limit} = {most}")
        self.limit = limit


class ToolFailed(EpisodeError):
    """A tool failed, and the run is configured so that this ends the episode."""

    def __init__(self, result: ToolResult) -> None:
        super().__init__(f"{result.tool} failed ({result.failure}): {result.text}")
        self.result = result


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
    """turns of all branches"""
    tokens: int
    """tokens of the longest branch, prompt included"""
    answer: int | None = None
    """tokens of one answer; None: as many as the branch may still have"""


class Model(Protocol):
    """What draws the answers of an episode."""

    async def draw(self, context: Tokens, most: int, seed: int | None = None) -> Generated:
        """Draw up to ``most`` tokens after ``context`` ``[P]``.

        ``seed``: of the caller's own, mixed with the run's for this sample: an episode draws the
        same again for the same seed and context, where the engine can seed a single request, and
        samples of one group still draw differently.
        """
        ...


class Endpoint(Protocol):
    """Serves episodes to agents that speak HTTP."""

    @property
    def base_url(self) -> str:
        """Its address; it is served from now on."""
        ...

    def key(self, episode: Episode) -> str:
        """Return the key that opens an episode."""
        ...


class Turn:
    """One answer of the model."""

    def __init__(
        self,
        text: str,
        thoughts: str,
        calls: tuple[ToolCall, ...],
        drawn: Generated,
        *,
        first_call: int = 0,
        stopped: str = "",
    ) -> None:
        self.text = text
        """what the model said, without thoughts and calls"""
        self.thoughts = thoughts
        self.tool_calls = calls
        self.call_ids = [f"call{first_call + at:05d}" for at in range(len(calls))]
        """identifiers of the calls, each once in an episode; nine characters, as some templates
        want them"""
        self.drawn = drawn
        """its tokens, as the engine drew them"""
        self.stopped = stopped
        """stop sequence that ended it; its tokens include it, its text does not"""
        self.message: Message = _as_message(self)
        """the answer as text, as later renderings have it"""
        self.reading: Reading | None = None
        """what the model had read when it answered; None: it did so in no `Chat`"""
        self.reward: float | None = None
        """reward of this turn alone, beside the episode's; set it where credit is given by turn"""

    @property
    def cut(self) -> bool:
        """Whether the answer was longer than it could be."""
        return self.drawn.finish == "length"


class _Line(NamedTuple):
    """A conversation, and the turns whose answers are in it."""

    conversation: Conversation
    turns: list[Turn]


class Chat:
    """One branch of an episode: a conversation with the model. Made by `Episode.chat`.

    Where the template rewrites what came before, and the run is configured so, it goes on in a
    conversation of its own, whose prompt is rendered anew: a further branch of the sample.
    """

    def __init__(
        self,
        episode: Episode,
        conversation: Conversation,
        messages: Sequence[Message],
        tools: Sequence[Tool | ToolSchema],
    ) -> None:
        self._episode = episode
        self._given_tools = tools
        self._lines = [_Line(conversation, [])]
        self._tools = by_name([one for one in tools if not isinstance(one, Mapping)])
        self._schemas = _schemas(tools)
        self._unsaid: list[Message] = []
        self._said: list[list[Message]] = []
        """what was said before each turn"""
        self._last: Turn | None = None
        self._asking = False
        """whether the model is drawing an answer"""
        self.messages: list[Message] = list(messages)
        """the conversation as text, for people; what is trained are its tokens"""
        self.turns: list[Turn] = []
        """turns of this branch, oldest first"""

    @property
    def tokens(self) -> Tokens:
        """``[P + R]``, as the model reads them at its next turn, but for what was not sent yet."""
        return self._conversation.tokens

    @property
    def lines(self) -> Sequence[_Line]:
        """Its conversations, oldest first: one, unless the template rewrote what came before."""
        return self._lines

    @property
    def said(self) -> list[list[Message]]:
        """Messages before each of its turns, and before the next one, beside those that it began
        with."""
        return [*self._said, list(self._unsaid)]

    @property
    def _conversation(self) -> Conversation:
        return self._lines[-1].conversation

    @property
    def last(self) -> Turn | None:
        """The turn that the next one follows; None: there was none."""
        return self._last

    @property
    def asking(self) -> bool:
        """Whether the model is drawing an answer."""
        return self._asking

    async def turn(
        self,
        max_tokens: int | None = None,
        *,
        stop: Sequence[str] = (),
        seed: int | None = None,
    ) -> Turn:
        """Let the model answer. The conversation is as before where it does not: this is cancelled,
        or raises.

        Args:
            max_tokens: of this answer; by default what the episode may still have.
            stop: texts that end the answer. What was drawn after the first of them is dropped: an
                engine that had stopped there would have drawn the same up to it.
            seed: see `Model.draw`.

        Raises:
            LimitReached: no turn, or no token, is left.
            Rewrites: the template would write what came before otherwise (see `OnRewrite`).
        """
        if self._asking:
            raise EpisodeError(
                "the model is answering in this branch already: fork() it for two answers at once"
            )
        if self._last is not None and not self._unsaid:
            raise EpisodeError("the model spoke last: answer its turn, or say something")
        conversation, reading, given = self._next()
        room = self._episode.room(len(conversation) + len(given))
        most = room if max_tokens is None else min(room, max_tokens)
        asked, self._asking = len(self._unsaid), True
        try:
            context = np.concatenate([conversation.tokens, given])
            drawn = await self._episode.draw(context, most, seed)
        finally:
            self._asking = False  # what was said stays unsaid where no answer came
        if conversation is not self._conversation:
            self._lines.append(_Line(conversation, []))
        if len(given):
            conversation.give(given)
        drawn, stopped = cut_at(drawn, stop, self._episode.decode)
        conversation.answer(drawn)
        self._said.append(self._unsaid[:asked])
        del self._unsaid[:asked]
        turn = self._episode.read(drawn, stopped)
        turn.reading = reading
        self._last = self._episode.last = turn
        self._lines[-1].turns.append(turn)
        self.turns.append(turn)
        self.messages.append(turn.message)
        return turn

    def say(self, content: str, role: str = "user", **fields: Any) -> None:
        """Append a message, which the model reads at its next turn."""
        message = {"role": role, "content": content, **fields}
        self._unsaid.append(message)
        self.messages.append(message)

    def unsay(self) -> None:
        """Take back what was said since the last answer."""
        if self._unsaid:
            del self.messages[-len(self._unsaid) :]
        self._unsaid.clear()

    async def answer(self, turn: Turn) -> list[ToolResult]:
        """Carry out the tools that a turn calls, all at once, and tell the model what they say.

        Raises:
            ToolFailed: a tool failed, and the run is configured so that this ends the episode.
        """
        names = ", ".join(dict.fromkeys(call.name or "?" for call in turn.tool_calls))
        with self._episode.watch(f"tool {names}"):
            results = await run_all(turn.tool_calls, self._tools)
        for result in results:
            self._episode.count(result)
        for result in results:
            if ends_episode(result, self._tools, self._episode.on_tool_failure):
                raise ToolFailed(result)
        for call_id, result in zip(turn.call_ids, results, strict=True):
            self.say(result.text, "tool", name=result.tool, tool_call_id=call_id)
        return results

    def fork(self, turn: Turn | None = None) -> Chat:
        """Return a branch that goes on by itself: what was said before is its prompt.

        Args:
            turn: of this branch, after which the new one goes on; by default from here.
        """
        conversation, messages, unsaid = self._conversation.fork(), self.messages, self._unsaid
        if turn is not None:
            conversation, unsaid = self._until(turn), []
            messages = messages[: 1 + _position(messages, turn.message)]
        branch = Chat(self._episode, conversation, messages, self._given_tools)
        branch._unsaid = list(unsaid)
        branch._last = turn or self._last
        self._episode.chats.append(branch)
        return branch

    def _until(self, turn: Turn) -> Conversation:
        """Return a conversation whose prompt is what was said up to the end of a turn."""
        for conversation, turns in self._lines:
            if turn in turns:
                _, end = conversation.spans()[turns.index(turn)]
                return conversation.fork(len(conversation.prompt) + end)
        raise EpisodeError("this turn is none of this branch")

    def _next(self) -> tuple[Conversation, Reading, Tokens]:
        """Return the conversation that the next answer belongs to, what the model will have read
        then, and the tokens of it that are not in the conversation yet."""
        nothing = np.zeros(0, np.int32)
        if self._last is None:  # nothing was drawn: what was said belongs to the prompt
            reading = self._episode.template.read(self.messages, self._schemas)
            self._lines[-1] = _Line(Conversation(reading.given), [])
            return self._conversation, reading, nothing
        try:
            reading = self._following(self._last)
            return self._conversation, reading, reading.given
        except Rewrites:
            if self._episode.on_rewrite != "branch":
                raise
        reading = self._episode.template.read(self.messages, self._schemas)
        return Conversation(reading.given), reading, nothing

    def _following(self, last: Turn) -> Reading:
        if last.reading is None:
            raise EpisodeError("the last turn was drawn in no chat")
        return last.reading.followed_by(
            _kind(last, self._episode.decode(last.drawn.token_ids), self._unsaid),
            last.drawn.token_ids,
            self._unsaid,
            keep=self._episode.on_rewrite == "keep",
        )


class Transcript(NamedTuple):
    """An episode as it is trained: one sequence of tokens, or several that share its outcome."""

    prompt: Tokens
    """``[P]``, of the first sequence"""
    response: Generated
    """``[R]``, of all sequences, one after the other"""
    branches: tuple[Branch, ...]
    turns: tuple[TurnSpan, ...]


Watch = Callable[[str], AbstractContextManager[Any]]
"""Opens a block of which is told what the episode waits for"""


class Episode:
    """One attempt at a task.

    Args:
        task: what it is about.
        model: draws answers.
        template: renders messages.
        parser: reads answers.
        decode: tokens -> text, special tokens of the end of a turn left out.
        limits: how long it may be.
        watch: is told what it waits for, beside the model.
        on_tool_failure: what becomes of a tool's failure, unless the tool says.
        on_rewrite: what is done where the template would write what came before otherwise.
        endpoint: where agents that speak HTTP find it; None: nowhere.
        sampling: how answers are drawn, for agents that ask for it otherwise.
    """

    def __init__(
        self,
        task: Task,
        model: Model,
        template: ChatTemplate,
        parser: Parser,
        decode: Callable[[Tokens], str],
        limits: Limits,
        *,
        watch: Watch = nullcontext,
        on_tool_failure: OnFailure = "tell",
        on_rewrite: OnRewrite = "fail",
        endpoint: Endpoint | None = None,
        sampling: Sampling | None = None,
    ) -> None:
        self.task = task
        self.template = template
        self.decode = decode
        self.sampling = sampling or Sampling(max_tokens=limits.tokens)
        self.watch = watch
        self.on_rewrite: OnRewrite = on_rewrite
        self.chats: list[Chat] = []
        """branches, oldest first"""
        self.turns = 0
        """turns of all branches"""
        self.last: Turn | None = None
        """newest turn of all branches"""
        self.reached: LimitReached | None = None
        """limit of which somebody else's agent was told over HTTP; whatever error it makes of
        that, the episode is judged as it stands"""
        self.state = b""
        """what the environment can be restored from: see `resume`"""
        self._made: Sequence[Sequence[Message]] = ()
        """what was said before each turn that `resume` makes again"""
        self.rendered_anew = 0
        """times that the template did not let a conversation go on, which was rendered anew"""
        self.metrics: dict[str, float] = {}
        """numbers of the user's own, which the run averages"""
        self.tool_calls: Counter[str] = Counter()
        self.tool_failures: Counter[tuple[str, str]] = Counter()
        """calls that failed, by tool and kind of failure"""
        self.tool_seconds: defaultdict[str, float] = defaultdict(float)
        """duration of all calls, by tool"""
        self._model = model
        self._parser = parser
        self._limits = limits
        self._endpoint = endpoint
        self.on_tool_failure: OnFailure = on_tool_failure
        self._closed = False
        self._calls = 0
        """calls of tools in all turns"""

    @property
    def base_url(self) -> str:
        """Address for clients of OpenAI's and Anthropic's interfaces:
        ``AsyncOpenAI(base_url=episode.base_url, api_key=episode.key)``.

        Raises:
            MissingExtra: the extra ``agents`` is not installed.
        """
        return self._served().base_url

    @property
    def key(self) -> str:
        """API key that opens this episode, and ends with it."""
        return self._served().key(self)

    def _served(self) -> Endpoint:
        if self._endpoint is None:
            raise EpisodeError("this episode has no endpoint: it was made without one")
        return self._endpoint

    @property
    def limits(self) -> Limits:
        """How long it may be."""
        return self._limits

    def chat(
        self,
        tools: Sequence[Tool | ToolSchema] = (),
        messages: Sequence[Message] | None = None,
    ) -> Chat:
        """Begin a conversation.

        Args:
            tools: those that the model may call; of one that somebody else carries out, its schema.
            messages: what it reads first; by default the task's.

        Raises:
            TemplateError: the template refuses a message, or leaves messages or the tools out.
            ValueError: two tools have one name.
        """
        by_name([one for one in tools if not isinstance(one, Mapping)])
        first = self.task.messages if messages is None else messages
        tokens = self.template.opening(first, _schemas(tools))
        chat = Chat(self, Conversation(tokens), first, tools)
        self.chats.append(chat)
        return chat

    async def resume(
        self,
        tools: Sequence[Tool] = (),
        messages: Sequence[Message] | None = None,
    ) -> Chat:
        """Begin a conversation, or go on with the one of an earlier life of this episode.

        For an environment that can be restored: whoever sets ``episode.state`` before each turn
        finds it here where the worker has died meanwhile, as it was when the last turn was asked
        for, and the conversation up to that turn's answer::

            game = Game.load(episode.state) if episode.state else Game()
            chat = await episode.resume()
            turn = chat.turns[-1] if chat.turns else None
            while not game.over:
                if turn is None:
                    episode.state = game.save()
                    turn = await chat.turn()
                chat.say(game.play(turn.text))
                turn = None

        Nothing is restored of an episode of several chats; its coroutine begins anew, over the
        answers that there are. Arguments and errors are those of `chat`.
        """
        chat = self.chat(tools, messages)
        for said in self._made:
            for message in said:
                fields = {
                    name: one for name, one in message.items() if name not in ("role", "content")
                }
                chat.say(message["content"], message["role"], **fields)
            await chat.turn()
        self._made = ()
        return chat

    def saved(self) -> bytes:
        """Return what `restore` takes; empty: nothing can be restored."""
        if not self.state or len(self.chats) != 1:
            return b""
        return msgspec.msgpack.encode((self.state, self.chats[0].said))

    def restore(self, saved: bytes) -> None:
        """Take up what was saved with the last turn of an earlier life."""
        if saved:
            kind = tuple[bytes, list[list[dict[str, Any]]]]
            self.state, self._made = msgspec.msgpack.decode(saved, type=kind)

    def room(self, tokens: int) -> int:
        """Return the number of tokens that a branch of so many may still get.

        Raises:
            LimitReached: none, or there was the last turn.
        """
        limits = self._limits
        left = limits.tokens - tokens
        if self.turns >= limits.turns:
            raise LimitReached("turns", limits.turns)
        if left < 1:
            raise LimitReached("tokens", limits.tokens)
        return left if limits.answer is None else min(left, limits.answer)

    async def draw(self, context: Tokens, most: int, seed: int | None = None) -> Generated:
        """Have the model draw an answer."""
        if self._closed:
            raise EpisodeError("the episode is over: its coroutine has returned")
        self.turns += 1
        return await self._model.draw(context, most, seed)

    def read(self, drawn: Generated, stopped: str = "") -> Turn:
        """Return an answer, read; what comes from the stop sequence on is no text of it."""
        text = self.decode(drawn.token_ids)
        if stopped:
            text = text[: text.find(stopped)]
        found = self._parser(text)
        turn = Turn(
            found.text,
            found.thoughts,
            found.tool_calls,
            drawn,
            first_call=self._calls,
            stopped=stopped,
        )
        self._calls += len(turn.tool_calls)
        return turn

    def count(self, result: ToolResult) -> None:
        """Count a call of a tool."""
        name = result.tool
        self.tool_calls[name] += 1
        self.tool_seconds[name] += result.seconds
        if result.failure:
            self.tool_failures[name, result.failure] += 1

    def close(self) -> None:
        """Let no more answers be drawn: what a task that was left running asks for is refused."""
        self._closed = True

    def transcript(self) -> Transcript | None:
        """Return what is trained of the episode; None where the model has drawn nothing."""
        lines = [line for chat in self.chats for line in chat.lines if line.conversation.drawn]
        if not lines:
            return None
        branches: list[Branch] = []
        spans: list[TurnSpan] = []
        at = 0
        for conversation, turns in lines:
            if at:
                branches.append(Branch(prompt_ids=conversation.prompt, start=at))
            for (start, stop), turn in zip(conversation.spans(), turns, strict=True):
                if stop > start:
                    spans.append(TurnSpan(start=at + start, stop=at + stop, reward=turn.reward))
            at += len(conversation.response().token_ids)
        parts = [line.conversation.response() for line in lines]
        response = parts[0] if len(parts) == 1 else joined(parts)
        return Transcript(lines[0].conversation.prompt, response, tuple(branches), tuple(spans))

    def record(self, cut: str = "") -> EpisodeRecord:
        """Return what happened, for metrics."""
        return EpisodeRecord(
            turns=self.turns,
            tool_calls=dict(self.tool_calls),
            tool_failures={f"{one}/{kind}": n for (one, kind), n in self.tool_failures.items()},
            tool_seconds=dict(self.tool_seconds),
            cut=cut,
            rendered_anew=self.rendered_anew,
            metrics=dict(self.metrics),
        )


RunEpisode = Callable[[Episode], Awaitable[Any]]
"""The user's coroutine function"""


def _kind(turn: Turn, written: str, following: Sequence[Message]) -> Answered:
    """Return what an answer is made of; calls that nobody could read, and that nobody answers, are
    text."""
    named = zip(turn.call_ids, turn.tool_calls, strict=True)
    calls = tuple(Called(call_id, call.name) for call_id, call in named)
    answered = any(one["role"] == "tool" for one in following)
    if not answered and any(one.problem for one in turn.tool_calls):
        calls = ()
    empty: Literal["none", "empty"] = "empty" if "</think>" in written else "none"
    return Answered("some" if turn.thoughts else empty, bool(turn.text), calls)


def _as_message(turn: Turn) -> Message:
    message: dict[str, Any] = {"role": "assistant", "content": turn.text}
    if turn.thoughts:
        message["reasoning_content"] = turn.thoughts
    if turn.tool_calls:
        calls = zip(turn.call_ids, turn.tool_calls, strict=True)
        message["tool_calls"] = [as_call(call_id, call) for call_id, call in calls]
    return message


def as_call(call_id: str, call: ToolCall) -> Mapping[str, Any]:
    """Return a call as templates read it, with its arguments as an object."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call_id, "type": "function", "function": function}


def _schemas(tools: Sequence[Tool | ToolSchema]) -> list[ToolSchema]:
    return [one if isinstance(one, Mapping) else one.schema for one in tools]


def _position(messages: Sequence[Message], wanted: Message) -> int:
    return next(at for at, one in enumerate(messages) if one is wanted)
