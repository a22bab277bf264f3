"""What a language run has reached: kept beside its checkpoints, so that it can go on from there.

::

    checkpoints/
      latest.json           `Reached`: written last, in one atomic step, and names the rest
      version-000010/       the actors' shards
        run.msgpack         `Unfinished`: the ledger and the position in the data
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from rlinf_async.channels.wire import Decoder, Encoded, encode
from rlinf_async.observe.errors import RunFolderError
from rlinf_async.observe.files import atomic_write, explaining
from rlinf_async.runtime.jobs.checkpoints import check_complete, folder_of, keep_newest
from rlinf_async.runtime.jobs.language.ledger import LedgerState
from rlinf_async.runtime.jobs.language.under_way import Waiting

NOTE = "latest.json"
RUN = "run.msgpack"


class Reached(msgspec.Struct, kw_only=True):
    """How far a run has come."""

    version: int = 0
    samples: int = 0
    """that were trained on, those that were not scored included"""
    tokens: int = 0
    """prompts and responses of those samples"""
    train_seconds: float = 0.0
    lag_sum: float = 0.0
    """of the mean lag of each iteration"""
    lag_max: int = 0
    duplicates: int = 0
    outcomes: dict[str, int] = {}
    """samples by outcome: scored, rejected, failed"""
    eval_accuracy_before: float | None = None
    checkpoint: str = ""
    """folder, relative to that of the checkpoints"""

    @property
    def lag_mean(self) -> float:
        return self.lag_sum / self.version if self.version else 0.0


class Unfinished(msgspec.Struct, kw_only=True):
    """What was under way when the checkpoint was written."""

    ledger: LedgerState
    data: bytes
    """the position in the prompts, as the data's own state, JSON"""
    waiting: Waiting = msgspec.field(default_factory=Waiting)


class Books(msgspec.Struct, frozen=True):
    """Both as they were at one moment, ready to be written once the checkpoint is."""

    name: str
    """of the checkpoint's folder"""
    reached: bytes
    unfinished: bytes

    @classmethod
    def of(cls, reached: Reached, unfinished: Unfinished) -> Books:
        """Close the books of this moment."""
        name = folder_of(reached.version)
        encoded = encode(unfinished)
        stored = _Stored(encoded.data, [bytes(buffer) for buffer in encoded.buffers])
        noted = msgspec.structs.replace(reached, checkpoint=name)
        return cls(name, msgspec.json.encode(noted), msgspec.msgpack.encode(stored))


class _Stored(msgspec.Struct, frozen=True):
    data: bytes
    buffers: list[bytes]


_unfinished = Decoder(Unfinished)


def load_reached(checkpoints: Path) -> Reached | None:
    """Where to go on; None where there is no checkpoint.

    Raises:
        RunFolderError: the note, or the checkpoint that it names, is damaged or missing.
    """
    note = checkpoints / NOTE
    if not note.exists():
        return None
    try:
        reached = msgspec.json.decode(note.read_bytes(), type=Reached)
    except (OSError, msgspec.DecodeError) as error:
        raise RunFolderError(f"{note} cannot be read: {error}") from error
    if not (checkpoints / reached.checkpoint / RUN).is_file():
        raise RunFolderError(
            f"{note} names the checkpoint {reached.checkpoint!r}, which is not there or has no "
            f"{RUN}: restore it, or start again in another folder"
        )
    return reached


def load_unfinished(checkpoints: Path, reached: Reached) -> Unfinished:
    """What was under way at the checkpoint that ``reached`` names.

    Raises:
        RunFolderError: the file is damaged.
    """
    path = checkpoints / reached.checkpoint / RUN
    with explaining("read", path):
        content = path.read_bytes()
    try:
        stored = msgspec.msgpack.decode(content, type=_Stored)
        decoded: Unfinished = _unfinished.decode_copy(
            Encoded(stored.data, [memoryview(buffer) for buffer in stored.buffers])
        )
    except Exception as error:
        raise RunFolderError(f"{path} is damaged: {error}") from error
    return decoded


def keep(checkpoints: Path, books: Books, count: int) -> None:
    """Make the checkpoint of these books the one to go on from; keep ``count - 1`` before it.

    Raises `RunFolderError` unless it is complete.
    """
    check_complete(checkpoints / books.name)
    atomic_write(checkpoints / books.name / RUN, books.unfinished)
    atomic_write(checkpoints / NOTE, books.reached)
    keep_newest(checkpoints, books.name, count)
