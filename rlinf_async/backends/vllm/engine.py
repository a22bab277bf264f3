"""`VllmEngine`: generation with vLLM's ``AsyncLLM``.

::

    this process                              vLLM's engine process
    generate() ---tokens, sampling---------->  continuous batching, paged cache
               <--tokens, log-probs, versions
    load()     ---shared memory (memfd)----->  pause, load, clear caches, resume

                  waits for                       unblocked by
    generate      its response                    the engine; abort; the engine's death
    load, ...     the current update to end       the engine, or its death

New weights are loaded in flight: requests keep their tokens, their cache is recomputed. The engine
reports which tokens were made under which version; that is exact because it is paused meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from rlinf_async.backends.base import ShieldedTasks
from rlinf_async.backends.language import EngineDied, ModelOutputError
from rlinf_async.backends.language_training.lora import write_update
from rlinf_async.backends.transformers.folder import ModelFolder, open_folder
from rlinf_async.backends.transformers.formats import ResponseFormats
from rlinf_async.backends.transformers.images import processor_in
from rlinf_async.backends.transformers.tensors import ModelTensors, check_fit, check_kind
from rlinf_async.backends.vllm.config import VllmEngineConfig, asked_log_probs
from rlinf_async.backends.vllm.following import Following, RequestedFormat
from rlinf_async.backends.vllm.images import engine_input
from rlinf_async.backends.vllm.library import (
    Output,
    adapter_request,
    collect_in_arrays,
    collected,
    dead_error,
    joined,
    make_sampling,
    start_llm,
)
from rlinf_async.backends.vllm.shared import Known, UpdateSharing
from rlinf_async.data.images import ImageProcessor
from rlinf_async.messages.embodied import Floats
from rlinf_async.messages.language import Generated, Request, Tokens
from rlinf_async.messages.weights import WeightUpdate, refuse_older
from rlinf_async.weights.pack import verify

R = TypeVar("R")

DEATH_CHECK: Final = 0.1
"""seconds between checks that the engine is alive, while an answer is awaited"""


class VllmEngine:
    """A `GenerationEngine` over ``AsyncLLM``. See `GenerationEngine` for the methods.

    Args:
        config: the model and how it is served.
        seed: seed of requests that have none.
        device: ``"cpu"`` or a CUDA device; which GPUs is up to ``CUDA_VISIBLE_DEVICES``.
    """

    def __init__(self, config: VllmEngineConfig, seed: int = 0, device: str = "cpu") -> None:
        self._config = config
        self.max_concurrent = config.max_concurrent
        self._seed = seed
        self._device = device
        self._folder: ModelFolder | None = None
        self._tensors: ModelTensors | None = None
        self._processor: ImageProcessor | None = None
        self._formats: ResponseFormats | None = None
        self._llm: Any = None
        self.version = -1
        """version of the weights that make new tokens; -1 before the first load"""
        self._known: Known = {}
        self._adapter: Any = None
        """names the adapter that all requests are under; None: there is none"""
        self._running: dict[str, Request] = {}
        self._following: dict[str, Following] = {}
        self._asked = 0
        self._changing = asyncio.Lock()
        self._shielded = ShieldedTasks()
        self._failure: str | None = None

    @property
    def process_ids(self) -> list[int]:
        """Ids of the processes that vLLM started, while they run."""
        if self._llm is None:
            return []
        return [process.pid for process in self._llm.engine_core.resources.engine_manager.processes]

    def decode(self, token_ids: Tokens) -> str:
        """Return the text of these tokens, special ones left out."""
        assert self._folder is not None
        return self._folder.decode(token_ids)

    async def start(self) -> None:
        """Start the engine's process and generate a token, as a warm-up. If cancelled, the start
        goes on: `close` ends the process.

        Raises:
            ModelFolderError: something is missing in the folder.
            ModuleNotFoundError: vLLM is not installed.
        """
        await self._shielded.run(self._start())

    async def _start(self) -> None:
        config = self._config
        needs_weights = config.weights != "update"
        folder = self._folder = await asyncio.to_thread(
            open_folder, config.model, context=config.context, needs_weights=needs_weights
        )
        self._formats = ResponseFormats(folder)
        self._tensors = await asyncio.to_thread(ModelTensors, folder.described)
        if folder.sees:
            self._processor = await asyncio.to_thread(processor_in, Path(folder.path))
        self._llm = await asyncio.to_thread(start_llm, config, folder, self._seed, self._device)
        self._check_alive()  # it may have been closed meanwhile
        collect_in_arrays(self._llm.output_processor, self._watch)
        await self._ask(_tokens([0]), make_sampling(max_tokens=1), "warm up", 0)  # it takes seconds
        await self._set_version(0 if config.weights == "folder" else -1)

    async def generate(self, request: Request) -> Generated:
        """Generate the response. See `GenerationEngine.generate`."""
        self._check_alive()
        assert self._folder is not None
        self._folder.check_fits(request)
        partial, sampling = request.partial, request.sampling
        made = 0 if partial is None else len(partial.token_ids)
        if partial is not None and (partial.finish == "stop" or made >= sampling.max_tokens):
            return partial
        begun: list[int] = [] if partial is None else partial.token_ids.tolist()
        prompt: list[int] = request.prompt.token_ids.tolist() + begun
        params = make_sampling(
            max_tokens=sampling.max_tokens - made,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            logit_bias=dict(sampling.logit_bias) or None,
            repetition_penalty=sampling.repetition_penalty,
            logprobs=asked_log_probs(sampling, self._vocabulary),
            stop_token_ids=sorted(self._folder.stop_token_ids.union(sampling.stop_token_ids)),
            # The rest of a partial response must not draw the same random numbers again.
            seed=(request.seed + made) % 2**63 if self._config.seeded else None,
            extra_args=self._format(request, begun),
        )
        following = None
        if sampling.grammar:
            assert self._formats is not None
            following = await asyncio.to_thread(Following, self._formats, request, begun)
        self._asked += 1
        identity = f"{request.name}#{self._asked}"
        self._running[identity] = request
        if following is not None:
            self._following[identity] = following
        try:
            given = engine_input(request.prompt, prompt, self._processor)
            output = await self._ask(given, params, identity, request.priority)
        finally:
            del self._running[identity]
            self._following.pop(identity, None)
        cached = output.num_cached_tokens
        if cached is not None:
            cached = min(cached, len(request.prompt.token_ids))  # of a partial response more
        ended = output.outputs[0]
        if following is None:
            return joined(request, ended, self._vocabulary, cached)
        return await asyncio.to_thread(  # a long response takes a while
            joined, request, ended, self._vocabulary, cached, following
        )

    def _format(self, request: Request, begun: list[int]) -> dict[str, Any] | None:
        """Return what tells vLLM the format of a response, after the tokens that it begun with."""
        if not request.sampling.grammar:
            return None
        if not self._config.formats:
            raise ValueError(
                "a request has a grammar, and the vllm engine was started without formats: set "
                "formats = true in its configuration"
            )
        wanted = RequestedFormat(request.sampling.grammar, request.name, tuple(begun))
        return wanted.as_arguments()

    def _watch(self, identity: str) -> Callable[[int], bool] | None:
        """Return what is told each new token of a request, and says whether it has completed a stop
        text; None: it has none."""
        request = self._running.get(identity)
        if request is None or self._folder is None:
            return None
        texts = self._folder.stop_texts(request.sampling)
        if texts is None:
            return None
        made: list[int] = [] if request.partial is None else request.partial.token_ids.tolist()

        def ended(token: int) -> bool:
            made.append(token)
            return texts.ended(made)

        return ended

    @property
    def _vocabulary(self) -> int:
        assert self._folder is not None
        return int(self._folder.config.vocab_size)

    async def abort(self, names: Sequence[str] | None = None) -> None:
        """End these requests with what they have. See `GenerationEngine.abort`."""
        ending = {key for key, one in self._running.items() if names is None or one.name in names}
        while ending := ending & self._running.keys():
            # A request that is still being sent to the engine is missed by a single abort.
            await self._llm.abort(ending)
            await asyncio.sleep(0.001)

    async def so_far(self) -> dict[str, Generated]:
        """Return what each request under way has by now. See `GenerationEngine.so_far`."""
        self._check_alive()
        asked = [
            (self._running[identity], made, self._following.get(identity))
            for identity, made in collected(self._llm, self._running).items()
        ]
        return await asyncio.to_thread(_joined, asked, self._vocabulary)

    async def made(self) -> dict[str, int]:
        """Return the tokens of each response so far. See `CountsTokens.made`."""
        self._check_alive()
        found = {}
        for identity, one in collected(self._llm, self._running).items():
            request = self._running[identity]
            brought = 0 if request.partial is None else len(request.partial.token_ids)
            found[request.name] = brought + len(one.token_ids)
        return found

    async def load(self, update: WeightUpdate) -> int:
        """Take new weights in flight. See `GenerationEngine.load`."""
        self._check_alive()
        return await self._shielded.run(self._load(update))

    async def _load(self, update: WeightUpdate) -> int:
        assert self._tensors is not None
        check_kind(update, adapter=self._config.weights == "adapter")
        if self._config.weights == "adapter":
            return await self._load_adapter(update)
        check_fit(update, self._tensors)
        async with self._changing:
            self._check_alive()
            refuse_older(update.version, self.version)
            sharing = await asyncio.to_thread(_share, update, self._known)
            with sharing:
                await self._take(sharing)
            self._known = {bucket.slots: bucket.checksum for bucket in update.buckets}
        return update.checksum

    async def _load_adapter(self, update: WeightUpdate) -> int:
        """Have vLLM read the adapter from files that are there for as long as that takes."""
        async with self._changing:
            self._check_alive()
            refuse_older(update.version, self.version)
            with tempfile.TemporaryDirectory(prefix="rlinf_async-adapter-") as folder:
                await asyncio.to_thread(write_update, update, Path(folder))
                request = adapter_request(Path(folder), load=True)
                await self._while_paused(self._llm.engine_core.add_lora_async(request), update)
                self._adapter = adapter_request(Path(folder), load=False)
        return update.checksum

    async def log_probs(self, sequences: Sequence[tuple[Tokens, Tokens]]) -> list[Floats]:
        """Return log-probs ``[R]`` at temperature 1 of each ``(prompt [P], response [R])``."""
        self._check_alive()
        return await asyncio.gather(*(self._log_probs(*pair) for pair in sequences))

    async def offload(self) -> None:
        """Release the GPU's memory: weights are dropped, and come with the next update.

        Does nothing on a CPU, nor without ``sleep`` in the configuration.
        """
        if self._config.sleep:
            async with self._changing:
                self._known = {}
                await self._await_engine(self._llm.sleep(level=2))
                await self._set_version(-1)

    async def onload(self) -> None:
        """Allocate the memory again. The weights must be loaded again."""
        if self._config.sleep:
            async with self._changing:
                await self._await_engine(self._llm.wake_up())

    async def close(self) -> None:
        """End the engine's process."""
        self._fail("the vllm engine was closed")
        llm, self._llm = self._llm, None
        await self._shielded.wait()  # a load that is running sees that the engine is gone
        if llm is None:
            llm, self._llm = self._llm, None  # it was being started
        if llm is not None:
            handler = llm.output_handler
            if handler is not None:  # or it would report the end as an error
                handler.cancel()
                await asyncio.gather(handler, return_exceptions=True)
            if self._config.tensor_parallel in (None, 1):
                # It has nothing to save and no child, and vLLM would kill it after 5 seconds.
                for process in llm.engine_core.resources.engine_manager.processes:
                    process.kill()
            await asyncio.to_thread(llm.shutdown)
            # vLLM leaves it to the garbage collector, which complains of it.
            llm.engine_core.resources.ctx.destroy(linger=0)
            llm.shutdown = _nothing  # its destructor calls it again, when modules may be gone

    async def _take(self, sharing: UpdateSharing) -> None:
        """Load while the engine is paused, or only set the version if nothing changed."""
        core, update = self._llm.engine_core, sharing.update
        if len(sharing.unchanged) == len(update.buckets):
            await self._set_version(update.version)
            return
        loading = core.collective_rpc_async("rlinf_async_load", args=(sharing.header,))
        await self._while_paused(loading, update)

    async def _while_paused(self, loading: Coroutine[Any, Any, Any], update: WeightUpdate) -> None:
        """Await the loading of an update while the engine is paused.

        A failure in between ends the engine: it never serves a half-loaded model.
        """
        core = self._llm.engine_core
        try:
            # AsyncLLM.pause_generation() would sleep on for 20 ms; its outputs say their version.
            await self._await_engine(core.pause_scheduler_async(mode="keep", clear_cache=True))
            await self._await_engine(loading)
            # Else cached blocks of prompts, computed under the old weights, would be used again.
            cleared = await self._await_engine(self._llm.reset_prefix_cache())
            if not cleared:
                raise RuntimeError("the prefix cache could not be cleared")
            await self._set_version(update.version)
            await self._await_engine(core.resume_scheduler_async())
        except EngineDied:
            raise
        except BaseException as error:  # also a cancellation, when the event loop ends
            loading.close()
            how = f"could not load weights version {update.version}: {type(error).__name__}"
            self._fail(f"the vllm engine {how}: {error}")
            if not isinstance(error, Exception):
                raise
            raise EngineDied(self._failure) from error

    async def _set_version(self, version: int) -> None:
        await self._await_engine(self._llm.update_weight_version(str(version)))
        self.version = version

    async def _log_probs(self, prompt: Tokens, response: Tokens) -> Floats:
        tokens: list[int] = [*prompt.tolist(), *response.tolist()]
        params = make_sampling(max_tokens=1, prompt_logprobs=0)
        self._asked += 1
        output = await self._ask(_tokens(tokens), params, f"log-probs#{self._asked}", 0)
        found = output.prompt_logprobs
        # Of each position, the first entry is of the token that stands there; the first has none.
        starts = found.start_indices[len(prompt) : len(tokens)]
        return np.array([found.logprobs[at] for at in starts], np.float32)

    async def _ask(self, prompt: Any, params: Any, identity: str, priority: int) -> Any:
        """Return the final output of one request."""
        output = None
        try:
            async for part in self._llm.generate(
                prompt,
                params,
                identity,
                priority=priority,
                lora_request=self._adapter,
            ):
                output = part  # only the final output is sent
        except dead_error() as error:
            raise self._died() from error
        if output is None:
            raise EngineDied(self._failure or f"the vllm engine gave no answer to {identity}")
        return output

    async def _await_engine(self, call: Coroutine[Any, Any, R]) -> R:
        """Await a call of the engine. Raises `EngineDied` if it dies, where the call would hang."""
        task = asyncio.ensure_future(call)
        try:
            while not task.done():
                await asyncio.wait([task], timeout=DEATH_CHECK)
                if not task.done() and (self._llm is None or self._llm.errored):
                    raise self._died()
            return task.result()
        except dead_error() as error:
            raise self._died() from error
        finally:
            task.cancel()

    def _died(self) -> EngineDied:
        self._failure = self._failure or "the vllm engine's process has ended"
        return EngineDied(self._failure)

    def _fail(self, how: str) -> None:
        """End the engine. Waiting requests get an error: vLLM alone would never answer them."""
        self._failure = self._failure or how
        if self._llm is not None:
            self._llm.output_processor.propagate_error(dead_error()())

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineDied(self._failure)


def _tokens(token_ids: list[int]) -> Any:
    """A prompt without images, as vLLM takes it."""
    return {"prompt_token_ids": token_ids}


def _joined(
    asked: Sequence[tuple[Request, Output, Following | None]], vocabulary: int
) -> dict[str, Generated]:
    """Responses so far, by the names of their requests; without those that cannot go on in their
    format, which the end of their request says."""
    found = {}
    for request, made, following in asked:
        with contextlib.suppress(ModelOutputError):
            found[request.name] = joined(request, made, vocabulary, following=following)
    return found


def _nothing() -> None:
    """Do nothing."""


def _share(update: WeightUpdate, known: Known) -> UpdateSharing:
    """Put the update into shared memory, and verify the buckets that the engine may read there.

    If any bucket has changed, these are all buckets: the engine builds parameters from changed and
    unchanged tensors together. If none has, none is read.
    """
    sharing = UpdateSharing(update, known)
    nothing_changed = len(sharing.unchanged) == len(update.buckets)
    try:
        verify(sharing.update, but=sharing.unchanged if nothing_changed else ())
    except BaseException:
        sharing.__exit__(None, None, None)
        raise
    return sharing
