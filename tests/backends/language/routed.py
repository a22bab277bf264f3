"""Tiny mixtures of experts, whose engine chooses other experts than the trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import AutoConfig

from rlinf_async.algorithms.config import LanguageLossConfig
from rlinf_async.backends.fsdp.language.config import LanguageFSDPConfig, LanguageTrainerConfig
from rlinf_async.backends.fsdp.language.trainer import PolicyTrainer
from rlinf_async.backends.language_training.config import LanguageModelConfig
from rlinf_async.backends.transformers.config import TransformersEngineConfig
from rlinf_async.backends.transformers.engine import TransformersEngine
from rlinf_async.backends.transformers.routing import routers_of
from rlinf_async.messages.language import Request, Sample
from tests.backends.distributions import fields_of, sample_of
from tests.backends.models import END, VOCABULARY, endless, make_model, save_folder
from tests.backends.requests import request

TOKENS: Final = 10
LAYERS: Final = 3
FAMILIES: Final[dict[str, dict[str, Any]]] = {
    "qwen3_moe": {"norm_topk_prob": True},
    "qwen3_moe, weights as they are": {"norm_topk_prob": False},
    "qwen2_moe": {"shared_expert_intermediate_size": 32},
    "olmoe": {},
    "mixtral": {"num_local_experts": 6, "sliding_window": None},
}


def make(family: str = "qwen3_moe", seed: int = 0) -> nn.Module:
    """A model of three layers; of Qwen3 the second one has no experts."""
    kind = family.partition(",")[0]
    config: Any = AutoConfig
    given: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 24,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "eos_token_id": END,
        "pad_token_id": 0,
        "bos_token_id": 0,
        "tie_word_embeddings": False,
        **FAMILIES[family],
    }
    if kind == "mixtral":
        del given["moe_intermediate_size"], given["num_experts"]
    if kind == "qwen3_moe":
        given["mlp_only_layers"] = [1]
    return endless(make_model(config.for_model(kind, **given), seed, sharpness=0.25))


def disturb(model: nn.Module, tie: float = 0.4) -> None:
    """Have routers take the next likely expert in the place of the last one that they chose, where
    it is nearly as likely: what rounding does, but for many tokens."""

    def other(router: Any, given: Any, output: tuple[Tensor, Tensor, Tensor]) -> Any:
        logits, weights, own = output
        likely = logits.softmax(-1, dtype=torch.float32)
        values, ids = likely.topk(router.top_k + 1, -1)
        near = values[:, -1] > tie * values[:, -2]
        swapped = torch.cat([ids[:, :-2], ids[:, -1:]], 1)
        chosen = torch.where(near[:, None], swapped, own)
        new = likely.gather(-1, chosen)
        if getattr(router, "norm_topk_prob", True):
            new = new / new.sum(-1, keepdim=True)
        return logits, new.to(weights.dtype), chosen

    for router in routers_of(model):
        router.register_forward_hook(other, prepend=True)


async def started(path: str, *, disturbed: bool = True, **fields: Any) -> TransformersEngine:
    given: dict[str, Any] = {"weights": "folder"} | fields
    engine = TransformersEngine(TransformersEngineConfig(model=path, **given))
    await engine.start()
    assert engine._decoder is not None
    if disturbed:
        disturb(engine._decoder.model)
    return engine


def asked(count: int = 4, **fields: Any) -> list[Request]:
    """Requests of one prompt each; the first and the second one have the same."""
    given: dict[str, Any] = {"max_tokens": TOKENS, "routing_replay": True} | fields
    return [
        request(at, range(2, 4 + max(at, 1)), group=at, seed=7 + at, **given) for at in range(count)
    ]


def generated(path: str, requests: Sequence[Request], **fields: Any) -> list[Sample]:
    """What an engine makes of requests, all at once."""

    async def generate() -> list[Sample]:
        engine = await started(path, **fields)
        try:
            made = await asyncio.gather(*(engine.generate(one) for one in requests))
        finally:
            await engine.close()
        return [sample_of(one, got) for one, got in zip(requests, made, strict=True)]

    return asyncio.run(generate())


def trainer_of(
    path: str,
    *,
    replay: bool = True,
    loss: LanguageLossConfig | None = None,
    checkpointing: bool = False,
    ranks: tuple[int, int] = (1, 0),
    strategy: Any = "fsdp2",
    **fields: Any,
) -> PolicyTrainer:
    given = fields_of(path)
    given["model"] = LanguageModelConfig(path=path, activation_checkpointing=checkpointing)
    loss = loss or LanguageLossConfig(kl_coefficient=0.05)
    config = LanguageTrainerConfig(
        fsdp=LanguageFSDPConfig(strategy=strategy, **given),
        loss=loss,
        reference=True,
        routing_replay=replay,
        **fields,
    )
    return PolicyTrainer(config, *ranks)


def saved(folder: Path, model: nn.Module) -> str:
    config: Any = model.config
    return save_folder(folder, config, model)
