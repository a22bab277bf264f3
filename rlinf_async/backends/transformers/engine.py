"""`TransformersEngine`: generation with a Hugging Face model, batched continuously.

::

    generate() --> waiting (by priority) --room--> Decoder, in the engine's own thread --> Generated
                                                      ^
                       load(): between two steps      |  abort(): at the end of this step

                  waits for                                unblocked by
    generate      its response                             the thread; abort; the engine's failure
    load, ...     the current steps to end (``_turn``)     the thread

The thread computes up to `STRETCH` steps in one call, and returns early when a row is finished or
another call waits for the decoder. Between two calls only the event loop touches the decoder.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeVar

import torch

from rlinf_async.backends.base import ShieldedTasks
from rlinf_async.backends.building import building
from rlinf_async.backends.language import EngineDied
from rlinf_async.backends.transformers.config import TransformersEngineConfig
from rlinf_async.backends.transformers.decoder import BatchDecoder, DecodedRow
from rlinf_async.backends.transformers.folder import ModelFolder, open_folder
from rlinf_async.backends.transformers.formats import ResponseFormats
from rlinf_async.backends.transformers.images import processor_in
from rlinf_async.backends.transformers.tensors import build_model
from rlinf_async.messages.embodied import Floats
from rlinf_async.messages.language import Generated, Request, Tokens
from rlinf_async.messages.weights import WeightsError, WeightUpdate

R = TypeVar("R")

STRETCH: Final = 16
"""steps of the thread in one call, at most"""


class TransformersEngine:
    """A `GenerationEngine` over ``model.forward``. See `GenerationEngine` for the methods.

    Args:
        config: the model and how it generates.
        seed: seed of what the model draws when it is built; requests have their own.
        device: device, as torch names it.
    """

    def __init__(
        self, config: TransformersEngineConfig, seed: int = 0, device: str = "cpu"
    ) -> None:
        self._config = config
        self.max_concurrent = config.max_concurrent
        self._seed = seed
        self._device = device
        self._folder: ModelFolder | None = None
        self._decoder: BatchDecoder | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="transformers engine")
        self._waiting: list[tuple[int, int, DecodedRow]] = []
        self._answers: dict[DecodedRow, asyncio.Future[Generated]] = {}
        self._ending: set[DecodedRow] = set()
        self._arrived = 0
        self._turn = asyncio.Lock()
        self._shielded = ShieldedTasks()
        self._wanted = False
        self._work: asyncio.Task[None] | None = None
        self._failure: str | None = None

    @property
    def version(self) -> int:
        """The version of the weights that make new tokens; -1 before the first load."""
        return -1 if self._decoder is None else self._decoder.version

    def decode(self, token_ids: Tokens) -> str:
        """Return the text of these tokens, special ones left out."""
        assert self._folder is not None
        return self._folder.decode(token_ids)

    async def start(self) -> None:
        """Build the model.

        Raises:
            ModelFolderError: something is missing in the folder.
        """
        await self._in_thread(self._build)

    def _build(self) -> None:
        config = self._config
        if config.threads:
            torch.set_num_threads(config.threads)
        self._folder = open_folder(
            config.model, context=config.context, needs_weights=config.weights != "update"
        )
        with building(self._seed):
            model = build_model(self._folder, config, self._device)
        processor = processor_in(Path(self._folder.path))
        self._decoder = BatchDecoder(
            model,
            self._folder.stop_token_ids,
            config.prefill_tokens,
            processor,
            ResponseFormats(self._folder),
        )
        self._decoder.takes_adapter = config.weights == "adapter"
        if config.weights == "folder":
            self._decoder.version = 0

    async def generate(self, request: Request) -> Generated:
        """Generate the response. See `GenerationEngine.generate`."""
        self._check_alive()
        assert self._folder is not None
        self._check_weights()
        self._folder.check_fits(request)
        row = DecodedRow(request, self._folder.stop_texts(request.sampling))
        if row.finish is not None:  # the partial has all that was asked for
            return row.generated()
        answer: asyncio.Future[Generated] = asyncio.get_running_loop().create_future()
        self._answers[row] = answer
        self._arrived += 1
        heapq.heappush(self._waiting, (request.priority, self._arrived, row))
        self._wanted = True
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._run(), name="transformers engine")
        try:
            return await answer
        except asyncio.CancelledError:
            self._ending.add(row)
            self._wanted = True
            raise

    async def abort(self, names: Sequence[str] | None = None) -> None:
        """End these requests with what they have. See `GenerationEngine.abort`."""
        ending = {
            row: answer
            for row, answer in self._answers.items()
            if names is None or row.name in names
        }
        self._ending |= ending.keys()
        self._wanted = True
        await asyncio.gather(*ending.values(), return_exceptions=True)

    async def so_far(self) -> dict[str, Generated]:
        """Return what each request under way has by now. See `GenerationEngine.so_far`."""
        self._check_alive()
        self._wanted = True
        async with self._turn:  # no step is under way: nothing grows meanwhile
            return {row.name: row.generated() for row in self._answers if row.finish is None}

    async def load(self, update: WeightUpdate) -> int:
        """Take new weights between two steps. See `GenerationEngine.load`."""
        return await self._shielded.run(self._load(update))

    async def _load(self, update: WeightUpdate) -> int:
        """Load. A failure in between ends the engine: it never serves a half-loaded model."""
        self._check_alive()
        self._wanted = True
        async with self._turn:
            self._check_alive()
            assert self._decoder is not None
            try:
                return await self._in_thread(self._decoder.load, update)
            except WeightsError:  # nothing was changed
                raise
            except Exception as error:
                how = f"could not load weights version {update.version}: {type(error).__name__}"
                self._fail(f"{how}: {error}")
                raise EngineDied(self._failure) from error

    async def log_probs(self, sequences: Sequence[tuple[Tokens, Tokens]]) -> list[Floats]:
        """Return log-probs ``[R]`` at temperature 1 of each ``(prompt [P], response [R])``."""
        return await self._call_between_stretches(lambda decoder: decoder.log_probs(sequences))

    async def offload(self) -> None:
        """Move the weights to the CPU; the cache is dropped."""
        await self._call_between_stretches(lambda decoder: decoder.move("cpu"))

    async def onload(self) -> None:
        """Move the weights back."""
        await self._call_between_stretches(lambda decoder: decoder.move(self._device))

    async def close(self) -> None:
        """End what runs, and the thread."""
        self._fail("was closed")
        await self._shielded.wait()
        if self._work is not None:
            await asyncio.gather(self._work, return_exceptions=True)
        self._thread.shutdown(wait=False)
        self._decoder = None

    async def _call_between_stretches(self, fn: Callable[[BatchDecoder], R]) -> R:
        """Call a function of the decoder in the thread, between two stretches of steps."""
        self._check_alive()
        self._wanted = True
        async with self._turn:
            self._check_alive()
            assert self._decoder is not None
            return await self._in_thread(fn, self._decoder)

    async def _run(self) -> None:
        assert self._decoder is not None
        try:
            while self._failure is None and (self._waiting or self._decoder.rows):
                async with self._turn:
                    self._wanted = False
                    joining, leaving = self._changes(self._decoder)
                    done = await self._in_thread(self._decode, self._decoder, joining, leaving)
                    for row in [*done, *leaving]:
                        self._answer(row)
        except Exception as error:
            self._fail(f"failed with {type(error).__name__}: {error}")

    def _changes(self, decoder: BatchDecoder) -> tuple[list[DecodedRow], list[DecodedRow]]:
        """Return the rows that join the decoder now, and those that leave it."""
        for _, _, row in self._waiting:
            if row in self._ending:
                self._answer(row)
        self._waiting = [entry for entry in self._waiting if entry[2] not in self._ending]
        heapq.heapify(self._waiting)
        leaving = [row for row in decoder.rows if row in self._ending]
        self._ending = set(leaving)
        room = self._config.max_concurrent - len(decoder.rows) + len(leaving)
        count = min(room, len(self._waiting))
        return [heapq.heappop(self._waiting)[2] for _ in range(count)], leaving

    def _decode(
        self, decoder: BatchDecoder, joining: list[DecodedRow], leaving: list[DecodedRow]
    ) -> list[DecodedRow]:
        """Compute a stretch of steps. Runs in the thread."""
        decoder.leave(leaving)
        if joining and (failed := decoder.join(joining)):
            return failed
        for _ in range(STRETCH):
            if not decoder.rows:
                break
            if done := decoder.step():
                return done
            if self._wanted:  # checked after a step, so that frequent calls cannot stop decoding
                break
        return []

    def _answer(self, row: DecodedRow) -> None:
        self._ending.discard(row)
        answer = self._answers.pop(row, None)
        if answer is None or answer.done():
            return
        if row.failure is not None:
            answer.set_exception(row.failure)
        else:
            answer.set_result(row.generated())

    def _fail(self, how: str) -> None:
        self._failure = self._failure or f"the transformers engine {how}"
        answers, self._answers, self._waiting = self._answers, {}, []
        self._wanted = True
        for answer in answers.values():
            if not answer.done():
                answer.set_exception(EngineDied(self._failure))

    def _check_weights(self) -> None:
        """Raise unless the engine has weights: its memory is not filled before the first update."""
        if self.version < 0:
            raise RuntimeError(
                "the engine has no weights yet: they come with the first update, or, with "
                "weights = 'folder', from the model's folder"
            )

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineDied(self._failure)

    async def _in_thread(self, fn: Callable[..., R], *args: object) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._thread, fn, *args)
