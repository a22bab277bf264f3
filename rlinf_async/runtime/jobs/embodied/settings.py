"""What the jobs in environments have in common: the settings that collectors and reports read."""

from __future__ import annotations

from typing import Protocol

from rlinf_async.backends.policies.config import PolicyConfig
from rlinf_async.runtime.jobs.embodied.config import ClusterConfig, EvaluationConfig
from rlinf_async.workers.env.config import EnvConfig
from rlinf_async.workers.rollout.config import RolloutConfig


class Admission(Protocol):
    """How far collectors may be ahead of the training."""

    @property
    def max_staleness(self) -> int:
        """Iterations that are collected ahead."""
        ...


class EnvironmentSettings(Protocol):
    """A configuration of a job in environments, fitted to its environment."""

    @property
    def name(self) -> str: ...
    @property
    def seed(self) -> int: ...
    @property
    def env(self) -> EnvConfig: ...
    @property
    def training(self) -> Admission: ...
    @property
    def rollout(self) -> RolloutConfig: ...
    @property
    def evaluation(self) -> EvaluationConfig: ...
    @property
    def cluster(self) -> ClusterConfig: ...

    @property
    def acting_policy(self) -> PolicyConfig:
        """The policy that acts in the environments."""
        ...

    @property
    def trajectories(self) -> int:
        """Trajectories of one iteration."""
        ...

    @property
    def iterations(self) -> int:
        """Iterations of the whole run."""
        ...
