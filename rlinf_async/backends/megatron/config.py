"""Settings of the Megatron backend, and what it needs to know of a model and a strategy. No torch.

The model comes from its Hugging Face configuration. Strategies that Megatron has, but this backend
does not offer, are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from rlinf_async.backends.base import OptimizerConfig, SchedulerConfig
from rlinf_async.backends.language_training.config import (
    LanguageModelConfig,
    LanguageTrainingConfig,
)
from rlinf_async.config.counts import check_bounds
from rlinf_async.parallel import (
    GlobalTensor,
    Layout,
    Model,
    ModelMismatch,
    Parameter,
    Strategy,
    StrategyError,
    Whole,
    layout,
)
from rlinf_async.parallel.decoders import DecoderSizes, megatron
from rlinf_async.parallel.splits import UNEVEN

FAMILIES: Final = ("llama", "mistral", "qwen2", "qwen3")
VOCABULARY_MULTIPLE: Final = 1
"""the vocabulary is padded to a multiple of this times the number of tensor ranks"""

OUTPUT_LAYER: Final = "output_layer."
VALUE_HEAD: Final = "value_head."
"""prefix of the names of a critic's own tensors in a checkpoint"""


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and options of a model that Megatron needs, from its Hugging Face configuration."""

    decoder: DecoderSizes
    norm_eps: float
    rope_theta: float
    rope_factor: float | None
    """factor of Llama 3's scaling of rotary positions; None: not scaled"""
    longest: int
    """tokens of a sequence"""
    padding: int | None = None
    """token whose embedding is not trained"""
    values: bool = False
    """a critic: a value head in place of the output layer"""


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    """Read a Hugging Face ``config.json``.

    Raises:
        ModelMismatch: Megatron's layers would compute something else.
    """
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise ModelMismatch(
            f"the backend 'megatron' does not train model_type {kind!r}; it trains "
            f"{', '.join(FAMILIES)}. Use the backend 'fsdp' for others"
        )
    faults = []
    if config.get("hidden_act", "silu") != "silu":
        faults.append(f"hidden_act={config['hidden_act']!r} (only 'silu')")
    if config.get("use_sliding_window") or (kind == "mistral" and config.get("sliding_window")):
        faults.append(f"sliding_window={config.get('sliding_window')}")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    scaling = rope.get("rope_type", rope.get("type", "default"))
    factor = None
    if scaling == "llama3":
        factor = float(rope["factor"])
        known = {
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        faults += [
            f"{name}={rope[name]} of the rotary positions (only {value})"
            for name, value in known.items()
            if rope.get(name, value) != value
        ]
    elif scaling != "default":
        faults.append(f"rotary positions of type {scaling!r} (only 'default' and 'llama3')")
    if rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        faults.append("partial_rotary_factor (only 1)")
    if config.get("attention_dropout"):
        faults.append(f"attention_dropout={config['attention_dropout']} (only 0)")
    if faults:
        raise ModelMismatch(
            f"the backend 'megatron' does not train a {kind} with {', '.join(faults)}. Use the "
            "backend 'fsdp'"
        )
    theta = rope.get("rope_theta", config.get("rope_theta", 10_000.0))
    return Architecture(
        decoder=DecoderSizes.from_config(config),
        norm_eps=float(config["rms_norm_eps"]),
        rope_theta=float(theta),
        rope_factor=factor,
        longest=int(config["max_position_embeddings"]),
        padding=config.get("pad_token_id"),
    )


def layout_of(architecture: Architecture, strategy: Strategy) -> Layout:
    """Return who holds which slices. Raises `StrategyError` for what does not divide."""
    decoder = architecture.decoder
    model = megatron(decoder, vocabulary_multiple=VOCABULARY_MULTIPLE)
    if architecture.values:
        model = _with_value_head(model, decoder)
    try:
        return layout(model, strategy)
    except StrategyError as error:  # stages have the same number of layers each here
        raise StrategyError([one.partition(UNEVEN)[0] for one in error.faults]) from None


def _with_value_head(model: Model, decoder: DecoderSizes) -> Model:
    """Return the parameters of a critic: every tensor rank has the whole head."""
    kept = [one for one in model.parameters if one.name != OUTPUT_LAYER + "weight"]
    head = {"weight": (1, decoder.hidden), "bias": (1,)}
    kept += [
        Parameter(
            name=OUTPUT_LAYER + kind,
            tensors=(GlobalTensor(VALUE_HEAD + kind, shape, decoder.dtype),),
            split=Whole(),
            stage="last",
        )
        for kind, shape in head.items()
    ]
    return Model(tuple(kept), model.layers)


class MegatronOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of training with Megatron, beside ``tp`` and ``pp``; see docs/megatron.md."""

    virtual_stages: int = 1
    """model chunks of each pipeline stage, whose passes are interleaved"""
    cp: int = 1
    """context parallel actors: refused where Transformer Engine's attention is not there"""
    ep: int = 1
    """expert parallel actors: refused for models without experts"""
    sequence_parallel: bool = False
    """actors that share layers share the tokens between them, too"""
    distributed_optimizer: bool = True
    """actors that train on other samples share the optimizer's state, instead of having copies"""
    overlap: bool = False
    """reduce gradients and gather parameters while others are computed"""

    def __post_init__(self) -> None:
        check_bounds(self, "virtual_stages", "cp", "ep", least=1)


class MegatronConfig(MegatronOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A language model, how it is cut over ranks, and how it is optimised."""

    model: LanguageModelConfig
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-6, eps=1e-8, max_grad_norm=1.0)
    scheduler: SchedulerConfig = SchedulerConfig()
    precision: Literal["float32", "bfloat16"] = "float32"
    """dtype of weights and arithmetic; gradients and the optimizer's own weights stay float32"""
    device: str = "cpu"
    """``"cpu"``, ``"cuda"`` or ``"cuda:1"``; several ranks take one of ``"cuda"`` each"""
    tp: int = 1
    """ranks that share each layer"""
    pp: int = 1
    """pipeline stages, which share the layers"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(self, "tp", "pp", least=1)
        if self.virtual_stages > 1 and self.pp == 1:
            raise ValueError(
                f"virtual_stages is {self.virtual_stages}, but pp is 1: one stage has nothing to "
                "interleave; leave it out, or set pp"
            )
        if self.optimizer.value_lr is not None:
            raise ValueError("value_lr is for policies with a value of their own: leave it out")


class MegatronTrainerConfig(
    LanguageTrainingConfig, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """A language actor that Megatron trains: its model, its advantages, its loss."""

    megatron: MegatronConfig

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lora.rank:
            raise ValueError("lora is for the trainer over FSDP: Megatron trains all weights")


def strategy_of(cfg: MegatronConfig, world_size: int) -> Strategy:
    """Return the strategy of ``world_size`` ranks. Raises `StrategyError` where ``tp x pp`` does
    not divide them."""
    part = cfg.tp * cfg.pp
    if world_size % part:
        near = [size for size in (world_size // part * part, -(-world_size // part) * part) if size]
        nearest = ", ".join(map(str, near))
        fault = f"tp={cfg.tp} x pp={cfg.pp} does not divide {world_size} ranks; nearest: {nearest}"
        raise StrategyError([fault])
    return Strategy(tp=cfg.tp, pp=cfg.pp, dp=world_size // part, virtual_stages=cfg.virtual_stages)


def check_offered(architecture: Architecture, parts: Strategy, *, cp: int, ep: int) -> None:
    """Refuse context and expert parallelism.

    Args:
        architecture: architecture of the model.
        parts: how each copy of the model is cut otherwise.
        cp: ranks that share the tokens of each sample.
        ep: ranks that share the experts of each layer.

    Raises:
        StrategyError: with the reason, and strategies for as many ranks that fit the model.
    """
    faults = []
    if cp > 1:
        faults.append(
            f"cp={cp}: context parallelism needs the attention of Transformer Engine, on GPUs, in "
            f"place of this backend's own; {_alternatives(architecture, parts, cp)}"
        )
    if ep > 1:
        faults.append(
            f"ep={ep}: expert parallelism spreads experts, and this backend trains dense models, "
            f"which have none; {_alternatives(architecture, parts, ep)}"
        )
    if faults:
        raise StrategyError(faults)


def _alternatives(architecture: Architecture, parts: Strategy, ranks: int) -> str:
    """What the ranks may do instead."""
    replace = msgspec.structs.replace
    wanted = {
        f"tp={parts.tp * ranks}, pp={parts.pp}": replace(parts, tp=parts.tp * ranks),
        f"tp={parts.tp}, pp={parts.pp * ranks}": replace(parts, pp=parts.pp * ranks),
    }
    fitting = [name for name, strategy in wanted.items() if _fits(architecture, strategy)]
    fitting.append(f"tp={parts.tp}, pp={parts.pp} with {ranks} x the data ranks")
    return f"nearest that fit the model: {'; '.join(fitting)}"


def _fits(architecture: Architecture, strategy: Strategy) -> bool:
    try:
        layout_of(architecture, strategy)
    except StrategyError:
        return False
    return True


class NoSamples(ValueError):
    """A data rank has no samples of a global batch; raised on every rank."""

    def __init__(self) -> None:
        super().__init__(
            "a global batch has no samples on a rank that reads them: give every data rank at "
            "least one"
        )
