"""What the workers ask of a backend. numpy in, numpy out: nothing here needs torch.

::

    PolicyBackend    rollout worker: observations -> actions, under one weight version
    TrainerBackend   actor worker: trajectories -> a better policy, its weights, its checkpoints

A backend is loaded by name with `rlinf_async.backends.registry.load_policy_backend` and
`load_trainer_backend`, so that only the worker that computes imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple, Protocol

from rlinf_async.messages.embodied import Floats, Ints, Trajectory
from rlinf_async.messages.weights import WeightUpdate


class PolicyAnswer(NamedTuple):
    """What the policy does for ``N`` observations."""

    action: Floats | Ints
    """``[N, A]``, or int64 ``[N]``"""
    log_prob: Floats
    """``[N]``, of the distribution that was sampled from"""
    value: Floats
    """``[N]``"""


class PolicyOutputError(RuntimeError):
    """The policy returned NaN or infinity; the message names the tensor and the version."""


class TrainingDiverged(RuntimeError):
    """No update of a whole iteration could be applied: the gradients are not finite."""


class PolicyBackend(Protocol):
    """A policy that answers. Not thread-safe: one compute thread calls it."""

    @property
    def version(self) -> int:
        """The version of the loaded weights; -1 before the first."""
        ...

    def load(self, update: WeightUpdate) -> None:
        """Take the weights of ``update``. Raises before anything changed if they do not fit."""
        ...

    def act(self, observation: Floats) -> PolicyAnswer:
        """Sample actions for ``[N, D]`` observations."""
        ...

    def mode(self, observation: Floats) -> Floats | Ints:
        """Return the most likely actions for ``[N, D]`` observations."""
        ...

    def value(self, observation: Floats) -> Floats:
        """Return values ``[N]`` of ``[N, D]`` observations."""
        ...


class TrainerBackend(Protocol):
    """A policy that learns. Not thread-safe: one compute thread calls it."""

    @property
    def version(self) -> int:
        """How many iterations were trained."""
        ...

    def train(self, trajectories: Sequence[Trajectory]) -> Mapping[str, float]:
        """Train on one iteration, update the normalisers, and count the version up."""
        ...

    def publish(self) -> WeightUpdate:
        """Return the weights and normalisers of the present version. Collective over ranks."""
        ...

    def save_checkpoint(self, path: Path) -> None:
        """Write a checkpoint folder, atomically. Collective over ranks."""
        ...

    def begin_checkpoint(self, path: Path) -> Future[Path]:
        """Start writing what `save_checkpoint` writes, and go on. Collective over ranks.

        Waits for the one before. The future ends when this rank's part is on the disk, or has its
        error; when all ranks' parts are, the folder is there.
        """
        ...

    def load_checkpoint(self, path: Path) -> None:
        """Go on where the checkpoint was written, under any world size. Collective over ranks."""
        ...
