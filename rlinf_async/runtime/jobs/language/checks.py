"""Whether a language run can be carried out: what would otherwise end it in its middle.

::

    check_backends   installed, registered                       nothing is read
    check_sizes      numbers that have to divide one another     nothing is read
    check_verifiers  those that settings name load
    open_prompts     context of the model - rollout.sampling.max_tokens >= every prompt
                     iterations x prompts of each <= records x epochs; verifiers that load
    open_sets        the same of the prompts of evaluation sets
    check_critic     a critic's own model: it reads the actor's tokens
    check_teacher    so does a teacher
    check_scoring    verifiers load in a scoring process, too
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rlinf_async.algorithms.config import (
    DISTIL,
    WITHOUT_TEACHER,
    LanguageAdvantageConfig,
    LanguageLossConfig,
)
from rlinf_async.backends.language import (
    FAMILIES,
    SEEING,
    ModelOutputError,
    UnsupportedModel,
    check_family,
    sees_images,
)
from rlinf_async.backends.parts import EngineRun, TrainerRun, engines, language_trainers
from rlinf_async.config import ConfigError, MissingExtra, UsageError
from rlinf_async.data import (
    DataConfig,
    DataError,
    Prompts,
    PromptsTooLong,
    Tokenizer,
    load_tokenizer,
)
from rlinf_async.data.config import NO_VERIFIER
from rlinf_async.episodes.agents import load_agent
from rlinf_async.episodes.endpoint import EndpointConfig
from rlinf_async.episodes.endpoint.server import listener
from rlinf_async.episodes.environments import Asked, environments, is_number
from rlinf_async.episodes.episode import EpisodeError
from rlinf_async.episodes.parsing import parsers
from rlinf_async.messages.language import Grammar, Rejected, Sampling
from rlinf_async.observe.evaluations import HELD_OUT
from rlinf_async.parallel.splits import nearest_divisors
from rlinf_async.rewards import ScoringPool, load_verifier
from rlinf_async.rewards.judging import BUILT_IN, INLINE, Answer, judge, verifiers
from rlinf_async.runtime.apart import apart as run_apart
from rlinf_async.runtime.jobs.language.acceptance import acceptance_rules
from rlinf_async.runtime.jobs.language.backends import has_weights, inference_backend
from rlinf_async.runtime.jobs.language.config import ActorConfig, LanguageConfig, LearnerConfig
from rlinf_async.runtime.jobs.language.evaluation import EvaluationSet
from rlinf_async.runtime.jobs.language.model import check_weights, processor_of
from rlinf_async.runtime.jobs.placement import PlacementPlan
from rlinf_async.runtime.signals import run
from rlinf_async.workers.actor.language import DEFAULT_MICRO_BATCH_TOKENS
from rlinf_async.workers.base import WorkerDied, WorkerError
from rlinf_async.workers.episode.config import EpisodeConfig
from rlinf_async.workers.reward import RewardConfig

Setting = tuple[str, ...]
"""path of a setting or a section"""
SETS = ("evaluation", "sets")
OF_TRAINING = ("rollout", "sampling", "max_tokens")
COMPARING = frozenset({"grpo", "turn_grpo", "rloo", "reinforce++_baseline"})
"""built-in advantages that compare the samples of a prompt with one another"""
WITHOUT_VALUES = COMPARING | {"reinforce++"}
"""built-in advantages that use no values; a user's own may"""


def check_backends(config: LanguageConfig) -> None:
    """Raise where a backend is not installed, or an advantage or a loss is not registered.

    Raises:
        MissingExtra: with what to install.
        ConfigError: an unknown name, with the nearest.
    """
    engine, trainer = config.rollout.part, config.actor.part
    if engine.has_weights != trainer.has_weights:
        raise ConfigError(
            f"rollout.backend is {config.rollout.backend!r} and actor.backend is "
            f"{config.actor.backend!r}: a toy has no weights: set both to 'toy', or neither",
            path=("actor", "backend"),
        )
    if importlib.util.find_spec("transformers") is None:  # tokenizers, whatever computes
        raise MissingExtra("transformers", extra="llm", needed_for="the language_rl job")
    for part in (engine, trainer, config.critic_part):
        part.check_installed("the language_rl job")
    if config.cluster.processes:
        engines.check(config.rollout.backend, ("rollout", "backend"), apart=True)
        language_trainers.check(config.actor.backend, ("actor", "backend"), apart=True)
    _check_names(config)


def check_families(config: LanguageConfig) -> None:
    """Ask engine and trainers whether they can do with the settings and the models of the run.

    Raises:
        ConfigError: names the setting, the reason, and what is supported.
    """
    path, rollout = config.model.path, config.rollout
    described = _read(path) if path else config.model.config
    where = ("model", "path") if path else ("model", "config", "model_type")
    _check_images(config, described, where)
    asked = EngineRun(rollout.engine, rollout.where, rollout.sampling, described, where)
    with _at(where):
        rollout.part.check(asked)
    _check_routes(config, described)
    actor = config.actor
    if not actor.part.has_weights:
        return
    actor.part.check(TrainerRun("actor", described, where, config.actor_parts, actor.trainer))
    if not config.has_critic:
        return
    if config.critic.path and (read := _read(config.critic.path)):
        described, where = read, ("critic", "path")
        with _at(where):
            check_family(described)
        _check_reads_text(described, where, "critic")
    parts, options = config.critic_parts, config.critic_trainer
    config.critic_part.check(TrainerRun("critic", described, where, parts, options))


def _check_routes(config: LanguageConfig, described: dict[str, Any]) -> None:
    """Refuse to replay the routing of a model of which nobody can tell it."""
    kind = described.get("model_type")
    if not (config.rollout.sampling.routing_replay and kind):
        return
    able = [name for name, one in FAMILIES.items() if one.routes]
    if kind not in able:
        raise ConfigError(
            f"the experts that tokens go through are told and replayed of models of the families "
            f"{', '.join(able)}, and this one is of the family {kind!r}: leave it out",
            path=("rollout", "sampling", "routing_replay"),
        )


def _check_images(config: LanguageConfig, model: dict[str, Any], where: Setting) -> None:
    """Refuse images where a part of the run would not see them, and what was not made for models
    that see."""
    sections = data_sections(config)
    if config.warm_start.data is not None:
        sections.append((config.warm_start.data, ("warm_start", "data")))
    shown = [(*place, "image_column") for data, place in sections if data.image_column]
    sees = sees_images(model) and config.rollout.part.has_weights
    if shown and not sees:
        kind = f"a model of the family {model.get('model_type')!r} takes none"
        if not config.rollout.part.has_weights:
            kind = f"the engine {config.rollout.backend!r} sees none"
        raise ConfigError(
            f"prompts have images, but {kind}: leave it out, or "
            f"give a model of one of the families {', '.join(SEEING)}",
            path=shown[0],
        )
    if not sees:
        return
    actor, name = config.actor, f"models that see images, such as {model['model_type']!r}"
    if not config.rollout.part.sees_images:
        raise ConfigError(
            f"{config.rollout.backend!r} does not serve {name}: set it to one that does "
            f"({_seeing(engines)})",
            path=("rollout", "backend"),
        )
    for role, backend, part in (
        ("actor", actor.backend, actor.part),
        *([("critic", config.critic_backend, config.critic_part)] if config.has_critic else []),
    ):
        if not part.sees_images:
            raise ConfigError(
                f"{backend!r} does not train {name}: set it to one that does "
                f"({_seeing(language_trainers)})",
                path=(role, "backend"),
            )
    for setting, given, instead in (
        (("actor", "lora", "rank"), actor.lora.rank, "0: all weights are trained"),
        (
            ("episode", "run"),
            config.has_episodes,
            "'', as conversations of episodes have no images",
        ),
        (("reward", "model"), config.reward.model, "'', and name a verifier"),
        (("teacher", "path"), config.teacher.path, "'', and train by a verifier"),
        (("critic", "path"), config.has_critic and config.critic.path, "'': the actor's own model"),
        (("scheduler", "policy"), config.scheduled, "'static'"),
    ):
        if given:
            raise ConfigError(f"this was not made for {name}: set it to {instead}", path=setting)


def _seeing(parts: Any) -> str:
    """Names of the engines or trainers that read images."""
    return ", ".join(one for one in parts.paths if parts.load(one).sees_images)


def _check_reads_text(model: dict[str, Any], where: Setting, role: str) -> None:
    """Refuse a model that sees images in a role that was not made for one."""
    if sees_images(model):
        raise ConfigError(
            f"it holds a {model['model_type']} model, which sees images: a {role} in a folder of "
            "its own has to be a model of text",
            path=where,
        )


@contextlib.contextmanager
def _at(where: tuple[str, ...]) -> Iterator[None]:
    """Say by which setting a model came that is refused."""
    try:
        yield
    except UnsupportedModel as error:
        raise ConfigError(str(error), path=where) from error


def _read(folder: str) -> dict[str, Any]:
    """A folder's ``config.json``; empty where it cannot be read, which is reported by whoever needs
    the whole folder."""
    try:
        content = (Path(folder).expanduser() / "config.json").read_bytes()
        return msgspec.json.decode(content, type=dict[str, Any])
    except (OSError, msgspec.DecodeError):
        return {}


def _check_names(config: LanguageConfig) -> None:
    """The registries import torch: they are loaded only for names that are not built in."""
    advantage, loss = config.actor.advantage.name, config.actor.loss.name
    if advantage not in WITHOUT_VALUES | {"gae"}:
        from rlinf_async.algorithms.language.advantages import group_advantages

        where = ("actor", "advantage", "name")
        group_advantages.check(advantage, where, apart=config.cluster.processes)
    if loss not in ("ppo", "gspo", "reinforce"):
        from rlinf_async.algorithms.language.losses import language_losses

        where = ("actor", "loss", "name")
        language_losses.check(loss, where, apart=config.cluster.processes)


def check_sizes(config: LanguageConfig) -> None:
    """Refuse sizes that do not divide or do not fit, and settings that exclude each other.

    Raises:
        ConfigError: with the values, and the nearest valid ones.
    """
    _check_batches(config)
    _check_sampling(config)
    check_evaluation(config)
    _check_learning(config)
    _check_off_policy(config)
    _check_critics(config)
    _check_places(config)
    _check_reference(config)
    _check_adapter(config)
    _check_teacher(config)
    _check_unjudged(config)
    check_episodes(config)
    _check_branches(config)


def _check_batches(config: LanguageConfig) -> None:
    """Prompts over actors, groups over global batches, samples over micro-batches."""
    training, actor, ranks = config.training, config.actor, config.data_ranks
    if config.actors % actor.model_ranks:
        raise ConfigError(
            f"{config.actors} actors are no multiple of actor.tp x actor.pp = {actor.model_ranks}, "
            f"which hold one copy of the model: use {_nearest(config.actors, actor.model_ranks)}",
            path=("cluster", "actors"),
        )
    if training.prompts % ranks:
        raise ConfigError(
            f"{training.prompts} prompts cannot be divided among {ranks} actors: use "
            f"{_nearest(training.prompts, ranks)}",
            path=("training", "prompts"),
        )
    groups = training.prompts // ranks
    if groups % actor.global_batches:
        raise ConfigError(
            f"an actor gets {groups} groups of {training.group_size} samples in an iteration "
            f"({training.prompts} prompts / {ranks} actors): they cannot be cut into "
            f"{actor.global_batches} global batches of whole groups: use a divisor of {groups}",
            path=("actor", "global_batches"),
        )
    size = config.iteration_samples // ranks // actor.global_batches
    _check_micro_batches("actor", size, actor.micro_batch_size)
    _check_balancing(size, actor)
    if config.has_critic:
        _check_micro_batches("critic", size, config.critic.micro_batch_size)


def _check_sampling(config: LanguageConfig) -> None:
    """Refuse samples that would be drawn from another distribution than is trained."""
    if config.rollout.sampling.greedy:
        raise ConfigError(
            "at temperature 0 the most likely token is taken, but a policy is trained on what it "
            "draws: all samples of a prompt would be equal, and their log-probs those of another "
            "policy. Set it to 0.01 or more (evaluations are greedy, unless a set of them says "
            "otherwise)",
            path=("rollout", "sampling", "temperature"),
        )
    check_honoured(config)
    _check_trained_sampling(config)


def check_honoured(config: LanguageConfig) -> None:
    """Refuse what the engine would not do when it draws samples, or answers of an evaluation."""
    for where, sampling in _samplings(config).items():
        for name in sampling.further:
            if name not in config.rollout.part.honours:
                others = [one for one in engines.paths if name in engines.load(one).honours]
                raise ConfigError(
                    f"the engine {config.rollout.backend!r} does not say that it honours {name}: "
                    f"leave it out, or set rollout.backend to one that does ({', '.join(others)})",
                    path=(*where, name),
                )


def _samplings(config: LanguageConfig) -> dict[tuple[str, ...], Sampling]:
    """How samples of training and of evaluations are drawn, by their settings."""
    found: dict[tuple[str, ...], Sampling] = {("rollout", "sampling"): config.rollout.sampling}
    for name, one in config.evaluation.sets.items():
        found[(*SETS, name)] = one.sampling(config.rollout.sampling)
    return found


def _check_trained_sampling(config: LanguageConfig) -> None:
    """Refuse settings of samples to train on whose distribution the trainer would not compute."""
    sampling, actor = config.rollout.sampling, config.actor
    for name in sampling.further:
        if name in ("min_p", "grammar"):  # what they kept travels along
            continue
        if name not in actor.part.honours:
            parts = {one: language_trainers.load(one) for one in language_trainers.paths}
            able = [one for one, part in parts.items() if part.actor and name in part.honours]
            instead = "set it in a set of evaluation.sets, for evaluations alone"
            if able:
                instead = f"set actor.backend to one that does ({', '.join(able)})"
            raise ConfigError(
                f"{name} changes what a token is drawn from, which the trainer {actor.backend!r} "
                "does not compute: it would train another distribution than was sampled. Leave it "
                f"out, or {instead}",
                path=("rollout", "sampling", name),
            )
    if sampling.include_stop and config.has_episodes:
        raise ConfigError(
            "the text of a turn ends before what has stopped it, as agents expect: leave it out",
            path=("rollout", "sampling", "include_stop"),
        )


def _check_places(config: LanguageConfig) -> None:
    together = config.actor.part.collective
    if config.cluster.backend == "local" and config.actors > 1 and together:
        raise ConfigError(
            "several actors need a process each: use backend = 'process', or actors = 1",
            path=("cluster", "backend"),
        )
    if config.cluster.backend == "local" and config.cluster.critics > 1:
        raise ConfigError(
            "several critics need a process each: use backend = 'process', or one critic",
            path=("cluster", "backend"),
        )


def check_evaluation(config: LanguageConfig) -> None:
    """Refuse an evaluation without prompts, and prompts that do not fit the samples of the run."""
    if config.evaluation.samples and not config.data.held_out:
        raise ConfigError(
            f"evaluation.samples is {config.evaluation.samples}, but no record is held out: set "
            "data.held_out, or evaluation.samples to 0",
            path=("data", "held_out"),
        )
    for name, one in config.evaluation.sets.items():
        _check_episode_data(config, one.data, (*SETS, name, "data"))
    if config.evaluation.has_target and not config.evaluation.samples:
        name = "reward" if config.evaluation.target_accuracy is None else "accuracy"
        raise ConfigError(
            "there is a target but no evaluation: set evaluation.samples",
            path=("evaluation", f"target_{name}"),
        )


def _check_learning(config: LanguageConfig) -> None:
    actor = config.actor
    learns = actor.part.has_weights
    compares = actor.advantage.name in COMPARING and not config.distils
    if learns and config.training.group_size == 1 and compares:
        raise ConfigError(
            f"one sample of each prompt, but {actor.advantage.name} compares the samples of a "
            "prompt with one another: every advantage would be 0; use at least 2, or "
            "actor.advantage.name = 'reinforce++' or 'gae'",
            path=("training", "group_size"),
        )
    if actor.advantage.name == "turn_grpo" and not config.has_episodes:
        raise ConfigError(
            "turn_grpo gives credit to the turns of an episode, but each sample is one answer: set "
            "episode.run to the coroutine of an episode, or this to 'grpo'",
            path=("actor", "advantage", "name"),
        )
    if actor.epochs > 1 and actor.loss.proximal == "current":
        raise ConfigError(
            f"with {actor.epochs} epochs the weights change between passes, but 'current' takes "
            "those of each pass as the proximal policy: use 'auto' or 'behaviour', or one epoch",
            path=("actor", "loss", "proximal"),
        )
    if config.warm_start.steps and config.model.path:
        raise ConfigError(
            "a warm start is for a model with random weights (model.config), but model.path is "
            f"{config.model.path!r}, which has weights: set it to 0",
            path=("warm_start", "steps"),
        )
    if config.warm_start.steps and not learns:
        raise ConfigError(
            "a toy actor has no weights to warm up: set it to 0", path=("warm_start", "steps")
        )
    batch, ranks = config.warm_start.batch_size, config.data_ranks
    if config.warm_start.steps and batch % ranks:
        raise ConfigError(
            f"a batch of {batch} examples cannot be divided among {ranks} actors: use "
            f"{_nearest(batch, ranks)}",
            path=("warm_start", "batch_size"),
        )


def _check_micro_batches(whose: str, samples: int, size: int | None) -> None:
    if size is not None and samples % size:
        raise ConfigError(
            f"a global batch has {samples} samples on each {whose}, which micro_batch_size = "
            f"{size} does not divide: use {nearest_divisors(size, samples)}",
            path=(whose, "micro_batch_size"),
        )


def _check_balancing(samples: int, actor: ActorConfig) -> None:
    size, window = actor.micro_batch_size, actor.balance_window
    if size is not None and actor.max_tokens is not None:
        raise ConfigError(
            f"a micro-batch has either a number of samples (micro_batch_size is {size}) or a limit "
            f"of tokens ({actor.max_tokens}): leave one of them out",
            path=("actor", "max_tokens"),
        )
    if window is None:
        return
    if size is not None:
        raise ConfigError(
            f"micro-batches of {size} samples each are not balanced: leave it out, or set "
            "actor.max_tokens instead of actor.micro_batch_size",
            path=("actor", "balance_window"),
        )
    if samples % window:
        raise ConfigError(
            f"a global batch has {samples} samples on each actor, which balance_window = {window} "
            f"does not divide: use {nearest_divisors(window, samples)}",
            path=("actor", "balance_window"),
        )


def _check_critics(config: LanguageConfig) -> None:
    critics, actors = config.cluster.critics, config.data_ranks
    if critics and not config.critic_part.critic_trainer:
        raise ConfigError(
            f"{config.critic_backend!r} trains no critics: set critic.backend to one that does",
            path=("critic", "backend"),
        )
    needed, together = config.critics_needed, config.critic_parts.world_size
    advantage = config.actor.advantage.name
    if advantage == "gae" and not critics:
        raise ConfigError(
            f"gae needs the values of a critic: set cluster.critics to {needed}, or use an "
            "advantage without one (grpo, rloo, reinforce++, reinforce++_baseline)",
            path=("actor", "advantage", "name"),
        )
    if critics and advantage in WITHOUT_VALUES:
        raise ConfigError(
            f"{advantage} does not use values: set cluster.critics to 0, or "
            "actor.advantage.name to 'gae'",
            path=("cluster", "critics"),
        )
    if critics not in (0, needed):
        each = "the one of its rank" if together == 1 else f"{together} that hold one model"
        raise ConfigError(
            f"{critics} critics cannot be paired with {actors} actors, each with {each}: set it to "
            f"{needed}",
            path=("cluster", "critics"),
        )
    if config.critic.warmup_iterations and not critics:
        raise ConfigError(
            "there is no critic to warm up: set cluster.critics, or leave this setting out",
            path=("critic", "warmup_iterations"),
        )


def _check_off_policy(config: LanguageConfig) -> None:
    """Refuse a correction that would weight each token by 1, or leave out nothing."""
    actor, staleness = config.actor, config.training.max_staleness
    loss = actor.loss
    named = [] if loss.off_policy == "none" else [f"{loss.off_policy!r}"]
    used = [*(["off_policy"] if named else []), *loss.masks]
    if not used:
        return
    where, what = ("actor", "loss", used[0]), [*named, *loss.masks][0]
    # In less than float32 the actor's forward pass finds others than the engine at once.
    recomputed = config.needs_inference and config.needs_previous
    if loss.proximal == "auto" and not (config.rounded and recomputed):
        raise ConfigError(
            f"{what} weights tokens by proximal / behaviour, but with proximal = "
            "'auto' both are of the weights that sampled (an inference worker computes as soon as "
            "a sample is there), and each weight is 1: set actor.loss.proximal to 'step', or leave "
            "it out (also to resume a run that has it)",
            path=where,
        )
    changes = actor.part.has_weights and actor.global_batches > 1
    one_policy = loss.proximal == "step" or not changes
    if one_policy and not staleness and _engine_is_exact(config):
        raise ConfigError(
            f"{what} weights tokens by proximal / behaviour, but with "
            "training.max_staleness = 0 an iteration begins with the weights that sampled, which "
            f"the engine {config.rollout.backend!r} computes with as the trainer does: each weight "
            "is 1; leave it out, or set training.max_staleness",
            path=where,
        )


def _engine_is_exact(config: LanguageConfig) -> bool:
    """Whether the engine's log-probs are the trainer's, up to the last bits of float32."""
    return config.rollout.part.exact and not config.rounded


def _check_reference(config: LanguageConfig) -> None:
    nothing = not (config.needs_previous or config.needs_reference or config.needs_teacher)
    if nothing and config.cluster.inference_workers:
        raise ConfigError(
            f"with actor.loss.proximal = {config.actor.loss.proximal!r}, no KL and no teacher "
            "nobody uses the log-probs of inference workers: set it to 0",
            path=("cluster", "inference_workers"),
        )
    if config.needs_reference and not config.cluster.inference_workers:
        raise ConfigError(
            "a KL to the reference needs reference log-probs: set cluster.inference_workers",
            path=("cluster", "inference_workers"),
        )


def _check_unjudged(config: LanguageConfig) -> None:
    """Refuse to learn from rewards, or to measure, where no answer is judged."""
    loss, warm = config.actor.loss, config.warm_start
    if warm.steps and (warm.data or config.data).verifier == NO_VERIFIER:
        raise ConfigError(
            f"it imitates the answers of the data, which are not read with verifier = "
            f"{NO_VERIFIER!r}: name a verifier there, or set this to 0",
            path=("warm_start", "steps"),
        )
    judged = config.data.verifier != NO_VERIFIER or config.reward.model
    if judged or config.has_episodes:
        return
    if loss.name in WITHOUT_TEACHER:
        raise ConfigError(
            f"{NO_VERIFIER!r} gives every answer a reward of 0, and {loss.name!r} learns from "
            "rewards: name a verifier, set reward.model, or learn from a teacher alone "
            f"(actor.loss.name = {DISTIL!r})",
            path=("data", "verifier"),
        )
    if config.evaluation.samples:
        raise ConfigError(
            f"no answer is right or wrong with data.verifier = {NO_VERIFIER!r}: set it to 0, or "
            "name a verifier that judges the answers, which the loss does not have to use",
            path=("evaluation", "samples"),
        )
    if config.training.accept:
        raise ConfigError(
            f"all groups are alike with data.verifier = {NO_VERIFIER!r}: leave it out",
            path=("training", "accept"),
        )


OF_TEACHER = ("divergence", "divergence_beta", "divergence_outside")
"""settings of the loss about a teacher"""


def _check_teacher(config: LanguageConfig) -> None:
    """Refuse a teacher whom nobody asks or learns from, and what cannot be learnt from it."""
    loss, teacher = config.actor.loss, config.teacher
    if not config.needs_teacher:
        if loss.uses_teacher:
            name = "name" if config.distils else "teacher_coefficient"
            raise ConfigError(
                f"{getattr(loss, name)!r} compares with a teacher, and there is none: set "
                "teacher.path to the folder of one",
                path=("actor", "loss", name),
            )
        for name in OF_TEACHER:
            if getattr(loss, name) != getattr(LanguageLossConfig(), name):
                raise ConfigError(
                    f"{getattr(loss, name)!r} has no effect without a teacher: set teacher.path, "
                    "or leave it out",
                    path=("actor", "loss", name),
                )
        return
    if not loss.may_use_teacher:
        raise ConfigError(
            f"nothing is learnt from it by actor.loss.name = {loss.name!r}: set that to "
            f"{DISTIL!r}, or actor.loss.teacher_coefficient, or leave it out",
            path=("teacher", teacher.named_by),
        )
    if not config.actor.part.has_weights:
        raise ConfigError(
            f"actor.backend is {config.actor.backend!r}, which has no weights: nothing would be "
            "learnt from a teacher; leave it out",
            path=("teacher", teacher.named_by),
        )
    if not config.cluster.inference_workers:
        raise ConfigError(
            "nobody asks the teacher: set it to at least 1", path=("cluster", "inference_workers")
        )
    if teacher.every:
        _check_own_teacher(config)
    check_comparison(config.actor, loss, teacher.top_k, where=("actor", "loss"))
    if config.distils and teacher.top_k and loss.off_policy != "none":
        raise ConfigError(
            f"{loss.off_policy!r} weights tokens for having been drawn by another policy, but what "
            "is learnt is the teacher's distribution, whichever was drawn: leave it out, or set "
            "teacher.top_k to 0",
            path=("actor", "loss", "off_policy"),
        )
    if config.distils and config.actor.advantage != LanguageAdvantageConfig():
        raise ConfigError(
            f"{DISTIL!r} learns from the teacher alone, and uses no advantages: leave it out, or "
            "name another loss and set actor.loss.teacher_coefficient",
            path=("actor", "advantage"),
        )


def _check_own_teacher(config: LanguageConfig) -> None:
    """Refuse an earlier version of the policy that it would not differ from."""
    actor, where = config.actor, ("teacher", "every")
    if config.distils:
        raise ConfigError(
            f"with actor.loss.name = {DISTIL!r} the policy would learn from its own earlier "
            "version alone, which it begins as: nothing would change. Name another loss and set "
            "actor.loss.teacher_coefficient, or name another teacher (teacher.path)",
            path=where,
        )
    steps = actor.global_batches * actor.epochs
    if config.teacher.every == 1 and steps == 1 and config.training.max_staleness == 0:
        raise ConfigError(
            "it is 1, and an iteration is one optimizer step on samples of the present version: "
            "the teacher would always be the policy itself; set it to at least 2",
            path=where,
        )


def check_comparison(
    actor: LearnerConfig, loss: LanguageLossConfig, top_k: int | str, *, where: tuple[str, ...]
) -> None:
    """Refuse a divergence of which the teacher does not tell enough, a setting of it that has no
    effect, and a trainer that cannot compute it.

    Args:
        actor: the policy.
        loss: its loss.
        top_k: setting of the teacher.
        where: section of the loss's settings.

    Raises:
        ConfigError: such a setting.
    """
    if top_k == 0 and loss.divergence != "reverse":
        raise ConfigError(
            f"{loss.divergence!r} compares distributions, but with teacher.top_k = 0 the teacher "
            "only tells the log-prob of the drawn token, by which the reverse KL is estimated: set "
            "that to a number of tokens, or to 'all'",
            path=(*where, "divergence"),
        )
    if top_k in (0, "all") and loss.divergence_outside != "one_token":
        raise ConfigError(
            f"{loss.divergence_outside!r} is about tokens that are not among the teacher's most "
            f"likely ones, but teacher.top_k is {top_k!r}: leave it out",
            path=(*where, "divergence_outside"),
        )
    for name in (actor.backend, inference_backend(actor)):
        if top_k and not language_trainers.load(name).tells_distributions:
            raise ConfigError(
                f"it is {top_k!r}, but the trainer {name!r} computes log-probs of the drawn tokens "
                "alone: set it to 0, or actor.backend to 'fsdp'",
                path=("teacher", "top_k"),
            )


def check_teacher(config: LanguageConfig, model: Path) -> None:
    """Refuse a folder for the teacher that is incomplete, or whose tokens are not the actor's.

    Raises:
        ConfigError: with the folder, and what is wrong with it.
    """
    if config.teacher.path:
        check_teacher_folder(config.teacher.path, model)


def check_reward(config: LanguageConfig) -> None:
    """Refuse a folder that holds no reward model, and samples that are none for one.

    Raises:
        ConfigError: with the folder, and what is wrong with it.
        MissingExtra: transformers is not installed.
    """
    if not config.reward.model:
        return
    where = ("reward", "model")
    if config.has_episodes:
        raise ConfigError(
            "it reads a prompt and its answer, and samples are episodes of several turns: leave it "
            "out, and ask a reward model in episode.run",
            path=where,
        )
    from rlinf_async.backends.transformers.reward_model import check_reward_model

    check_reward_model(config.reward.model)


def check_teacher_folder(path: str, model: Path) -> None:
    """Refuse a folder for a teacher that is incomplete, or whose tokens are not those of a model.

    Raises:
        ConfigError: with the folder, and what is wrong with it.
    """
    folder, where = Path(path).expanduser(), ("teacher", "path")
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{folder} has no config.json: give a Hugging Face checkpoint on this disk", path=where
        )
    if not has_weights(folder):
        raise ConfigError(f"{folder} has no weights (*.safetensors)", path=where)
    try:
        own, theirs = load_tokenizer(model).get_vocab(), load_tokenizer(folder).get_vocab()
    except DataError as error:
        raise ConfigError(str(error), path=where) from error
    if own != theirs:
        differing = {*own.items()} ^ {*theirs.items()}
        _, token = min((number, token) for token, number in differing)
        raise ConfigError(
            f"the tokenizer in {folder} is not the model's: it has {len(theirs)} tokens, and the "
            f"model's has {len(own)}; the first that differs is {token!r}, which is token "
            f"{theirs.get(token, 'none')} there and {own.get(token, 'none')} here. A teacher is "
            "compared token by token: give one of the same family",
            path=where,
        )
    with _at(where):
        check_family(_described(folder))
    _check_reads_text(_read(path), where, "teacher")
    check_weights(folder, where)


def _check_adapter(config: LanguageConfig) -> None:
    """Refuse an adapter that the engine would not serve."""
    rollout, where = config.rollout, ("actor", "lora", "publish")
    if not config.publishes_adapter:
        if getattr(rollout.engine, "weights", "") == "adapter":
            raise ConfigError(
                "the engine would wait for an adapter, but whole weights are published: set "
                "actor.lora.publish to 'adapter', or leave it out",
                path=(*rollout.where, "weights"),
            )
        return
    if not (config.model.path or config.warm_start.steps):
        raise ConfigError(
            "engines read the weights under the adapter from the model's folder, but a model with "
            "random weights has none there: set it to 'merged', or give model.path or a warm start",
            path=where,
        )


def check_episodes(config: LanguageConfig) -> None:
    """Refuse settings of episodes without episodes, and episodes that could not have a turn.

    Raises:
        ConfigError: with the setting, and what to do.
    """
    episode, workers = config.episode, config.cluster.episode_workers
    _check_episode_data(config, config.data, ("data",))
    if not episode.run:
        given = [
            name
            for name in EpisodeConfig.__struct_fields__
            if getattr(episode, name) != getattr(EpisodeConfig(), name)
        ]
        if given:
            raise ConfigError(
                "each sample is one answer, so that this has no use: set episode.run to the "
                "coroutine of an episode, or leave it out",
                path=("episode", given[0]),
            )
        if workers:
            raise ConfigError(
                f"there are {workers} episode workers, but each sample is one answer: set "
                "episode.run to the coroutine of an episode, or this to 0",
                path=("cluster", "episode_workers"),
            )
        return
    if not workers:
        raise ConfigError(
            f"nobody would run {episode.run!r}: set it to at least 1",
            path=("cluster", "episode_workers"),
        )
    if episode.on_timeout == "score" and episode.run in environments:
        raise ConfigError(
            f"the environment {episode.run!r} scores its own episodes, and has none for one that "
            "took too long: leave it out, and the episode fails",
            path=("episode", "on_timeout"),
        )
    if episode.endpoint.port and workers > 1 and config.cluster.backend != "ray":
        raise ConfigError(
            f"{workers} episode workers of this host cannot listen on one port: leave it out, so "
            "that each takes one that is free, or set cluster.episode_workers to 1",
            path=("episode", "endpoint", "port"),
        )


def _check_branches(config: LanguageConfig) -> None:
    """Refuse branches of episodes that are longer than a micro-batch."""
    episode, most = config.episode, config.actor.max_tokens or DEFAULT_MICRO_BATCH_TOKENS
    if not episode.run:
        return
    if config.actor.micro_batch_size is None and most < episode.max_tokens:
        raise ConfigError(
            f"a micro-batch has at most {most} tokens, but a branch of an episode may have "
            f"{episode.max_tokens} (episode.max_tokens): raise this, or lower that",
            path=("actor", "max_tokens"),
        )


def _check_episode_data(config: LanguageConfig, data: DataConfig, where: Setting) -> None:
    """Refuse tasks of an environment that is not there, and prompts that are no conversation."""
    if data.environment_tasks and not config.has_episodes:
        raise ConfigError(
            "no environment makes these tasks: name one in episode.run",
            path=(*where, "environment_tasks"),
        )
    names = "chat_template", "chat_options"
    of_run = {one: getattr(config.data, one) for one in names}
    own = [one for one in names if getattr(data, one) and getattr(data, one) != of_run[one]]
    if config.has_episodes and own:
        raise ConfigError(
            f"episodes render their conversations themselves, with data.{own[0]}: leave it out",
            path=(*where, own[0]),
        )
    if config.has_episodes and not data.chat:
        raise ConfigError(
            "an episode is a conversation, whose messages go through a chat template: set it to "
            "true",
            path=(*where, "chat"),
        )


def check_endpoint(config: LanguageConfig) -> None:
    """Listen where the endpoint of episodes will; with Ray that is other hosts.

    Raises:
        ConfigError: it cannot: there is no such interface, or the port is taken.
    """
    if not config.has_episodes or config.cluster.backend == "ray":
        return
    endpoint = config.episode.endpoint
    tried = [("interface", EndpointConfig(interface=endpoint.interface)), ("port", endpoint)]
    for setting, one in tried:
        try:
            listener(one).close()
        except EpisodeError as error:
            raise ConfigError(str(error), path=("episode", "endpoint", setting)) from error


def check_agent(config: LanguageConfig, plan: PlacementPlan) -> None:
    """Load the coroutine of the episodes, and the format of their tool calls; with the Python of
    episode workers, where they have one of their own. With Ray that, and what else their runtime
    environment has, is on other hosts: it is asked when they start.

    Raises:
        ConfigError: one cannot be imported, or is none.
        MissingExtra: the environment's package is not installed.
    """
    if config.has_episodes:
        settings = plan.settings.get("episode")
        most = config.episode.concurrent * config.cluster.episode_workers
        asked = Asked(tasks=config.data.environment_tasks, at_once=most)
        if settings is not None and settings.environment:
            if config.cluster.backend != "ray":
                _check_agent_apart(config, settings.python, settings.env_vars, asked)
        else:
            _load_agent(config.episode.run, config.episode.environment, asked)
        parsers.check(config.episode.tools, ("episode", "tools"), apart=True)


def _check_agent_apart(
    config: LanguageConfig, python: str, env_vars: dict[str, str], asked: Asked
) -> None:
    where = ("episode", "run")
    try:
        run_apart(
            *(_load_agent, config.episode.run, config.episode.environment, asked),
            returns=type(None),
            name="Episode",
            quiet=True,
            python=python,
            env_vars=env_vars,
        )
    except (WorkerDied, WorkerError) as error:
        raise ConfigError(f"with {python!r}: {error}", path=where) from error
    except ConfigError:
        raise
    except UsageError as error:
        raise UsageError(f"with {python!r}: {error}") from error


def _load_agent(name: str, environment: dict[str, Any], asked: Asked) -> None:
    load_agent(name, ("episode", "run"), environment, asked)


def _nearest(number: int, divisor: int) -> str:
    below = number // divisor * divisor
    above = below + divisor
    return f"{below} or {above}" if below else str(above)


def open_prompts(config: LanguageConfig, model: Path, tokenizer: Tokenizer) -> Prompts:
    """The run's prompts; each fits the context of the model.

    Args:
        config: the run's configuration.
        model: the model's folder.
        tokenizer: the model's.

    Raises:
        ConfigError: they cannot be read, do not fit the model or are too few, or a verifier that
            they name cannot be loaded.
    """
    _check_tokens(config, model)
    room = _room(config, model, config.rollout.sampling, OF_TRAINING)
    prompts = _opened(config, config.data, ("data",), model, tokenizer, room)
    _check_count(config, prompts)
    if config.evaluation.samples and not prompts.held_out:
        raise ConfigError(
            f"all {config.data.held_out} held-out prompts are longer than max_prompt_tokens = "
            f"{prompts.config.max_prompt_tokens} and left out: nothing is left to evaluate; raise "
            "the limit, or set evaluation.samples to 0",
            path=("data", "held_out"),
        )
    if not prompts.usable:
        raise ConfigError(
            f"none of the {len(prompts)} records is left to train on: their prompts are too long, "
            "or those of held-out records. Does the chat template write each record's own prompt?",
            path=("data",),
        )
    return prompts


def open_sets(
    config: LanguageConfig, model: Path, tokenizer: Tokenizer, training: Prompts | None = None
) -> list[EvaluationSet]:
    """The sets of prompts that every evaluation asks; each prompt fits the context of the model.

    Says on stderr where prompts of a set are among those that are trained on.

    Args:
        config: the run's configuration.
        model: the model's folder.
        tokenizer: the model's.
        training: the run's prompts, of which the held-out ones are a set; None: nothing is trained.

    Raises:
        ConfigError: as `open_prompts`.
    """
    wanted, drawn = config.evaluation, config.rollout.sampling
    held_out = [] if training is None else training.held_out[: wanted.samples]
    found = [EvaluationSet(HELD_OUT, held_out, drawn.greedily())] if held_out else []
    for name, one in wanted.sets.items():
        where, sampling = (*SETS, name), one.sampling(drawn)
        limit = OF_TRAINING if one.max_tokens is None else (*where, "max_tokens")
        room = _room(config, model, sampling, limit)
        data = msgspec.structs.replace(one.data, epochs=1)
        prompts = _opened(config, data, (*where, "data"), model, tokenizer, room)
        try:
            asked = list(itertools.islice(prompts, one.prompts or None))
        except DataError as error:  # all are too long
            raise ConfigError(str(error), path=(*where, "data")) from error
        known = 0 if training is None else training.known(asked)
        if known:
            print(
                f"{config.name}: {known} of the {len(asked)} prompts of evaluation.sets.{name} are "
                "among the records of [data], which are trained on (but for held-out ones): its "
                "figures are not those of prompts that the model has never seen",
                file=sys.stderr,
            )
        found.append(EvaluationSet(name, asked, sampling, one.samples))
    return found


def _opened(
    config: LanguageConfig,
    data: DataConfig,
    where: Setting,
    model: Path,
    tokenizer: Tokenizer,
    room: tuple[int | None, str],
) -> Prompts:
    """The prompts of a section, checked; ``room``: see `_room`."""
    _check_stops(config, tokenizer)
    most, why = room
    narrowed = most is not None and most < data.max_prompt_tokens
    if most is not None and narrowed:
        data = msgspec.structs.replace(data, max_prompt_tokens=most)
    try:
        messages = config.has_episodes or bool(config.reward.model)
        prompts = Prompts(data, tokenizer, messages=messages, processor=processor_of(model))
    except DataError as error:
        blamed = narrowed and isinstance(error, PromptsTooLong)
        hint = f" ({why})" if blamed else ""
        raise ConfigError(f"{error}{hint}", path=where) from error
    for name in prompts.verifiers:
        verifiers.check(name, (*where, "verifier"), apart=True)
        if name in BUILT_IN:
            _check_references(name, prompts.references(name), (*where, "verifier"))
    run = config.episode.run
    if not data.environment_tasks and run in environments and environments[run].numbered:
        _check_numbers(run, prompts, (*where, "reference_column"))
    return prompts


def _check_numbers(run: str, prompts: Prompts, where: Setting) -> None:
    """Refuse references of which none is the number of an environment's task."""
    given = ""
    for reference in (one for name in prompts.verifiers for one in prompts.references(name)):
        if is_number(reference):
            return
        given = given or reference
    raise ConfigError(
        f"a task of the environment {run!r} is a number from 0, its reference, but no record has "
        f"one (the first has {given[:80]!r}): set data.environment_tasks in place of data.path, or "
        "name the column with the numbers",
        path=where,
    )


def _check_references(name: str, references: Iterator[str], where: Setting) -> None:
    """Refuse references of which a built-in verifier can read none: nothing would be scored.

    One that it can read is enough: others are counted by the run, and train nothing.
    """
    verifier, why, count = load_verifier(name), "", 0
    for reference in references:
        outcome = judge(name, verifier, Answer(prompt="", text="", reference=reference))
        if not isinstance(outcome, Rejected):
            return
        why, count = why or outcome.reason, count + 1
    raise ConfigError(
        f"{name!r} can read the reference of none of the {count} records that it scores, so that "
        f"nothing would be learned: {why}; is reference_column the right one?",
        path=where,
    )


def data_sections(config: LanguageConfig) -> list[tuple[DataConfig, Setting]]:
    """The data whose answers are scored, each with its section."""
    sets = config.evaluation.sets.items()
    return [(config.data, ("data",)), *((one.data, (*SETS, name, "data")) for name, one in sets)]


def check_verifiers(config: LanguageConfig) -> None:
    """Load the verifiers that settings name, a user's own included. Those that records name are
    loaded with the prompts.

    Raises:
        ConfigError: there is no such verifier, or it cannot be imported.
        MissingExtra: a library that it needs is not installed.
    """
    missing = [name for name in config.reward.environment if name not in os.environ]
    if missing and config.cluster.backend != "ray":
        raise ConfigError(
            f"there is no environment variable {missing[0]}: set it, or leave it out",
            path=("reward", "environment"),
        )
    for data, where in data_sections(config):
        if data.verifier:
            verifiers.check(data.verifier, (*where, "verifier"), apart=True)
    for name in config.reward.preload:
        verifiers.check(name, ("reward", "preload"), apart=True)
    if config.training.accept:
        acceptance_rules.check(config.training.accept, ("training", "accept"))


def check_scoring(config: LanguageConfig, verifiers: Sequence[str]) -> None:
    """Load verifiers as a reward worker does: in a process with its limits, and without variables
    of this one that were not named. With Ray that is another host's to do.

    Raises:
        ConfigError: one cannot be loaded there, or a setting has no effect with these verifiers.
    """
    reward, names = config.reward, sorted({*verifiers, *config.reward.preload} - INLINE)
    if verifiers and not names:
        check_judges(config, inline=True, asynchronous=False)
    if not names or config.cluster.backend == "ray":
        return

    async def load() -> bool:
        async with ScoringPool(
            processes=1,
            time_limit=reward.time_limit,
            memory_limit_mib=reward.memory_limit_mib,
            environment=reward.environment,
        ) as pool:
            await pool.load(names)
            return any(name in pool.asynchronous for name in names)

    try:
        asynchronous = run(load())
    except ConfigError as error:
        raise ConfigError(
            f"in a scoring process, which has reward.memory_limit_mib = {reward.memory_limit_mib} "
            f"and the variables of reward.environment: {error.problem}",
            path=("data", "verifier"),
        ) from error
    check_judges(config, inline=False, asynchronous=asynchronous)


def check_judges(config: LanguageConfig, *, inline: bool, asynchronous: bool) -> None:
    """Refuse settings that have no effect with the verifiers of this run.

    Args:
        config: the run's configuration.
        inline: all verifiers run in the worker itself.
        asynchronous: one of them is asynchronous.

    Raises:
        ConfigError: such a setting.
    """
    reward, default = config.reward, RewardConfig()
    if not asynchronous and not reward.model and reward.calls != default.calls:
        raise ConfigError(
            f"calls is {reward.calls}, but no verifier of this run is asynchronous: each process "
            "judges one answer at a time. Write it as `async def`, set reward.processes instead, "
            "or leave it out",
            path=("reward", "calls"),
        )
    for name in ("retries", "cache"):
        if inline and getattr(reward, name) != getattr(default, name):
            raise ConfigError(
                f"{name} is {getattr(reward, name)}, but exact and numeric are neither called "
                "again nor remembered: leave it out",
                path=("reward", name),
            )


def check_engine(config: LanguageConfig, model: Path, device: str) -> None:
    """Refuse what the engine would refuse when it starts. Imports the engine's library.

    Args:
        config: the run's configuration.
        model: the model's folder.
        device: ``"cpu"`` or a CUDA device, of the rollout workers.

    Raises:
        ConfigError: a limit or an argument that the engine cannot have with this model.
    """
    from rlinf_async.backends.transformers.folder import ModelFolderError

    rollout = config.rollout
    try:
        rollout.part.inspect(rollout.engine, model, device)
    except (ModelFolderError, ValueError) as error:
        raise ConfigError(str(error), path=rollout.where) from error


def check_formats(config: LanguageConfig, model: Path) -> None:
    """Refuse formats of responses that are none, or that no response can begin with.

    Raises:
        ConfigError: with the setting.
        MissingExtra: xgrammar is not installed.
    """
    formats = {one.grammar: where for where, one in reversed(_samplings(config).items())}
    for grammar, where in formats.items():
        if grammar:
            _check_format(grammar, model, (*where, "grammar", grammar.kind))


def _check_format(grammar: Grammar, model: Path, where: Setting) -> None:
    """Refuse what is no grammar, and one that no token of the model can begin."""
    from rlinf_async.backends.transformers.folder import open_folder
    from rlinf_async.backends.transformers.formats import ResponseFormats

    formats = ResponseFormats(open_folder(str(model)))
    try:
        formats.allowed([formats.begin(grammar, "check")])
    except ValueError as error:
        raise ConfigError(str(error), path=where) from error
    except ModelOutputError as error:
        raise ConfigError(
            f"no response can begin so: the tokenizer in {model} has no token for it", path=where
        ) from error


def check_critic(config: LanguageConfig, model: Path) -> None:
    """Refuse a folder for the critic that is incomplete, or whose tokens are not the actor's.

    Raises:
        ConfigError: with the folder, and what is wrong with it.
    """
    if not config.critic.path:
        return
    folder, where = Path(config.critic.path).expanduser(), ("critic", "path")
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{folder} has no config.json: give a Hugging Face checkpoint on this disk, or leave "
            "it out for the actor's own",
            path=where,
        )
    if not has_weights(folder):
        raise ConfigError(f"{folder} has no weights (*.safetensors)", path=where)
    own, actors = _described(folder).get("vocab_size"), _described(model).get("vocab_size")
    if own != actors:
        raise ConfigError(
            f"the model in {folder} has {own} tokens, the actor's has {actors}: a critic needs the "
            "actor's tokenizer",
            path=where,
        )
    check_weights(folder, where)


def _described(model: Path) -> dict[str, Any]:
    """The Hugging Face configuration of the text model."""
    described: dict[str, Any] = msgspec.json.decode((model / "config.json").read_bytes())
    text: dict[str, Any] = described.get("text_config") or described
    return text


def _check_tokens(config: LanguageConfig, model: Path) -> None:
    """Refuse tokens in settings of samples that the model does not have."""
    size = _described(model).get("vocab_size") if config.rollout.part.has_weights else None
    if not isinstance(size, int):
        return
    sampling = config.rollout.sampling
    given: dict[str, Sequence[int]] = {
        "logit_bias": [token for token, _ in sampling.logit_bias],
        "stop_token_ids": sampling.stop_token_ids,
    }
    for name, tokens in given.items():
        if max(tokens, default=0) >= size:
            raise ConfigError(
                f"there is no token {max(tokens)}: the model has tokens 0 .. {size - 1}",
                path=("rollout", "sampling", name),
            )


def _check_stops(config: LanguageConfig, tokenizer: Tokenizer) -> None:
    """Refuse a stop text with a special token, which the text of no response has."""
    added: dict[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    special = {number: str(one) for number, one in added.items() if one.special}
    for stop in config.rollout.sampling.stop:
        for number, token in special.items():
            if token in stop:
                raise ConfigError(
                    f"{stop!r} would end no response: {token!r} is a special token, which is in no "
                    f"text; set rollout.sampling.stop_token_ids to [{number}] instead",
                    path=("rollout", "sampling", "stop"),
                )


def _room(
    config: LanguageConfig, model: Path, sampling: Sampling, where: Setting
) -> tuple[int | None, str]:
    """Largest number of tokens of a prompt, and the reason; None: the model has no limit.

    Args:
        config: the run's configuration.
        model: the model's folder.
        sampling: how answers are drawn.
        where: setting of their ``max_tokens``.
    """
    context, longest = _context(config, model), sampling.max_tokens
    if config.has_episodes:
        most = config.episode.max_tokens
        if context is not None and most > context:
            raise ConfigError(
                f"max_tokens is {most}, but an episode has to fit the model's context of {context} "
                "tokens: lower it",
                path=("episode", "max_tokens"),
            )
        why = f"episode.max_tokens = {most} leaves {most - 1}: raise it for longer prompts"
        return most - 1, why
    if context is None:
        return None, ""
    if longest >= context:
        raise ConfigError(
            f"max_tokens is {longest}, but prompt and response have to fit the model's context of "
            f"{context} tokens together: lower it",
            path=where,
        )
    room = context - longest
    return room, (
        f"a context of {context} tokens less max_tokens = {longest} leaves {room}: lower "
        f"{'.'.join(where)} for longer prompts"
    )


def _context(config: LanguageConfig, model: Path) -> int | None:
    """Largest number of tokens of a prompt with its response; None: no limit."""
    rollout = config.rollout
    return rollout.part.context(rollout.engine, _described(model))


def _check_count(config: LanguageConfig, prompts: Prompts) -> None:
    epochs, training = config.data.epochs, config.training
    there, wanted = prompts.usable * epochs, training.iterations * training.prompts
    if epochs and there < wanted:
        raise ConfigError(
            f"{prompts.usable} records x {epochs} epochs are {there} prompts, but "
            f"{training.iterations} iterations of {training.prompts} need {wanted}: set epochs to "
            "0 (on and on), or fewer iterations",
            path=("data", "epochs"),
        )
