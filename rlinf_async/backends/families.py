"""Which families of language models can be trained, and which engines agree with the trainer.

`FAMILIES` is the table of docs/language-training.md: each entry was tried with a tiny random model,
whose published weights were loaded by the engine (``python -m tests.backends.families``). A family
that is not in it is judged by its structure. No torch, except for such a family.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple

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
    "llama": Family(),
    "mistral": Family(),
    "mixtral": Family(),
    "olmo": Family(),
    "olmo2": Family(),
    "olmo3": Family(),
    "olmoe": Family(),
    "opt": Family(),
    "phi": Family("untried"),
    "phi3": Family(),
    "qwen2": Family(),
    "qwen2_moe": Family(),
    "qwen3": Family(),
    "qwen3_moe": Family(),
    "seed_oss": Family("untried"),
    "smollm3": Family(),
    "starcoder2": Family("untried"),
}
"""by ``model_type``"""

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


def supported_families(engine: str | None = None) -> str:
    """Return a sentence with the families that were tried: with the engine, or with the trainer."""
    names = [name for name, one in FAMILIES.items() if engine != "vllm" or one.vllm != "no"]
    return f"Supported are {', '.join(names)}; see 'Model families' in docs/language-training.md"


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
