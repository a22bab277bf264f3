"""Which families of language models can be trained, and which engines agree with the trainer.

`FAMILIES` is the table of docs/language.md: each entry was tried with a tiny random model, whose
published weights were loaded by the engine (``python -m tests.backends.families``). A family that
is not in it is judged by its structure. No torch, except for such a family.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

ENGINES: Final = ("transformers", "vllm")
LAYER_KINDS: Final = ("full_attention", "sliding_attention")
"""layers that packed attention and the transformers engine compute"""


class UnsupportedModel(ValueError):
    """Models of this family cannot be trained, or not with this engine; the message says why."""


class Family(NamedTuple):
    """What was found of a family."""

    engines: tuple[str, ...]
    """engines whose log-probs are those of the trainer"""
    note: str = ""
    """why another engine is missing"""


FAMILIES: Final[Mapping[str, Family]] = {
    "arcee": Family(ENGINES),
    "cohere": Family(ENGINES),
    "cohere2": Family(ENGINES),
    "deepseek_v2": Family(ENGINES),
    "deepseek_v3": Family(ENGINES),
    "dots1": Family(ENGINES),
    "ernie4_5": Family(ENGINES),
    "exaone4": Family(ENGINES),
    "gemma": Family(ENGINES),
    "gemma2": Family(ENGINES),
    "gemma3_text": Family(ENGINES),
    "glm": Family(ENGINES),
    "glm4": Family(ENGINES),
    "glm4_moe": Family(ENGINES),
    "gpt2": Family(ENGINES),
    "gpt_neox": Family(ENGINES),
    "granite": Family(ENGINES),
    "granitemoe": Family(ENGINES),
    "helium": Family(ENGINES),
    "llama": Family(ENGINES),
    "mistral": Family(ENGINES),
    "mixtral": Family(ENGINES),
    "olmo": Family(ENGINES),
    "olmo2": Family(ENGINES),
    "olmo3": Family(ENGINES),
    "olmoe": Family(ENGINES),
    "opt": Family(ENGINES),
    "phi": Family(ENGINES),
    "phi3": Family(ENGINES),
    "qwen2": Family(ENGINES),
    "qwen2_moe": Family(ENGINES),
    "qwen3": Family(ENGINES),
    "qwen3_moe": Family(ENGINES),
    "seed_oss": Family(ENGINES),
    "smollm3": Family(ENGINES),
    "starcoder2": Family(ENGINES),
}
"""by ``model_type``"""

REFUSED: Final[Mapping[str, str]] = {
    "gpt_oss": "its attention has sinks, which packed attention does not compute",
    "nemotron": "its log-probs in packed samples differ from its own forward pass",
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
    elif engine in ENGINES and engine not in family.engines:
        others = " or ".join(repr(one) for one in family.engines)
        instead = f"; set rollout.backend to {others}" if others else ""
        raise UnsupportedModel(
            f"models of the family {kind!r} cannot be served by the {engine} engine: "
            f"{family.note}{instead}. {supported_families(engine)}"
        )


def supported_families(engine: str | None = None) -> str:
    """Return a sentence with the families that were tried: with the engine, or with the trainer."""
    names = sorted(
        name for name, family in FAMILIES.items() if engine is None or engine in family.engines
    )
    return f"Supported are {', '.join(names)}; see 'Model families' in docs/language.md"


def _structural_fault(config: Mapping[str, Any]) -> str | None:
    """Return why a family cannot be trained; None if nothing speaks against it, or if transformers
    does not know it, which is reported where the model is built."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    try:
        described: Any = AutoConfig.for_model(**config)
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
