"""Random configurations of runs in environments: PPO, GRPO and soft actor-critic."""

from __future__ import annotations

from random import Random

from tests.jobs.random_runs.settings import RandomRun, Settings

CONFIGURATION = """\
job = "{job}"
name = "random"

[env]
id = "Pendulum-v1"

[training]
total_steps = 64
steps_per_iteration = 16

[evaluation]
episodes = 2
video_episodes = 0

[cluster]
deadlock_after = 30
"""


def embodied_run(random: Random, *, local: bool = False) -> RandomRun:
    """Draw a run; ``local``: in this process."""
    replayed = random.random() < 0.3
    drawn: Settings = {
        "seed": random.randrange(1000),
        "cluster.backend": "local" if local else random.choice(["process", "process", "local"]),
    }
    pixels = _environments(random, drawn, replayed, local)
    steps = random.choice([4, 8, 16, 32])
    workers = random.choice([1, 1, 2])
    iteration = workers * int(str(drawn["env.envs"])) * steps
    drawn |= {
        "training.steps_per_iteration": steps,
        "training.max_staleness": random.choice([0, 0, 1, 2]),
        "training.checkpoint_every": random.choice([0, 1, 2]),
        "cluster.env_workers": workers,
        "evaluation.before": random.random() < 0.3,
    }
    if random.random() < 0.5:
        drawn["cluster.rollout_workers"] = random.choice([0, 1, 2])
    if replayed:
        _soft_actor_critic(random, drawn)
    else:
        if random.random() < 0.25:
            drawn["training.rollout_epochs"] = 2
            iteration *= 2
        _ppo(random, drawn, iteration, pixels=pixels)
    iterations = random.choice([1, 2, 3])
    drawn["training.total_steps"] = iteration * iterations
    return RandomRun(
        text=CONFIGURATION.format(job="embodied_sac" if replayed else "embodied_ppo"),
        settings=drawn,
        iterations=iterations,
        steps=iteration,
        column="env_steps",
        max_staleness=int(str(drawn["training.max_staleness"])),
    )


def _environments(random: Random, drawn: Settings, replayed: bool, local: bool) -> bool:
    """Returns whether the policy sees images."""
    name = "Pendulum-v1" if replayed else random.choice(["CartPole-v1", "Pendulum-v1", "pixels"])
    stages = random.choice([1, 1, 2])
    drawn |= {"env.stages": stages, "env.envs": stages * random.choice([1, 2, 4])}
    pixels = name == "pixels" and not local
    if pixels:
        drawn["env.entry_point"] = "examples/reach_env.py:ReachTargets"
        drawn["env.kwargs"] = "{pixels_only = true}"
    elif name != "pixels":
        drawn["env.id"] = name
        if random.random() < 0.3:
            drawn["env.simulator"] = "vector"
    if random.random() < 0.2:
        drawn["env.parallel"] = True
    if random.random() < 0.2:
        drawn["env.autoreset"] = random.choice(["same_step", "next_step", "disabled"])
    if replayed or random.random() < 0.3:
        drawn["env.actions"] = "rescale"
    chunks = not replayed and name != "CartPole-v1" and "env.simulator" not in drawn
    if random.random() < (0.3 if chunks else 0.02):
        drawn["env.action_chunk"] = random.choice([2, 4])
    return pixels


def _soft_actor_critic(random: Random, drawn: Settings) -> None:
    drawn |= {
        "training.learning_starts": random.choice([4, 16]),
        "training.updates_per_step": random.choice([0.5, 1.0]),
        "replay.batch_size": random.choice([8, 16]),
        "replay.capacity": random.choice([200, 1000]),
    }
    if random.random() < 0.3:
        drawn["replay.n_step"] = 3
    if random.random() < 0.3:
        drawn["replay.sampling"] = "prioritized"


def _ppo(random: Random, drawn: Settings, iteration: int, *, pixels: bool) -> None:
    chunk = int(str(drawn.get("env.action_chunk", 1)))
    trajectories = int(str(drawn["cluster.env_workers"])) * int(str(drawn["env.stages"]))
    actors = 1
    if drawn["cluster.backend"] == "process" and trajectories % 2 == 0:
        actors = random.choice([1, 2])
    share = iteration // chunk // actors
    drawn |= {
        "cluster.actors": actors,
        "actor.ppo.minibatch_size": max(1, random.choice([share, share // 2, share // 3])),
        "actor.ppo.epochs": random.choice([1, 2]),
    }
    stage = int(str(drawn["env.envs"])) // int(str(drawn["env.stages"]))
    if random.random() < 0.2 and stage % 2 == 0:
        drawn |= {"env.group_size": 2, "actor.advantage.name": "grpo"}
    elif random.random() < 0.2 and not pixels and chunk == 1:
        steps = int(str(drawn["training.steps_per_iteration"]))
        drawn["actor.fsdp.policy.name"] = "gru"
        drawn["actor.ppo.minibatch_size"] = steps * max(1, share // steps // 2)
    if chunk > 1 and random.random() < 0.5:
        drawn["actor.advantage.level"] = random.choice(["action", "chunk"])
        drawn["actor.ppo.log_prob_level"] = random.choice(["action", "chunk"])
    for name in ("normalize_observation", "normalize_reward"):
        if random.random() < 0.3:
            drawn[f"actor.{name}"] = False
    if random.random() < 0.2:
        drawn["actor.fsdp.precision"] = "bfloat16"
