"""Whether the numbers of a language run's configuration fit one another."""

from __future__ import annotations

from rlinf_async.config import ConfigError
from rlinf_async.runtime.jobs.language.config import LanguageConfig


def check_sizes(config: LanguageConfig) -> None:
    """Refuse what could only fail later.

    Raises:
        ConfigError: with the numbers, and the nearest that would do.
    """
    training, cluster, actor = config.training, config.cluster, config.actor
    ranks = cluster.actors
    if training.prompts % ranks:
        raise ConfigError(
            f"{training.prompts} prompts cannot be divided among {ranks} actors: use "
            f"{_near(training.prompts, ranks)}",
            path=("training", "prompts"),
        )
    share = config.iteration_samples // ranks
    groups = training.prompts // ranks
    if groups % actor.global_batches:
        raise ConfigError(
            f"an actor gets {groups} groups of {training.group_size} samples in an iteration "
            f"({training.prompts} prompts / {ranks} actors): they cannot be cut into "
            f"{actor.global_batches} global batches of whole groups",
            path=("actor", "global_batches"),
        )
    if actor.micro_batch_size is not None and (share // actor.global_batches) % (
        actor.micro_batch_size
    ):
        raise ConfigError(
            f"a global batch has {share // actor.global_batches} samples on each actor, which "
            f"micro_batch_size = {actor.micro_batch_size} does not divide",
            path=("actor", "micro_batch_size"),
        )
    if cluster.backend == "local" and ranks > 1:
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
    if actor.advantage.name == "gae":
        raise ConfigError(
            "gae needs the values of a critic, which this job does not run: use grpo, rloo, "
            "reinforce++ or reinforce++_baseline",
            path=("actor", "advantage", "name"),
        )
    if config.needs_reference and not cluster.inference_workers:
        raise ConfigError(
            "a KL to the reference needs reference log-probs: set cluster.inference_workers",
            path=("cluster", "inference_workers"),
        )


def _near(number: int, divisor: int) -> str:
    below = number // divisor * divisor
    above = below + divisor
    return f"{below} or {above}" if below else str(above)
