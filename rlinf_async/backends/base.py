"""The interfaces of backends. numpy in, numpy out: nothing here needs torch.

::

    PolicyBackend    rollout worker: observations -> actions, under one weight version
    TrainerBackend   actor worker: trajectories -> a better policy, its weights, its checkpoints
    OffPolicyTrainer actor worker: batches of a replay worker -> the same

A backend is loaded by name (`rlinf_async.backends.parts`), so that only the worker that computes
imports torch.

Settings of optimizers, and errors that every backend may raise, are here as well.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

import msgspec

from rlinf_async.config.counts import check_between, check_bounds
from rlinf_async.messages.embodied import Floats, Ints, ReplayBatch, Trajectory
from rlinf_async.messages.spaces import ObservationArray
from rlinf_async.messages.weights import WeightUpdate
from rlinf_async.parallel import Strategy


class PolicyAnswer(NamedTuple):
    """Output of the policy for ``N`` observations."""

    action: Floats | Ints
    """``[N, A]``, or int64 ``[N, A]``, or int64 ``[N]``"""
    log_prob: Floats
    """``[N]``, of the distribution that was sampled from"""
    value: Floats
    """``[N]``"""
    memory: Floats | None = None
    """``[N, H]``, of a recurrent policy: after these observations"""
    chain: Floats | None = None
    """``[N, C]``, of a flow policy: how its actions came about"""


class PolicyOutputError(RuntimeError):
    """The policy returned NaN or infinity; the message names the tensor and the version."""


class TrainingDiverged(RuntimeError):
    """No update of a whole iteration could be applied: the gradients are not finite."""


class StrategyUnknown(RuntimeError):
    """The strategy of the other ranks cannot be known on this rank: it has to be ended."""


class NotSetUp(RuntimeError):
    """Something was asked of an object that has to be set up first; the message says by what."""


class OffloadedError(RuntimeError):
    """Weights or optimizer are offloaded: take them back to the device first."""


class IdleRank(RuntimeError):
    """The rank holds no part of the model: the strategy does not use it."""


class _MadeBy:
    def __init__(self, call: str) -> None:
        self._call = call

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name.strip("_")

    def __get__(self, instance: object | None, owner: type) -> Any:
        if instance is None:
            return self
        raise NotSetUp(f"{owner.__name__} has no {self._name} yet: call {self._call} first")


def made_by(call: str) -> Any:
    """Return the default of an attribute that a call sets; reading it before raises `NotSetUp`."""
    return _MadeBy(call)


class PolicyBackend(Protocol):
    """A policy that acts. Not thread-safe: one compute thread calls it."""

    @property
    def version(self) -> int:
        """The version of the loaded weights; -1 before the first."""
        ...

    def load(self, update: WeightUpdate) -> None:
        """Load the weights of ``update``. Raises, before anything changed, if they do not fit."""
        ...

    def act(self, observation: ObservationArray) -> PolicyAnswer:
        """Sample actions for ``[N, D]`` observations."""
        ...

    def mode(self, observation: ObservationArray) -> Floats | Ints:
        """Return the most likely actions for ``[N, D]`` observations."""
        ...

    def value(self, observation: ObservationArray) -> Floats:
        """Return values ``[N]`` of ``[N, D]`` observations."""
        ...


@runtime_checkable
class RecurrentPolicyBackend(PolicyBackend, Protocol):
    """A policy that acts by what it saw before, too. It keeps nothing itself: what it remembers is
    given with each observation, ``[N, H]``, zeros at the beginning of an episode."""

    @property
    def memory_size(self) -> int:
        """``H``"""
        ...

    def act_from(self, observation: ObservationArray, memory: Floats) -> PolicyAnswer:
        """Act as `act` does; the answer has the memory after these observations."""
        ...

    def mode_from(
        self, observation: ObservationArray, memory: Floats
    ) -> tuple[Floats | Ints, Floats]:
        """Return the most likely actions, and the memory after these observations."""
        ...

    def value_from(self, observation: ObservationArray, memory: Floats) -> Floats:
        """Return the values as `value` does, from the memory before these observations."""
        ...


class Trainer(Protocol):
    """A model that learns, of any kind. Not thread-safe: one compute thread calls it."""

    @property
    def version(self) -> int:
        """Number of iterations that were trained."""
        ...

    def begin_checkpoint(self, path: Path) -> Future[Path]:
        """Start writing a checkpoint folder, and return. Collective over ranks.

        Waits for the checkpoint before. The future ends when this rank's part is on the disk, or
        has its error; when all ranks' parts are, the folder exists.
        """
        ...

    def load_checkpoint(self, path: Path) -> object:
        """Continue where the checkpoint was written, under any world size. Collective."""
        ...


class WorldModelLearner(Trainer, Protocol):
    """A world model that learns. All methods are collective."""

    def train(self, steps: int) -> Mapping[str, float]:
        """Take optimizer steps; count an iteration; return means of losses and norms."""
        ...

    def measure(self) -> Mapping[str, float]:
        """Compare the model with held-out episodes."""
        ...

    def export(self, file: Path) -> None:
        """Write the model's file, from rank 0."""
        ...


class FirstWeights(msgspec.Struct, frozen=True, kw_only=True):
    """Weights of another run, with which a run begins."""

    folder: str
    """folder of a checkpoint, or of an exported policy"""
    tensors: dict[str, str]
    """tensors that are taken: name in the model that is trained -> name in the folder"""


@runtime_checkable
class TakesWeights(Protocol):
    """A trainer that can begin with weights of another run."""

    def take_weights(self, first: FirstWeights) -> None:
        """Take these tensors; optimizer, counters and version stay as they are. Collective."""
        ...


class TrainerBackend(Trainer, Protocol):
    """A policy that learns."""

    def train(self, trajectories: Sequence[Trajectory]) -> Mapping[str, float]:
        """Train on one iteration, update the normalisers, and count the version up."""
        ...

    def clone(self) -> Mapping[str, float]:
        """Learn from the configured demonstrations, before the first iteration; return metrics."""
        ...

    def publish(self) -> WeightUpdate:
        """Return the weights and normalisers of the present version. Collective over ranks."""
        ...


class GradientStep(NamedTuple):
    """Results of one gradient step."""

    metrics: Mapping[str, float]
    error: Floats
    """``[B]``: absolute temporal-difference errors, before the step, of the shares of all ranks"""


class OffPolicyTrainer(Trainer, Protocol):
    """A policy that learns from transitions of any age."""

    def step(self, batch: ReplayBatch) -> GradientStep:
        """Take one gradient step from this rank's share of the batch. Collective over ranks."""
        ...

    def end_iteration(self) -> None:
        """Count the version up."""
        ...

    def publish(self) -> WeightUpdate:
        """Return the policy's weights of the present version. Collective over ranks."""
        ...


class RescaleReport(NamedTuple):
    """Result of a change of strategy, on one rank."""

    old_strategy: Strategy
    new_strategy: Strategy
    active: bool
    """whether this rank trains now"""
    seconds: float
    """seconds from the call to the commit, waiting for other ranks included"""
    sent_bytes: int
    received_bytes: int
    peak_bytes: int
    """largest size of all buckets at one time, beside old and new shards"""
    kept_bytes: int
    """bytes of the new shards that stayed in place"""
    extras: tuple[bytes, ...]
    """``extra`` of each of the old active ranks"""


@runtime_checkable
class Rescalable(Protocol):
    """A trainer whose strategy can change while it trains.

    Of a strategy only the sizes count: how a backend spreads a parameter over data ranks is its
    own choice. The first ``strategy.world_size`` of the launched ranks train.
    """

    @property
    def strategy(self) -> Strategy:
        """The strategy that is in force."""
        ...

    def check_strategy(self, strategy: Strategy, /) -> None:
        """Raise `StrategyError`, with the nearest sizes that fit, unless this trainer could train
        under the strategy. Nothing is started or changed."""
        ...

    def rescale(
        self, strategy: Strategy, *, timeout: float, bucket_bytes: int, objection: str = ""
    ) -> RescaleReport:
        """Train under another strategy from now on. Collective over launched ranks.

        Args:
            timeout: seconds, waiting for other ranks included.
            bucket_bytes: memory for buckets.
            objection: why this rank cannot change; no rank changes then.

        Raises when it failed; then every rank is as before. Raises `StrategyUnknown` when this rank
        cannot know that.
        """
        ...

    def skip_iteration(self) -> None:
        """Count an iteration that the active ranks train, on an idle one."""
        ...


class OptimizerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """AdamW. Comparisons are written so that NaN fails them."""

    lr: float = 3e-4
    value_lr: float | None = None
    """learning rate of the parameters that only the value uses; ``lr`` when left out"""
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-5
    weight_decay: float = 0.0
    max_grad_norm: float | None = 0.5
    """limit of the norm of all gradients together; None measures but does not clip"""

    def __post_init__(self) -> None:
        check_bounds(self, "lr", "value_lr", "eps", "max_grad_norm", above=0)
        check_bounds(self, "weight_decay", least=0)
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ValueError(f"betas is {self.betas}; both must be at least 0 and below 1")


class LoraConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Low-rank adapters (Hu et al. 2021): the model's own weights stay as they are."""

    rank: int = 0
    """rank of the update of each linear layer; 0: no adapters, all weights are trained"""
    alpha: float = 16.0
    """the update is multiplied by ``alpha / rank``"""

    def __post_init__(self) -> None:
        check_bounds(self, "rank", least=0)
        check_bounds(self, "alpha", above=0)


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The learning rate over optimizer steps, as a factor of its configured value."""

    kind: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    """the factor rises in a line from near 0 to 1"""
    total_steps: int = 0
    """linear and cosine reach ``min_factor`` here, and stay"""
    min_factor: float = 0.0

    def __post_init__(self) -> None:
        check_bounds(self, "warmup_steps", least=0)
        if self.kind != "constant" and self.total_steps <= self.warmup_steps:
            raise ValueError(
                f"total_steps is {self.total_steps}; a {self.kind} schedule with warmup_steps "
                f"{self.warmup_steps} needs more steps than that"
            )
        if self.kind == "constant" and self.total_steps:
            raise ValueError(
                f"total_steps is {self.total_steps}, but a constant schedule has no end: set kind "
                "to 'linear' or 'cosine', or leave it out"
            )
        check_between(self, "min_factor")


def lr_factor(step: int, config: SchedulerConfig) -> float:
    """Return the factor of the learning rate for optimizer step ``step``, counted from 0."""
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    if config.kind == "constant":
        return 1.0
    done = (step - config.warmup_steps) / (config.total_steps - config.warmup_steps)
    done = min(done, 1.0)
    left = 1.0 - done if config.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.min_factor + (1.0 - config.min_factor) * left


R = TypeVar("R")


class ShieldedTasks:
    """Work that is not left half done when whoever waits for it is cancelled.

    An error that nobody waits for any more is dropped.
    """

    def __init__(self) -> None:
        self._under_way = set[asyncio.Task[Any]]()

    async def run(self, work: Coroutine[Any, Any, R]) -> R:
        """Wait for the work; a cancellation ends the wait only."""
        task = asyncio.create_task(work)
        self._under_way.add(task)
        task.add_done_callback(self._ended)
        try:
            return await asyncio.shield(task)
        finally:
            del task  # or its error would hold this frame, and with it all that the work had

    async def wait(self) -> None:
        """Wait until nothing is under way."""
        while self._under_way:
            await asyncio.wait(self._under_way)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._under_way.discard(task)
        if not task.cancelled():
            task.exception()  # asyncio would report one that nobody has looked at
