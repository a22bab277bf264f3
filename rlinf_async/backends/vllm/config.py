"""Settings of the vLLM engine. Imports neither torch nor vLLM."""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from rlinf_async.config.counts import MOST_THREADS, check_bounds
from rlinf_async.messages.language import Sampling

GPU_MEMORY: Final = 0.9
"""share of a GPU's memory for an engine that has the GPU alone; vLLM does not count all it takes"""

LORA_RANKS: Final = (8, 16, 32, 64, 128, 256, 320, 512)
"""ranks for which vLLM makes room"""
MOST_KEPT: Final = 1024
"""largest top-k whose kept tokens vLLM returns"""
OWN_ARGUMENTS: Final = {
    "generation_config": "settings of samples are those of [rollout.sampling] alone",
    "logits_processors": "the trainer would not know what they do to the distribution",
    "logprobs_mode": "log-probs are of the distribution that is sampled from",
    "max_logprobs": "it follows from what top-k may keep",
    "override_generation_config": "settings of samples are those of [rollout.sampling] alone",
}
"""arguments of vLLM that change what samples are drawn from, or what is known of it"""


class VllmEngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model folder, and how vLLM serves it."""

    model: str = ""
    """folder with a Hugging Face config and tokenizer, and weights where they are asked for"""
    weights: Literal["update", "folder", "adapter"] = "update"
    """``update``: the first `WeightUpdate` brings them; ``folder``: those there are version 0;
    ``adapter``: those there, under the adapter (LoRA) that each `WeightUpdate` brings"""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """dtype of weights and arithmetic; log-probs are float32"""
    max_concurrent: int = 256
    """sequences decoded together; more wait, by priority"""
    context: int | None = None
    """limit for the tokens of a prompt and its response; the model's own when left out"""
    kv_cache_bytes: int | None = None
    """size of the key-value cache; when left out 256 MiB on a CPU, and on a GPU what ``gpu_memory``
    leaves"""
    gpu_memory: float | None = None
    """share of a GPU's memory for the whole engine; when left out 0.9, or what the job's placement
    gives"""
    tensor_parallel: int | None = None
    """GPUs that share each layer; when left out 1, or as many as the job's placement gives"""
    eager: bool | None = None
    """no compiled graphs: starts faster, decodes slower. When left out: true on a CPU"""
    seeded: bool = True
    """draw each sample from its own seed, so that a run can be repeated; costs some speed"""
    sleep: bool | None = None
    """release a GPU's memory on `offload` (vLLM's sleep mode, which CPUs do not have); when left
    out, where the job's placement lets others use the device in turns"""
    formats: bool = False
    """responses may have a format (``grammar`` of their sampling), by a logits processor and vLLM's
    first model runner; a run with a grammar sets it"""
    threads: int = 1
    """threads of the engine on a CPU"""
    extra: dict[str, Any] = {}
    """further arguments of vLLM's ``AsyncEngineArgs``, passed unchanged; none of
    `OWN_ARGUMENTS`"""

    def __post_init__(self) -> None:
        check_bounds(self, "max_concurrent", "tensor_parallel", "kv_cache_bytes", least=1)
        check_bounds(self, "threads", least=1, most=MOST_THREADS)
        check_bounds(self, "context", least=2)
        check_bounds(self, "gpu_memory", above=0, most=1)
        for name in self.extra.keys() & OWN_ARGUMENTS.keys():
            raise ValueError(f"extra has {name!r}: {OWN_ARGUMENTS[name]}; leave it out")

    def untold(self, sampling: Sampling) -> str:
        """Return why it cannot tell what such samples are drawn from, and what to set; empty where
        it can."""
        if sampling.greedy or not sampling.cuts or 0 < sampling.top_k <= MOST_KEPT:
            return ""
        if sampling.top_k:
            return (
                f"vLLM tells which tokens it kept for at most {MOST_KEPT}, and top_k is "
                f"{sampling.top_k}: lower it, or use the transformers engine"
            )
        name = self.unbounded(sampling)
        return (
            f"with {name} = {getattr(sampling, name)} alone vLLM may keep any number of tokens, of "
            f"which it tells at most {MOST_KEPT}: set top_k (at most {MOST_KEPT}) as well, or use "
            "the transformers engine"
        )

    def unbounded(self, sampling: Sampling) -> str:
        """Return the setting by which more tokens may be kept than it can tell."""
        return "top_k" if sampling.top_k else "top_p" if sampling.top_p < 1.0 else "min_p"


def asked_log_probs(sampling: Sampling, vocabulary: int) -> int:
    """Return how many tokens have to be asked for beside the drawn one, so that all that were kept
    are among them: 0 where that cannot be known, or nothing is left out.

    More than ``top_k``: vLLM keeps all that are as likely as the last of these.
    """
    if not sampling.truncates or not 0 < sampling.top_k <= MOST_KEPT:
        return 0
    return min(sampling.top_k + sampling.top_k // 2 + 16, vocabulary)
