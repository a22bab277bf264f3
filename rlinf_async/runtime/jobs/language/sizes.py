"""Whether the numbers of a language run's configuration fit one another."""

from __future__ import annotations

from rlinf_async.config import ConfigError
from rlinf_async.runtime.jobs.language.config import LanguageConfig

WITHOUT_VALUES = frozenset({"grpo", "rloo", "reinforce++", "reinforce++_baseline"})
"""built-in advantages that no critic helps; a user's own may look at values"""


def check_sizes(config: LanguageConfig) -> None:
    """Refuse what could only fail later.

    Raises:
        ConfigError: with the numbers, and the nearest that would do.
    """
    _check_batches(config)
    _check_places(config)
    _check_evaluation(config)
    _check_learning(config)
    _check_critics(config)
    _check_reference(config)


def _check_batches(config: LanguageConfig) -> None:
    """Prompts over actors, groups over global batches, samples over micro-batches."""
    training, actor, ranks = config.training, config.actor, config.cluster.actors
    if training.prompts % ranks:
        raise ConfigError(
            f"{training.prompts} prompts cannot be divided among {ranks} actors: use "
            f"{_near(training.prompts, ranks)}",
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
    if config.has_critic:
        _check_micro_batches("critic", size, config.critic.micro_batch_size)


def _check_places(config: LanguageConfig) -> None:
    training, cluster = config.training, config.cluster
    if cluster.backend == "local" and cluster.actors > 1:
        raise ConfigError(
            "several actors need a process each: use backend = 'process', or actors = 1",
            path=("cluster", "backend"),
        )
    if cluster.placement == "collocated" and training.max_staleness:
        raise ConfigError(
            f"max_staleness is {training.max_staleness}, but workers that take turns on their "
            "devices have nothing to be ahead of: set it to 0, or placement to 'disaggregated'",
            path=("cluster", "placement"),
        )


def _check_evaluation(config: LanguageConfig) -> None:
    if config.evaluation.samples and not config.data.held_out:
        raise ConfigError(
            f"evaluation.samples is {config.evaluation.samples}, but no record is held out: set "
            "data.held_out, or evaluation.samples to 0",
            path=("data", "held_out"),
        )
    if config.evaluation.target_accuracy is not None and not config.evaluation.samples:
        raise ConfigError(
            "there is a target but no evaluation: set evaluation.samples",
            path=("evaluation", "target_accuracy"),
        )


def _check_learning(config: LanguageConfig) -> None:
    actor = config.actor
    if actor.epochs > 1 and actor.loss.proximal == "current":
        raise ConfigError(
            f"with {actor.epochs} epochs the samples become older than the weights, but 'current' "
            "compares with the weights as they are: use 'auto' or 'behaviour', or one epoch",
            path=("actor", "loss", "proximal"),
        )
    if config.warm_start.steps and config.model.path:
        raise ConfigError(
            "a supervised phase is for a model that begins from nothing (model.config), but "
            f"model.path names {config.model.path!r}, which has weights: set it to 0",
            path=("warm_start", "steps"),
        )
    batch, ranks = config.warm_start.batch_size, config.cluster.actors
    if config.warm_start.steps and batch % ranks:
        raise ConfigError(
            f"a batch of {batch} examples cannot be divided among {ranks} actors: use "
            f"{_near(batch, ranks)}",
            path=("warm_start", "batch_size"),
        )


def _check_micro_batches(whose: str, samples: int, size: int | None) -> None:
    if size is not None and samples % size:
        raise ConfigError(
            f"a global batch has {samples} samples on each {whose}, which micro_batch_size = "
            f"{size} does not divide: use {_near_divisors(samples, size)}",
            path=(whose, "micro_batch_size"),
        )


def _check_critics(config: LanguageConfig) -> None:
    critics, actors = config.cluster.critics, config.cluster.actors
    advantage = config.actor.advantage.name
    if advantage == "gae" and not critics:
        raise ConfigError(
            f"gae needs the values of a critic: set cluster.critics to {actors}, or use an "
            "advantage without one (grpo, rloo, reinforce++, reinforce++_baseline)",
            path=("actor", "advantage", "name"),
        )
    if critics and advantage in WITHOUT_VALUES:
        raise ConfigError(
            f"{advantage} does not look at values: set cluster.critics to 0, or "
            "actor.advantage.name to 'gae'",
            path=("cluster", "critics"),
        )
    if critics not in (0, actors):
        raise ConfigError(
            f"{critics} critics cannot be paired with {actors} actors, each with the one of its "
            f"rank: set it to {actors}",
            path=("cluster", "critics"),
        )
    if config.critic.warmup_iterations and not critics:
        raise ConfigError(
            "there is no critic to warm up: set cluster.critics, or leave it out",
            path=("critic", "warmup_iterations"),
        )


def _check_reference(config: LanguageConfig) -> None:
    if config.needs_reference and not config.cluster.inference_workers:
        raise ConfigError(
            "a KL to the reference needs reference log-probs: set cluster.inference_workers",
            path=("cluster", "inference_workers"),
        )


def _near_divisors(number: int, wanted: int) -> str:
    divisors = [one for one in range(1, number + 1) if number % one == 0]
    below = [one for one in divisors if one < wanted][-1:]
    above = [one for one in divisors if one > wanted][:1]
    return " or ".join(str(one) for one in below + above)


def _near(number: int, divisor: int) -> str:
    below = number // divisor * divisor
    above = below + divisor
    return f"{below} or {above}" if below else str(above)
