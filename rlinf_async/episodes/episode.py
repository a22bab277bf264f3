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

import asyncio
import numbers
import operator
import zlib
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Final, Literal, NamedTuple, Protocol

import msgspec
import numpy as np

from rlinf_async.episodes.conversation import Conversation, joined
from rlinf_async.episodes.parsing import Parser, ParserError, ToolCall
from rlinf_async.episodes.template import (
    Answered,
    Called,
    ChatTemplate,
    Message,
    Reading,
    Rewrites,
    TemplateError,
    ToolSchema,
    as_answer,
    as_call,
)
from rlinf_async.episodes.tools import OnFailure, Tool, ToolResult, by_name, ends_episode, run_all
from rlinf_async.messages.language import (
    MAX_REWARD,
    Branch,
    EpisodeRecord,
    Generated,
    Sample,
    Sampling,
    Tokens,
    TurnSpan,
)
from rlinf_async.messages.stopping import cut_at, without_stop_token

OnRewrite = Literal["fail", "branch", "keep"]
"""What is done where the template would write what came before otherwise: the episode fails; it
goes on in a branch, which the model reads as the template writes it now; or what the model has read
stays as it is."""

PAUSE: Final = 0.05
"""seconds after which a turn that cannot be asked for is refused: an agent that asks again and
again would leave its worker no time for other episodes"""


class EpisodeError(Exception):
    """The episode cannot go on."""


class EpisodeOver(EpisodeError):
    """The episode has ended: nothing more can be asked in it."""


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

        ``seed``: of the caller's own, mixed with the run's for this sample and with the number of
        the turn: an episode that is run again draws the same, where the engine can seed a single
        request; samples of one group, branches, and two turns with one seed draw differently.
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


class _Asked(NamedTuple):
    """How a turn was asked for."""

    said: list[Message]
    """what was said to the model since its answer before, or since the branch began"""
    stop: tuple[str, ...]
    """texts that end the answer"""
    number: int
    """number of the answer among all that were asked for in the episode, from 0 on"""


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
        self.message: Message = as_answer(text, thoughts, self.told_calls)
        """the answer as text, as later renderings have it"""
        self.reading: Reading | None = None
        """what the model had read when it answered; None: it did so in no `Chat`"""
        self.asked = _Asked([], (), 0)
        """how it was asked for"""
        self._reward: float | None = None

    @property
    def reward(self) -> float | None:
        """Reward of this turn alone, beside the episode's; set it where credit is given by turn."""
        return self._reward

    @reward.setter
    def reward(self, reward: float | None) -> None:
        self._reward = None if reward is None else _finite("the reward of a turn", reward)

    @property
    def told_calls(self) -> list[Message]:
        """Its calls, as templates read them."""
        calls = zip(self.call_ids, self.tool_calls, strict=True)
        return [as_call(call_id, call.name, call.arguments) for call_id, call in calls]

    @property
    def cut(self) -> bool:
        """Whether the answer was longer than it could be."""
        return self.drawn.finish == "length"


class _Line(NamedTuple):
    """A conversation, and the turns whose answers are in it."""

    conversation: Conversation
    turns: list[Turn]


class _Next(NamedTuple):
    """What the model reads before it answers."""

    conversation: Conversation
    """that its answer belongs to"""
    reading: Reading
    given: Tokens
    """what is not in the conversation yet"""

    @property
    def context(self) -> Tokens:
        """``[P]``"""
        return np.concatenate([self.conversation.tokens, self.given])


class Chat:
    """One branch of an episode: a conversation with the model. Made by `Episode.chat`.

    Where the template rewrites what came before, and the run is configured so, it goes on in a
    conversation of its own, whose prompt is rendered anew: a further branch of the sample.
    """

    def __init__(
        self,
        episode: Episode,
        opening: Reading,
        messages: Sequence[Message],
        tools: Sequence[Tool | ToolSchema],
    ) -> None:
        self._episode = episode
        self._given_tools = tools
        self._tools = by_name([one for one in tools if not isinstance(one, Mapping)])
        self._schemas = _schemas(tools)
        self._opening = opening
        self._first = list(messages)
        """messages that it began with"""
        self._lines = [_Line(Conversation(opening.given), [])]
        self._unsaid: list[Message] = []
        """messages that the model has not read yet"""
        self._asked: _Asked | None = None
        """how the answer was asked for that the model is drawing"""
        self._last: Turn | None = None

    @property
    def turns(self) -> list[Turn]:
        """Turns of this branch, oldest first."""
        return [turn for line in self._lines for turn in line.turns]

    @property
    def messages(self) -> list[Message]:
        """The conversation as text, for people; what is trained are its tokens."""
        found = list(self._first)
        for turn in self.turns:
            found += [*turn.asked.said, turn.message]
        return [*found, *self._pending]

    @property
    def tokens(self) -> Tokens:
        """``[P + R]``, as the model reads them at its next turn, but for what was not sent yet."""
        return self._conversation.tokens

    @property
    def lines(self) -> Sequence[_Line]:
        """Its conversations, oldest first: one, unless the template rewrote what came before."""
        return self._lines

    @property
    def last(self) -> Turn | None:
        """The turn that the next one follows; None: there was none."""
        return self._last

    @property
    def _conversation(self) -> Conversation:
        return self._lines[-1].conversation

    @property
    def _pending(self) -> list[Message]:
        """What was said since the last answer."""
        return [*(self._asked.said if self._asked else ()), *self._unsaid]

    async def turn(
        self,
        max_tokens: int | None = None,
        *,
        stop: str | Sequence[str] = (),
        seed: int | None = None,
    ) -> Turn:
        """Let the model answer. The conversation is as before where it does not: this is cancelled,
        or raises.

        Args:
            max_tokens: of this answer; by default what the episode may still have.
            stop: text that ends the answer, or several, beside the run's own. What was drawn after
                the first of them is dropped: an engine that had stopped there would have drawn the
                same up to it.
            seed: see `Model.draw`.

        Raises:
            LimitReached: no turn, or no token, is left.
            ParserError: a parser of the user's own cannot read the answer.
            Rewrites: the template would write what came before otherwise (see `OnRewrite`).
            EpisodeError: an argument is none, or nobody may be asked now.
        """
        try:
            stops = (*self._episode.sampling.stop, *_stops(stop))
            asked = _Asked(self._unsaid, stops, self._episode.asked)
            seed = None if seed is None else _whole("seed", seed)
            coming, most = self._ready(max_tokens)
        except Exception:
            await asyncio.sleep(PAUSE)
            raise
        self._asked, self._unsaid = asked, []
        try:
            drawn = await self._episode.draw(coming.context, most, seed)
            return self._answered(coming, drawn, asked)
        except BaseException:
            self._unsaid = self._pending  # what was said stays unsaid where no answer came
            raise
        finally:
            self._asked = None

    def _ready(self, max_tokens: int | None) -> tuple[_Next, int]:
        """Return what the model reads next, and how many tokens its answer may have."""
        if self._asked is not None:
            raise EpisodeError(
                "the model is answering in this branch already: fork() it for two answers at once"
            )
        if self._last is not None and not self._unsaid:
            raise EpisodeError("the model spoke last: answer its turn, or say something")
        coming = self._next()
        room = self._episode.room(len(coming.conversation) + len(coming.given))
        if max_tokens is None:
            return coming, room
        if (most := _whole("max_tokens", max_tokens)) < 1:
            raise EpisodeError(f"max_tokens is {most}: an answer has at least 1 token")
        return coming, min(room, most)

    def _answered(self, coming: _Next, drawn: Generated, asked: _Asked) -> Turn:
        """Append an answer of the model."""
        # A parser of the user's own may raise: before anything is appended.
        stopped = ""
        if asked.stop:
            drawn, stopped = cut_at(drawn, asked.stop, self._episode.decode)
        turn = self._episode.read(drawn, stopped)
        turn.reading, turn.asked = coming.reading, asked
        if coming.conversation is not self._conversation:
            if self._last is None:
                self._lines.clear()  # what was said before the first answer belongs to its prompt
            self._lines.append(_Line(coming.conversation, []))
        if len(coming.given):
            coming.conversation.give(coming.given)
        coming.conversation.answer(turn.drawn)
        self._lines[-1].turns.append(turn)
        self._last = turn
        self._episode.answered(turn)
        return turn

    def say(self, content: str, role: str = "user", **fields: Any) -> None:
        """Append a message, which the model reads at its next turn."""
        self._unsaid.append({"role": role, "content": content, **fields})

    def unsay(self) -> None:
        """Take back what was said since the last answer, but for what the model is answering."""
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
        branch = Chat(self._episode, self._opening, self._first, self._given_tools)
        if turn is None:
            branch._lines = [_Line(self._conversation.fork(), [])]
            branch._unsaid = self._pending
            branch._first = self.messages[: -len(branch._unsaid) or None]
        else:
            branch._lines = [_Line(self._until(turn), [])]
            branch._first = self.messages[: 1 + _position(self.messages, turn.message)]
        branch._last = turn or self._last
        self._episode.chats.append(branch)
        return branch

    def made(self) -> list[_Made]:
        """Return the turns so far, and the one that is being asked for."""
        found = [
            _Made(one.asked.said, one.asked.stop, digest(one.drawn.token_ids), one.reward)
            for one in self.turns
        ]
        return [*found, _Made(self._asked.said, self._asked.stop)] if self._asked else found

    def make_again(self, made: _Made, recorded: list[Sample]) -> bool:
        """Make a turn of an earlier life again: its answer is taken out of those that were
        recorded. Return whether it is there, and has read the same as now."""
        self._unsaid = made.said
        coming = self._next()
        context = coming.context
        for at, sample in reversed(list(enumerate(recorded))):  # the newest: others were given up
            drawn = sample.generated
            if made.stop:
                drawn, _ = cut_at(drawn, made.stop, self._episode.decode)
            same = np.array_equal(sample.request.prompt.token_ids, context)
            if same and made.digest in (None, digest(drawn.token_ids)):
                del recorded[at]
                self._unsaid = []
                asked = _Asked(made.said, made.stop, self._episode.asked)
                self._episode.asked += 1
                self._answered(coming, sample.generated, asked).reward = made.reward
                return True
        return False

    def _until(self, turn: Turn) -> Conversation:
        """Return a conversation whose prompt is what was said up to the end of a turn."""
        for conversation, turns in self._lines:
            if turn in turns:
                _, end = conversation.spans()[turns.index(turn)]
                return conversation.fork(len(conversation.prompt) + end)
        raise EpisodeError("this turn is none of this branch")

    def _next(self) -> _Next:
        nothing = np.zeros(0, np.int32)
        if self._last is None:
            if not self._unsaid:
                return _Next(self._conversation, self._opening, nothing)
            return self._anew()
        try:
            reading = self._following(self._last)
            return _Next(self._conversation, reading, reading.given)
        except Rewrites:
            if self._episode.on_rewrite != "branch":
                raise
        return self._anew()

    def _anew(self) -> _Next:
        """Return all of it as the template writes it now: a conversation of its own."""
        reading = self._episode.template.read(self.messages, self._schemas)
        return _Next(Conversation(reading.given), reading, np.zeros(0, np.int32))

    def _following(self, last: Turn) -> Reading:
        if last.reading is None:
            raise EpisodeError("the last turn was drawn in no chat")
        return last.reading.followed_by(
            _kind(last, self._episode.decode(last.drawn.token_ids), self._unsaid),
            last.drawn.token_ids,
            self._unsaid,
            keep=self._episode.on_rewrite == "keep",
        )


class _Made(msgspec.Struct, frozen=True, array_like=True):
    """A turn of an earlier life, beside its answer."""

    said: list[Message]
    stop: tuple[str, ...]
    digest: int | None = None
    """of the tokens of its answer, up to a stop sequence; None: it was not there yet"""
    reward: float | None = None


class _Saved(msgspec.Struct, frozen=True, array_like=True):
    """What can be restored of an episode."""

    state: bytes
    turns: list[_Made]
    record: EpisodeRecord


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
        state: what `state` is once `resume` has returned.
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
        state: bytes = b"",
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
        self.given_up = 0
        """answers that were not waited for: no turns, but there may be as many of them"""
        self.asked = 0
        """answers that were asked for, also those that were given up: it never goes back"""
        self.last: Turn | None = None
        """newest turn of all branches: of those that were answered the one that was asked for last;
        the verifier of the data judges it"""
        self.short: LimitReached | None = None
        """limit for which a turn was refused; None once a later one was answered"""
        self._short_at = 0
        """answers that had been asked for when it was refused"""
        self.reached: LimitReached | None = None
        """limit of which somebody else's agent was told over HTTP, and after which it had no answer
        yet; whatever error it makes of that, the episode is judged as it stands"""
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
        self._state = _state(state)
        self._may_read_state = False
        self._saved: _Saved | None = None
        """what `resume` takes up"""
        self._recorded: list[Sample] = []
        """answers of an earlier life"""

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
    def state(self) -> bytes:
        """What the environment can be restored from: see `resume`.

        Raises:
            EpisodeError: it was not set, and `resume`, which says what it is, was not awaited.
            TypeError: it is set to something else than bytes.
        """
        if not self._may_read_state:
            raise EpisodeError(
                "episode.state is known once `await episode.resume()` has returned: call it before"
            )
        return self._state

    @state.setter
    def state(self, state: bytes) -> None:
        self._state, self._may_read_state = _state(state), True

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
        opening = self.template.read(first, _schemas(tools))
        chat = Chat(self, opening, first, tools)
        self.chats.append(chat)
        return chat

    async def resume(
        self,
        tools: Sequence[Tool] = (),
        messages: Sequence[Message] | None = None,
    ) -> Chat:
        """Begin a conversation, or go on with the one of an earlier life of this episode.

        For an environment that can be restored: whoever sets ``episode.state`` before each turn
        finds it there after this where the worker has died meanwhile, as it was when the last turn
        was asked for, and the conversation up to that turn's answer::

            chat = await episode.resume()
            game = Game.load(episode.state) if episode.state else Game()
            turn = chat.turns[-1] if chat.turns else None
            while not game.over:
                if turn is None:
                    episode.state = game.save()
                    turn = await chat.turn()
                chat.say(game.play(turn.text))
                turn = None

        Rewards of turns, metrics and counts of tools are as they were at that time, too. Nothing is
        restored of an episode of several chats, nor where an answer is missing, or belongs to
        another conversation than arguments and template make now: then ``episode.state`` is empty,
        and the coroutine begins anew, over the answers that there are. Arguments and errors are
        those of `chat`.
        """
        self._may_read_state = True
        saved, self._saved = self._saved, None
        found = None if saved is None or self.chats else self._restored(saved, tools, messages)
        return found or self.chat(tools, messages)

    def _restored(
        self, saved: _Saved, tools: Sequence[Tool], messages: Sequence[Message] | None
    ) -> Chat | None:
        recorded, chat = list(self._recorded), None
        try:
            chat = self.chat(tools, messages)
            whole = all(chat.make_again(made, recorded) for made in saved.turns)
        except (TemplateError, ParserError):  # raised again, if the coroutine comes there again
            whole = False
        if chat is None or not whole:
            self.chats.clear()
            self.last, self._calls, self.asked = None, 0, 0
            return None
        self._recorded[:] = recorded
        record, self._state = saved.record, saved.state
        self.turns, self.rendered_anew = record.turns, record.rendered_anew
        self.metrics.update(record.metrics)
        self.tool_calls.update(record.tool_calls)
        for name, count in record.tool_failures.items():
            tool, _, kind = name.rpartition("/")
            self.tool_failures[tool, kind] += count
        for name, seconds in record.tool_seconds.items():
            self.tool_seconds[name] += seconds
        return chat

    def saved(self) -> bytes:
        """Return what `restore` takes; empty: nothing can be restored."""
        if not self._state or len(self.chats) != 1:
            return b""
        saved = _Saved(self._state, self.chats[0].made(), self.record())
        try:
            return msgspec.msgpack.encode(saved)
        except Exception as error:  # messages may have fields of any type
            raise EpisodeError(f"what was said cannot be kept for a resume: {error}") from error

    def restore(self, recorded: list[Sample]) -> None:
        """Let `resume` take up an earlier life.

        Args:
            recorded: its answers, in their order; those that are taken up are taken out of it.
        """
        self._recorded = recorded
        state = recorded[-1].request.state if recorded else b""
        with suppress(msgspec.MsgspecError):  # of another version of this package
            self._saved = msgspec.msgpack.decode(state, type=_Saved)

    def room(self, tokens: int) -> int:
        """Return the number of tokens that a branch of so many may still get.

        Raises:
            LimitReached: none, or there was the last turn.
            EpisodeOver: it is closed.
        """
        if self._closed:
            raise EpisodeOver("the episode is over: its coroutine has returned, or was cancelled")
        limits = self._limits
        left = limits.tokens - tokens
        if max(self.turns, self.given_up) >= limits.turns:
            raise self.refused(LimitReached("turns", limits.turns))
        if left < 1:
            raise self.refused(LimitReached("tokens", limits.tokens))
        return left if limits.answer is None else min(left, limits.answer)

    def refused(self, reached: LimitReached) -> LimitReached:
        """Note that a turn is refused for this limit, which is returned."""
        self.short, self._short_at = reached, self.asked
        return reached

    async def draw(self, context: Tokens, most: int, seed: int | None = None) -> Generated:
        """Have the model draw an answer."""
        self.turns += 1
        self.asked += 1
        try:
            return await self._model.draw(context, most, seed)
        except asyncio.CancelledError:
            self.turns -= 1
            self.given_up += 1
            raise

    def written(self, drawn: Generated, stopped: str = "") -> str:
        """Return an answer as text; a stop token, and what comes from the stop sequence on, is none
        of it."""
        tokens = drawn.token_ids
        if self.sampling.stop_token_ids:
            tokens = without_stop_token(tokens, self.sampling)
        text = self.decode(tokens)
        return text[: text.find(stopped)] if stopped else text

    def read(self, drawn: Generated, stopped: str = "") -> Turn:
        """Return an answer, read; ``stopped``: stop sequence that ended it."""
        found = self._parser(self.written(drawn, stopped))
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

    def answered(self, turn: Turn) -> None:
        """Note that the model has answered."""
        if turn.asked.number >= self._short_at:  # it has gone on after all
            self.reached = self.short = None
        # Not the one that came last: which of two that does depends on the engine.
        if self.last is None or turn.asked.number >= self.last.asked.number:
            self.last = turn

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
        if self.last is not None:  # that whose text is judged, in whichever branch
            response = msgspec.structs.replace(response, finish=self.last.drawn.finish)
        return Transcript(lines[0].conversation.prompt, response, tuple(branches), tuple(spans))

    def record(self, cut: str = "") -> EpisodeRecord:
        """Return what happened, for metrics.

        Raises:
            EpisodeError: a metric is no finite number.
        """
        return EpisodeRecord(
            turns=self.turns,
            tool_calls=dict(self.tool_calls),
            tool_failures={f"{one}/{kind}": n for (one, kind), n in self.tool_failures.items()},
            tool_seconds=dict(self.tool_seconds),
            cut=cut,
            rendered_anew=self.rendered_anew,
            metrics={
                str(name): _finite(f"episode.metrics[{name!r}]", one)
                for name, one in self.metrics.items()
            },
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


def _schemas(tools: Sequence[Tool | ToolSchema]) -> list[ToolSchema]:
    return [one if isinstance(one, Mapping) else one.schema for one in tools]


def digest(tokens: Tokens) -> int:
    """Return a checksum of tokens, the same in every process."""
    return zlib.crc32(np.asarray(tokens, np.int32).tobytes())


def _finite(what: str, value: object) -> float:
    """Return a number that an agent has set, as a float; `EpisodeError` where it is none."""
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        with suppress(OverflowError):
            if abs(found := float(value)) <= MAX_REWARD:
                return found
    raise EpisodeError(
        f"{what} is {value!r:.80} (a {type(value).__name__}), not a finite number of at most "
        f"{MAX_REWARD:g}"
    )


def _whole(what: str, value: object) -> int:
    """Return a whole number that an agent has given, as an int; `EpisodeError` where it is none."""
    if not isinstance(value, bool):
        with suppress(TypeError):
            return operator.index(value)  # type: ignore[arg-type]
    raise EpisodeError(f"{what} is {value!r:.80} (a {type(value).__name__}), not a whole number")


def _stops(stop: str | Sequence[str]) -> tuple[str, ...]:
    """Return the texts that end an answer; `EpisodeError` for what ends none."""
    found: tuple[Any, ...] = (stop,) if isinstance(stop, str) else tuple(stop)
    for one in found:
        if not isinstance(one, str) or not one:
            raise EpisodeError(f"stop: {one!r:.80} is no text that could end an answer")
    return found


def _state(state: object) -> bytes:
    if not isinstance(state, bytes):
        raise TypeError(f"episode.state is {state!r:.80} (a {type(state).__name__}), not bytes")
    return state


def _position(messages: Sequence[Message], wanted: Message) -> int:
    return next(at for at, one in enumerate(messages) if one is wanted)
