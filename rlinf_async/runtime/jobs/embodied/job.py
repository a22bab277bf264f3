"""The ``embodied_ppo`` job, as the command line uses it: checks a configuration, and runs it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlinf_async.algorithms.config import OF_CORRECTION, LossConfig
from rlinf_async.backends.fsdp.config import OF_LOSS, OF_UPDATES, EmbodiedTrainerConfig
from rlinf_async.backends.policies.config import MLPS, ignored
from rlinf_async.config import ConfigError
from rlinf_async.config.registry import raised
from rlinf_async.data.config import DataError
from rlinf_async.data.demonstrations import check_demonstrations
from rlinf_async.observe.run_folder import RunFolder
from rlinf_async.runtime.jobs.config import Reads, every_file, model_files
from rlinf_async.runtime.jobs.embodied.beginning import (
    Beginning,
    begins_with,
    files_of,
)
from rlinf_async.runtime.jobs.embodied.environment_job import EnvironmentJob
from rlinf_async.runtime.jobs.embodied.playing import TrainerMaker
from rlinf_async.runtime.jobs.embodied.run import (
    COLUMNS,
    EmbodiedRun,
    check_judged,
    make_trainer,
)
from rlinf_async.runtime.jobs.embodied.settings import (
    MAY_DIFFER,
    EmbodiedConfig,
    check_host,
    check_judging_env,
    check_sizes,
    fitted,
)
from rlinf_async.workers.base import Device
from rlinf_async.workers.env import EnvSpec

if TYPE_CHECKING:
    from torch import nn

FSDP = ("actor", "fsdp")
OF_TRAINING = (*OF_UPDATES, "explained_variance")
"""columns of every loss"""


class EmbodiedPPO(EnvironmentJob[EmbodiedConfig, EmbodiedConfig]):
    """PPO on a Gymnasium environment, over env, rollout and actor workers."""

    name = "embodied_ppo"
    config_type = EmbodiedConfig
    may_differ = MAY_DIFFER

    def check_settings(self, config: EmbodiedConfig, devices: Sequence[Device] | None) -> None:
        check_sizes(config)
        _check_names(config)
        check_host(config, devices, config.actor.fsdp.device)

    def script_of(self, config: EmbodiedConfig) -> str:
        return config.demonstrations.policy

    def build(
        self, full: EmbodiedConfig, folder: RunFolder, beginning: Beginning | None
    ) -> EmbodiedRun:
        return EmbodiedRun(full, folder, beginning)

    def trainer(self, full: EmbodiedConfig) -> TrainerMaker:
        return partial(make_trainer, full)

    @staticmethod
    def reads(run: EmbodiedRun) -> Reads:
        actor = run.config.actor
        shown, model = actor.cloning.demonstrations, actor.fsdp.policy.vision_language.folder
        files: dict[str, tuple[Path, list[Path]]] = files_of(run.beginning)
        if shown:
            files["actor.cloning.demonstrations"] = Path(shown), every_file(Path(shown))
        if model:
            files["actor.fsdp.policy.vision_language.folder"] = (
                Path(model),
                model_files(Path(model)),
            )
        return Reads(files)

    def fitted(self, config: EmbodiedConfig, spec: EnvSpec) -> EmbodiedConfig:
        return fitted(config, spec)

    def checked(self, config: EmbodiedConfig, spec: EnvSpec) -> EmbodiedConfig:
        full = fitted(config, spec)
        _check_fit(full)
        check_judging_env(config, spec)
        _check_demonstrations(full, spec)
        check_judged(full, (*OF_TRAINING, *_columns_of_loss(full), *_columns_of_correction(full)))
        return full

    def begins_with(self, full: EmbodiedConfig, *, starts: bool = False) -> Beginning | None:
        def make_model() -> nn.Module:
            from rlinf_async.backends.building import building
            from rlinf_async.backends.policies.base import find_policy

            with building(full.actor.seed):
                return find_policy(full.acting_policy.name)(full.acting_policy)

        return begins_with(full, self, make_model, starts=starts)


def _check_fit(config: EmbodiedConfig) -> None:
    """Raise `ConfigError` where a policy or its levels do not fit the environment.

    Any callable can be registered as a policy; a subclass of `Policy` says what it takes.
    """
    policy = config.actor.fsdp.policy
    setting, problem = ignored(policy)
    if problem:
        raise ConfigError(problem, path=(*FSDP, "policy", *setting))
    levels = ("chunk",)
    if policy.name not in MLPS:
        from rlinf_async.backends.policies.base import find_policy

        found = find_policy(policy.name)
        levels = getattr(found, "levels", levels)
        if getattr(found, "recurrent", False):
            _check_recurrent(config)
        misfit = getattr(found, "misfit", None)
        if misfit is not None and (problem := misfit(policy)):
            raise ConfigError(f"policy {policy.name!r}: {problem}", path=(*FSDP, "policy", "name"))
        if getattr(found, "off_policy", False):
            raise ConfigError(
                f"policy {policy.name!r} has no value and learns from stored transitions: it is "
                "for job = 'embodied_sac'",
                path=(*FSDP, "policy", "name"),
            )
        if getattr(found, "rescaled", False) and config.env.actions != "rescale":
            raise ConfigError(
                f"{config.env.actions!r}, but the actions of policy {policy.name!r} are numbers in "
                "[-1, 1], which the environment stretches to its bounds: set actions = 'rescale'",
                path=("env", "actions"),
            )
        if not getattr(found, "normalizes", True) and not config.actor.normalize_observation:
            raise ConfigError(
                f"policy {policy.name!r} normalises observations by itself, whatever is set: leave "
                "it out",
                path=("actor", "normalize_observation"),
            )
        _check_entropy(config, found)
    for setting, level in (
        (("ppo", "log_prob_level"), config.actor.ppo.log_prob_level),
        (("advantage", "level"), config.actor.advantage.level),
    ):
        if level not in levels:
            raise ConfigError(
                f"{level!r}, but policy {policy.name!r} has one log-prob and one value for a whole "
                "answer: leave it out",
                path=("actor", *setting),
            )


def _columns_of_loss(config: EmbodiedConfig) -> Sequence[str]:
    """The columns of the loss: of one that is the user's own those that it returns for a small
    batch. Raises `ConfigError` where they are not known, but asked for, or are taken."""
    ppo, path = config.actor.ppo, ("actor", "ppo", "loss", "name")
    if ppo.loss.name == LossConfig().name:
        return OF_LOSS
    from rlinf_async.algorithms.losses import loss_functions, metrics_of

    loss = loss_functions.check(ppo.loss.name, path)
    try:
        found = metrics_of(loss, ppo.loss)
    except Exception as error:  # it may need more than a small batch has
        for section in ("stop_at", "keep_best"):
            metric = getattr(config.training, section).metric
            if metric and metric not in (*COLUMNS, *OF_TRAINING):
                raise ConfigError(
                    f"whether the loss {ppo.loss.name!r} has a column {metric!r} is not known: for "
                    f"a small batch it raised {raised(error)}",
                    path=("training", section, "metric"),
                ) from error
        return ()
    reserved = (*COLUMNS, *OF_TRAINING, *OF_CORRECTION)
    if taken := [name for name in found if name in reserved]:
        raise ConfigError(
            f"{ppo.loss.name!r} returns a metric {taken[0]!r}, which an iteration has already: "
            "give it another name",
            path=path,
        )
    if ppo.target_kl is not None and "approx_kl" not in found:
        raise ConfigError(
            f"{ppo.target_kl} is a limit of the metric 'approx_kl', which the loss "
            f"{ppo.loss.name!r} does not return: leave it out, or return it",
            path=("actor", "ppo", "target_kl"),
        )
    return found


def _columns_of_correction(config: EmbodiedConfig) -> Sequence[str]:
    """The columns of iterations for which an older policy acted, where there are such."""
    loss = config.actor.ppo.loss
    weighted = loss.proximal == "step" and loss.off_policy != "none"
    return OF_CORRECTION if weighted and config.training.max_staleness else ()


def _check_entropy(config: EmbodiedConfig, found: Any) -> None:
    """Raise `ConfigError` for a bonus for entropy that would do nothing."""
    misfit = getattr(found, "entropy_misfit", None)
    if misfit is None or not config.actor.ppo.loss.entropy_coefficient:
        return
    if problem := misfit(config.actor.fsdp.policy):
        raise ConfigError(problem, path=("actor", "ppo", "loss", "entropy_coefficient"))


def _check_recurrent(config: EmbodiedConfig) -> None:
    """Raise `ConfigError` for what a recurrent policy cannot have."""
    policy, steps = config.actor.fsdp.policy, config.training.steps_per_iteration
    ppo = config.actor.ppo
    for setting, size in (
        ("minibatch_size", ppo.minibatch_size),
        ("micro_batch_size", ppo.micro_batch_size or 0),
    ):
        if size % steps:
            raise ConfigError(
                f"{size} steps are no whole sequences of training.steps_per_iteration = {steps} "
                f"steps, on which the recurrent policy {policy.name!r} is trained: take a multiple "
                f"of {steps}",
                path=("actor", "ppo", setting),
            )
    if config.env.group_size > 1:
        raise ConfigError(
            f"{config.env.group_size}, but the recurrent policy {policy.name!r} is trained on "
            "whole iterations, not on groups of episodes: leave it out",
            path=("env", "group_size"),
        )
    if config.actor.cloning.demonstrations or config.demonstrations.policy:
        raise ConfigError(
            f"the recurrent policy {policy.name!r} cannot clone demonstrations: leave them out",
            path=("actor", "cloning", "demonstrations"),
        )


def _check_demonstrations(config: EmbodiedConfig, spec: EnvSpec) -> None:
    """Raise `ConfigError` where demonstrations do not fit the environment."""
    folder, policy = config.actor.cloning.demonstrations, config.actor.fsdp.policy
    scripted = config.demonstrations.policy
    if folder and scripted:
        raise ConfigError(
            f"{folder!r} are given, and demonstrations.policy = {scripted!r} would record others: "
            "leave one of the two out",
            path=("actor", "cloning", "demonstrations"),
        )
    if not (folder or scripted):
        return
    if not (policy.acts.continuous or policy.acts.discrete):
        raise ConfigError(
            "cloning learns actions of one Box or one Discrete space; the environment's are of "
            "several: leave it out",
            path=("actor", "cloning", "demonstrations"),
        )
    if scripted:
        return
    size = 1 if policy.acts.discrete else policy.acts.columns // config.env.action_chunk
    try:
        check_demonstrations(
            Path(folder),
            policy.sees,
            size,
            discrete=policy.acts.discrete,
            bounds=spec.bounds[:size],
        )
    except DataError as error:
        raise ConfigError(str(error), path=("actor", "cloning", "demonstrations")) from error


def _check_names(config: EmbodiedConfig) -> None:
    """Raise `ConfigError` for a policy, an advantage or a loss that is not registered.

    The registries import torch: they are loaded only for names that are not built in.
    """
    actor = config.actor
    if actor.fsdp.pretrained is not None:
        raise ConfigError(
            "the embodied_ppo job trains a registered policy, not a language model: leave it out",
            path=(*FSDP, "pretrained"),
        )
    known, apart = EmbodiedTrainerConfig(), config.cluster.processes
    policy, advantage, loss = actor.fsdp.policy.name, actor.advantage.name, actor.ppo.loss.name
    if policy not in ("auto", *MLPS):
        from rlinf_async.backends.policies.base import policies

        policies.check(policy, (*FSDP, "policy", "name"), apart=apart)
    if advantage != known.advantage.name:
        from rlinf_async.algorithms.advantages import advantage_functions

        advantage_functions.check(advantage, ("actor", "advantage", "name"), apart=apart)
    if loss != known.ppo.loss.name:
        from rlinf_async.algorithms.losses import loss_functions

        loss_functions.check(loss, ("actor", "ppo", "loss", "name"), apart=apart)
