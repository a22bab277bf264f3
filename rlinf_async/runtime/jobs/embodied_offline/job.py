"""The ``embodied_offline`` job, as the command line uses it: checks a configuration, runs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from rlinf_async.messages.spaces import EnvSpec
from rlinf_async.observe.run_folder import RunFolder
from rlinf_async.observe.summary import EmbodiedSummary
from rlinf_async.runtime.jobs.embodied.beginning import Beginning, as_begun, begins_with, pinned
from rlinf_async.runtime.jobs.embodied.choosing import planned, tried_and_chosen
from rlinf_async.runtime.jobs.embodied.playing import TrainedPolicy, check_scripted_policy
from rlinf_async.runtime.jobs.embodied.run import COLUMNS, OF_EPISODES
from rlinf_async.runtime.jobs.embodied.settings import (
    check_host,
    check_judging_env,
    described,
    described_for_run,
)
from rlinf_async.runtime.jobs.embodied_offline.config import (
    MAY_DIFFER,
    FittedOffline,
    OfflineConfig,
    check_sizes,
    fitted,
)
from rlinf_async.runtime.jobs.embodied_offline.run import OfflineRun
from rlinf_async.runtime.jobs.embodied_sac.job import check_store, checked_demonstrations, reads_of
from rlinf_async.runtime.jobs.embodied_sac.run import make_trainer
from rlinf_async.runtime.jobs.placement import PlacementPlan
from rlinf_async.runtime.jobs.run import run_in_folder
from rlinf_async.runtime.jobs.targets import check_targets
from rlinf_async.workers.base import Device

if TYPE_CHECKING:
    from torch import nn

OF_LOSSES: Final = (
    *("critic_loss", "value_loss", "policy_loss", "advantage", "weight", "value"),
    *("grad_norm", "updates"),
)
"""columns of learning from data alone"""
ELSEWHERE: Final[Mapping[str, str]] = dict.fromkeys(
    (*OF_EPISODES, "eval_return", "eval_success_rate"),
    "is of episodes, and no iteration plays one: they are evaluated at the end",
)


class EmbodiedOffline:
    """Learning from demonstrations alone, over env, rollout, replay and actor workers."""

    name = "embodied_offline"
    config_type = OfflineConfig

    def plan(self, config: OfflineConfig, devices: Sequence[Device] | None = None) -> PlacementPlan:
        """The devices of every worker: on this host, or on a machine with these devices."""
        return planned(config, devices)

    def check(self, config: OfflineConfig, devices: Sequence[Device] | None = None) -> None:
        """Check all that can be checked before a worker starts; asks an environment.

        Args:
            config: the run's configuration.
            devices: devices of the machine to check for; None: this host's.

        Raises:
            UsageError: with the setting, and what is wrong with it.
        """
        check_sizes(config)
        check_host(config, devices, config.actor.fsdp.device)
        self._begins_with(self._fitted(config, described(config)))
        if config.demonstrations.policy:
            check_scripted_policy(config, config.demonstrations.policy)

    def run(self, config: OfflineConfig, out: Path | None, resume: bool) -> EmbodiedSummary:
        """Train, evaluate, and leave everything in the run folder."""
        config = pinned(config, out, resume=resume)
        full = self._fitted(config, described_for_run(config))
        beginning = self._begins_with(full, starts=True)
        cluster = tried_and_chosen(config, full)
        full = msgspec.structs.replace(full, cluster=cluster)
        as_run = msgspec.structs.replace(as_begun(config, beginning), cluster=cluster)

        def build(folder: RunFolder) -> OfflineRun:
            return OfflineRun(full, folder, beginning)

        return run_in_folder(
            as_run, out, resume=resume, may_differ=MAY_DIFFER, build=build, reads=reads_of
        )

    def trained(self, config: OfflineConfig) -> TrainedPolicy:
        """Return what lets a policy act that was trained with this configuration."""
        full = fitted(config, described(config))
        return TrainedPolicy(full, partial(make_trainer, full, OfflineRun.trainer))

    def _fitted(self, config: OfflineConfig, spec: EnvSpec) -> FittedOffline:
        full = fitted(config, spec)
        check_judging_env(config, spec)
        check_store(full, checked_demonstrations(full, spec))
        training, valued = full.training, full.actor.offline.algorithm == "iql"
        own = [name for name in OF_LOSSES if valued or name != "value_loss"]
        check_targets(
            training.stop_at,
            training.keep_best,
            [*own, *(name for name in COLUMNS if name not in OF_EPISODES)],
            elsewhere=ELSEWHERE,
            iterations=full.iterations,
            checkpoint_every=training.checkpoint_every,
        )
        return full

    def _begins_with(self, full: FittedOffline, *, starts: bool = False) -> Beginning | None:
        def make_model() -> nn.Module:
            from rlinf_async.backends.building import building
            from rlinf_async.backends.fsdp.offline import MODELS

            offline = full.actor.offline
            with building(full.actor.seed):
                return MODELS[offline.algorithm](full.policy, offline)

        return begins_with(full, self, make_model, prefix="policy.", starts=starts)
