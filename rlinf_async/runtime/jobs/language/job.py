"""The ``language_rl`` job, as the command line uses it: checks a configuration, and runs it."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from rlinf_async.config import ConfigError
from rlinf_async.data import DataConfig, DataError, Prompts, load_tokenizer
from rlinf_async.data.records import existing
from rlinf_async.episodes.template import load_template
from rlinf_async.observe.evaluations import Evaluated
from rlinf_async.observe.run_folder import RunFolder
from rlinf_async.observe.sinks.config import check_sinks
from rlinf_async.observe.summary import LanguageSummary
from rlinf_async.runtime.jobs import OnAnswer
from rlinf_async.runtime.jobs.config import Reads, model_files
from rlinf_async.runtime.jobs.hooks import check_hooks
from rlinf_async.runtime.jobs.language.answering import answers
from rlinf_async.runtime.jobs.language.backends import has_weights, placed, plan_roles
from rlinf_async.runtime.jobs.language.checks import (
    check_agent,
    check_backends,
    check_critic,
    check_endpoint,
    check_engine,
    check_families,
    check_formats,
    check_reward,
    check_scoring,
    check_sizes,
    check_teacher,
    check_verifiers,
    data_sections,
    open_prompts,
    open_sets,
)
from rlinf_async.runtime.jobs.language.config import MAY_DIFFER, LanguageConfig
from rlinf_async.runtime.jobs.language.evaluation import EvaluationSet, verifiers_of
from rlinf_async.runtime.jobs.language.model import (
    Examples,
    check_adapter,
    check_forward,
    check_tokens,
    check_weights,
    checkpoint_folder,
    examples,
    make_model_folder,
    processor_of,
    warm_start,
)
from rlinf_async.runtime.jobs.language.run import LanguageRun
from rlinf_async.runtime.jobs.language.schedulable import check_scheduler
from rlinf_async.runtime.jobs.placement import PlacementPlan
from rlinf_async.runtime.jobs.run import run_in_folder
from rlinf_async.runtime.jobs.swapping import RoleSwap, with_swaps
from rlinf_async.runtime.signals import run
from rlinf_async.workers.base import Device

WARM_START_DATA = ("warm_start", "data")
_OF_THE_LEARNERS = (
    "its ranks hold the weights that are trained: stop the run (rlinf-async stop), and go on from "
    "its checkpoint under another configuration (--resume)"
)
SWAPS: Mapping[str, RoleSwap] = {
    "reward": RoleSwap(("data.verifier", "reward")),
    "episode": RoleSwap(
        (
            "episode.run",
            "episode.environment",
            "episode.max_turns",
            "episode.seconds",
            "episode.on_timeout",
            "episode.concurrent",
            "episode.tools",
            "episode.on_tool_failure",
            "episode.on_rewrite",
        )
    ),
    "inference": RoleSwap(),
    "rollout": RoleSwap(("rollout.serving", "rollout.transformers", "rollout.vllm", "rollout.toy")),
    "actor": RoleSwap(refused=_OF_THE_LEARNERS),
    "critic": RoleSwap(refused=_OF_THE_LEARNERS),
    "scheduler": RoleSwap(refused="it holds the ledger of the devices"),
}
"""what can be swapped while a run goes on, by role"""


class LanguageRL:
    """Reinforcement learning of a language model: rollout, reward, inference, actor workers."""

    name = "language_rl"
    config_type = LanguageConfig
    swaps = SWAPS

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
        check_sinks(config.observe)
        check_hooks(config.hooks)
        checkpoint_folder(config.model)
        check_families(config)
        check_verifiers(config)
        config.cluster.check_interpreters(config.cluster.placement)
        check_agent(config, plan)
        if devices is None:
            check_endpoint(config)
        warm = config.warm_start.data
        for data, path in (
            *data_sections(config),
            *([] if warm is None else [(warm, WARM_START_DATA)]),
        ):
            if data.path:
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
            names = (*inputs.prompts.verifiers, *verifiers_of(inputs.sets))
            check_scoring(config, names)
            device = plan.device("rollout", own_process=config.cluster.processes)
            check_engine(config, inputs.model, device)

    def run(self, config: LanguageConfig, out: Path | None, resume: bool) -> LanguageSummary:
        """Train, evaluate, and leave everything in the run folder."""
        if resume:
            config, notes = with_swaps(config, out)
            for note in notes:
                print(f"{config.name}: {note}", file=sys.stderr)
        seeded = _seeded(placed(config, self.plan(config)))

        def build(folder: RunFolder) -> LanguageRun:
            return self._training(seeded, folder)

        return run_in_folder(
            config,
            out,
            resume=resume,
            may_differ=MAY_DIFFER,
            build=build,
            reads=_reads,
            swaps=self,
        )

    def answers(
        self, config: LanguageConfig, folder: Path, *, seed: int, on_answer: OnAnswer
    ) -> Sequence[Evaluated]:
        """Evaluate the model in a folder on the held-out prompts and the sets of a configuration.

        Raises:
            UsageError: with the setting, and what is wrong with it.
        """
        return answers(_seeded(config), folder, seed=seed, on_answer=on_answer)

    def check_swap(self, config: LanguageConfig, role: str) -> None:
        """Check the configuration under which workers of a role are to take the places of others,
        and load the user's code that they would load.

        Raises:
            UsageError: with the setting, and what is wrong with it.
        """
        self.check(config, config.cluster.devices())
        if role == "reward":
            verifier = config.data.verifier
            check_scoring(config, (verifier,) if verifier else ())
            check_reward(config)
        elif role == "rollout":  # the prompts have to fit the new engines, too
            self.inspect(config, config.cluster.devices())

    def _training(self, config: LanguageConfig, folder: RunFolder) -> LanguageRun:
        inputs = _inputs(config, folder.path / "model")
        if inputs.examples:
            _warm_start(config, inputs.model, inputs.examples, folder.workers_log)
        return LanguageRun(config, inputs.prompts, folder, inputs.model, inputs.sets)


def _reads(run: LanguageRun) -> Reads:
    config = run.config
    folders = {
        "model.path": config.model.path,
        "critic.path": config.critic.path if config.has_critic else "",
        "teacher.path": config.teacher.path,
        "reward.model": config.reward.model,
    }
    if config.model.tokenizer != "arithmetic":
        folders["model.tokenizer"] = config.model.tokenizer
    found = {setting: Path(one).expanduser() for setting, one in folders.items() if one}
    files = {setting: (one, model_files(one)) for setting, one in found.items()}
    if config.data.chat_template:
        template = Path(config.data.chat_template).expanduser()
        files["data.chat_template"] = template, [template]
    return Reads(files, run.verifiers, may_differ=("reward.model",))


class _Inputs(NamedTuple):
    """Files that a run has read when its first worker starts."""

    model: Path
    """Folder of the model."""
    prompts: Prompts
    sets: Sequence[EvaluationSet]
    """prompts to evaluate on"""
    examples: Examples
    """examples of a warm start that is still to come; else none"""


def _inputs(config: LanguageConfig, into: Path) -> _Inputs:
    """Read and check the model, the prompts of training and evaluation, and the examples of the
    warm start.

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
    check_adapter(model, config.actor.lora)
    try:
        tokenizer = load_tokenizer(model)
        prompts = open_prompts(config, model, tokenizer)
        sets = open_sets(config, model, tokenizer, prompts)
        if config.has_episodes:
            load_template(model, config.data.chat_options, tokenizer)
        if config.model.path and config.actor.part.has_weights:
            check_weights(Path(config.model.path).expanduser(), ("model", "path"))
        check_formats(config, model)
        check_critic(config, model)
        check_teacher(config, model)
        check_reward(config)
        warm = config.warm_start.steps and not has_weights(model)
        learned = examples(config, tokenizer, processor_of(model)) if warm else []
        return _Inputs(model, prompts, sets, learned)
    except DataError as error:
        raise ConfigError(str(error), path=("data",)) from error


def _check_there(data: DataConfig, path: tuple[str, ...]) -> None:
    try:
        existing(data.path)
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
