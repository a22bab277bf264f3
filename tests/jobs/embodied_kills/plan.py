"""What a seed means: which job runs with what settings, and who is killed, or hangs, when."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from random import Random
from typing import Final, Literal

import msgspec

Kind = Literal["ppo", "sac"]
How = Literal["kill", "hang"]
KILL: Final[tuple[How]] = ("kill",)
HANG: Final[tuple[How]] = ("hang",)
DRIVER: Final = "driver"
ENVIRONMENT: Final = "environment"
"""one of the environments, whose step does not return"""
KILLS: Final = 4
HOST: Final = """\
[cluster]
env_workers = 2
max_restarts = 10
heartbeat_limit = 10.0
"""
ENV: Final = """\
entry_point = "tests.jobs.embodied_kills.hanging:Hanging"
kwargs = {id = "ID", request = "REQUEST"}
step_seconds = 5.0
"""

PPO: Final = """\
job = "embodied_ppo"
name = "killed-ppo"

[env]
id = "CartPole-v1"
ENV
envs = 8

[training]
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

"""
"""CartPole is solved at a mean return of 195 in its first version; untrained it is about 20."""

SAC: Final = """\
job = "embodied_sac"
name = "killed-sac"

[env]
id = "Pendulum-v1"
ENV
envs = 4
actions = "rescale"

[training]
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

"""
"""Untrained, a return is about -1,200."""

Settings = dict[str, int | str]


class Kill(msgspec.Struct, frozen=True):
    """Once an iteration is booked, and a moment later, a worker, the driver or an environment is
    killed, or hangs."""

    iteration: int
    moment: float
    """seconds"""
    name: str
    how: How = "kill"

    @property
    def ends_the_run(self) -> bool:
        """Whether the run has to be resumed after it."""
        return self.name == DRIVER or self.name.startswith("Actor")

    @property
    def may_fail(self) -> bool:
        """Whether an episode may fail of it: that of an environment, or of a worker that was just
        in a step."""
        return self.name == ENVIRONMENT or self.name.startswith("Env")

    def __str__(self) -> str:
        return f"{self.name}{'' if self.how == 'kill' else ' hangs'}@{self.iteration}"


class Plan(msgspec.Struct, frozen=True):
    """One run."""

    seed: int
    kind: Kind
    settings: Settings
    kills: tuple[Kill, ...]
    short: bool = False
    """whether it ends before it has learnt anything"""

    def text(self, request: Path) -> str:
        """The configuration file, of environments that hang once this file is there."""
        name = "CartPole-v1" if self.kind == "ppo" else "Pendulum-v1"
        env = ENV.replace("ID", name).replace("REQUEST", str(request)).rstrip()
        return (PPO if self.kind == "ppo" else SAC).replace("ENV", env) + HOST

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
        return -(-int(self.settings["training.total_steps"]) // self.iteration_steps)


def plan(seed: int, kills: int = KILLS, hangs: int = 0, *, short: bool = False) -> Plan:
    """The run of a seed, with so many kills and hangs; even seeds are PPO's."""
    random = Random(seed)
    kind: Kind = "sac" if seed % 2 else "ppo"
    rollouts = random.choice((0, 1, 2))
    actors = random.choice((1, 2))
    total = {"ppo": 40_960, "sac": 6_400}[kind] // (8 if short else 1)
    settings: Settings = {
        "seed": seed,
        "env.stages": random.choice((1, 2)),
        "training.total_steps": total,
        "training.max_staleness": random.choice((0, 1)),
        "cluster.actors": actors,
        "cluster.rollout_workers": rollouts,
    }
    if kind == "ppo":
        settings["training.rollout_epochs"] = random.choice((1, 2, 4))
    else:
        settings["replay.sampling"] = random.choice(("uniform", "prioritized"))
        settings["replay.n_step"] = random.choice((1, 3))
        settings["intervention.person"] = "tests.jobs.embodied_kills.person:holds_up"
    made = Plan(seed, kind, settings, (), short)
    others = [f"Rollout[{rank}]" for rank in range(rollouts)] or ["Env[1]"]
    victims = ["Env[0]", "Replay[0]" if kind == "sac" else random.choice(others)]
    victims += ["Person[0]"] if kind == "sac" else []
    victims += [f"Actor[{random.randrange(actors)}]", DRIVER]
    killed = [victims[-1 - one % len(victims)] for one in range(kills)]
    victims[0] = ENVIRONMENT
    hung = [victims[one % len(victims)] for one in range(hangs)]
    faults = [*product(killed, KILL), *product(hung, HANG)]
    random.shuffle(faults)
    # What is left after the last one takes longer than a restart.
    moments = sorted(random.choices(range(made.iterations * 2 // 3), k=len(faults)))
    drawn = (
        Kill(iteration, round(random.uniform(0.0, 1.0), 3), *fault)
        for iteration, fault in zip(moments, faults, strict=True)
    )
    return msgspec.structs.replace(made, kills=tuple(drawn))
