"""Random configurations of language runs: toys, FSDP and Megatron."""

from __future__ import annotations

from random import Random

from tests.jobs.random_runs.settings import RandomRun, Settings

CONFIGURATION = """\
job = "language_rl"
name = "random"

[model]
tokenizer = "arithmetic"

[model.config]
model_type = "qwen3"
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 4
num_attention_heads = 4
num_key_value_heads = 2
head_dim = 8
max_position_embeddings = 64
tie_word_embeddings = true

[data]
path = "examples/arithmetic/addition.jsonl"
verifier = "exact"
held_out = 16

[training]
iterations = 1
prompts = 4
group_size = 4

[rollout.sampling]
max_tokens = 6

[cluster]
deadlock_after = 30
"""


def language_run(random: Random, *, local: bool = False) -> RandomRun:
    """Draw a run; ``local``: of toys, in this process."""
    backend = "toy" if local else random.choice(["fsdp", "fsdp", "megatron", "toy", "toy"])
    toys = backend == "toy"
    drawn: Settings = {
        "seed": random.randrange(1000),
        "actor.backend": backend,
        "rollout.backend": "toy" if toys else "transformers",
        "cluster.backend": "local" if local else random.choice(["process", "process", "local"]),
    }
    ranks = _actors(random, drawn)
    _training(random, drawn)
    _cut(random, drawn, ranks // _model_ranks(drawn))
    _learning(random, drawn, ranks)
    _around(random, drawn)
    training = {name: drawn[f"training.{name}"] for name in ("iterations", "prompts", "group_size")}
    iterations, prompts, group = (int(str(value)) for value in training.values())
    return RandomRun(
        text=CONFIGURATION,
        settings=drawn,
        iterations=iterations,
        steps=prompts * group,
        column="samples",
        max_staleness=int(str(drawn["training.max_staleness"])),
    )


def _model_ranks(drawn: Settings) -> int:
    return int(str(drawn.get("actor.tp", 1))) * int(str(drawn.get("actor.pp", 1)))


def _actors(random: Random, drawn: Settings) -> int:
    """How the actor is cut; returns the number of actors."""
    if drawn["actor.backend"] == "megatron":
        drawn["actor.tp"] = random.choice([1, 2])
        drawn["actor.pp"] = random.choice([1, 1, 2])
        for name in ("sequence_parallel", "overlap", "distributed_optimizer"):
            if random.random() < 0.3:
                drawn[f"actor.megatron.{name}"] = name != "distributed_optimizer"
        if drawn["actor.pp"] == 2 and random.random() < 0.3:
            drawn["actor.megatron.virtual_stages"] = 2
    together = _model_ranks(drawn)
    alone = drawn["cluster.backend"] == "local" or together == 4
    ranks = together * (1 if alone else random.choice([1, 1, 2]))
    if random.random() < 0.7 or ranks > together:
        drawn["cluster.actors"] = ranks
    if drawn["actor.backend"] != "toy":
        if random.random() < 0.2:
            drawn["actor.activation_checkpointing"] = True
        for name in ("precision", "publish_precision"):
            if random.random() < 0.15:
                drawn[f"actor.{name}"] = "bfloat16"
        if random.random() < 0.15 and drawn["actor.backend"] == "fsdp":
            drawn["actor.strategy"] = "fsdp1"
    return ranks


def _training(random: Random, drawn: Settings) -> None:
    drawn |= {
        "training.iterations": random.choice([1, 2, 3]),
        "training.prompts": random.choice([2, 4, 6, 8, 12]),
        "training.group_size": random.choice([1, 2, 4, 4]),
        "training.max_staleness": random.choice([0, 0, 1, 2]),
        "training.check_weights_every": random.choice([0, 1]),
        "training.checkpoint_every": random.choice([0, 1, 2]),
    }


def _cut(random: Random, drawn: Settings, data_ranks: int) -> None:
    """Global batches and micro-batches; mostly such as divide."""
    steps = random.choice([1, 1, 2, 3])
    prompts = int(str(drawn["training.prompts"]))
    fits = random.random() < 0.95
    if fits:
        prompts = -(-prompts // (data_ranks * steps)) * data_ranks * steps
    share = prompts * int(str(drawn["training.group_size"])) // data_ranks // steps or 1
    drawn |= {
        "training.prompts": prompts,
        "actor.global_batches": steps,
        "actor.epochs": random.choice([1, 1, 2]),
        "actor.pipelined": random.random() < 0.7,
    }
    divisors = [size for size in range(1, share + 1) if share % size == 0 or not fits]
    if random.random() < 0.5:
        drawn["actor.micro_batch_size"] = random.choice(divisors)
    elif random.random() < 0.5:
        drawn["actor.max_tokens"] = random.choice([40, 64, 200, 1000])
        if random.random() < 0.4:
            drawn["actor.balance_window"] = random.choice(divisors)


def _learning(random: Random, drawn: Settings, ranks: int) -> None:
    advantage = random.choice(["grpo", "rloo", "reinforce++", "reinforce++_baseline", "gae"])
    drawn |= {
        "actor.advantage.name": advantage,
        "actor.loss.name": random.choice(["ppo", "ppo", "gspo", "reinforce"]),
        "actor.loss.aggregation": random.choice(
            ["token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum"]
        ),
        "cluster.inference_workers": random.choice([0, 0, 0, 1, 2]),
    }
    if advantage == "gae":
        drawn["cluster.critics"] = ranks
    for section in ("advantage", "loss"):
        if random.random() < 0.3:
            drawn[f"actor.{section}.kl_coefficient"] = 0.05
            if random.random() < 0.95:
                drawn["cluster.inference_workers"] = random.choice([1, 2])
    if random.random() < 0.3:
        drawn["actor.loss.off_policy"] = random.choice(["truncated", "decoupled"])
        drawn["actor.loss.proximal"] = random.choice(["step", "step", "current", "auto"])
    if random.random() < 0.2:
        drawn["actor.loss.entropy_coefficient"] = 0.01
    if random.random() < 0.2 and drawn["actor.backend"] != "toy":
        drawn |= {"warm_start.steps": 3, "warm_start.batch_size": 8}


def _around(random: Random, drawn: Settings) -> None:
    """Engines, evaluation, scheduler, placement."""
    drawn["cluster.rollout_workers"] = random.choice([1, 1, 2])
    drawn["cluster.reward_workers"] = random.choice([1, 1, 2])
    if drawn["actor.backend"] == "toy":
        drawn |= {
            "rollout.toy.tail": random.choice([0.0, 1.0]),
            "rollout.toy.mean_tokens": random.choice([3.0, 6.0]),
            "rollout.toy.seconds_per_step": 0.002,
        }
    if random.random() < 0.3:
        drawn["scheduler.policy"] = random.choice(["tail", "greedy", "longest_first"])
        if random.random() < 0.95:
            drawn["cluster.rollout_workers"] = 2
    if random.random() < 0.2:
        drawn["cluster.placement"] = random.choice(["collocated", "disaggregated", "hybrid"])
    drawn["evaluation.samples"] = random.choice([0, 8])
    if drawn["evaluation.samples"] and random.random() < 0.5:
        drawn["evaluation.every"] = 1
    if random.random() < 0.2:
        drawn["rollout.serving.max_concurrent"] = random.choice([1, 3])
    if random.random() < 0.2:
        drawn["rollout.sampling.temperature"] = 0.7
    if random.random() < 0.2:
        drawn["rollout.sampling.top_k"] = random.choice([1, 5])
        drawn["rollout.sampling.top_p"] = random.choice([1.0, 0.8])
    if random.random() < 0.3:
        more = "evaluation.sets.more"
        drawn[f"{more}.data.path"] = "examples/arithmetic/addition.jsonl"
        drawn[f"{more}.data.verifier"] = "exact"
        drawn[f"{more}.prompts"] = random.choice([1, 5])
        if random.random() < 0.5:
            drawn |= {f"{more}.samples": 3, f"{more}.temperature": 1.0}
        drawn["evaluation.every"] = 1
