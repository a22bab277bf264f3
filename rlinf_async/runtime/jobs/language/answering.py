"""Evaluations of a model's folder, without a run: its answers to prompts, scored.

::

    this process --Request--> rollout --Sample--> reward --ScoredSample--> this process
                              episode, where samples are episodes

Rollout workers load the weights of the folder themselves, as version 0; nothing is published. All
else is as in the evaluations of a run (`evaluation`), so the figures are.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec

from rlinf_async.backends.language_training.config import PublishedAdapterConfig
from rlinf_async.backends.parts import EngineRun
from rlinf_async.config import UsageError
from rlinf_async.data import load_tokenizer
from rlinf_async.episodes.template import load_template
from rlinf_async.observe.evaluations import Evaluated
from rlinf_async.rewards.judging import group_verifiers
from rlinf_async.runtime.jobs import OnAnswer
from rlinf_async.runtime.jobs.checkpoints import in_background
from rlinf_async.runtime.jobs.language.backends import placed, plan_roles
from rlinf_async.runtime.jobs.language.checks import (
    check_agent,
    check_endpoint,
    check_engine,
    check_episodes,
    check_evaluation,
    check_formats,
    check_honoured,
    check_reward,
    check_scoring,
    check_verifiers,
    open_prompts,
    open_sets,
)
from rlinf_async.runtime.jobs.language.config import LanguageConfig, ModelConfig
from rlinf_async.runtime.jobs.language.evaluation import EvaluationSet, evaluate
from rlinf_async.runtime.jobs.language.model import (
    check_tokens,
    check_weights,
    checkpoint_folder,
    make_model_folder,
)
from rlinf_async.runtime.jobs.language.roles import LanguageChannels, Roles
from rlinf_async.runtime.jobs.language.samples import (
    Collector,
    Ledger,
    gathering,
    judged_at_once,
)
from rlinf_async.runtime.recording import RecordingConfig
from rlinf_async.runtime.signals import run
from rlinf_async.scheduling import SchedulingConfig


def answers(
    config: LanguageConfig, folder: Path, *, seed: int, on_answer: OnAnswer
) -> Sequence[Evaluated]:
    """Evaluate the model in a folder on the held-out prompts and the sets of a configuration.

    Args:
        config: configuration whose data have the run's seed in theirs.
        folder: folder of a Hugging Face checkpoint.
        seed: seed of the random numbers of the answers.
        on_answer: is told how many there are.

    Raises:
        UsageError: with the setting, and what is wrong with it.
    """
    config = only_answering(config, folder)
    checkpoint_folder(config.model)
    plan = plan_roles(config, config.cluster.devices(), learners=False)
    config = placed(config, plan)
    rollout, where = config.rollout, ("model", "path")
    rollout.part.check_installed("an evaluation")
    described = msgspec.json.decode((folder / "config.json").read_bytes(), type=dict[str, Any])
    rollout.part.check(EngineRun(rollout.engine, rollout.where, rollout.sampling, described, where))
    check_evaluation(config)
    check_episodes(config)
    check_honoured(config)
    check_verifiers(config)
    check_agent(config, plan)
    check_endpoint(config)
    with tempfile.TemporaryDirectory(prefix="rlinf-async-evaluate-") as made:
        model = make_model_folder(config.model, Path(made), config.data.chat_template)
        check_tokens(model, where)
        check_weights(folder, where)
        sets = _opened(config, model)
        names = sorted({one.verifier for each in sets for one in each.prompts})
        check_scoring(config, names)
        check_reward(config)
        check_formats(config, model)
        check_engine(config, model, plan.device("rollout", own_process=config.cluster.processes))
        return run(_answered(config, model, sets, names, seed, on_answer))


def only_answering(config: LanguageConfig, folder: Path) -> LanguageConfig:
    """Return a configuration under which rollout workers serve the weights of a folder.

    Raises:
        UsageError: the engine has none, or cannot load them.
    """
    replace, rollout = msgspec.structs.replace, config.rollout
    if not rollout.part.has_weights:
        raise UsageError(
            f"rollout.backend is {rollout.backend!r}, which has no weights: there is no model to "
            "evaluate; summary.json has the run's own evaluation"
        )
    engine = rollout.part.with_own_weights(rollout.engine, rollout.where)
    playing = max(config.cluster.episode_workers, 1 if config.has_episodes else 0)
    return replace(
        config,
        model=ModelConfig(path=str(folder), tokenizer=_tokenizer(config, folder)),
        rollout=rollout.with_engine(engine),
        actor=replace(config.actor, lora=PublishedAdapterConfig()),  # it is in these weights
        training=replace(config.training, max_staleness=0),
        cluster=replace(config.cluster, inference_workers=0, critics=0, episode_workers=playing),
        scheduler=SchedulingConfig(),
        recording=RecordingConfig(),
    )


def _tokenizer(config: LanguageConfig, folder: Path) -> str:
    """The tokenizer that is named for this folder; its own where it is a run's."""
    return config.model.tokenizer if config.model.path == str(folder) else ""


def _opened(config: LanguageConfig, model: Path) -> list[EvaluationSet]:
    """The prompts of the sets, and the held-out ones.

    Raises:
        UsageError: there are none.
    """
    tokenizer = load_tokenizer(model)
    prompts = open_prompts(config, model, tokenizer) if config.evaluation.samples else None
    sets = open_sets(config, model, tokenizer, prompts)
    if not sets:
        raise UsageError(
            "there is nothing to evaluate on: the configuration has neither held-out prompts "
            "(evaluation.samples, data.held_out) nor evaluation.sets; give --data.path FILE "
            "--data.verifier NAME"
        )
    if config.has_episodes:
        load_template(model, config.data.chat_options, tokenizer)
    return sets


async def _answered(
    config: LanguageConfig,
    model: Path,
    sets: Sequence[EvaluationSet],
    verifiers: Sequence[str],
    seed: int,
    on_answer: OnAnswer,
) -> Sequence[Evaluated]:
    async with config.cluster.make_cluster(None) as cluster:
        of_groups = group_verifiers(verifiers)
        channels = LanguageChannels(cluster, config, gathers=bool(of_groups))
        roles = Roles(cluster, config, channels, model, verifiers, learners=False)
        nothing = Ledger(
            prompts=1, group_size=1, max_staleness=0, sampling=config.rollout.sampling, seed=0
        )
        scored, groups = channels.scored.receiver, channels.groups.sender
        collector = Collector(nothing, scored, groups, ranks=1, version=0)
        gatherer = gathering(channels, collector, nothing, judged_at_once(of_groups))
        await roles.launch_answering()
        await roles.connect()
        with (
            channels.held_open(),
            in_background(cluster, collector.run(), "collector"),
            in_background(cluster, gatherer.run(), "gatherer") if gatherer else nullcontext(),
        ):
            found = await evaluate(
                sets,
                version=0,
                seed=seed,
                requests=channels.tasks.sender,
                collector=collector,
                on_answer=on_answer,
            )
        channels.weights.sender.close()
        await roles.finish()
    return found
