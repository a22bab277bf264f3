"""`Prompts`: an iterator over the prompts of a run, whose position can be saved and restored.

Invariant: which prompt has which index is a function of the data and the configuration alone. So a
restored run gets the prompts that it would have got without the interruption.

::

    record in the order of the epoch --> same prompt as a held-out one  --> left out, counted
                                     --> longer than max_prompt_tokens  --> DataError, or left out
                                     --> `Prompt`
"""

from __future__ import annotations

import itertools
import math
import time
from array import array
from collections.abc import Iterator
from functools import lru_cache
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from rlinf_async.data.config import DataConfig
from rlinf_async.data.errors import DataChanged, DataError, PromptTooLong
from rlinf_async.data.files import TableRecords, open_file
from rlinf_async.data.records import WHOLE, Records
from rlinf_async.data.rendering import Renderer
from rlinf_async.data.tasks import TaskRecords
from rlinf_async.data.tokenizer import Tokenizer
from rlinf_async.messages.language import Prompt

BATCH: Final = 256
"""records that are checked together when the data are opened"""
TASK_SECONDS: Final = 10.0
"""for which entries of tasks, which are made one by one, are checked; the others are checked when
they occur"""

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
    return open_file(config)


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

    def __init__(self, config: DataConfig, tokenizer: Tokenizer) -> None:
        """Open the data and check them.

        Raises:
            DataError: a record, the template or the split cannot be used; names file and line.
            ConfigError: an unknown task, or options that it does not take.
            MissingExtra: a library that reads the data is not installed.
        """
        self.config = config
        self._records: Records = open_records(config)
        self._renderer = Renderer(config, tokenizer)
        self._training, self._kept = self._split()
        self._verifiers: set[str] = set()
        self._long: dict[int, int] = {}
        """tokens of the prompts that are too long, of the records that were checked"""
        self._hashes = array("q")
        """of the texts of the prompts that were checked"""
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
        self._held_out_texts = {prompt.text for prompt in self.held_out}

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
        held_out = list(map(hash, self._held_out_texts))
        repeated = np.flatnonzero(np.isin(np.asarray(self._hashes), held_out))
        return len(self) - int(np.isin(self._training, [*self._long, *repeated.tolist()]).sum())

    @property
    def verifiers(self) -> tuple[str, ...]:
        """Names of the verifiers of the records that were checked."""
        return tuple(sorted(self._verifiers))

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
            elif prompt.text in self._held_out_texts:
                self.like_held_out += 1
            else:
                return prompt
        raise DataError(
            f"{self.config.name}: none of {len(self)} records can be used: of {self.position} "
            f"looked at so far, over epochs, {self.too_long} were longer than max_prompt_tokens = "
            f"{self.config.max_prompt_tokens}, and {self.like_held_out} had the prompt of a "
            "held-out record"
        )

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
        raise PromptTooLong(_too_long([f"{where} ({tokens} tokens)"], 1, limit))

    def _check(self) -> None:
        """Find what would stop the run hours later: missing columns, prompts that are too long."""
        on_demand = self._records.made_on_demand
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
            raise PromptTooLong(_too_long(found, len(self._long), limit))

    def _check_batch(self, batch: range) -> None:
        texts = []
        for at in batch:
            record, where = self._records[at], self._records.where(at)
            self._verifiers.add(self._renderer.verifier(record, where))
            self._renderer.reference(record, where)
            texts.append(self._renderer.text(record, where))
        self._hashes.extend(map(hash, texts))
        limit = self.config.max_prompt_tokens
        for at, tokens in self._renderer.not_between(1, limit, texts):
            if not tokens:
                raise DataError(f"{self._records.where(batch[at])}: the prompt is empty")
            self._long[batch[at]] = tokens


def _too_long(places: list[str], count: int, limit: int) -> str:
    more = f" and {count - len(places)} more" if count > len(places) else ""
    return (
        f"{count} prompt{'s are' if count > 1 else ' is'} longer than max_prompt_tokens = {limit}: "
        f"{', '.join(places)}{more}; raise the limit, or set too_long to 'skip'"
    )
