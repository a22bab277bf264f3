"""The ``sft``, ``dpo`` and ``distill`` jobs, as the command line uses them: they check and run."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import msgspec

from rlinf_async.backends.language import sees_images
from rlinf_async.backends.parts import TrainerRun, language_trainers
from rlinf_async.config import ConfigError, MissingExtra
from rlinf_async.data import DataError, load_tokenizer
from rlinf_async.data.examples import Examples
from rlinf_async.data.records import existing
from rlinf_async.observe.run_folder import RunFolder
from rlinf_async.observe.sinks.config import check_sinks
from rlinf_async.observe.summary import SupervisedSummary
from rlinf_async.runtime.jobs.config import Reads, every_file, model_files
from rlinf_async.runtime.jobs.language.checks import check_comparison, check_teacher_folder
from rlinf_async.runtime.jobs.language.model import (
    check_adapter,
    check_forward,
    check_tokens,
    check_weights,
    checkpoint_folder,
    make_model_folder,
)
from rlinf_async.runtime.jobs.placement import PlacementPlan
from rlinf_async.runtime.jobs.run import run_in_folder
from rlinf_async.runtime.jobs.supervised.config import (
    MAY_DIFFER,
    DistillConfig,
    DpoConfig,
    SftConfig,
    SupervisedConfig,
)
from rlinf_async.runtime.jobs.supervised.run import SupervisedRun, plan_actors
from rlinf_async.workers.base import Device


class Supervised:
    """A language model learns from examples that are there already."""

    name: ClassVar[str]
    config_type: ClassVar[type[SupervisedConfig]]

    def plan(
        self, config: SupervisedConfig, devices: Sequence[Device] | None = None
    ) -> PlacementPlan:
        """The devices of every worker: on this host, or on a machine with these devices."""
        return plan_actors(config, config.cluster.devices() if devices is None else devices)

    def check(self, config: SupervisedConfig, devices: Sequence[Device] | None = None) -> None:
        """Check all that can be checked without opening data, tokenizer and weights: `inspect`.

        Args:
            config: the run's configuration.
            devices: devices of the machine to check for; None: this host's.

        Raises:
            UsageError: with the setting, and what is wrong with it.
        """
        config = _placed(config, self.plan(config, devices))
        config.check_sizes()
        needed_for = f"the {self.name} job"
        if importlib.util.find_spec("transformers") is None:
            raise MissingExtra("transformers", extra="llm", needed_for=needed_for)
        actor = config.actor
        actor.part.check_installed(needed_for)
        if config.cluster.processes:
            language_trainers.check(actor.backend, ("actor", "backend"), apart=True)
        if config.taught_by is not None:
            check_comparison(actor, config.loss_config, config.taught_by.top_k, where=("loss",))
        check_sinks(config.observe)
        folder = checkpoint_folder(config.model)
        where = ("model", "path") if folder else ("model", "config", "model_type")
        described = _described(folder) if folder else config.model.config
        if sees_images(described):
            raise ConfigError(
                f"{self.name} trains models of text, and not a {described['model_type']} model, "
                "which sees images: set job to 'language_rl', whose [warm_start] imitates answers "
                "about images, or give another model",
                path=where,
            )
        actor.part.check(TrainerRun("actor", described, where, config.parts, actor.trainer))
        config.cluster.check_interpreters(config.cluster.placement)
        try:
            existing(config.data.path)
        except DataError as error:
            raise ConfigError(str(error), path=("data", "path")) from error

    def inspect(self, config: SupervisedConfig, devices: Sequence[Device] | None = None) -> None:
        """Read all that a run reads before its first worker starts: examples, tokenizer, weights.

        Args:
            config: the run's configuration, checked.
            devices: devices of the machine to check for; None: this host's.

        Raises:
            UsageError: with the setting, and what is wrong with what it names.
        """
        with tempfile.TemporaryDirectory(prefix="rlinf-async-check-") as folder:
            _inputs(_seeded(_placed(config, self.plan(config, devices))), Path(folder))

    def run(self, config: SupervisedConfig, out: Path | None, resume: bool) -> SupervisedSummary:
        """Train, and leave everything in the run folder."""
        seeded = _seeded(_placed(config, self.plan(config)))

        def build(folder: RunFolder) -> SupervisedRun:
            inputs = _inputs(seeded, folder.path / "model")
            return SupervisedRun(seeded, inputs.examples, folder, inputs.model)

        return run_in_folder(
            config, out, resume=resume, may_differ=MAY_DIFFER, build=build, reads=_reads
        )


class Sft(Supervised):
    """Supervised fine-tuning."""

    name = "sft"
    config_type = SftConfig


class Dpo(Supervised):
    """Direct preference optimization."""

    name = "dpo"
    config_type = DpoConfig


class Distill(Supervised):
    """Distillation: what a teacher holds of given answers."""

    name = "distill"
    config_type = DistillConfig


class _Inputs(NamedTuple):
    """Files that a run has read when its first worker starts."""

    model: Path
    """folder of the model"""
    examples: Examples


def _inputs(config: SupervisedConfig, into: Path) -> _Inputs:
    """Read and check the model and the examples.

    Args:
        config: the run's configuration.
        into: folder for a model that is described by settings.

    Raises:
        UsageError: one of them cannot be read, or does not fit the other.
    """
    model = make_model_folder(config.model, into, config.data.chat_template)
    check_tokens(model, ("model", "tokenizer" if config.model.tokenizer else "path"))
    if config.model.path:
        check_weights(Path(config.model.path).expanduser(), ("model", "path"))
    else:
        check_forward(model, ("model", "config"))
    if config.taught_by is not None:
        check_teacher_folder(config.taught_by.path, model)
    check_adapter(model, config.actor.lora)
    try:
        examples = Examples(config.data, load_tokenizer(model))
    except DataError as error:
        raise ConfigError(str(error), path=("data",)) from error
    size = config.training.batch_size
    if len(examples) < size:
        raise ConfigError(
            f"there are {len(examples)} records to learn from, fewer than a batch of {size}: set "
            f"it to at most {len(examples)}, or give more data",
            path=("training", "batch_size"),
        )
    if config.data.held_out and not examples.held_out:
        raise ConfigError(
            f"all {config.data.held_out} held-out records are longer than data.max_tokens = "
            f"{config.data.max_tokens}: hold out more, or raise the limit",
            path=("data", "held_out"),
        )
    _check_context(model, examples)
    return _Inputs(model, examples)


def _check_context(model: Path, examples: Examples) -> None:
    """Refuse examples that are longer than the model's positions."""
    described = _described(model)
    described = described.get("text_config", described)
    limit = described.get("max_position_embeddings")
    if isinstance(limit, int) and examples.longest > limit:
        raise ConfigError(
            f"the longest example has {examples.longest} tokens, and the model has "
            f"{limit} positions (max_position_embeddings): set it to {limit}, and too_long to "
            "'skip'",
            path=("data", "max_tokens"),
        )


def _described(folder: Path) -> dict[str, Any]:
    """A folder's ``config.json``, which was looked at before."""
    return msgspec.json.decode((folder / "config.json").read_bytes(), type=dict[str, Any])


def _reads(run: SupervisedRun) -> Reads:
    config = run.config
    folders = {"model.path": config.model.path}
    if config.taught_by is not None:
        folders["teacher.path"] = config.taught_by.path
    if config.model.tokenizer != "arithmetic":
        folders["model.tokenizer"] = config.model.tokenizer
    found = {setting: Path(one).expanduser() for setting, one in folders.items() if one}
    files = {setting: (one, model_files(one)) for setting, one in found.items()}
    data = Path(config.data.path).expanduser()
    files["data.path"] = data, every_file(data)
    if config.data.chat_template:
        template = Path(config.data.chat_template).expanduser()
        files["data.chat_template"] = template, [template]
    return Reads(files)


def _placed(config: SupervisedConfig, plan: PlacementPlan) -> SupervisedConfig:
    """The configuration with the number of actors of the plan."""
    replace = msgspec.structs.replace
    return replace(config, cluster=replace(config.cluster, actors=plan.count("actor")))


def _seeded(config: SupervisedConfig) -> SupervisedConfig:
    """The configuration with the run's seed added to that of the data."""
    replace = msgspec.structs.replace
    return replace(config, data=replace(config.data, seed=config.data.seed + config.seed))
