"""Entries of reasoning-gym tasks as records: made from a seed, with nothing to download."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from rlinf_async.config.errors import raised
from rlinf_async.data.errors import DataError
from rlinf_async.data.records import Record
from rlinf_async.rewards.reasoning import open_task, reference_of

REFERENCE_COLUMN: Final = "reasoning_gym"
"""column that the verifier of that name reads"""

_IN_FINGERPRINT: Final = 2
"""entries of each task that are part of the fingerprint"""


class TaskRecords:
    """Tasks in turn: record ``i`` is of task ``i % len(tasks)``.

    Its columns are ``prompt`` (the question), ``answer``, and the task's metadata of the entry
    (such as ``expression`` of ``chain_sum``).
    """

    made_on_demand = True

    def __init__(
        self,
        names: Sequence[str],
        options: Mapping[str, Mapping[str, Any]],
        seed: int,
        size: int,
    ) -> None:
        """Raises `ConfigError` for an unknown task, and for options that a task does not have."""
        self._size = size
        self._seed = seed
        self._each = -(-size // len(names))
        self._options = {name: dict(options.get(name, {})) for name in names}
        self._names = list(names)
        self._tasks = [open_task(name, self._options[name], seed, self._each) for name in names]
        count = min(_IN_FINGERPRINT * len(names), size)
        about = [names, self._options, seed, size]
        about += [self[index]["prompt"] for index in range(count)]
        text = msgspec.json.encode(about, order="sorted")
        self.fingerprint = hashlib.blake2b(text, digest_size=16).hexdigest()

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Record:
        which, at = index % len(self._names), index // len(self._names)
        name = self._names[which]
        try:
            entry = self._tasks[which][at]
        except Exception as error:  # with some options a task finds no entry
            raise DataError(
                f"{self.where(index)} with {self._options[name]} cannot be made: {raised(error)}"
            ) from error
        options = self._options[name]
        return {
            **entry["metadata"],
            "prompt": entry["question"],
            "answer": entry["answer"],
            REFERENCE_COLUMN: reference_of(entry, name, options, self._seed, self._each, at),
        }

    def where(self, index: int) -> str:
        name = self._names[index % len(self._names)]
        return f"task {name}, entry {index // len(self._names)}"
