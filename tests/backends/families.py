"""Tiny models of many families: what the trainer publishes, held against each engine's log-probs.

``python -m tests.backends.families`` tries every family with every engine, each in a process of its
own, prints the table of docs/language-training.md, and fails where that and the code's list are not
what was found. ``--family qwen3_moe --engine vllm`` tries one.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from rlinf_async.backends.fsdp.language.trainer import PolicyTrainer
from rlinf_async.backends.language import ENGINES, FAMILIES, GenerationEngine
from rlinf_async.backends.language_training.model import add_missing_files
from rlinf_async.backends.transformers.config import TransformersEngineConfig
from rlinf_async.backends.transformers.engine import TransformersEngine
from rlinf_async.messages.embodied import Floats
from rlinf_async.messages.language import Tokens
from tests.backends.language.kit import sample, trainer_config
from tests.backends.models import VOCABULARY, save_tokenizer
from tests.backends.requests import request
from tests.backends.seeing import IDEFICS3, QWEN2_5_VL, QWEN2_VL, QWEN_TEXT

TOLERANCE = 1e-3
"""of a log-prob: the default of ``check_weights_tolerance``"""

COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,  # the smallest that vLLM has on a CPU
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
DEEPSEEK = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 2,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "head_dim": 32,
}
TIED = {"tie_word_embeddings": True}
KEPT = ("gpt2", "opt", "idefics3", "qwen2_vl", "qwen2_5_vl")
"""families that do not know all fields of `COMMON`"""


def seeing(config: dict[str, Any], width: str) -> dict[str, Any]:
    """A model with positions in grids, whose vision tower has the text's width by this name."""
    rope = QWEN_TEXT["rope_parameters"] | {"mrope_section": [4, 6, 6]}
    return config | {
        "text_config": config["text_config"] | COMMON | TIED | {"rope_parameters": rope},
        "vision_config": config["vision_config"] | {width: COMMON["hidden_size"]},
        "image_token_id": 2,
    }


TINY: dict[str, dict[str, Any]] = {
    "arcee": {},
    "cohere": {**TIED, "logit_scale": 0.25},
    "cohere2": {
        **TIED,
        "logit_scale": 0.25,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "deepseek_v2": {**EXPERTS, **DEEPSEEK},
    "deepseek_v3": {**EXPERTS, **DEEPSEEK},
    "dots1": {**EXPERTS, **DEEPSEEK},
    "ernie4_5": TIED,
    "exaone4": {},
    "gemma": TIED,
    "gemma2": {**TIED, "query_pre_attn_scalar": 32},
    "gemma3_text": {**TIED, "query_pre_attn_scalar": 32},
    "glm": {},
    "glm4": {},
    "glm4_moe": {**EXPERTS, **DEEPSEEK},
    "gpt2": {
        "vocab_size": VOCABULARY,
        "n_embd": 64,
        "n_head": 2,
        "n_layer": 2,
        "n_positions": 256,
        "initializer_range": 0.1,
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
    "gpt_neox": {},
    "granite": {"logits_scaling": 2.0, "residual_multiplier": 0.5},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "helium": {},
    "idefics3": IDEFICS3
    | {
        "text_config": IDEFICS3["text_config"] | COMMON | TIED | {"pad_token_id": 1},
        "image_token_id": 2,
        "pad_token_id": 1,
    },
    "llama": {},
    "mistral": {"sliding_window": 8},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "olmo": {},
    "olmo2": {},
    "olmo3": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "opt": {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "word_embed_proj_dim": 64,
        "ffn_dim": 96,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "max_position_embeddings": 256,
        "init_std": 0.1,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 0,
    },
    "phi": {"num_key_value_heads": 2},
    "phi3": {},
    "qwen2": {},
    "qwen2_5_vl": seeing(QWEN2_5_VL, "out_hidden_size"),
    "qwen2_vl": seeing(QWEN2_VL, "hidden_size"),
    "qwen2_moe": {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 32},
    "qwen3": {},
    "qwen3_moe": {**EXPERTS, "num_experts": 4},
    "seed_oss": {},
    "smollm3": {"no_rope_layers": [1, 0]},
    "starcoder2": TIED,
}
"""Configurations, by ``model_type``; a small window shows that windows are the same."""


def tiny(family: str, **fields: Any) -> dict[str, Any]:
    """Return a configuration of a family, with its ``model_type``."""
    common = {} if family in KEPT else COMMON
    return {"model_type": family, **common, **TINY[family], **fields}


def published_difference(engine: str, config: dict[str, Any], folder: Path) -> float:
    """Return the largest difference between log-probs of an engine and of the trainer.

    The engine loads two versions of the weights; under the second it answers for given tokens, and
    for those that it generates.
    """
    trainer = PolicyTrainer(trainer_config(config), 1, 0)
    with torch.no_grad():  # as if it had been trained: biases and norms that begin at 0 or 1, too
        generator = torch.Generator().manual_seed(1)
        for parameter in trainer.manager.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
    add_missing_files(trainer.manager.model_files, folder)
    save_tokenizer(folder)
    return asyncio.run(_difference(_engine(engine, folder), trainer))


async def _difference(engine: GenerationEngine, trainer: PolicyTrainer) -> float:
    prompt = np.arange(3, 20, dtype=np.int32)
    given = np.arange(40, 60, dtype=np.int32)
    await engine.start()
    try:
        await engine.load(trainer.publish())
        with torch.no_grad():
            for parameter in trainer.manager.model.parameters():
                parameter.mul_(1.1)
        trainer.end_iteration()
        await engine.load(trainer.publish())
        [of_given] = await engine.log_probs([(prompt, given)])
        drawn = await engine.generate(request(tokens=prompt.tolist(), max_tokens=16))
    finally:
        await engine.close()
    return max(
        float(np.abs(of_given - _own(trainer, prompt, given)).max()),
        float(np.abs(drawn.log_prob - _own(trainer, prompt, drawn.token_ids)).max()),
    )


def _own(trainer: PolicyTrainer, prompt: Tokens, response: Tokens) -> Floats:
    one = msgspec.structs.replace(
        sample(0, 0), prompt_ids=prompt, response_ids=response, temperature=1.0
    )
    [found] = trainer.log_probs([one])
    return found


def _engine(name: str, folder: Path) -> GenerationEngine:
    if name == "transformers":
        return TransformersEngine(TransformersEngineConfig(model=str(folder)))
    from rlinf_async.backends.vllm.config import VllmEngineConfig
    from rlinf_async.backends.vllm.engine import VllmEngine
    from tests.backends.vllm.kit import SMALL

    return VllmEngine(VllmEngineConfig(model=str(folder), **SMALL))


def try_one(engine: str, family: str, *, tied: bool = False) -> float:
    """Return the largest difference of log-probs for a tiny model of a family."""
    fields = TIED if tied else {}
    with tempfile.TemporaryDirectory() as folder:
        return published_difference(engine, tiny(family, **fields), Path(folder))


def main() -> None:
    """Try families with engines, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", action="append", choices=sorted(TINY))
    parser.add_argument("--engine", action="append", choices=ENGINES)
    parser.add_argument("--tied", action="store_true", help="tie embedding and output layer")
    parser.add_argument("--here", action="store_true", help="one family and engine, this process")
    arguments = parser.parse_args()
    families, engines = arguments.family or sorted(TINY), arguments.engine or list(ENGINES)
    if arguments.here:
        print(f"{try_one(engines[0], families[0], tied=arguments.tied):.2g}")
        return
    wrong = 0
    for family in families:
        for engine in engines:
            found = _in_process(family, engine, tied=arguments.tied)
            listed = engine == "transformers" or FAMILIES[family].vllm == "yes"
            works = found.replace(".", "", 1).replace("e-", "", 1).isdigit()
            works = works and float(found) <= TOLERANCE
            wrong += works != listed
            print(f"{family:14} {engine:13} {found}{'' if works == listed else '  NOT AS LISTED'}")
    sys.exit(wrong > 0)


def _in_process(family: str, engine: str, *, tied: bool) -> str:
    """Return the difference that was found, or the last line of the error."""
    command = [sys.executable, "-m", "tests.backends.families", "--here"]
    command += ["--family", family, "--engine", engine, *(["--tied"] if tied else [])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    return lines[-1] if lines else f"exit code {done.returncode}"


if __name__ == "__main__":
    main()
