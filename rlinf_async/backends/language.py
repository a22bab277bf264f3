"""What the workers of a language-model run ask of a backend. Nothing here needs torch.

::

    GenerationEngine   rollout worker: one prompt -> its response, many at a time (async)
    LanguageTrainer    actor and inference worker: samples -> a better model, log-probs, weights

Backends are loaded by name (`rlinf_async.backends.registry`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple, Protocol

from rlinf_async.messages.embodied import Floats
from rlinf_async.messages.language import Generated, Request, Tokens, TrainingSample
from rlinf_async.messages.weights import Allocate, WeightUpdate


class EngineDied(RuntimeError):
    """The engine cannot serve any more; what it was generating must be asked for again."""


class PromptTooLong(ValueError):
    """The prompt and its response do not fit the model's context; the message has the numbers."""


class ModelOutputError(RuntimeError):
    """The model gave NaN or infinity; the message names the request and the weights' version."""


class GenerationEngine(Protocol):
    """A model that generates. The async methods are safe to overlap."""

    @property
    def version(self) -> int:
        """The version of the weights that make new tokens; -1 before the first load."""
        ...

    @property
    def max_concurrent(self) -> int:
        """How many requests it works on at a time; more would only queue inside it."""
        ...

    def decode(self, token_ids: Tokens) -> str:
        """Return the text of these tokens, special ones left out."""
        ...

    async def start(self) -> None:
        """Build and warm up."""
        ...

    async def generate(self, request: Request) -> Generated:
        """Generate, after the tokens of ``request.partial`` where there are some.

        The answer holds the partial's tokens too, with their own versions and log-probs. A
        cancelled call aborts the request inside the engine.

        Raises:
            PromptTooLong: it does not fit.
            EngineDied: the engine is gone.
        """
        ...

    async def abort(self, names: Sequence[str] | None = None) -> None:
        """End these requests (None: all) with what they have: ``finish == "abort"``.

        Every one whose `generate` has been called is ended. Returns when they are.
        """
        ...

    async def so_far(self) -> dict[str, Generated]:
        """What each request under way has by now, by its name; none is interrupted.

        ``finish`` is ``"abort"``: it can be gone on with, as the ``partial`` of a request.
        """
        ...

    async def load(self, update: WeightUpdate) -> int:
        """Take new weights in flight: running requests pause, keep their tokens, and go on.

        Returns the update's checksum, which its bytes were compared with. Raises
        `WeightsError` before anything changed if they are damaged, do not fit, or are older than
        those served. A failure after that is the engine's end (`EngineDied`): it serves no model
        that is half loaded. A cancelled call changes nothing, or its load goes on to the end.
        """
        ...

    async def log_probs(self, sequences: Sequence[tuple[Tokens, Tokens]]) -> list[Floats]:
        """Log-probs at temperature 1 of ``(prompt [P], response [R])``: one ``[R]`` each."""
        ...

    async def offload(self) -> None:
        """Give the device's memory back. The engine is idle."""
        ...

    async def onload(self) -> None:
        """Take it again; weights must be loaded anew where the engine dropped them."""
        ...

    async def close(self) -> None:
        """End the engine and all of its processes."""
        ...


class MicroBatch(NamedTuple):
    """Samples of one forward and backward pass."""

    samples: Sequence[TrainingSample]
    is_last: bool
    """of its global batch: sharded gradients then cross the ranks"""


class LanguageTrainer(Protocol):
    """A language model that learns: a policy, or a critic. One compute thread calls it.

    Methods marked collective are called by all ranks, in the same order.
    """

    @property
    def version(self) -> int:
        """How many iterations were trained, or the version that `load` took."""
        ...

    def compute_advantages(self, samples: Sequence[TrainingSample]) -> list[TrainingSample]:
        """Return the samples of whole groups with advantages and returns, never normalised.

        Those that have an advantage already are left alone; those that were not scored get none,
        train nothing and enter no baseline.
        """
        ...

    @property
    def normalizes(self) -> bool:
        """Advantages are normalised over the global batch, by `normalize_advantages`."""
        ...

    def normalize_advantages(self, samples: Sequence[TrainingSample]) -> list[TrainingSample]:
        """Return this rank's part of a global batch, normalised over all of it. Collective."""
        ...

    def agree(self, count: int, /) -> int:
        """Return the largest of what the ranks gave. Collective."""
        ...

    def training_step(self, micro_batches: Iterable[MicroBatch]) -> Mapping[str, float]:
        """Make one optimizer step from the micro-batches of one global batch. Collective.

        Pulled one by one, so it may block until the next one arrives; every rank yields the same
        number of them. Gradients are the same however the samples are cut into micro-batches.
        Metrics are those of the global batch, equal on every rank. Raises `TrainingDiverged` for a
        loss that is not finite; a gradient that is not skips the step (``skipped`` is then 1).
        """
        ...

    def end_iteration(self) -> None:
        """Count the version up: the next weights that are published are the next version's."""
        ...

    def log_probs(
        self, samples: Sequence[TrainingSample], *, reference: bool = False
    ) -> list[Floats]:
        """Log-probs ``[R]`` of each sample's response, by this model or the reference weights.

        Input order; micro-batched by tokens inside. Collective.
        """
        ...

    def values(self, samples: Sequence[TrainingSample]) -> list[Floats]:
        """Values ``[R]`` before each response token, of a critic. Collective."""
        ...

    def publish(self, allocate: Allocate | None = None) -> WeightUpdate:
        """Return the weights of the present version, Hugging Face names. Collective.

        Tied weights come once. Ranks other than 0 return an update without buckets. ``allocate``
        gives the memory they travel from; all ranks may write into it where it is shared, and only
        that of rank 0 counts. A bucket in which nothing changed since the last time is that of the
        last time.
        """
        ...

    def load(self, update: WeightUpdate) -> None:
        """Take published weights and their version; only where ``world_size`` is 1.

        Raises `WeightsError` before anything changed if they are damaged or do not fit.
        """
        ...

    def offload(self, *, keep_weights: bool = False) -> None:
        """Move optimizer state and weights to the CPU, and drop the gradients."""
        ...

    def onload(self) -> None:
        """Take them back to the device."""
        ...

    def save_pretrained(self, folder: Path) -> None:
        """Write the model as Hugging Face does: config, weights, tokenizer if known. Collective."""
        ...

    def save_checkpoint(self, path: Path, extra: Mapping[str, object] | None = None) -> None:
        """Write a checkpoint folder, atomically. Collective."""
        ...

    def begin_checkpoint(
        self, path: Path, extra: Mapping[str, object] | None = None
    ) -> Future[Path]:
        """Start writing what `save_checkpoint` writes, and go on. Collective.

        Waits for the one before. The future ends when this rank's part is on the disk, or has its
        error; when all ranks' parts are, the folder is there.
        """
        ...

    def load_checkpoint(self, path: Path) -> list[dict[str, object]]:
        """Go on where the checkpoint was written, under any world size; the extras. Collective."""
        ...
