"""`Prompts`: an iterator over the prompts of a run, whose position can be saved and restored.

Invariant: which prompt has which index is a function of the data and the configuration alone. So a
restored run gets the prompts that it would have got without the interruption.

::

    record in the order of the epoch --> same prompt as a held-out one  --> left out, counted
                                     --> longer than max_prompt_tokens  --> DataError, or left out
                                     --> `Prompt`

    prompt column: text ---------> [system message,] user message ---+
                   messages -----> [system message,] messages -------+--chat template--> text
                   text, chat = false ---------------------------------------------------> text
    text --tokenizer--> token ids     special tokens are the template's, or else the tokenizer's
    text, images --processor--> token ids     of a vision-language model: `rlinf_async.data.images`

The tokenizer is that of a checkpoint folder, or one of single characters for models that are
trained from scratch: every printable ASCII character is a token, each digit included, and so are
the roles of a chat, 102 tokens. A model of some hundred thousand parameters learns arithmetic with
it. Saved to a folder, it is an ordinary Hugging Face tokenizer, which transformers and vLLM load.
"""

from __future__ import annotations

import itertools
import json
import math
import string
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from rlinf_async.config import MissingExtra, needed
from rlinf_async.data.config import NO_VERIFIER, DataChanged, DataConfig, DataError, PromptsTooLong
from rlinf_async.data.images import ImageProcessor, identity, read_images
from rlinf_async.data.records import (
    REFERENCE_COLUMN,
    WHOLE,
    NumberRecords,
    Record,
    Records,
    TableRecords,
    TaskRecords,
    as_text,
    column,
    open_file,
)
from rlinf_async.messages.language import Images, Prompt, Tokens

FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
)


SLOW_IMPORTS: Final = ("transformers.models.auto.tokenization_auto",)
"""modules that `load_tokenizer` imports, which takes seconds"""


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used."""

    chat_template: Any
    eos_token_id: Any
    pad_token_id: Any

    def __call__(self, text: Any, /, **options: Any) -> Any: ...

    def __len__(self) -> int: ...

    def apply_chat_template(self, conversation: Any, /, **options: Any) -> Any: ...

    def decode(self, token_ids: Any, /, **options: Any) -> Any: ...

    def get_vocab(self) -> dict[str, int]: ...


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer of a folder on disk; nothing is downloaded, and no code of the folder runs.

    Raises:
        DataError: no such folder, no tokenizer in it, or one that cannot be read.
        MissingExtra: transformers is not installed.
    """
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise DataError(
            f"there is no tokenizer folder {str(folder)!r}: it is read from disk, not downloaded"
        )
    if not any((path / name).is_file() for name in FILES):
        raise DataError(
            f"{path} holds no tokenizer: none of {', '.join(FILES)} is there; copy "
            "tokenizer.json and tokenizer_config.json of the model into it"
        )
    library = needed("transformers", extra="llm", needed_for=f"tokenizer {path}")
    try:
        tokenizer: Tokenizer = library.AutoTokenizer.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers and tokenizers raise errors of many types
        raise DataError(f"the tokenizer in {path} cannot be loaded: {error}") from error
    return tokenizer


def end_tokens(
    folder: str | Path, tokenizer: Tokenizer, config: Any | None = None
) -> frozenset[int]:
    """Return the tokens at which engines end an answer of a model: the tokenizer's, and those of
    config.json, or else of its kind of model, and of generation_config.json.

    Args:
        folder: the model's folder.
        tokenizer: its tokenizer.
        config: ``PretrainedConfig`` of its config.json, where that is read already.

    Raises:
        DataError: one of the files is damaged.
        MissingExtra: transformers is not installed.
    """
    path = Path(folder).expanduser()
    given: list[Any] = [tokenizer.eos_token_id]
    found: set[int] = set()
    try:
        if config is None and (path / "config.json").is_file():
            library = needed("transformers", extra="llm", needed_for=f"the model in {path}")
            config = library.AutoConfig.from_pretrained(
                str(path), local_files_only=True, trust_remote_code=False
            )
        if config is not None:
            given.append(config.get_text_config(decoder=True).eos_token_id)
        settings = path / "generation_config.json"
        if settings.is_file():
            given.append(json.loads(settings.read_text(encoding="utf-8")).get("eos_token_id"))
        for one in given:
            several = isinstance(one, list | tuple)
            found.update(map(int, one if several else [] if one is None else [one]))
    except MissingExtra:
        raise
    except Exception as error:  # transformers raises errors of many types
        raise DataError(f"the end tokens in {path} cannot be read: {error}") from error
    return frozenset(found)


def decode(tokenizer: Tokenizer, token_ids: Sequence[int] | Tokens) -> str:
    """The text of a response: special tokens left out, spaces as they are."""
    text: str = tokenizer.decode(
        token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    return text


_AT_ENDS: Final = 16
"""tokens that a tokenizer may add at both ends of a text"""


class Renderer:
    """Makes prompts from records, with one configuration and tokenizer."""

    def __init__(
        self,
        config: DataConfig,
        tokenizer: Tokenizer,
        *,
        messages: bool = False,
        processor: ImageProcessor | None = None,
    ) -> None:
        """``messages``: whether prompts carry their messages, too. ``processor``: of a model that
        sees images.

        Raises `DataError` if a chat template is needed and there is none, and for images that
        nobody can see.
        """
        if config.image_column and processor is None:
            raise DataError(
                f"image_column is {config.image_column!r}, but the model takes no images: leave it "
                "out, or give a vision-language model"
            )
        self._config = config
        self._processor = processor
        place = Path(config.path).expanduser()
        self._base = place if place.is_dir() else place.parent
        self._with_messages = messages
        self._tokenizer = tokenizer
        self._template = template_of(config.chat_template, tokenizer) if config.chat else None
        task = bool(config.tasks)
        own_verifier = (
            "reasoning_gym" if task else "environment" if config.environment_tasks else ""
        )
        self._verifier = config.verifier or own_verifier
        own = task and self._verifier == "reasoning_gym"
        self._reference = REFERENCE_COLUMN if own else config.reference_column

    def prompt(self, record: Record, index: int, where: str) -> Prompt:
        """The prompt of a record, however long.

        Raises:
            DataError: a column is missing or of the wrong kind, or the template refuses it.
        """
        text, images = self.text(record, where), self.images(record, where)
        token_ids = self.tokens(text, images, where)
        if not len(token_ids):
            raise DataError(f"{where}: the prompt is empty")
        return Prompt(
            index=index,
            text=text,
            token_ids=token_ids,
            verifier=self.verifier(record, where),
            reference=self.reference(record, where),
            messages=tuple(self._messages(record, where)) if self._with_messages else (),
            images=images,
        )

    @property
    def sees(self) -> bool:
        """Whether records have images."""
        return bool(self._config.image_column)

    def images(self, record: Record, where: str) -> Images:
        """Return the encoded images of a record; raises `DataError` where one cannot be read."""
        return read_images(self._given_images(record, where), self._base, where)

    def _given_images(self, record: Record, where: str) -> list[Any]:
        """Return what a record has in the place of images; a null is none."""
        name = self._config.image_column
        if not name or (name in record and record[name] is None):
            return []
        given = column(record, name, where)
        return given if isinstance(given, list) else [given]

    def tokens(self, text: str, images: Images, where: str) -> Tokens:
        """Return the tokens ``[P]`` of a text, and of its images; raises `DataError`."""
        special = not self._config.chat
        if self._processor is not None and self.sees:
            return self._processor.tokens(text, images, where, special=special)
        ids = self._tokenizer(text, add_special_tokens=special, verbose=False)
        return np.asarray(ids["input_ids"], np.int32)

    def verifier(self, record: Record, where: str) -> str:
        """The name of the verifier that scores responses to this record."""
        if self._verifier:
            return self._verifier
        name = column(record, self._config.verifier_column, where)
        if not isinstance(name, str) or not name:
            raise DataError(f"{where}: {self._config.verifier_column} is {name!r}, not a name")
        return name

    def reference(self, record: Record, where: str) -> str:
        """The reference as text: `values` has the rule. Empty where nothing is scored."""
        if self._verifier == NO_VERIFIER:
            return ""
        value = column(record, self._reference, where)
        try:
            return as_text(value)
        except ValueError as error:
            raise DataError(f"{where}: column {self._reference!r}: {error}") from error

    def not_between(self, least: int, most: int, texts: Sequence[str]) -> Iterator[tuple[int, int]]:
        """Yield position and number of tokens of the texts that have fewer than ``least`` or more
        than ``most``."""
        # No tokenizer makes more tokens of ASCII than it has characters, but for a few at its ends.
        unclear = [
            at
            for at, text in enumerate(texts)
            if not text.strip() or not text.isascii() or len(text) + _AT_ENDS > most
        ]
        if not unclear:
            return
        ids = self._tokenizer(
            [texts[at] for at in unclear],
            add_special_tokens=not self._config.chat,
            verbose=False,
        )["input_ids"]
        for at, one in zip(unclear, ids, strict=True):
            if not least <= len(one) <= most:
                yield at, len(one)

    def text(self, record: Record, where: str) -> str:
        """The text that the model reads.

        Raises:
            DataError: the column is missing or of the wrong kind, or the template refuses it.
        """
        given = column(record, self._config.prompt_column, where)
        if not self._config.chat:
            if not isinstance(given, str):
                raise DataError(
                    f"{where}: {self._config.prompt_column} is a {type(given).__name__}, and "
                    "messages need a chat template: set chat to true"
                )
            return given
        messages = self._messages(record, where)
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages,
                chat_template=self._template,
                add_generation_prompt=True,
                tokenize=False,
                **self._config.chat_options,
            )
        except Exception as error:  # templates raise errors of any type, as for an unknown role
            raise DataError(f"{where}: the chat template refuses it: {error}") from error
        return text

    def _messages(self, record: Record, where: str) -> list[dict[str, Any]]:
        name, system = self._config.prompt_column, self._config.system_prompt
        given = column(record, name, where)
        messages = messages_of(given, name, where, system=system, parts=self.sees)
        if not self.sees:
            return messages
        return _with_placeholders(messages, len(self._given_images(record, where)))


def _with_placeholders(messages: Sequence[dict[str, Any]], images: int) -> list[dict[str, Any]]:
    """Return messages whose contents are lists of parts. Where none of these is an image, all
    images stand before the text of the user's first message."""
    found = []
    given = any(
        part["type"] == "image"
        for one in messages
        if not isinstance(one["content"], str)
        for part in one["content"]
    )
    left = 0 if given else images
    for one in messages:
        content = one["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if left and one["role"] == "user":
            parts = [*({"type": "image"} for _ in range(left)), *parts]
            left = 0
        found.append({**one, "content": parts})
    return found


def messages_of(
    given: object,
    name: str,
    where: str,
    *,
    role: str = "user",
    system: str = "",
    parts: bool = False,
) -> list[dict[str, Any]]:
    """The messages of a column; text is one message.

    Args:
        given: its content.
        name: name of the column.
        where: place of the record, for errors.
        role: who says what is given as text.
        system: system message where there is none; empty: none.
        parts: whether a content may be a list of texts and images, instead of text.

    Raises:
        DataError: it is neither text nor a list of messages.
    """
    messages: list[dict[str, Any]] = []
    for one in (
        [{"role": role, "content": given}]
        if isinstance(given, str)
        else _listed(given, name, where)
    ):
        if not (isinstance(one, Mapping) and isinstance(one.get("role"), str)):
            raise DataError(
                f"{where}: a message must have the texts role and content, not {one!r:.200}"
            )
        content = one.get("content")
        if parts and isinstance(content, list):
            content = [_part(part, where) for part in content]
        elif not isinstance(content, str):
            hint = (
                "; a list of texts and images needs an image_column, which the data of a "
                "language_rl job may have"
            ) * _is_parts(content)
            raise DataError(
                f"{where}: a message must have the texts role and content, not {one!r:.200}{hint}"
            )
        messages.append({**one, "content": content})
    if system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return messages


def _is_parts(content: object) -> bool:
    return isinstance(content, list) and all(isinstance(one, Mapping) for one in content)


def _part(given: object, where: str) -> dict[str, str]:
    """Return a part of a message's content: a text, or the placeholder of an image."""
    if isinstance(given, Mapping):
        if given.get("type") == "text" and isinstance(given.get("text"), str):
            return {"type": "text", "text": given["text"]}
        others = {name for name, value in given.items() if value is not None} - {"type"}
        if given.get("type") == "image" and not others:
            return {"type": "image"}
    raise DataError(
        f"{where}: a part of a message must be a text, as {{'type': 'text', 'text': '...'}}, or "
        f"the place of the next image of image_column, {{'type': 'image'}}, not {given!r:.200}"
    )


def _listed(given: object, name: str, where: str) -> list[Any]:
    if not isinstance(given, list) or not given:
        raise DataError(f"{where}: {name} must be text or a list of messages, not {given!r:.200}")
    return given


def template_of(file: str, tokenizer: Tokenizer) -> str | None:
    """The template of a file; None: the tokenizer's own.

    Args:
        file: path of a Jinja file; empty: there is none.
        tokenizer: of the model.

    Raises:
        DataError: the file cannot be read; there is neither.
    """
    if file:
        try:
            return Path(file).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"chat_template {file!r}: {error}") from error
    if not tokenizer.chat_template:
        raise DataError(
            "the tokenizer has no chat template: name a Jinja file in chat_template, or set chat "
            "to false for a model that is no chat model"
        )
    return None


BATCH: Final = 256
"""records that are checked together when the data are opened"""
TASK_SECONDS: Final = 10.0
"""seconds for which entries of tasks, and prompts with images, are checked in advance, as they are
made one by one; the others are checked when they occur"""

_SHOWN: Final = 3
"""records that an error names"""

Indices = NDArray[np.int64]

_SPLIT, _EPOCH = 0, 1  # two independent streams of random numbers


def open_records(config: DataConfig) -> Records:
    """The records that the configuration names.

    Raises:
        DataError: they are not there, or cannot be read.
        ConfigError: no such task, or options that it does not take.
        MissingExtra: a library that reads them is not installed.
    """
    if config.tasks:
        return TaskRecords(config.tasks, config.task_options, config.seed, config.task_size)
    if config.environment_tasks:
        return NumberRecords(config.environment_tasks, config)
    reference = "" if config.verifier == NO_VERIFIER else config.reference_column
    columns = (config.prompt_column, config.image_column, reference, config.verifier_column)
    return open_file(config.path, config.split, columns)


def split(records: int, held_out: int, seed: int) -> tuple[Indices, Indices]:
    """Indices ``[records - held_out]`` for training, in order, and ``[held_out]`` kept back."""
    chosen = np.random.default_rng((seed, _SPLIT)).permutation(records)[:held_out]
    kept = np.sort(chosen).astype(np.int64)
    return np.setdiff1d(np.arange(records, dtype=np.int64), kept), kept


def order_of(indices: Indices, seed: int, epoch: int, *, shuffle: bool) -> Indices:
    """The order of one epoch."""
    if not shuffle:
        return indices
    return np.random.default_rng((seed, _EPOCH, epoch)).permutation(indices)


class DataState(msgspec.Struct, frozen=True, kw_only=True):
    """A position in the data, and what identifies the data."""

    position: int
    """index of the next prompt"""
    too_long: int
    """records left out so far, over epochs"""
    like_held_out: int
    """records left out so far because a held-out one has the same prompt"""
    fingerprint: str
    records: int
    seed: int
    shuffle: bool
    held_out: int


class Prompts(Iterator[Prompt]):
    """The prompts of a run."""

    def __init__(
        self,
        config: DataConfig,
        tokenizer: Tokenizer,
        *,
        messages: bool = False,
        processor: ImageProcessor | None = None,
    ) -> None:
        """Open the data and check them.

        Args:
            config: which data.
            tokenizer: of the model.
            messages: whether prompts carry their messages, for episodes.
            processor: of a model that sees images; None: it does not.

        Raises:
            DataError: a record, the template or the split cannot be used; names file and line.
            ConfigError: an unknown task, or options that it does not take.
            MissingExtra: a library that reads the data is not installed.
        """
        self.config = config
        self._records: Records = open_records(config)
        self._renderer = Renderer(config, tokenizer, messages=messages, processor=processor)
        self._training, self._kept = self._split()
        self._verifiers: set[str] = set()
        self._long: dict[int, int] = {}
        """tokens of the prompts that are too long, of the records that were checked"""
        self._hashes = array("q")
        """hashes of the prompts that were checked"""
        self.position = 0
        """index of the next prompt"""
        self.too_long = 0
        """records left out so far, over epochs"""
        self.like_held_out = 0
        """records left out so far because a held-out one has the same prompt"""
        self._order_of = lru_cache(maxsize=1)(self._make_order)
        self._check()
        self.held_out: list[Prompt] = self._held_out()
        """prompts for evaluation, in the order of the data, without those that are too long"""
        self._held_out_prompts = {identity(one.text, one.images) for one in self.held_out}

    @property
    def left_out(self) -> dict[str, int]:
        """Numbers of prompts left out so far, over epochs, by the reason; without those of 0."""
        counts = {
            "prompts that are too long": self.too_long,
            "prompts like held-out ones": self.like_held_out,
            "held-out prompts that are too long": len(self._kept) - len(self.held_out),
        }
        return {reason: count for reason, count in counts.items() if count}

    def __len__(self) -> int:
        """The number of records in an epoch, including those that are left out."""
        return len(self._training)

    @property
    def usable(self) -> int:
        """The number of records in an epoch, at most, without those that are too long, or have the
        prompt of a held-out one."""
        held_out = list(map(hash, self._held_out_prompts))
        repeated = np.flatnonzero(np.isin(np.asarray(self._hashes), held_out))
        return len(self) - int(np.isin(self._training, [*self._long, *repeated.tolist()]).sum())

    @property
    def verifiers(self) -> tuple[str, ...]:
        """Names of the verifiers of the records that were checked."""
        return tuple(sorted(self._verifiers))

    def known(self, prompts: Iterable[Prompt]) -> int:
        """Return how many of these prompts are among those of the records that were checked,
        held-out ones included."""
        hashes = set(self._hashes)
        return sum(hash(identity(one.text, one.images)) in hashes for one in prompts)

    def references(self, verifier: str) -> Iterator[str]:
        """The references of the records that this verifier scores."""
        for at in range(len(self._records)):
            record, where = self._records[at], self._records.where(at)
            if self._renderer.verifier(record, where) == verifier:
                yield self._renderer.reference(record, where)

    @property
    def epoch(self) -> int:
        """The epoch of the next prompt, from 0."""
        return self.position // len(self)

    def __iter__(self) -> Prompts:
        return self

    def __next__(self) -> Prompt:
        """The next prompt.

        Raises:
            StopIteration: all epochs are done.
            DataError: the record cannot be used, or none of a whole epoch can.
        """
        for _ in range(
            2 * len(self)
        ):  # the usable one may be first in one epoch and last in the next
            epoch, at = divmod(self.position, len(self))
            if self.config.epochs and epoch >= self.config.epochs:
                if self.too_long + self.like_held_out < self.position:
                    raise StopIteration
                break
            record = int(self._order_of(epoch)[at])
            prompt = self._prompt(record, self.position)
            self.position += 1
            if prompt is None:
                self.too_long += 1
            elif identity(prompt.text, prompt.images) in self._held_out_prompts:
                self.like_held_out += 1
            else:
                return prompt
        raise DataError(
            f"{self.config.name}: none of {len(self)} records can be used: of {self.position} "
            f"looked at so far, over epochs, {self.too_long} were longer than max_prompt_tokens = "
            f"{self.config.max_prompt_tokens}, and {self.like_held_out} had the prompt of a "
            "held-out record"
        )

    def at(self, index: int) -> Prompt:
        """Return a prompt that was given before, by its index; raises `DataError`."""
        epoch, at = divmod(index, len(self))
        record = int(self._order_of(epoch)[at])
        return self._renderer.prompt(self._records[record], index, self._records.where(record))

    def state(self) -> DataState:
        """The present position."""
        return DataState(
            position=self.position,
            too_long=self.too_long,
            like_held_out=self.like_held_out,
            fingerprint=self._records.fingerprint,
            records=len(self._records),
            seed=self.config.seed,
            shuffle=self.config.shuffle,
            held_out=self.config.held_out,
        )

    def restore(self, state: DataState) -> str:
        """Continue from a saved position; return what could not be compared, or nothing.

        Raises:
            DataChanged: the data, or a setting that decides their order, have changed.
        """
        now, note = self.state(), ""
        if isinstance(self._records, TableRecords) and not state.fingerprint.startswith(WHOLE):
            now = msgspec.structs.replace(now, fingerprint=self._records.earlier_fingerprint())
            note = (
                f"{self.config.name}: the position was saved by an earlier version: of each file "
                "only its size and the first and last 4 MiB could be compared"
            )
        names = ("records", "seed", "shuffle", "held_out", "fingerprint")
        for name in names:
            before, after = getattr(state, name), getattr(now, name)
            if before == after:
                continue
            what = "the content of the data" if name == "fingerprint" else name
            hint = (
                "; the entries of some tasks depend on PYTHONHASHSEED: set it to a number"
                if name == "fingerprint" and self.config.tasks
                else ""
            )
            raise DataChanged(
                f"{self.config.name}: {what} was {before!r} when the position was saved, and is "
                f"{after!r}: go on with the same data and settings, or start anew{hint}"
            )
        self.position = state.position
        self.too_long = state.too_long
        self.like_held_out = state.like_held_out
        return note

    def _split(self) -> tuple[Indices, Indices]:
        count = len(self._records)
        if not count:
            raise DataError(f"{self.config.name} has no records")
        if count <= self.config.held_out:
            raise DataError(
                f"{self.config.name} has {count} records, of which held_out = "
                f"{self.config.held_out} are kept back: none is left to train on"
            )
        return split(count, self.config.held_out, self.config.seed)

    def _make_order(self, epoch: int) -> Indices:
        return order_of(self._training, self.config.seed, epoch, shuffle=self.config.shuffle)

    def _held_out(self) -> list[Prompt]:
        made = (self._prompt(int(record), at) for at, record in enumerate(self._kept))
        return [prompt for prompt in made if prompt is not None]

    def _prompt(self, record: int, index: int) -> Prompt | None:
        """The prompt; None if it is too long and to be skipped."""
        where = self._records.where(record)
        prompt = self._renderer.prompt(self._records[record], index, where)
        tokens, limit = len(prompt.token_ids), self.config.max_prompt_tokens
        if tokens <= limit:
            return prompt
        if self.config.too_long == "skip":
            return None
        raise PromptsTooLong(_too_long([f"{where} ({tokens} tokens)"], 1, limit))

    def _check(self) -> None:
        """Find what would stop the run hours later: missing columns, prompts that are too long."""
        on_demand = self._records.made_on_demand or self._renderer.sees
        until = time.monotonic() + TASK_SECONDS if on_demand else math.inf
        for start in range(0, len(self._records), BATCH):
            if time.monotonic() > until:
                break
            self._check_batch(range(start, min(start + BATCH, len(self._records))))
        if self._long and self.config.too_long == "error":
            found = [
                f"{self._records.where(at)} ({tokens} tokens)"
                for at, tokens in itertools.islice(self._long.items(), _SHOWN)
            ]
            limit = self.config.max_prompt_tokens
            raise PromptsTooLong(_too_long(found, len(self._long), limit))

    def _check_batch(self, batch: range) -> None:
        texts = []
        for at in batch:
            record, where = self._records[at], self._records.where(at)
            self._verifiers.add(self._renderer.verifier(record, where))
            self._renderer.reference(record, where)
            text = self._renderer.text(record, where)
            if self._renderer.sees:
                self._check_seen(record, text, at)
            else:
                texts.append(text)
        self._hashes.extend(map(hash, texts))
        limit = self.config.max_prompt_tokens
        for at, tokens in self._renderer.not_between(1, limit, texts):
            if not tokens:
                raise DataError(f"{self._records.where(batch[at])}: the prompt is empty")
            self._long[batch[at]] = tokens

    def _check_seen(self, record: Record, text: str, at: int) -> None:
        """Check a record that may have images, of which the processor makes tokens."""
        where = self._records.where(at)
        images = self._renderer.images(record, where)
        self._hashes.append(hash(identity(text, images)))
        tokens = len(self._renderer.tokens(text, images, where))
        if not tokens:
            raise DataError(f"{where}: the prompt is empty")
        if tokens > self.config.max_prompt_tokens:
            self._long[at] = tokens


def _too_long(places: list[str], count: int, limit: int) -> str:
    more = f" and {count - len(places)} more" if count > len(places) else ""
    return (
        f"{count} prompt{'s are' if count > 1 else ' is'} longer than max_prompt_tokens = {limit}: "
        f"{', '.join(places)}{more}; raise the limit, or set too_long to 'skip'"
    )


PAD, END, UNKNOWN = "<pad>", "<eos>", "<unk>"
ROLES: Final = ("<system>", "<user>", "<assistant>")
CHARACTERS: Final = "\n " + string.digits + string.punctuation + string.ascii_letters

CHAT_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{{ '<' + message['role'] + '>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
"""``<user>12+30=<assistant>42<eos>``"""


def arithmetic_tokenizer() -> Any:
    """The tokenizer, as a `transformers.PreTrainedTokenizerFast`. Raises `MissingExtra`."""
    wanted_by = "the arithmetic tokenizer"
    tokenizers = needed("tokenizers", extra="llm", needed_for=wanted_by)
    transformers = needed("transformers", extra="llm", needed_for=wanted_by)
    special = (PAD, END, UNKNOWN, *ROLES)
    words = {word: at for at, word in enumerate((*special, *CHARACTERS))}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token=UNKNOWN))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    made.decoder = tokenizers.decoders.Fuse()
    made.add_special_tokens(list(special))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=1_000_000,
    )


def save_arithmetic_tokenizer(folder: str | Path) -> None:
    """Save the tokenizer to a folder, beside a model's own files."""
    arithmetic_tokenizer().save_pretrained(str(folder))
