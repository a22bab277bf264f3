"""Protocols between the workers of a language-model run and their backends, and which families of
models can be trained. No torch.

::

    GenerationEngine   rollout worker: one prompt -> its response, many at a time (async)
    LanguageTrainer    actor and inference worker: samples -> a better model, log-probs, weights

Backends are loaded by name (`rlinf_async.backends.parts`).

`FAMILIES` is the table of docs/language-training.md: each entry was tried with a tiny random model,
whose published weights were loaded by the engine (``python -m tests.backends.families``). A family
that is not in it is judged by its structure, for which transformers is imported.
"""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, NamedTuple, NoReturn, Protocol, runtime_checkable

import msgspec
import numpy as np

from rlinf_async.backends.base import RescaleReport
from rlinf_async.messages.embodied import Floats
from rlinf_async.messages.language import (
    Generated,
    Request,
    TeacherLogProbs,
    Tokens,
    TrainingSample,
)
from rlinf_async.messages.weights import Allocate, WeightUpdate
from rlinf_async.parallel import DataRank, Strategy, StrategyError


class EngineDied(RuntimeError):
    """The engine cannot serve any more; its running requests have to be issued again."""


class PromptTooLong(ValueError):
    """The prompt and its response do not fit the model's context; the message has the numbers."""


class ModelOutputError(RuntimeError):
    """The model returned NaN or infinity; the message names request and weight version."""


class EngineDisagrees(RuntimeError):
    """The engine's log-probs of tokens that it generated under the weights that are trained are not
    the actor's; the message has the difference, and over how many tokens it was taken."""


def require_finite(
    log_prob: Floats, token_ids: Tokens, whose: str, sample: str, *, if_nan: str = ""
) -> None:
    """Check log-probs ``[R]`` that come with a sample.

    Args:
        log_prob: log-prob of each of ``token_ids``.
        token_ids: tokens of the response.
        whose: says who computed them, and under which weights.
        sample: name of the sample.
        if_nan: what to look at where one is NaN.

    Raises:
        ModelOutputError: one is NaN or infinite; names the token, and what that means.
    """
    for at in np.flatnonzero(~np.isfinite(log_prob))[:1]:
        number = float(log_prob[at])
        if np.isnan(number):
            meaning = "the output of the model is NaN there" + if_nan
        else:
            meaning = (
                "what was drawn has a probability above 0, so whoever drew it, or computed this, "
                "is at fault"
            )
        raise ModelOutputError(
            f"{sample}: the log-prob of token {at} (id {token_ids[at]}) of {len(token_ids)} is "
            f"{number} by {whose}: {meaning}"
        )


class RankFailed(RuntimeError):
    """A rank failed that others wait for: it reads samples for them, or at the same time as they
    do. All of them raise this, and drop the gradients of the global batch; the message names the
    rank and its cause."""


@runtime_checkable
class CountsTokens(Protocol):
    """An engine that can say how far its requests are without giving their tokens."""

    async def made(self) -> dict[str, int]:
        """Return the tokens of each response so far, by the name of its request."""
        ...


@runtime_checkable
class Resizable(Protocol):
    """An engine that can serve on other devices than those it was made for."""

    async def resize(self, devices: int, /) -> None:
        """Serve on ``devices`` from now on. Requests that are here go on afterwards."""
        ...


class GenerationEngine(Protocol):
    """A model that generates. The async methods are safe to overlap."""

    @property
    def version(self) -> int:
        """The version of the weights that make new tokens; -1 before the first load."""
        ...

    @property
    def max_concurrent(self) -> int:
        """The number of requests decoded together; further ones would wait inside the engine."""
        ...

    def decode(self, token_ids: Tokens) -> str:
        """Return the text of these tokens, special ones left out."""
        ...

    async def start(self) -> None:
        """Build and warm up."""
        ...

    async def generate(self, request: Request) -> Generated:
        """Generate a response, or the rest of ``request.partial``.

        The result includes the partial's tokens, with their own versions and log-probs. A
        cancelled call aborts the request inside the engine.

        Raises:
            PromptTooLong: it does not fit.
            EngineDied: the engine is gone.
        """
        ...

    async def abort(self, names: Sequence[str] | None = None) -> None:
        """End these requests (None: all) with the tokens they have: ``finish == "abort"``.

        Every one whose `generate` has been called is ended. Returns when they have ended.
        """
        ...

    async def so_far(self) -> dict[str, Generated]:
        """Return the tokens of each running request, by its name; none is interrupted.

        ``finish`` is ``"abort"``: the request can be continued with it as its ``partial``.
        """
        ...

    async def load(self, update: WeightUpdate) -> int:
        """Load new weights in flight: running requests pause, keep their tokens, and go on.

        Returns the update's checksum, after its bytes were verified. Raises `WeightsError` before
        anything is changed if the weights are damaged, do not fit, or are older than those served.
        A failure after that ends the engine (`EngineDied`): it never serves a half-loaded model.
        A cancelled call changes nothing, or its load goes on to the end.
        """
        ...

    async def log_probs(self, sequences: Sequence[tuple[Tokens, Tokens]]) -> list[Floats]:
        """Return log-probs ``[R]`` at temperature 1 of each ``(prompt [P], response [R])``."""
        ...

    async def offload(self) -> None:
        """Release the device's memory. The engine is idle."""
        ...

    async def onload(self) -> None:
        """Allocate it again; weights that the engine dropped have to be loaded again."""
        ...

    async def close(self) -> None:
        """End the engine and all of its processes."""
        ...


WEIGHTS: Final = "weights"
OPTIMIZER: Final = "optimizer"
PARTS: Final = frozenset({WEIGHTS, OPTIMIZER})
"""what a device holds of a trainer: `SleepingTrainer`"""


class MicroBatch(NamedTuple):
    """Samples of one forward and backward pass."""

    samples: Sequence[TrainingSample]
    is_last: bool
    """last of its global batch: sharded gradients are then reduced over the ranks"""
    of: int | None = None
    """micro-batches of its global batch, where that is known before the last one arrives"""


class LanguageTrainer(Protocol):
    """A language model that learns: a policy, or a critic. One compute thread calls it.

    Methods marked collective are called by all ranks, in the same order.
    """

    @property
    def version(self) -> int:
        """The number of trained iterations, or the version that `load` loaded."""
        ...

    @property
    def data_rank(self) -> DataRank:
        """Share of the samples that this rank trains on."""
        ...

    def compute_advantages(self, samples: Sequence[TrainingSample]) -> list[TrainingSample]:
        """Return the samples of whole groups with advantages and returns, never normalised.

        Samples that have an advantage already are unchanged; samples that were not scored get none,
        train nothing and are in no baseline.
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
        """Return the largest ``count`` of all ranks. Collective."""
        ...

    def training_step(self, micro_batches: Iterable[MicroBatch]) -> Mapping[str, float]:
        """Make one optimizer step from the micro-batches of one global batch. Collective.

        The iterable may block until the next micro-batch arrives; it has the same length on every
        data rank, and is empty on ranks that do not read (`DataRank.is_io`). Gradients do not
        depend on how the samples are divided into micro-batches. Metrics are those of the global
        batch, equal on every rank. A gradient that is not finite skips the step (``skipped`` is
        then 1).

        Raises:
            TrainingDiverged: the loss is not finite.
            RankFailed: what the iterable raised on a rank that reads for others; on all ranks.
        """
        ...

    def end_iteration(self) -> None:
        """Increase the version: the next published weights are the next version."""
        ...

    def log_probs(
        self, samples: Sequence[TrainingSample], *, reference: bool = False
    ) -> list[Floats]:
        """Log-probs ``[R]`` of each sample's response, by this model or the reference weights; 0 of
        tokens that the model was given.

        Input order; micro-batched by tokens inside. Collective. Ranks that do not read
        (`DataRank.is_io`) return those of the samples of the rank that does.
        """
        ...

    @property
    def recomputes(self) -> bool:
        """Each sample's ``prev_log_prob`` is to be that of `first_log_probs`."""
        ...

    def first_log_probs(
        self, samples: Sequence[TrainingSample], *, batch: int, batches: int
    ) -> list[Floats]:
        """Log-probs ``[R]`` under the weights that the iteration began with. As `log_probs`.

        Called before the optimizer step of each global batch of the first epoch, on its samples;
        ``batch`` counts from 0 to ``batches - 1``. Collective.
        """
        ...

    def leave_out(self, samples: Sequence[TrainingSample]) -> int:
        """Clear the ``loss_mask`` of samples, with the log-probs of `first_log_probs`, that the
        loss does not train; return how many these are."""
        ...

    def values(self, samples: Sequence[TrainingSample]) -> list[Floats]:
        """Values ``[R]`` before each response token, of a critic. As `log_probs`. Collective."""
        ...

    def publish(self, allocate: Allocate | None = None) -> WeightUpdate:
        """Return the weights of the current version, named as in checkpoints. Collective.

        Tied weights come once. Ranks other than 0 return an update without buckets. ``allocate``
        of rank 0 gives the memory of the buckets; all ranks write into it if it is shared. A bucket
        that has not changed since the last call is reused.
        """
        ...

    def load(self, update: WeightUpdate) -> None:
        """Load published weights and their version; only if ``world_size`` is 1.

        Raises `WeightsError` before anything changed if they are damaged or do not fit.
        """
        ...

    def offload(self, *, keep_weights: bool = False) -> None:
        """Move optimizer state and weights to the CPU, and drop the gradients."""
        ...

    def onload(self) -> None:
        """Move them back to the device."""
        ...

    def save_pretrained(self, folder: Path) -> None:
        """Write a Hugging Face folder: config, weights, tokenizer if known. Collective."""
        ...

    def save_checkpoint(self, path: Path, extra: Mapping[str, object] | None = None) -> None:
        """Write a checkpoint folder, atomically. Collective."""
        ...

    def begin_checkpoint(
        self, path: Path, extra: Mapping[str, object] | None = None
    ) -> Future[Path]:
        """Start writing what `save_checkpoint` writes, and return. Collective.

        Waits for the previous checkpoint. The future is done when this rank's part is on the disk,
        or has its error; the folder appears when the parts of all ranks are.
        """
        ...

    def load_checkpoint(self, path: Path) -> list[dict[str, object]]:
        """Restore a checkpoint written under any world size; return the extras. Collective."""
        ...


class SleepingTrainer(LanguageTrainer, Protocol):
    """A trainer whose `PARTS` are offloaded and onloaded one by one."""

    def sleep(self, parts: Collection[str] = PARTS) -> None:
        """Free the device's memory of these parts."""
        ...

    def wake_up(self, parts: Collection[str] = PARTS) -> None:
        """Take these parts back to the device, where they slept."""
        ...

    @property
    def asleep(self) -> frozenset[str]:
        """The parts that sleep."""
        ...


class StagedTrainer(LanguageTrainer, Protocol):
    """A trainer whose optimizer step is made of a schedule's passes, which can be run alone."""

    def get_forward_step_func(self) -> Callable[..., Any]:
        """Return what the schedule calls for each micro-batch."""
        ...

    def forward_backward(self, micro_batches: Iterable[MicroBatch]) -> Mapping[str, float]:
        """Add the gradients of one global batch, undivided, to those that are there. Collective.

        Returns the metrics of the global batch; raises what `training_step` does.
        """
        ...


@runtime_checkable
class ReadsForOthers(Protocol):
    """A trainer of which some ranks read samples for others (`DataRank.is_io`), which wait for
    them."""

    def cannot_train(self, error: Exception, /) -> NoReturn:
        """Raise `RankFailed` on all ranks, in place of the global batch that they train next. On a
        rank that reads, while the others call `training_step`; also while offloaded."""
        ...

    def cannot_infer(self, error: Exception, /) -> NoReturn:
        """Raise `RankFailed` on all ranks of this one's model, in place of the log-probs or values
        that they compute next. On a rank that reads; also while offloaded."""
        ...


@runtime_checkable
class TellsDistributions(Protocol):
    """A trainer that tells what its model holds of tokens that were not drawn."""

    def distributions(
        self, samples: Sequence[TrainingSample], *, top_k: int | None, vocabulary: int
    ) -> list[TeacherLogProbs]:
        """Log-probs of each sample's response, and of other tokens in the place of each of them.

        Args:
            samples: samples, which are micro-batched by tokens inside.
            top_k: number of the most likely tokens; None: all.
            vocabulary: number of first tokens of the vocabulary that may be among them.
        """
        ...


ENGINES: Final = ("transformers", "vllm")
LAYER_KINDS: Final = ("full_attention", "sliding_attention")
"""layers that packed attention and the transformers engine compute"""


class UnsupportedModel(ValueError):
    """Models of this family cannot be trained, or not with this engine; the message says why."""


class Family(NamedTuple):
    """A family that can be trained, and served by the transformers engine."""

    vllm: Literal["yes", "no", "not on a CPU", "untried"] = "yes"
    """whether vLLM on a CPU computes the trainer's log-probs; only ``no`` is refused"""
    note: str = ""
    """why vLLM cannot serve it"""
    routes: bool = False
    """whether the experts of its tokens can be told and replayed"""
    sees: bool = False
    """whether its prompts may have images"""


QWEN_VL: Final = "vLLM's model of it (qwen2_vl.py) imports torchvision, with which it was not tried"
FAMILIES: Final[Mapping[str, Family]] = {
    "arcee": Family("untried"),
    "cohere": Family(),
    "cohere2": Family(),
    "deepseek_v2": Family("not on a CPU"),
    "deepseek_v3": Family("not on a CPU"),
    "dots1": Family("untried"),
    "ernie4_5": Family("untried"),
    "exaone4": Family(),
    "gemma": Family(),
    "gemma2": Family(),
    "gemma3_text": Family(),
    "glm": Family(),
    "glm4": Family(),
    "glm4_moe": Family(),
    "gpt2": Family(),
    "gpt_neox": Family("no", "its log-probs differ from the trainer's"),
    "granite": Family(),
    "granitemoe": Family(),
    "helium": Family("untried"),
    "idefics3": Family(sees=True),
    "llama": Family(),
    "mistral": Family(),
    "mixtral": Family(routes=True),
    "olmo": Family(),
    "olmo2": Family(),
    "olmo3": Family(),
    "olmoe": Family(routes=True),
    "opt": Family(),
    "phi": Family("untried"),
    "phi3": Family(),
    "qwen2": Family(),
    "qwen2_5_vl": Family("no", QWEN_VL, sees=True),
    "qwen2_moe": Family(routes=True),
    "qwen2_vl": Family("no", QWEN_VL, sees=True),
    "qwen3": Family(),
    "qwen3_moe": Family(routes=True),
    "seed_oss": Family("untried"),
    "smollm3": Family(),
    "starcoder2": Family("untried"),
}
"""families of models that were tried, by ``model_type``"""

SEEING: Final = tuple(name for name, one in FAMILIES.items() if one.sees)
"""families whose prompts may have images"""

REFUSED: Final[Mapping[str, str]] = {
    "gpt_oss": "its attention has sinks, which packed attention does not compute",
    "nemotron": "its attention is not told where packed samples end",
    "phimoe": "its router draws random numbers in training",
}
"""reasons that do not follow from a model's structure, by ``model_type``"""


def check_family(config: Mapping[str, Any], engine: str | None = None) -> None:
    """Refuse a model that would be trained wrongly, or that the engine would not serve.

    Args:
        config: the content of its ``config.json``.
        engine: the rollout backend; None for the trainer alone.

    Raises:
        UnsupportedModel: names the family, the reason, and what is supported.
    """
    kind = str(config.get("model_type"))
    family = FAMILIES.get(kind)
    if family is None:
        reason = REFUSED.get(kind) or _structural_fault(config)
        if reason:
            raise UnsupportedModel(
                f"models of the family {kind!r} cannot be trained: {reason}. "
                f"{supported_families(engine)}"
            )
    elif engine == "vllm" and family.vllm == "no":
        raise UnsupportedModel(
            f"models of the family {kind!r} cannot be served by the vllm engine: {family.note}; "
            f"set rollout.backend to 'transformers'. {supported_families(engine)}"
        )


def sees_images(config: Mapping[str, Any]) -> bool:
    """Whether prompts of a model, by the content of its ``config.json``, may have images."""
    return config.get("model_type") in SEEING


def model_factory(kind: str) -> Any:
    """Return the class of transformers by which models of a ``model_type`` are built."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return (
        AutoModelForImageTextToText if sees_images({"model_type": kind}) else AutoModelForCausalLM
    )


def supported_families(engine: str | None = None) -> str:
    """Return a sentence with the families that were tried: with the engine, or with the trainer."""
    names = [name for name, one in FAMILIES.items() if engine != "vllm" or one.vllm != "no"]
    return f"Supported are {', '.join(names)}; see 'Model families' in docs/language-training.md"


def _structural_fault(config: Mapping[str, Any]) -> str | None:
    """Return why a family cannot be trained; None if nothing speaks against it, or if transformers
    does not know it, which is reported where the model is built."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    )

    try:
        described: Any = AutoConfig.for_model(**config)
        if (
            type(described) not in MODEL_FOR_CAUSAL_LM_MAPPING
            and type(described) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        ):
            return f"of vision-language models only {', '.join(SEEING)} can be trained"
        model: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(described)]
    except (KeyError, ValueError, TypeError):
        return None
    if getattr(model, "_is_stateful", False):
        return "a recurrent state is carried from token to token, across packed samples"
    text = described.get_text_config(decoder=True)
    kinds = set(getattr(text, "layer_types", None) or ()) - set(LAYER_KINDS)
    if kinds:
        return f"layers of kind {', '.join(sorted(kinds))} are not known to packed attention"
    if not getattr(model, "_supports_attention_backend", False):
        return "its attention in transformers cannot be replaced by packed attention"
    return None


class VersionCounter(ABC):
    """Counts versions."""

    def __init__(self) -> None:
        self.version = 0
        """number of iterations that were trained, or the version that `load` took"""

    def end_iteration(self) -> None:
        """Count the version up."""
        self.version += 1

    def skip_iteration(self) -> None:
        """Count an iteration that other ranks train."""
        self.end_iteration()

    @abstractmethod
    def log_probs(
        self, samples: Sequence[TrainingSample], *, reference: bool = False
    ) -> list[Floats]:
        """Return log-probs ``[R]`` of each response. Collective."""


class VersionTrainer(VersionCounter):
    """A version without a model; a checkpoint is the version.

    Args:
        world_size: data ranks that were launched.
        rank: number of this rank.
        tp: tensor-parallel ranks of a copy of the model.
    """

    normalizes = False
    recomputes = False
    has_weights: ClassVar[bool] = False
    collective: ClassVar[bool] = False
    """whether its ranks exchange anything"""
    file: ClassVar[str]
    """name of a checkpoint's file"""

    def __init__(self, world_size: int, rank: int, *, tp: int = 1) -> None:
        super().__init__()
        self._launched, self._rank = world_size, rank
        self.strategy = Strategy(dp=world_size, tp=tp)
        """strategy that is in force"""

    @abstractmethod
    def take_rescale(self) -> float:
        """Take the time of a change of the strategy, which has been made; return its seconds."""

    @property
    def trains(self) -> bool:
        """Whether this rank trains under the strategy that is in force."""
        return self._rank < self.strategy.dp

    @property
    def data_rank(self) -> DataRank:
        """Every rank that trains has samples of its own."""
        return DataRank(self._rank, self.strategy.dp, is_io=self.trains)

    def check_strategy(self, strategy: Strategy) -> None:
        """Raise `StrategyError` unless it is data parallel over copies that were launched."""
        tp = self.strategy.tp
        if strategy.world_size != strategy.dp * tp:
            raise StrategyError([f"{strategy.sizes}: tp must be {tp}, pp and cp must be 1"])
        if strategy.dp > self._launched:
            raise StrategyError([f"dp={strategy.dp}: only {self._launched} ranks were launched"])

    def rescale(
        self, strategy: Strategy, *, timeout: float, bucket_bytes: int, objection: str = ""
    ) -> RescaleReport:
        """Take the time of it; there is nothing to move, and nobody to wait for."""
        self.check_strategy(strategy)
        if objection:
            raise StrategyError([objection])
        old, self.strategy = self.strategy, strategy
        return RescaleReport(
            old_strategy=old,
            new_strategy=strategy,
            active=self.trains,
            seconds=self.take_rescale(),
            sent_bytes=0,
            received_bytes=0,
            peak_bytes=0,
            kept_bytes=0,
            extras=(),
        )

    def normalize_advantages(self, samples: Sequence[TrainingSample]) -> list[TrainingSample]:
        """Return the samples as they are."""
        return list(samples)

    def values(self, samples: Sequence[TrainingSample]) -> list[Floats]:
        """Return zeros."""
        return [np.zeros(len(one.response_ids), np.float32) for one in samples]

    def agree(self, count: int, /) -> int:
        """Return the count: ranks do not wait for one another."""
        return count

    def first_log_probs(
        self, samples: Sequence[TrainingSample], *, batch: int, batches: int
    ) -> list[Floats]:
        """Return the log-probs: within an iteration the version is the same."""
        return self.log_probs(samples)

    def leave_out(self, samples: Sequence[TrainingSample]) -> int:
        """Leave out nothing."""
        return 0

    def load(self, update: WeightUpdate) -> None:
        """Take the version of these weights."""
        self.version = update.version

    def save_pretrained(self, folder: Path) -> None:
        """Write the version."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / self.file).write_bytes(msgspec.json.encode({"version": self.version}))

    def save_checkpoint(self, path: Path, extra: Mapping[str, object] | None = None) -> None:
        """Write the version, from rank 0; it replaces a checkpoint that was there."""
        if self._rank == 0:
            shutil.rmtree(path, ignore_errors=True)
            self.save_pretrained(path)

    def begin_checkpoint(
        self, path: Path, extra: Mapping[str, object] | None = None
    ) -> Future[Path]:
        """Write the version, at once."""
        self.save_checkpoint(path, extra)
        done: Future[Path] = Future()
        done.set_result(path)
        return done

    def load_checkpoint(self, path: Path) -> list[dict[str, object]]:
        """Take the version that was written."""
        self.version = msgspec.json.decode((path / self.file).read_bytes())["version"]
        return [{}]
