"""What a seed means: which job runs with what settings, and who is killed when."""

from __future__ import annotations

from random import Random
from typing import Final, Literal

import msgspec

Kind = Literal["ppo", "sac"]
DRIVER: Final = "driver"
KILLS: Final = 4

PPO: Final = """\
job = "embodied_ppo"
name = "killed-ppo"

[env]
id = "CartPole-v1"
envs = 8

[training]
total_steps = 40_960
steps_per_iteration = 64
checkpoint_every = 3
metrics = []

[actor]
normalize_observation = false
normalize_reward = false

[actor.fsdp.optimizer]
lr = 1e-3

[actor.advantage]
gamma = 0.98
gae_lambda = 0.8

[actor.ppo]
epochs = 10
minibatch_size = 128

[evaluation]
episodes = 20
target_return = 195.0
video_episodes = 0

[cluster]
env_workers = 2
max_restarts = 10
"""
"""CartPole is solved at a mean return of 195 in its first version; untrained it is about 20."""

SAC: Final = """\
job = "embodied_sac"
name = "killed-sac"

[env]
id = "Pendulum-v1"
envs = 4
actions = "rescale"

[training]
total_steps = 6_400
steps_per_iteration = 20
learning_starts = 480
updates_per_step = 1.0
checkpoint_every = 3
metrics = []

[replay]
capacity = 5_000
batch_size = 128

[actor.fsdp.policy]
hidden_sizes = [64, 64]

[actor.fsdp.optimizer]
lr = 2e-3

[actor.sac]
tau = 0.01

[evaluation]
episodes = 20
target_return = -300.0
video_episodes = 0

[cluster]
env_workers = 2
max_restarts = 10
"""
"""Untrained, a return is about -1,200."""

Settings = dict[str, int | str]


class Kill(msgspec.Struct, frozen=True):
    """Once an iteration is booked, and a moment later, a worker or the driver is killed."""

    iteration: int
    moment: float
    """seconds"""
    name: str

    def __str__(self) -> str:
        return f"{self.name}@{self.iteration}"


class Plan(msgspec.Struct, frozen=True):
    """One run."""

    seed: int
    kind: Kind
    settings: Settings
    kills: tuple[Kill, ...]

    @property
    def text(self) -> str:
        """The configuration file."""
        return PPO if self.kind == "ppo" else SAC

    @property
    def arguments(self) -> list[str]:
        """Settings on the command line."""
        return [word for name, value in self.settings.items() for word in (f"--{name}", str(value))]

    @property
    def epochs(self) -> int:
        """Trajectories of a stage in each iteration."""
        return int(self.settings.get("training.rollout_epochs", 1))

    @property
    def iteration_steps(self) -> int:
        """Environment steps of an iteration."""
        return 2 * (8 * 64 * self.epochs if self.kind == "ppo" else 4 * 20)

    @property
    def iterations(self) -> int:
        """Of the whole run."""
        total = 40_960 if self.kind == "ppo" else 6_400
        return -(-total // self.iteration_steps)


def plan(seed: int) -> Plan:
    """The run of a seed; even seeds are PPO's."""
    random = Random(seed)
    kind: Kind = "sac" if seed % 2 else "ppo"
    rollouts = random.choice((0, 1, 2))
    settings: Settings = {
        "seed": seed,
        "env.stages": random.choice((1, 2)),
        "training.max_staleness": random.choice((0, 1)),
        "cluster.actors": random.choice((1, 2)),
        "cluster.rollout_workers": rollouts,
    }
    if kind == "ppo":
        settings["training.rollout_epochs"] = random.choice((1, 2, 4))
    else:
        settings["replay.sampling"] = random.choice(("uniform", "prioritized"))
        settings["replay.n_step"] = random.choice((1, 3))
    made = Plan(seed, kind, settings, ())
    victims = ["Env[0]", "Env[1]", *(f"Rollout[{rank}]" for rank in range(rollouts))]
    if kind == "sac":
        victims += ["Replay[0]", "Replay[0]"]
    names = [DRIVER, *random.choices(victims, k=KILLS - 1)]
    random.shuffle(names)
    # What is left after the last one takes longer than a restart.
    moments = sorted(random.sample(range(made.iterations * 2 // 3), KILLS))
    kills = (
        Kill(iteration, round(random.uniform(0.0, 1.0), 3), name)
        for iteration, name in zip(moments, names, strict=True)
    )
    return msgspec.structs.replace(made, kills=tuple(kills))
