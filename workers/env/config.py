"""The configuration of environments, their seeds, and their errors.

::

    EnvError                 an environment cannot be used, or failed while it ran
    +-- EnvFailed            it raised, or returned what cannot be trained on: names env, step, seed
    LabelError               a reward function raised, or returned what is no reward: names it
    RolloutGone              no rollout worker is left that could answer (a ChannelError)

A wrong configuration raises `rlinf_async.config.UsageError` before any environment is made. Seeds
of environments and of evaluation episodes are different for any two.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from typing import Any, Final, Literal

import msgspec
import numpy as np

from rlinf_async.channels import ChannelError
from rlinf_async.config import ConfigError
from rlinf_async.config.counts import check_bounds
from rlinf_async.config.registry import Registry, raised
from rlinf_async.messages.described import EnvError
from rlinf_async.realtime import ControlConfig
from rlinf_async.workers.foreign_calls import Limits

Autoreset = Literal["same_step", "next_step", "disabled"]


MOST_ENVS: Final = 65_536
"""environments of one worker: more than any simulator steps at once"""
MOST_FAILURES: Final = 100
"""default of ``max_failures``"""


environments: Registry[Callable[..., Any]] = Registry(
    "environment", group="rlinf_async.environments"
)
"""functions that ``entry_point`` names"""


class EnvRewardConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who says what steps pay, and whether they have succeeded, in place of the environment."""

    function: str = ""
    """``"file.py:function"`` or ``"module:function"``, see `rlinf_async.workers.env.labels`; empty:
    the environment says it"""
    classifier: str = ""
    """folder of a classifier of success, which ``rlinf-async classifier`` has written: 1 is paid
    for each step that is one, 0 for any other"""
    threshold: float = 0.5
    """probability from which a step is a success for the classifier"""
    ends: bool = False
    """whether an episode terminates with its first success"""

    def __post_init__(self) -> None:
        if self.function and self.classifier:
            raise ConfigError(
                f"{self.function!r}, but classifier = {self.classifier!r} would say, too, what is "
                "paid: leave one of the two out",
                path=("function",),
            )
        check_bounds(self, "threshold", above=0, below=1)
        if self.threshold != 0.5 and not self.classifier:
            raise ConfigError(
                f"{self.threshold} was given, but there is no classifier: name its folder in "
                "classifier, or leave it out",
                path=("threshold",),
            )
        if self.ends and not self.labels:
            raise ConfigError(
                "true, but it is the environment that says what a success is, and when it ends: "
                "name a function or a classifier, or leave it out",
                path=("ends",),
            )

    @property
    def labels(self) -> bool:
        """Whether anybody but the environment says it."""
        return bool(self.setting)

    @property
    def setting(self) -> str:
        """Name of the setting that says who; empty: the environment says it itself."""
        return "classifier" if self.classifier else "function" if self.function else ""

    @property
    def said_by(self) -> str:
        """Who says it, wherever their file lies; empty: the environment does."""
        if not self.labels:
            return ""
        name = getattr(self, self.setting).rstrip("/").rpartition("/")[2]
        threshold = f" at {self.threshold:g}" if self.classifier else ""
        return f"{self.setting} {name}{threshold}{', which ends episodes' * self.ends}"


class EnvConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The environments of each env worker."""

    id: str = ""
    """registered Gymnasium id; with ``entry_point``, a name for reports"""
    entry_point: str = ""
    """``"module:function"``, ``"file.py:function"``, or the name that a package gives one: takes
    ``kwargs``, returns the env"""
    kwargs: dict[str, Any] = {}
    """arguments of ``gymnasium.make`` or of the entry point"""
    options: dict[str, Any] = {}
    """options of each ``reset``"""
    envs: int = 8
    """number of environments in each worker"""
    stages: int = 2
    """number of groups of environments: while one waits for its actions, another steps"""
    parallel: bool = False
    """whether each stage steps and resets in a thread of its own: a slow one then holds no other"""
    seed: int = 0
    simulator: Literal["single", "pool", "vector", "envpool", "async"] = "single"
    """``single``: environments one by one; ``pool``: each in a process of its own. Or one that
    steps many in a call: ``vector``, made by ``gymnasium.make_vec`` or by the entry point, which is
    given ``num_envs``; ``envpool``; ``async``, made by the entry point, which is given ``num_envs``
    and ``seed``"""
    ready: int | Literal["auto", "adaptive"] = "auto"
    """environments of a stage that have to be ready before the policy answers them; ``adaptive``:
    as many as are worth waiting for; ``auto``: that, where the simulator says which are ready"""
    autoreset: Literal["auto", "same_step", "next_step", "disabled"] = "auto"
    """how a vector simulator begins episodes; ``auto``: as its metadata say"""
    probe: bool = True
    """whether a reset and a step are tried before anything starts, in an environment of its own"""
    make_seconds: float | None = 300.0
    """limit on making an environment, after which its process is killed; None: no limit"""
    reset_seconds: float | None = 60.0
    """limit on a reset, and on closing"""
    step_seconds: float | None = 60.0
    """limit on a step, and on a picture"""
    max_memory_mb: float | None = None
    """megabytes that an environment's process may have in memory, after which it is killed: with
    ``pool`` its own, else that of the env worker; None: no limit"""
    max_failures: int = MOST_FAILURES
    """episodes of a run that may end with their environment's process, after which the run ends"""
    actions: Literal["clip", "rescale"] = "clip"
    """continuous actions are clipped to the bounds, or [-1, 1] is rescaled to the bounds"""

    action_chunk: int = 1
    """actions that the policy answers with at once, and that are executed one by one"""
    control: ControlConfig = ControlConfig()
    """commands at a fixed rate: real time"""
    reward: EnvRewardConfig = EnvRewardConfig()
    group_size: int = 1
    """environments that begin an iteration in the same state; above 1, an iteration is one episode
    of each: steps after its end are not trained"""

    def __post_init__(self) -> None:
        if not self.id and not self.entry_point:
            raise ValueError(
                'which environment? give id, as in id = "FetchReachDense-v4", or entry_point, '
                'as in entry_point = "my_module:make_env"'
            )
        module, _, function = self.entry_point.rpartition(":")
        named = not self.entry_point or self.entry_point in environments
        if not named and not (module and function):
            raise ValueError(
                f"entry_point is {self.entry_point!r}; it must be 'module:function', "
                "'file.py:function', or a name of the entry point group rlinf_async.environments"
            )
        if self.envs < 1 or self.stages < 1 or self.seed < 0:
            raise ValueError(
                f"envs is {self.envs}, stages is {self.stages}, seed is {self.seed}; envs and "
                "stages must be at least 1, seed at least 0"
            )
        if self.envs > MOST_ENVS:
            raise ValueError(
                f"envs is {self.envs}; one env worker can have {MOST_ENVS} at most: use more "
                "env_workers"
            )
        if self.action_chunk < 1 or self.group_size < 1:
            raise ValueError(
                f"action_chunk is {self.action_chunk}, group_size is {self.group_size}; both must "
                "be at least 1"
            )
        if self.many_in_a_call and (self.action_chunk > 1 or self.group_size > 1):
            raise ValueError(
                f"simulator = {self.simulator!r} takes one action at a time and begins episodes by "
                f"itself, but action_chunk is {self.action_chunk}, group_size is {self.group_size}"
                ": leave both out, or use simulator = 'single' or 'pool'"
            )
        if self.many_in_a_call and self.options:
            raise ConfigError(
                f"{self.options} were given, but simulator = {self.simulator!r} begins episodes by "
                "itself, and is told none: leave them out, or use simulator = 'single' or 'pool'",
                path=("options",),
            )
        if self.simulator == "envpool" and self.entry_point:
            raise ValueError(
                "simulator = 'envpool' makes environments by their id: leave entry_point out, or "
                "use simulator = 'vector' for an entry point that returns a batched environment"
            )
        if self.simulator == "async" and not self.entry_point:
            raise ValueError(
                "simulator = 'async' needs entry_point, a function that is given num_envs and seed "
                "and returns the simulator; simulator = 'pool' steps environments of Gymnasium "
                "asynchronously, by their id"
            )
        if self.envs // self.stages % self.group_size:
            raise ValueError(
                f"envs = {self.envs} in stages = {self.stages} are {self.envs // self.stages} "
                f"environments in each stage, which are no whole groups of group_size = "
                f"{self.group_size}"
            )
        if self.envs % self.stages:
            raise ValueError(
                f"envs = {self.envs} cannot be divided into stages = {self.stages} groups of equal "
                f"size: take a multiple of {self.stages}, or stages = 1"
            )
        if self.autoreset != "auto" and not self.many_in_a_call:
            raise ValueError(
                f"autoreset is {self.autoreset!r}, but environments of simulator = "
                f"{self.simulator!r} are reset one by one when their episodes end: leave autoreset "
                "out, or use simulator = 'vector', 'envpool' or 'async', which step many in a call"
            )
        self._check_limits()
        self._check_control()
        self._check_reward()
        self._check_ready()
        self._check_steps()

    def _check_limits(self) -> None:
        for setting in ("make_seconds", "reset_seconds", "step_seconds"):
            limit = getattr(self, setting)
            if limit is not None and not 0.0 < limit < math.inf:
                raise ValueError(
                    f"{setting} is {limit}; it must be seconds above 0, or 'none' for no limit"
                )
        memory = self.max_memory_mb
        if memory is not None and not 0.0 < memory < math.inf:
            raise ValueError(
                f"max_memory_mb is {memory}; it must be megabytes above 0, or 'none' for no limit"
            )
        if self.max_failures < 0:
            raise ValueError(f"max_failures is {self.max_failures}; it must be at least 0")

    def _check_control(self) -> None:
        """Each environment needs somebody who answers it at once, and time of its own."""
        control = self.control
        if not control.hz:
            return
        try:
            between = control.steps_between(self.action_chunk)
        except ConfigError as error:
            raise ConfigError(error.problem, path=("control", *error.path)) from None
        least = between * control.period
        if self.step_seconds is not None and self.step_seconds <= least:
            raise ConfigError(
                f"{self.step_seconds:g}, but in real time the {between} steps between two "
                f"questions (control.every) take {least:g} seconds: allow more",
                path=("step_seconds",),
            )
        if self.many_in_a_call:
            raise ConfigError(
                f"{control.hz:g}, but simulator = {self.simulator!r} steps many environments in a "
                "call: leave it out, or use simulator = 'single' or 'pool'",
                path=("control", "hz"),
            )
        alone = self.envs == self.stages and (self.stages == 1 or self.parallel)
        if self.simulator == "single" and not alone:
            raise ConfigError(
                f"{control.hz:g}, but with simulator = 'single' and envs = {self.envs} in stages = "
                f"{self.stages} one environment waits for another: set envs = 1 and stages = 1, or "
                "stages = envs and parallel = true, or simulator = 'pool'",
                path=("control", "hz"),
            )
        if self.group_size > 1:
            raise ConfigError(
                f"{control.hz:g}, but in real time no two episodes of a group are alike: leave "
                "group_size out",
                path=("control", "hz"),
            )

    def _check_reward(self) -> None:
        """Simulators of many begin episodes by themselves, some before others are ready."""
        reward = self.reward
        if reward.labels and self.asynchronous and self.simulator != "pool":
            raise ConfigError(
                f"{getattr(reward, reward.setting)!r}, but simulator = {self.simulator!r}, in "
                "which some environments are ready before others, is not asked step by step: leave "
                "it out, or use simulator = 'single', 'pool' or 'vector', or 'envpool' without "
                "ready",
                path=("reward", reward.setting),
            )
        if reward.ends and self.many_in_a_call:
            raise ConfigError(
                f"true, but simulator = {self.simulator!r} ends and begins episodes by itself: "
                "leave it out, or use simulator = 'single' or 'pool'",
                path=("reward", "ends"),
            )

    def _check_steps(self) -> None:
        """Vector environments take this argument of Gymnasium unseen: their steps would fail."""
        steps = self.kwargs.get("max_episode_steps")
        unlimited = steps == -1 and not self.many_in_a_call
        if self.entry_point or steps is None or unlimited:
            return
        if type(steps) is not int or steps < 1:
            raise ConfigError(
                f"expected a whole number from 1, found {steps!r}",
                path=("kwargs", "max_episode_steps"),
            )

    def _check_ready(self) -> None:
        if self.ready == "auto":
            return
        if self.simulator in ("single", "vector"):
            raise ValueError(
                f"ready is {self.ready!r}, but the environments of simulator = {self.simulator!r} "
                "are all ready at the same time: leave ready out, or use simulator = 'pool', which "
                "gives each environment a process of its own"
            )
        if self.ready != "adaptive" and not 1 <= self.ready <= self.envs_per_stage:
            raise ValueError(
                f"ready is {self.ready}; it must be 'adaptive' or lie between 1 and the "
                f"{self.envs_per_stage} environments of a stage (envs / stages)"
            )

    @property
    def name(self) -> str:
        """The name of the environment in reports."""
        return self.id or self.entry_point

    @property
    def limits(self) -> Limits:
        """Limits of the calls of environments in a worker's process, and of that process: with a
        pool its memory has none."""
        memory = 0.0 if self.simulator == "pool" else self.max_memory_mb or 0.0
        return self.limits_in_pool._replace(memory=memory)

    @property
    def limits_in_pool(self) -> Limits:
        """Limits of the calls of environments that have processes of their own, and of those."""
        return Limits(
            make=self.make_seconds or 0.0,
            reset=self.reset_seconds or 0.0,
            step=self.step_seconds or 0.0,
            memory=self.max_memory_mb or 0.0,
        )

    @property
    def steps_per_answer(self) -> int:
        """Steps of an environment between two questions to the policy."""
        if not self.control.hz:
            return self.action_chunk
        return self.control.steps_between(self.action_chunk)

    @property
    def envs_per_stage(self) -> int:
        """The number of environments in each group."""
        return self.envs // self.stages

    @property
    def many_in_a_call(self) -> bool:
        """Whether one simulator steps the environments of a stage."""
        return self.simulator in ("vector", "envpool", "async")

    @property
    def asynchronous(self) -> bool:
        """Whether environments of a stage are answered as they get ready."""
        if self.simulator == "envpool":
            return self.ready not in ("auto", self.envs_per_stage)
        return self.simulator in ("pool", "async")

    @property
    def threads(self) -> bool:
        """Whether each stage has a thread of its own."""
        return self.parallel or (self.asynchronous and self.stages > 1)

    @property
    def rendering(self) -> bool:
        """Whether the environment has a renderer, which must stay in the thread that made it."""
        return self.kwargs.get("render_mode") is not None


def is_interrupt(error: BaseException) -> bool:
    """Whether an error is the user's Ctrl-C, which nobody handles, and not one that the environment
    raised.

    Everything else that comes out of a call of an environment is its error: SystemExit too, and
    what a library in Rust raises where it panics.
    """
    return (
        isinstance(error, KeyboardInterrupt)
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )


def not_made(what: str, error: BaseException, hint: str = "") -> EnvError:
    """The error where the making of an environment raised; a Ctrl-C is raised as it is."""
    if is_interrupt(error):
        raise error
    return EnvError(f"{what} raised {raised(error)}{hint}")


class LabelError(RuntimeError):
    """A reward function raised, or returned what is no reward; the message names it."""


class EnvFailed(EnvError):
    """One environment raised, or returned what cannot be trained on: NaN, infinity, a reward beyond
    `MAX_REWARD`."""


class RolloutGone(ChannelError):
    """The channel of answers has ended while a question was open."""


_TRAINING: Final = 0
_EVALUATION: Final = 1


def env_seed(seed: int, *, rank: int, stage: int, env: int, incarnation: int) -> int:
    """The seed of one environment; it differs after each restart of its worker."""
    return _mix(seed, _TRAINING, rank, stage, env, incarnation)


def episode_seed(seed: int, episode: int) -> int:
    """The seed of one episode of an evaluation, in whichever worker it runs."""
    return _mix(seed, _EVALUATION, episode)


def _mix(*parts: int) -> int:
    return int(np.random.SeedSequence(parts).generate_state(1)[0])
