"""The ``embodied_offline`` job, as the command line uses it: checks a configuration, runs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from rlinf_async.messages.spaces import EnvSpec
from rlinf_async.runtime.jobs.embodied.beginning import Beginning, begins_with
from rlinf_async.runtime.jobs.embodied.run import COLUMNS, OF_EPISODES
from rlinf_async.runtime.jobs.embodied.settings import (
    check_host,
    check_judging_env,
)
from rlinf_async.runtime.jobs.embodied_offline.config import (
    MAY_DIFFER,
    FittedOffline,
    OfflineConfig,
    check_sizes,
    fitted,
)
from rlinf_async.runtime.jobs.embodied_offline.run import OfflineRun
from rlinf_async.runtime.jobs.embodied_sac.job import (
    ReplayJob,
    check_store,
    checked_demonstrations,
)
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


class EmbodiedOffline(ReplayJob[OfflineConfig, FittedOffline]):
    """Learning from demonstrations alone, over env, rollout, replay and actor workers."""

    name = "embodied_offline"
    config_type = OfflineConfig
    may_differ = MAY_DIFFER
    run_type = OfflineRun

    def check_settings(self, config: OfflineConfig, devices: Sequence[Device] | None) -> None:
        check_sizes(config)
        check_host(config, devices, config.actor.fsdp.device)

    def fitted(self, config: OfflineConfig, spec: EnvSpec) -> FittedOffline:
        return fitted(config, spec)

    def checked(self, config: OfflineConfig, spec: EnvSpec) -> FittedOffline:
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

    def begins_with(self, full: FittedOffline, *, starts: bool = False) -> Beginning | None:
        def make_model() -> nn.Module:
            from rlinf_async.backends.building import building
            from rlinf_async.backends.fsdp.offline import MODELS

            offline = full.actor.offline
            with building(full.actor.seed):
                return MODELS[offline.algorithm](full.policy, offline)

        return begins_with(full, self, make_model, prefix="policy.", starts=starts)
