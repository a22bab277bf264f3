"""Test an agent without a model: its coroutine runs over answers that the test writes.

::

    from rlinf_async.testing import run
    from rlinf_async.testing.episodes import call, play

    def test_the_agent_calculates():
        answers = [call("calculate", expression="6*7"), "42"]
        played = run(play(my_agent.run, answers, reference="42"))
        assert played.outcome == Scored(reward=1.0)
        assert played.tool_calls == {"calculate": 1}

Everything but the model is what a run has: the chat template, the parser of tool calls, the tools,
limits, the endpoint, and what becomes of what the coroutine returns or raises.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from rlinf_async.config import needed
from rlinf_async.data import load_tokenizer
from rlinf_async.data.prompts import Tokenizer, end_tokens
from rlinf_async.episodes import Episode, Task
from rlinf_async.episodes.endpoint import Endpoint
from rlinf_async.episodes.episode import RunEpisode, Turn
from rlinf_async.episodes.parsing import parser_of
from rlinf_async.episodes.template import ChatTemplate, Message
from rlinf_async.messages.language import (
    EpisodeRecord,
    Generated,
    Outcome,
    Prompt,
    Request,
    Sample,
    Sampling,
    Tokens,
)
from rlinf_async.workers.episode.clock import AgentClock
from rlinf_async.workers.episode.config import EpisodeConfig
from rlinf_async.workers.episode.ending import finished, run_to_end

Answers = Iterable[str] | Callable[[str], str]
"""what the model says, turn after turn; or a function of the text that it has read"""

MOST_LEFT: Final = 1000
"""answers that are counted where nobody asks for them"""

START: Final = "<|im_start|>"
END: Final = "<|im_end|>"
TEMPLATE: Final = """
{%- if tools %}{{- '<|im_start|>system\\nTools:' }}
{%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + '}</tool_call>' }}{%- endfor %}
{{- '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def call(name: str, /, **arguments: Any) -> str:
    """Return an answer that calls a tool, in the format ``hermes``."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


class Played(msgspec.Struct, frozen=True, kw_only=True):
    """What came of an episode."""

    outcome: Outcome | None
    """its reward, or why it has none; None: the verifier of the data would judge `text`"""
    text: str
    """the last answer"""
    turns: tuple[Turn, ...]
    """answers of all branches, branch after branch"""
    read: tuple[str, ...]
    """what the model had read before each answer, in the order of drawing"""
    left: int
    """answers that were not asked for, up to 1,000; 0 for a function"""
    sample: Sample
    """the episode as a run sends it on, with the tokens of all branches"""

    @property
    def record(self) -> EpisodeRecord:
        """Turns, calls and failures of tools, the limit that ended it, metrics of its own."""
        assert self.sample.episode is not None
        return self.sample.episode

    @property
    def tool_calls(self) -> Mapping[str, int]:
        """Number of calls, by name of the tool."""
        return self.record.tool_calls


class NoMoreAnswers(AssertionError):
    """The agent asked for more answers than the test has."""


class _Script:
    """The model: draws what the test says, and keeps what it has read."""

    def __init__(self, answers: Answers, tokenizer: Tokenizer, clock: AgentClock) -> None:
        self._of = answers if callable(answers) else None
        self._next: Iterator[str] = iter(()) if callable(answers) else iter(answers)
        self._tokenizer: Any = tokenizer
        self._clock = clock
        self.read: list[str] = []
        self.missed = ""
        """what was asked for behind the last answer"""

    async def draw(self, context: Tokens, most: int, seed: int | None = None) -> Generated:
        """Draw the next answer, cut at ``most`` tokens."""
        read = self._tokenizer.decode(context)
        answer = self._of(read) if self._of is not None else next(self._next, None)
        if answer is None:
            self.missed = (
                f"the agent asked for answer {len(self.read) + 1}, but the test has "
                f"{len(self.read)}. The model had read:\n{read}"
            )
            raise NoMoreAnswers(self.missed)
        self.read.append(read)
        with self._clock.stopped():
            await asyncio.sleep(0)  # as any model, it has others run meanwhile
        ids = self._tokenizer(answer + (self._tokenizer.eos_token or ""), add_special_tokens=False)[
            "input_ids"
        ]
        return Generated(
            token_ids=np.array(ids[:most], np.int32),
            log_prob=np.zeros(min(len(ids), most), np.float32),
            version=np.zeros(min(len(ids), most), np.int32),
            finish="stop" if len(ids) <= most else "length",
        )

    def left(self) -> int:
        return sum(1 for _ in islice(self._next, MOST_LEFT))  # there may be no end of them


async def play(
    agent: RunEpisode,
    answers: Answers,
    *,
    messages: str | Sequence[Message] = "",
    reference: str = "",
    index: int = 0,
    state: bytes = b"",
    config: EpisodeConfig | None = None,
    model: str | Path | None = None,
) -> Played:
    """Run an agent over answers that a test writes.

    Args:
        agent: the coroutine function.
        answers: what the model says, turn after turn, without the token that ends an answer; or a
            function that is given all that the model has read, special tokens included.
        messages: the task: its messages, or what the user says.
        reference: the task's reference.
        index: position of the task in the data.
        state: what `Episode.state` is once `Episode.resume` has returned.
        config: the settings ``[episode]``; ``run`` is not looked at.
        model: folder of a tokenizer with a chat template; left out: one token for each byte, and a
            template with tools in the format ``hermes``.

    Raises:
        NoMoreAnswers: the agent asked for more answers than there are.
        TypeError: ``answers`` is a single text, which would be answers of one character.
        TemplateError: the tokenizer has no chat template.
    """
    if isinstance(answers, str):
        raise TypeError(f"answers is {answers!r:.80}, a single text: put it into a list")
    config = config or EpisodeConfig()
    tokenizer, template = _language(model)
    if isinstance(messages, str):
        messages = ({"role": "user", "content": messages},)
    clock = AgentClock(config.seconds)
    script = _Script(answers, tokenizer, clock)
    endpoint = Endpoint(config.endpoint)
    task = _task(messages, reference, index, config)
    episode = Episode(
        Task(index=index, messages=task.prompt.messages, reference=reference),
        script,
        template,
        parser_of(config.tools, ("episode", "tools")),
        template.decode,
        config.limits(config.max_tokens),
        on_tool_failure=config.on_tool_failure,
        on_rewrite=config.on_rewrite,
        endpoint=endpoint,
        sampling=task.sampling,
        state=state,
    )
    name = getattr(agent, "__name__", "agent")
    try:
        ending = await run_to_end(name, agent, episode, clock, config.on_timeout)
    finally:
        episode.close()
        await endpoint.end(episode)
        await endpoint.aclose()
    if script.missed:
        raise NoMoreAnswers(script.missed)
    sample = finished(name, task, episode, ending, 0)
    return Played(
        outcome=sample.outcome,
        text=sample.text,
        turns=tuple(turn for chat in episode.chats for turn in chat.turns),
        read=tuple(script.read),
        left=script.left(),
        sample=sample,
    )


def _language(model: str | Path | None) -> tuple[Tokenizer, ChatTemplate]:
    tokenizer = bytes_tokenizer() if model is None else load_tokenizer(model)
    ends = None if model is None else end_tokens(model, tokenizer)
    return tokenizer, ChatTemplate(tokenizer, ends=ends or None)


def _task(
    messages: Sequence[Message], reference: str, index: int, config: EpisodeConfig
) -> Request:
    prompt = Prompt(
        index=index,
        text="",
        token_ids=np.empty(0, np.int32),
        verifier="",
        reference=reference,
        messages=tuple(dict(one) for one in messages),
    )
    return Request(
        group=index,
        index=0,
        group_size=1,
        iteration=0,
        min_version=0,
        prompt=prompt,
        sampling=Sampling(max_tokens=config.max_tokens),
        seed=index,
    )


@cache
def bytes_tokenizer() -> Tokenizer:
    """Return a tokenizer with one token for each byte, and a chat template with tools.

    Raises:
        MissingExtra: transformers is not installed.
    """
    needed("transformers", extra="language", needed_for="a tokenizer")
    import tokenizers
    import transformers

    level = tokenizers.pre_tokenizers.ByteLevel
    vocabulary = {one: at for at, one in enumerate(sorted(level.alphabet()))}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = level(add_prefix_space=False, use_regex=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens([START, END])
    load: Any = transformers.PreTrainedTokenizerFast  # untyped
    found: Tokenizer = load(tokenizer_object=made, eos_token=END, chat_template=TEMPLATE)
    return found
