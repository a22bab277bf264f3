"""Arguments and rollouts of a tiny training group."""

from __future__ import annotations

from typing import Any

from rlinf_async.messages.language import TrainingSample
from rlinf_async.runtime.ray.training import TrainArgs
from tests.backends.language.kit import QWEN3, samples

GROUP, PROMPTS = 4, 4


def args(**fields: Any) -> TrainArgs:
    """A tiny random model; two optimizer steps for each rollout of 16 samples."""
    given: dict[str, Any] = {
        "model_config": QWEN3,
        "rollout_batch_size": PROMPTS,
        "n_samples_per_prompt": GROUP,
        "num_steps_per_rollout": 2,
        "max_tokens_per_gpu": 40,
        "lr": 1e-3,
        # An epsilon that keeps Adam from making large steps of the last bits of small gradients.
        "adam_eps": 1e-3,
        "clip_grad": 0.5,
        "use_rollout_logprobs": True,
        "debug_train_only": True,
        "train_env_vars": {"OMP_NUM_THREADS": "1"},
    }
    return TrainArgs(**(given | fields))


def batch(rollout: int, **fields: Any) -> list[TrainingSample]:
    """The samples of a rollout, as our own actors are given them."""
    found = samples(PROMPTS, GROUP, seed=rollout)
    for sample in found:
        sample.temperature = 1.0
        sample.prev_log_prob = sample.ref_log_prob = sample.value = None
        sample.version = sample.version + fields.get("version", rollout)
    return found


def columns(found: list[TrainingSample], *, log_probs: bool = True) -> dict[str, Any]:
    """The same as users of slime pass it."""
    data: dict[str, Any] = {
        "tokens": [[*s.prompt_ids.tolist(), *s.response_ids.tolist()] for s in found],
        "response_lengths": [len(s.response_ids) for s in found],
        "rewards": [s.reward if s.scored else None for s in found],
        "loss_masks": [s.loss_mask.astype(int).tolist() for s in found],
        "weight_versions": [int(s.version[0]) for s in found],
    }
    if log_probs:
        data["rollout_log_probs"] = [s.log_prob.tolist() for s in found]
    return data
