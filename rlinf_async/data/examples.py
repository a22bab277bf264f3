"""`Examples`: answers that a model learns from, and which of them in which step.

Invariant: which records a step learns from is a function of the data and the configuration alone,
so a run that is resumed learns from those that it would have had.

::

    prompt, completion        [system,] prompt --template, asked--> given     completion --> learnt
    messages                  a conversation, of which every turn of the assistant is learnt
    prompt, chosen, rejected  two examples with one prompt, in this order

    conversation   given  learnt  given  learnt        the template renders a conversation up to
                   <user>1+1=<assistant>2<eos><user>...    each answer, and with it: what is added
                                                       is the answer, its end of turn included

Each part is encoded alone: what is given has the tokens that an engine is given. A template may
mark what is learnt itself, by ``{% generation %}``; one that writes earlier turns otherwise once
there are later ones has to, or is refused.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, Final, Literal

import msgspec
import numpy as np

from rlinf_async.config.counts import check_bounds
from rlinf_async.data.config import DataError, check_chat
from rlinf_async.data.prompts import (
    Indices,
    Tokenizer,
    messages_of,
    order_of,
    split,
    template_of,
)
from rlinf_async.data.records import Record, Records, column, open_file
from rlinf_async.messages.language import Example, Mask, Tokens

ASSISTANT: Final = "assistant"
MARKS: Final = "{% generation"
"""begins what a template marks as learnt"""
_SHOWN: Final = 3
"""records that an error names"""

Learnt = tuple[Example, ...]
"""examples of a record"""


class ExamplesConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Examples from a file or from a folder."""

    path: str
    """a ``.jsonl``, ``.parquet`` or ``.arrow`` file, or a folder of a Hugging Face dataset"""
    split: str = "train"
    """name of the split, in a folder that has several"""
    chat: bool = True
    """whether examples go through a chat template"""
    chat_template: str = ""
    """path of a Jinja file; instead of the tokenizer's template"""
    chat_options: dict[str, Any] = {}
    """further variables of the template, such as ``enable_thinking``"""
    system_prompt: str = ""
    """system message for conversations that have none"""
    max_tokens: int = 2048
    """most tokens of a prompt with its answer"""
    too_long: Literal["error", "skip"] = "error"
    """treatment of longer ones; skipped records are counted"""
    shuffle: bool = True
    """whether each epoch has an order of its own"""
    seed: int = 0
    """seed of the order and the choice of held-out records"""
    held_out: int = 0
    """number of records kept for evaluation"""

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("path is empty: name a file or a folder")
        check_bounds(self, "max_tokens", least=2)
        check_bounds(self, "held_out", "seed", least=0)
        check_chat(self)

    @property
    @abstractmethod
    def columns(self) -> tuple[str, ...]:
        """Columns that are read."""

    @abstractmethod
    def read(self, reader: ExampleReader, record: Record, where: str) -> Learnt:
        """Return the examples of a record; raises `DataError`."""


class AnswersConfig(ExamplesConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prompts with the answers to learn, or whole conversations."""

    prompt_column: str = "prompt"
    """column with text or a list of chat messages; a dot leads into a nested column"""
    completion_column: str = "completion"
    """column with the answer: text or a list of chat messages"""
    messages_column: str = ""
    """column with whole conversations, of which each turn of the assistant is learnt; instead of
    both"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.messages_column and not self.chat:
            raise ValueError(
                f"chat is false, and messages_column is {self.messages_column!r}: conversations "
                "need a chat template"
            )
        given = (self.prompt_column, self.completion_column)
        if self.messages_column and given != ("prompt", "completion"):
            raise ValueError(
                f"messages_column is {self.messages_column!r}, which has prompts and answers: "
                "leave prompt_column and completion_column out"
            )

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that are read."""
        if self.messages_column:
            return (self.messages_column,)
        return (self.prompt_column, self.completion_column)

    def read(self, reader: ExampleReader, record: Record, where: str) -> Learnt:
        """Return the example of a record."""
        if self.messages_column:
            return (reader.conversation(record, self.messages_column, where),)
        return (reader.answer(record, self.prompt_column, self.completion_column, where),)


class PairsConfig(ExamplesConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prompts, each with a better and a worse answer."""

    prompt_column: str = "prompt"
    """column with text or a list of chat messages; a dot leads into a nested column"""
    chosen_column: str = "chosen"
    """column with the better answer: text or a list of chat messages"""
    rejected_column: str = "rejected"
    """column with the worse answer"""

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that are read."""
        return (self.prompt_column, self.chosen_column, self.rejected_column)

    def read(self, reader: ExampleReader, record: Record, where: str) -> Learnt:
        """Return the chosen and the rejected example of a record."""
        chosen, rejected = (
            reader.answer(record, self.prompt_column, name, where)
            for name in (self.chosen_column, self.rejected_column)
        )
        return (chosen, rejected)


class ExampleReader:
    """Makes examples of records, with one configuration and tokenizer.

    Raises `DataError` if a chat template is needed and there is none.
    """

    def __init__(self, config: ExamplesConfig, tokenizer: Tokenizer) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._template = template_of(config.chat_template, tokenizer) if config.chat else None
        text = self._template or tokenizer.chat_template
        self._marks = config.chat and isinstance(text, str) and MARKS in text.replace("{%-", "{%")

    def answer(self, record: Record, prompt: str, answer: str, where: str) -> Example:
        """Return the example of a record with a prompt and an answer.

        Args:
            record: the record.
            prompt: name of the column with the prompt.
            answer: name of the column with the answer.
            where: place of the record, for errors.

        Raises `DataError`.
        """
        given, said = column(record, prompt, where), column(record, answer, where)
        if not self._config.chat:
            for name, value in ((prompt, given), (answer, said)):
                if not isinstance(value, str):
                    raise DataError(
                        f"{where}: {name} is a {type(value).__name__}, and messages need a chat "
                        "template: set chat to true"
                    )
            first = self._encode(given, special=True)
            rest = [*self._encode(said), self._tokenizer.eos_token_id]
            return self._example([(first, False), (np.asarray(rest, np.int32), True)], where)
        before = messages_of(given, prompt, where, system=self._config.system_prompt)
        after = messages_of(said, answer, where, role=ASSISTANT)
        if after[0]["role"] != ASSISTANT:
            raise DataError(
                f"{where}: {answer} begins with a message of {after[0]['role']!r}, where the model "
                f"answers: {ASSISTANT!r} was expected (whole conversations: set messages_column)"
            )
        return self._rendered([*before, *after], len(before), where)

    def conversation(self, record: Record, name: str, where: str) -> Example:
        """Return the example of a record with a whole conversation; raises `DataError`."""
        given, system = column(record, name, where), self._config.system_prompt
        if isinstance(given, str):
            raise DataError(f"{where}: {name} is text, and not a list of messages")
        messages = messages_of(given, name, where, system=system)
        return self._marked(messages, where) if self._marks else self._rendered(messages, 0, where)

    def _rendered(self, messages: Sequence[dict[str, Any]], first: int, where: str) -> Example:
        """Return a conversation of which the assistant's turns from ``first`` on are learnt."""
        parts: list[tuple[Tokens, bool]] = []
        done = ""
        for at, message in enumerate(messages):
            if at < first or message["role"] != ASSISTANT:
                continue
            asked = self._text(messages[:at], where, ask=True)
            told = self._text(messages[: at + 1], where, ask=False)
            if not asked.startswith(done) or not told.startswith(asked):
                raise DataError(
                    f"{where}: the chat template writes what came before message {at} otherwise "
                    "once that message is there, so it is not known which tokens are learnt: set "
                    "chat_template to one that leaves it, or with a messages_column to one that "
                    "has answers between {% generation %} and {% endgeneration %}"
                )
            parts += [
                (self._encode(asked[len(done) :]), False),
                (self._encode(told[len(asked) :]), True),
            ]
            done = told
        return self._example(parts, where)

    def _marked(self, messages: Sequence[dict[str, Any]], where: str) -> Example:
        """Return a conversation of which is learnt what the template marks."""
        found = self._apply(
            messages,
            where,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        ids = np.asarray(found["input_ids"], np.int32)
        learnt = np.asarray(found["assistant_masks"], np.bool_)
        places = np.flatnonzero(learnt)
        if not len(places):
            return self._example([], where)
        first, last = int(places[0]), int(places[-1]) + 1
        mask = learnt[first:last]
        return self._whole(ids[:first], ids[first:last], mask, where)

    def _example(self, parts: Sequence[tuple[Tokens, bool]], where: str) -> Example:
        if not any(learnt and len(ids) for ids, learnt in parts):
            raise DataError(
                f"{where}: there is nothing to learn: it has no turn of the {ASSISTANT}, or an "
                "empty one"
            )
        (prompt, _), *rest = parts
        ids = np.concatenate([one for one, _ in rest]).astype(np.int32)
        mask = np.repeat([learnt for _, learnt in rest], [len(one) for one, _ in rest])
        return self._whole(prompt, ids, mask, where)

    def _whole(self, prompt: Tokens, answer: Tokens, mask: Mask, where: str) -> Example:
        if not len(prompt):
            raise DataError(
                f"{where}: the prompt is empty: there is nothing to predict its first token from"
            )
        return Example(prompt, answer, None if mask.all() else mask.astype(np.bool_))

    def _text(self, messages: Sequence[dict[str, Any]], where: str, *, ask: bool) -> str:
        text: str = self._apply(messages, where, tokenize=False, add_generation_prompt=ask)
        return text

    def _apply(self, messages: Sequence[dict[str, Any]], where: str, **how: Any) -> Any:
        options = {**how, **self._config.chat_options}
        try:
            return self._tokenizer.apply_chat_template(
                list(messages), chat_template=self._template, **options
            )
        except Exception as error:  # templates raise errors of any type, as for an unknown role
            raise DataError(f"{where}: the chat template refuses it: {error}") from error

    def _encode(self, text: str, *, special: bool = False) -> Tokens:
        ids = self._tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
        return np.asarray(ids, np.int32)


class Examples:
    """The examples of a run, all read and encoded.

    Args:
        config: which data.
        tokenizer: of the model.

    Raises:
        DataError: a record, the template or the split cannot be used; names file and line.
        MissingExtra: a library that reads the data is not installed.
    """

    def __init__(self, config: ExamplesConfig, tokenizer: Tokenizer) -> None:
        self.config = config
        if tokenizer.eos_token_id is None and not config.chat:
            raise DataError(
                "the tokenizer has no end-of-sequence token: the model would never end an answer"
            )
        records = open_file(config.path, config.split, config.columns)
        if len(records) <= config.held_out:
            raise DataError(
                f"{config.path} has {len(records)} records, of which held_out = {config.held_out} "
                "are kept back: none is left to learn from"
            )
        reader = ExampleReader(config, tokenizer)
        self._read: dict[int, Learnt] = {}
        self.too_long: int = 0
        """number of records that are left out"""
        self._read_all(records, reader)
        learnt, kept = split(len(records), config.held_out, config.seed)
        self._indices = self._usable(learnt)
        self.held_out: list[int] = self._usable(kept).tolist()
        """records for evaluation, by number"""
        if not len(self._indices):
            raise DataError(
                f"{config.path}: all records are longer than max_tokens = {config.max_tokens}"
            )
        self._order = lru_cache(maxsize=2)(self._order_of)

    def __len__(self) -> int:
        """The number of records of an epoch."""
        return len(self._indices)

    def __getitem__(self, record: int) -> Learnt:
        """The examples of a record."""
        return self._read[record]

    @property
    def longest(self) -> int:
        """Most tokens of an example."""
        return max(one.tokens for learnt in self._read.values() for one in learnt)

    def steps(self, epochs: int, size: int) -> int:
        """Return the number of steps of ``size`` records until every one was learnt ``epochs``
        times."""
        return math.ceil(epochs * len(self) / size)

    def batch(self, step: int, size: int) -> list[int]:
        """Return the records of a step, by number: the next ``size`` of epoch after epoch."""
        found = []
        for position in range(step * size, (step + 1) * size):
            epoch, at = divmod(position, len(self))
            found.append(int(self._order(epoch)[at]))
        return found

    def learnt_in(self, steps: int, size: int) -> Iterator[int]:
        """Yield the records that the first ``steps`` learn from, each once."""
        if steps * size >= len(self):
            yield from self._indices.tolist()
            return
        yield from (int(one) for one in self._order(0)[: steps * size])

    def _order_of(self, epoch: int) -> Indices:
        return order_of(self._indices, self.config.seed, epoch, shuffle=self.config.shuffle)

    def _usable(self, indices: Indices) -> Indices:
        return np.asarray([one for one in indices.tolist() if one in self._read], np.int64)

    def _read_all(self, records: Records, reader: ExampleReader) -> None:
        limit, long = self.config.max_tokens, []
        for at in range(len(records)):
            where = records.where(at)
            learnt = self.config.read(reader, records[at], where)
            tokens = max(one.tokens for one in learnt)
            if tokens <= limit:
                self._read[at] = learnt
            else:
                long.append(f"{where} ({tokens} tokens)")
        self.too_long = len(long)
        if long and self.config.too_long == "error":
            more = f" and {len(long) - _SHOWN} more" if len(long) > _SHOWN else ""
            raise DataError(
                f"{len(long)} records are longer than max_tokens = {limit}: "
                f"{', '.join(long[:_SHOWN])}{more}; raise the limit, or set too_long to 'skip'"
            )
