"""The checkpoints of a language run: what they hold beside the actors' shards.

::

    checkpoints/
      latest.json           `LanguageProgress`: written last, in one atomic step; names the rest
      version-000010/       the actors' shards; critic/ for those of the critics
        run.msgpack         `Unfinished`: the ledger, the position in the data, samples in flight

Samples in flight, so that a resumed run begins none of them anew::

    rollout workers: requests with the tokens generated so far --+
    generated, inferred: samples that wait for their score ------+--> InFlight
    scored: samples that wait for the collector -----------------+

A sample that is in none of these places at that moment is in the ledger all the same, as a request
that was admitted: it is requested again. So `InFlight` need not be complete, and it cannot be
wrong: whatever the ledger does not know to be running is left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rlinf_async.channels import Channel
from rlinf_async.channels.encoded import copy_of
from rlinf_async.channels.remote_payload import remote_payload_of
from rlinf_async.channels.wire import Decoder, Encoded, encode
from rlinf_async.config import UsageError
from rlinf_async.messages.language import Request, Sample, ScoredSample
from rlinf_async.observe.errors import RunFolderError
from rlinf_async.observe.files import explaining
from rlinf_async.runtime.jobs.checkpoints import RunProgress, load_progress
from rlinf_async.runtime.jobs.language.channels import LanguageChannels
from rlinf_async.runtime.jobs.language.config import LanguageConfig
from rlinf_async.runtime.jobs.language.learners import CRITIC
from rlinf_async.runtime.jobs.language.samples import Ledger, LedgerState

T = TypeVar("T")

RUN = "run.msgpack"


class LanguageProgress(RunProgress, kw_only=True):
    """How far a language run has come."""

    samples: int = 0
    """samples that were trained on, those that were not scored included"""
    tokens: int = 0
    """tokens of their prompts and responses"""
    outcomes: dict[str, int] = msgspec.field(default_factory=dict)
    """samples by outcome: scored, rejected, failed"""
    eval_accuracy_before: float | None = None
    eval_reward_before: float | None = None


class InFlight(msgspec.Struct, kw_only=True):
    """Samples between admission and collection, each of them in one place only."""

    partial: list[Request] = msgspec.field(default_factory=list)
    """requests with tokens to continue after"""
    generated: list[Sample] = msgspec.field(default_factory=list)
    inferred: list[Sample] = msgspec.field(default_factory=list)
    """samples with log-probs of the actor's forward"""
    scored: list[ScoredSample] = msgspec.field(default_factory=list)

    @property
    def names(self) -> set[str]:
        """Names of the samples that need no rollout any more."""
        return {one.request.name for one in (*self.generated, *self.inferred)}

    def enter(self, ledger: Ledger) -> None:
        """Enter into the ledger of a resumed run what need not begin anew."""
        for request in self.partial:
            ledger.continue_from(request)
        for scored in self.scored:
            ledger.take(scored)

    async def put_back(self, channels: LanguageChannels) -> None:
        """Put the samples of a resumed run where they were. Its workers have begun to take them."""
        for channel, samples in (
            (channels.generated, self.generated),
            (channels.inferred, self.inferred),
        ):
            if samples:
                with channel.new_sender() as sender:
                    for sample in samples:
                        await sender.put(sample)


def in_flight(
    channels: LanguageChannels, partial: Iterable[Request], running: Iterable[Request]
) -> InFlight:
    """Everything that is in flight, in the farthest place that each sample has come to.

    Args:
        channels: the run's channels, as they are now.
        partial: requests that the rollout workers hold.
        running: requests that the ledger waits for; nothing else is taken up.
    """
    left = {one.name for one in running}

    def new(name: str) -> bool:
        known = name in left
        left.discard(name)
        return known

    scored = [one for one in _items(channels.scored) if new(one.sample.request.name)]
    inferred: list[Sample] = []
    if channels.inferred is not channels.generated:
        inferred = [one for one in _items(channels.inferred) if new(one.request.name)]
    return InFlight(
        scored=scored,
        inferred=inferred,
        generated=[one for one in _items(channels.generated) if new(one.request.name)],
        partial=[one for one in partial if one.partial is not None and new(one.name)],
    )


def _items(channel: Channel[T]) -> list[T]:
    """The items that wait in a channel or are leased from it, without those whose arrays are still
    with their producer. Nothing is taken."""
    queue = channel.queue
    found: list[Any] = [
        queue.value(copy_of(item)) for item in queue.contents() if remote_payload_of(item) is None
    ]
    return found


class Unfinished(msgspec.Struct, kw_only=True):
    """What was not trained yet when the checkpoint was written."""

    ledger: LedgerState
    data: bytes
    """position in the prompts: the data's own state, as JSON"""
    waiting: InFlight = msgspec.field(default_factory=InFlight)

    def files(self) -> dict[str, bytes]:
        """The file that it is in the checkpoint, by name."""
        encoded = encode(self)
        stored = _Stored(encoded.data, [bytes(buffer) for buffer in encoded.buffers])
        return {RUN: msgspec.msgpack.encode(stored)}


class _Stored(msgspec.Struct, frozen=True):
    data: bytes
    buffers: list[bytes]


_unfinished = Decoder(Unfinished)


def load_language_progress(checkpoints: Path) -> LanguageProgress | None:
    """Where to go on; None where there is no checkpoint. Raises as `load_progress`."""
    return load_progress(checkpoints, LanguageProgress, file=RUN)


def load_unfinished(checkpoints: Path, progress: LanguageProgress) -> Unfinished:
    """What was not trained yet at the checkpoint that ``progress`` names.

    Raises:
        RunFolderError: the file is damaged.
    """
    path = checkpoints / progress.checkpoint / RUN
    with explaining("read", path):
        content = path.read_bytes()
    try:
        stored = msgspec.msgpack.decode(content, type=_Stored)
        decoded: Unfinished = _unfinished.decode_copy(
            Encoded(stored.data, [memoryview(buffer) for buffer in stored.buffers])
        )
    except Exception as error:
        raise RunFolderError(f"{path} is damaged: {error}") from error
    return _told(decoded)


def _told(unfinished: Unfinished) -> Unfinished:
    """Without the tokens of which nobody knows what they were drawn from: those of a run of an
    older version that truncates. They are generated again."""

    def told(sample: Sample) -> bool:
        return sample.generated.tells_of(sample.request.sampling)

    def begun(request: Request) -> Request:
        known = request.partial is None or request.partial.tells_of(request.sampling)
        return request if known else msgspec.structs.replace(request, partial=None)

    ledger, waiting = unfinished.ledger, unfinished.waiting
    again = [one.sample.request for one in ledger.finished if not told(one.sample)]
    return Unfinished(
        ledger=msgspec.structs.replace(
            ledger,
            running=[begun(one) for one in (*ledger.running, *again)],
            finished=[one for one in ledger.finished if told(one.sample)],
        ),
        data=unfinished.data,
        waiting=InFlight(
            partial=[begun(one) for one in waiting.partial],
            generated=[one for one in waiting.generated if told(one)],
            inferred=[one for one in waiting.inferred if told(one)],
            scored=[one for one in waiting.scored if told(one.sample)],
        ),
    )


def check_resumed_critic(config: LanguageConfig, checkpoint: Path) -> None:
    """Raise `UsageError` where a run with critics would go on from a checkpoint without one."""
    if config.has_critic and not (checkpoint / CRITIC).is_dir():
        raise UsageError(
            f"{checkpoint} was written by a run without a critic (it has no {CRITIC}/), and "
            f"{config.actor.advantage.name!r} needs its values: restore that folder, or start in "
            "another one"
        )
