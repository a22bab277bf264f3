"""The ``language_rl`` job, as the command line uses it: checks a configuration, and runs it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from rlinf_async.config import ConfigError
from rlinf_async.data import DataConfig, DataError, Prompts, load_tokenizer
from rlinf_async.data.records import existing
from rlinf_async.episodes.template import load_template
from rlinf_async.observe.run_folder import RunFolder
from rlinf_async.observe.summary import LanguageSummary
from rlinf_async.runtime.jobs.config import Reads, check_sinks, model_files
from rlinf_async.runtime.jobs.language.backends import has_weights, placed, plan_roles
from rlinf_async.runtime.jobs.language.checks import (
    check_agent,
    check_backends,
    check_critic,
    check_endpoint,
    check_engine,
    check_families,
    check_scoring,
    check_sizes,
    check_verifiers,
    open_prompts,
)
from rlinf_async.runtime.jobs.language.config import MAY_DIFFER, LanguageConfig
from rlinf_async.runtime.jobs.language.model import (
    Examples,
    check_forward,
    check_tokens,
    check_weights,
    checkpoint_folder,
    examples,
    make_model_folder,
    warm_start,
)
from rlinf_async.runtime.jobs.language.run import LanguageRun
from rlinf_async.runtime.jobs.language.schedulable import check_scheduler
from rlinf_async.runtime.jobs.placement import PlacementPlan
from rlinf_async.runtime.jobs.run import run_in_folder
from rlinf_async.runtime.signals import run
from rlinf_async.workers.base import Device

WARM_START_DATA = ("warm_start", "data")


class LanguageRL:
    """Reinforcement learning of a language model: rollout, reward, inference, actor workers."""

    name = "language_rl"
    config_type = LanguageConfig

    def plan(
        self, config: LanguageConfig, devices: Sequence[Device] | None = None
    ) -> PlacementPlan:
        """The devices of every worker: on this host, or on a machine with these devices."""
        return plan_roles(config, config.cluster.devices() if devices is None else devices)

    def check(self, config: LanguageConfig, devices: Sequence[Device] | None = None) -> None:
        """Check all that can be checked without opening data, tokenizer and weights: `inspect`.

        Args:
            config: the run's configuration.
            devices: devices of the machine to check for; None: this host's.

        Raises:
            UsageError: with the setting, and what is wrong with it.
        """
        plan = self.plan(config, devices)
        config = placed(config, plan)
        check_sizes(config)
        check_scheduler(config, plan)
        check_backends(config)
        check_sinks(config.training.metrics)
        checkpoint_folder(config.model)
        check_families(config)
        check_verifiers(config)
        config.cluster.check_interpreters(config.cluster.placement)
        check_agent(config, plan)
        if devices is None:
            check_endpoint(config)
        for data, path in ((config.data, ("data",)), (config.warm_start.data, WARM_START_DATA)):
            if data is not None and data.path:
                _check_there(data, (*path, "path"))

    def inspect(self, config: LanguageConfig, devices: Sequence[Device] | None = None) -> None:
        """Read all that a run reads before its first worker starts: prompts, tokenizer, weights.

        Args:
            config: the run's configuration, checked.
            devices: devices of the machine to check for; None: this host's.

        Raises:
            UsageError: with the setting, and what is wrong with what it names.
        """
        with tempfile.TemporaryDirectory(prefix="rlinf-async-check-") as folder:
            plan = self.plan(config, devices)
            inputs = _inputs(_seeded(placed(config, plan)), Path(folder))
            check_scoring(config, inputs.prompts.verifiers)
            device = plan.device("rollout", own_process=config.cluster.processes)
            check_engine(config, inputs.model, device)

    def run(self, config: LanguageConfig, out: Path | None, resume: bool) -> LanguageSummary:
        """Train, evaluate, and leave everything in the run folder."""
        seeded = _seeded(placed(config, self.plan(config)))

        def build(folder: RunFolder) -> LanguageRun:
            return self._training(seeded, folder)

        return run_in_folder(
            config, out, resume=resume, may_differ=MAY_DIFFER, build=build, reads=_reads
        )

    def _training(self, config: LanguageConfig, folder: RunFolder) -> LanguageRun:
        inputs = _inputs(config, folder.path / "model")
        if inputs.examples:
            _warm_start(config, inputs.model, inputs.examples, folder.workers_log)
        return LanguageRun(config, inputs.prompts, folder, inputs.model)


def _reads(run: LanguageRun) -> Reads:
    config = run.config
    folders = {
        "model.path": config.model.path,
        "critic.path": config.critic.path if config.has_critic else "",
    }
    if config.model.tokenizer != "arithmetic":
        folders["model.tokenizer"] = config.model.tokenizer
    found = {setting: Path(one).expanduser() for setting, one in folders.items() if one}
    files = {setting: (one, model_files(one)) for setting, one in found.items()}
    if config.data.chat_template:
        template = Path(config.data.chat_template).expanduser()
        files["data.chat_template"] = template, [template]
    return Reads(files, run.verifiers)


class _Inputs(NamedTuple):
    """Files that a run has read when its first worker starts."""

    model: Path
    """Folder of the model."""
    prompts: Prompts
    examples: Examples
    """examples of a warm start that is still to come; else none"""


def _inputs(config: LanguageConfig, into: Path) -> _Inputs:
    """Read and check the model, the prompts and the examples of the warm start.

    Args:
        config: the run's configuration.
        into: folder for a model that is described by settings.

    Raises:
        UsageError: one of them cannot be read, or does not fit the others.
    """
    model = make_model_folder(config.model, into, config.data.chat_template)
    if config.actor.part.has_weights:
        check_tokens(model, ("model", "tokenizer" if config.model.tokenizer else "path"))
    if not config.model.path and config.actor.part.has_weights:
        check_forward(model, ("model", "config"))
    try:
        tokenizer = load_tokenizer(model)
        prompts = open_prompts(config, model, tokenizer)
        if config.has_episodes:
            load_template(model, config.data.chat_options, tokenizer)
        if config.model.path and config.actor.part.has_weights:
            check_weights(Path(config.model.path).expanduser(), ("model", "path"))
        check_critic(config, model)
        warm = config.warm_start.steps and not has_weights(model)
        return _Inputs(model, prompts, examples(config, tokenizer) if warm else [])
    except DataError as error:
        raise ConfigError(str(error), path=("data",)) from error


def _check_there(data: DataConfig, path: tuple[str, ...]) -> None:
    try:
        existing(data)
    except DataError as error:
        raise ConfigError(str(error), path=path) from error


def _warm_start(config: LanguageConfig, model: Path, learned: Examples, log: Path) -> None:
    began = time.monotonic()
    losses = run(warm_start(config, model, learned, log))
    print(
        f"{config.name}: warm start of {len(losses)} steps in {time.monotonic() - began:.0f} s, "
        f"loss {losses[0]:.3f} -> {losses[-1]:.3f}",
        flush=True,
    )


def _seeded(config: LanguageConfig) -> LanguageConfig:
    """The configuration with the run's seed added to that of the data."""
    replace = msgspec.structs.replace
    return replace(config, data=replace(config.data, seed=config.data.seed + config.seed))
