"""A model that answers by a script, episodes with it, and what has become of its tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple

import numpy as np

from rlinf_async.episodes import Episode, Limits, Task
from rlinf_async.episodes.endpoint import Endpoint, EndpointConfig
from rlinf_async.episodes.parsing import Parser, parsers
from rlinf_async.episodes.template import ChatTemplate
from rlinf_async.messages.language import Generated, Sampling, Tokens
from tests.episodes.kit import FAMILIES, tokenizer_of

QUESTION: Final = {"role": "user", "content": "What is 1 + 2?"}
ADD_PARAMETERS: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
ADD: Final[dict[str, Any]] = {
    "type": "function",
    "function": {"name": "add", "description": "Add.", "parameters": ADD_PARAMETERS},
}
CALL: Final = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
SAMPLING: Final = Sampling(max_tokens=64, temperature=1.0)


class Draw(NamedTuple):
    """What the engine was given, and drew."""

    context: list[int]
    generated: Generated
    seed: int | None


class Scripted:
    """A model whose answers are a script's.

    Its tokens are those of the single characters: encoded anew, no answer is as it was drawn.
    """

    def __init__(
        self, script: Sequence[str] | Callable[[str], str], family: str = "qwen2.5"
    ) -> None:
        self.family = family
        tokenizer: Any = tokenizer_of(family)
        self.tokenizer = tokenizer
        self.end = int(tokenizer.convert_tokens_to_ids(FAMILIES[family].end))
        self.draws: list[Draw] = []
        self.given_up = 0
        self.dropped = asyncio.Semaphore(0)
        """released each time that an answer is given up"""
        self.open = asyncio.Event()
        """cleared: answers wait"""
        self.open.set()
        self.asked = asyncio.Semaphore(0)
        """released each time that an answer is asked for"""
        self.seconds: Callable[[], float] | None = None
        """how long an answer takes; None: no time"""
        self._script = script
        self._answers = 0

    async def draw(self, context: Tokens, most: int, seed: int | None = None) -> Generated:
        """Draw the next answer of the script."""
        self.asked.release()
        at, self._answers = self._answers, self._answers + 1
        try:
            await self.open.wait()
            if self.seconds is not None:
                await asyncio.sleep(self.seconds())
        except asyncio.CancelledError:
            self.given_up += 1
            self.dropped.release()
            raise
        if callable(self._script):
            text = self._script(self.tokenizer.decode(context))
        else:
            text = self._script[at]
        ids = [*(one for character in text for one in self._encoded(character)), self.end]
        made = Generated(
            token_ids=np.array(ids[:most], np.int32),
            log_prob=(-np.arange(1, len(ids[:most]) + 1) / (at + 1)).astype(np.float32),
            version=np.full(len(ids[:most]), at, np.int32),
            finish="stop" if len(ids) <= most else "length",
        )
        self.draws.append(Draw(context.tolist(), made, seed))
        return made

    def decode(self, token_ids: Tokens) -> str:
        """Return the text of tokens, without the end of the turn."""
        text: str = self.tokenizer.decode([one for one in token_ids.tolist() if one != self.end])
        return text

    def _encoded(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


def episode_of(
    model: Scripted,
    *,
    turns: int = 100,
    tokens: int = 10_000,
    endpoint: Endpoint | None = None,
    branches: bool = False,
    parser: Parser | None = None,
) -> Episode:
    """Return an episode that this model acts in."""
    return Episode(
        Task(index=17, messages=(QUESTION,), reference="3"),
        model,
        ChatTemplate(model.tokenizer),
        parser or parsers.load(FAMILIES[model.family].parser),
        model.decode,
        Limits(turns=turns, tokens=tokens),
        endpoint=endpoint,
        sampling=SAMPLING,
        on_rewrite="branch" if branches else "fail",
    )


@asynccontextmanager
async def served(
    script: Sequence[str] | Callable[[str], str], *, family: str = "qwen2.5", **options: Any
) -> AsyncIterator[tuple[Episode, Scripted]]:
    """Serve an episode; what is trained of it is exact at the end."""
    limits = {
        name: options.pop(name) for name in ("turns", "tokens", "branches") if name in options
    }
    model = Scripted(script, family)
    endpoint = Endpoint(EndpointConfig(**options))
    episode = episode_of(model, endpoint=endpoint, **limits)
    try:
        yield episode, model
        assert_exact(episode, model)
    finally:
        await endpoint.aclose()


def assert_exact(
    episode: Episode, model: Scripted, told: Sequence[Generated] | None = None
) -> None:
    """Each answer (of those that were told, if they are named) is trained once, bit for bit, after
    the very tokens that it was drawn from."""
    trained: list[tuple[list[int], list[int], list[float], list[int]]] = []
    for chat in episode.chats:
        for conversation, turns in chat.lines:
            prompt, response = conversation.prompt.tolist(), conversation.response()
            ids, spans = response.token_ids.tolist(), conversation.spans()
            assert len(spans) == len(turns)
            drawn = np.zeros(len(ids), np.bool_)
            for start, stop in spans:
                drawn[start:stop] = True
                trained.append(
                    (
                        prompt + ids[:start],
                        ids[start:stop],
                        response.log_prob[start:stop].tolist(),
                        response.version[start:stop].tolist(),
                    )
                )
            mask = np.ones(len(ids), np.bool_) if response.drawn is None else response.drawn
            assert np.array_equal(mask, drawn)
    expected = []
    for context, made, _ in model.draws:
        if told is not None and not any(one is made for one in told):
            continue
        kept = _kept(made.token_ids.tolist(), context, trained)
        expected.append(
            (
                context,
                made.token_ids[:kept].tolist(),
                made.log_prob[:kept].tolist(),
                made.version[:kept].tolist(),
            )
        )
    assert sorted(trained) == sorted(expected)


def _kept(drawn: list[int], context: list[int], trained: Sequence[tuple[Any, ...]]) -> int:
    """Return how much of an answer is trained: a stop sequence may have ended it before."""
    found = [
        len(ids) for before, ids, *_ in trained if before == context and drawn[: len(ids)] == ids
    ]
    return max(found, default=len(drawn))
