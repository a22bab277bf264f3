"""PPO with a training group of plain Ray actors, as users of slime write it: on CPUs, in a minute.

    python examples/ray_train_group.py --out runs/group        # again: it goes on where it stopped
    python examples/ray_train_group.py --out runs/megatron --train-backend megatron --ranks 2 --tp 2

A tiny random model learns to answer with digits alone. Actor and critic share a placement group; a
rollout manager (an actor of Ray, too) has an engine that is given new weights after each rollout.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Any

import numpy as np
import ray
from transformers import AutoModelForCausalLM, Qwen3Config

from rlinf_async.backends.transformers.config import TransformersEngineConfig
from rlinf_async.data.prompts import arithmetic_tokenizer, save_arithmetic_tokenizer
from rlinf_async.messages.language import Generated, Prompt, Request, Sampling
from rlinf_async.runtime.ray.training import (
    RayTrainGroup,
    RolloutEngineActor,
    TrainArgs,
    create_placement_group,
)

PROMPTS, SAMPLES = 8, 8


def make_model(folder: Path) -> str:
    """A tiny model of random weights, and its tokenizer."""
    tokenizer = arithmetic_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
    )
    if not (folder / "config.json").exists():
        models: Any = AutoModelForCausalLM
        models.from_config(config).save_pretrained(folder)
        save_arithmetic_tokenizer(folder)
    return str(folder)


class RolloutManager:
    """Generates rollouts, and scores them. What a training group needs of it are the two methods
    ``set_train_parallel_config`` and ``get_rollout_engines``."""

    def __init__(self, args: TrainArgs) -> None:
        folder = str(args.hf_checkpoint)
        self.tokenizer = arithmetic_tokenizer()
        engine: Any = ray.remote(RolloutEngineActor).options(num_cpus=0)
        self.engines = [engine.remote(TransformersEngineConfig(model=folder))]
        ray.get([one.start.remote() for one in self.engines])

    def set_train_parallel_config(self, config: dict[str, int]) -> None:
        self.dp_size = config["dp_size"]

    def get_rollout_engines(self) -> list[Any]:
        return self.engines

    def generate(self, rollout_id: int) -> Any:
        """A reference to the columns of a rollout."""
        random = np.random.default_rng(rollout_id)
        texts = [f"{a}+{b}=" for a, b in random.integers(0, 10, (PROMPTS, 2))]
        requests = [self._request(rollout_id, at, text) for at, text in enumerate(texts * SAMPLES)]
        requests.sort(key=lambda one: one.group)  # samples of one prompt in a row
        found: list[Generated] = ray.get(self.engines[0].generate.remote(requests))
        pairs = zip(requests, found, strict=True)
        columns = {
            "tokens": [[*r.prompt.token_ids, *g.token_ids] for r, g in pairs],
            "response_lengths": [len(one.token_ids) for one in found],
            "rewards": [self._reward(one) for one in found],
            "rollout_log_probs": [one.log_prob for one in found],
            "weight_versions": [one.version for one in found],
        }
        return ray.put(columns)

    def _request(self, rollout_id: int, at: int, text: str) -> Request:
        tokens = np.asarray(self.tokenizer(text)["input_ids"], np.int32)
        prompt = Prompt(index=at, text=text, token_ids=tokens, verifier="", reference="")
        return Request(
            group=at % PROMPTS,
            index=at // PROMPTS,
            group_size=SAMPLES,
            iteration=rollout_id,
            min_version=0,
            prompt=prompt,
            sampling=Sampling(max_tokens=8),
            seed=rollout_id * PROMPTS * SAMPLES + at,
        )

    def _reward(self, generated: Generated) -> float:
        """The share of digits in the answer."""
        tokens: list[str] = [self.tokenizer.decode([one]) for one in generated.token_ids]
        return sum(token.strip().isdigit() for token in tokens) / len(tokens)


def train(args: TrainArgs, ranks: int, rollouts: int) -> None:
    pg = create_placement_group(ranks)
    actor = RayTrainGroup(args, 1, ranks, pg, num_gpus_per_actor=0.4)
    starting = [actor.async_init(args, "actor", with_ref=True)]
    critic: RayTrainGroup | None = None
    if args.needs_values:
        critic = RayTrainGroup(args, 1, ranks, pg, num_gpus_per_actor=0.4, role="critic")
        starting.append(critic.async_init(args, "critic"))
    manager: Any = ray.remote(RolloutManager).options(num_cpus=0)
    manager = manager.remote(args)
    starts, *_ = [ray.get(one) for one in starting]
    start = starts[0]
    if critic is not None:
        actor.connect(critic)
    actor.set_rollout_manager(manager)
    actor.update_weights()  # the engine has none yet
    for rollout_id in range(start, rollouts):
        data = ray.get(manager.generate.remote(rollout_id))
        actor.onload()
        training = [actor.async_train(rollout_id, [data])]  # a list, as references in it stay such
        if critic is not None:
            training.append(critic.async_train(rollout_id, [data]))
        reports, *_ = [ray.get(one) for one in training]
        report = reports[0]
        actor.offload()
        if critic is not None:
            critic.offload()
        actor.update_weights()
        print(
            f"rollout {rollout_id}: reward {report.reward_mean:.3f}, "
            f"loss {report.metrics['loss']:+.4f}, weights of version {report.version}"
        )
    if start < rollouts:
        actor.save_model(rollouts - 1)
        if critic is not None:
            critic.save_model(rollouts - 1)
    print(f"trained {rollouts - start} rollouts; {args.save} has the last")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/group"), help="folder of the run")
    parser.add_argument("--ranks", type=int, default=1, help="of the actor, and of the critic")
    parser.add_argument(
        "--train-backend", choices=["fsdp", "megatron"], default="fsdp", help="what trains"
    )
    parser.add_argument("--tp", type=int, default=1, help="ranks that share a layer, with Megatron")
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages, with Megatron")
    parser.add_argument("--rollouts", type=int, default=8, help="in all")
    parser.add_argument("--colocate", action="store_true", help="weights by shared memory")
    parser.add_argument("--address", default="local", help="of a Ray cluster")
    options = parser.parse_args()
    out = options.out.absolute()
    args = TrainArgs(
        train_backend=options.train_backend,
        tensor_model_parallel_size=options.tp,
        pipeline_model_parallel_size=options.pp,
        hf_checkpoint=make_model(out / "model"),
        load=str(out / "actor"),
        save=str(out / "actor"),
        critic_load=str(out / "critic"),
        critic_save=str(out / "critic"),
        rollout_batch_size=PROMPTS,
        n_samples_per_prompt=SAMPLES,
        advantage_estimator="ppo",
        num_steps_per_rollout=4,
        lr=1e-2,
        critic_lr=1e-2,
        kl_coef=0.01,
        offload_train=True,
        colocate=options.colocate,
    )
    ray.init(address=options.address, log_to_driver=False, logging_level=logging.ERROR)
    train(args, options.ranks, options.rollouts)


if __name__ == "__main__":
    main()
