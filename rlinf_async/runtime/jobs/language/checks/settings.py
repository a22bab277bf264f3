"""What the settings say already: nothing is read but `config.json` of folders that they name."""

from __future__ import annotations

import importlib.util
from typing import Any

from rlinf_async.algorithms.config import (
    DISTIL,
    WITHOUT_TEACHER,
    LanguageAdvantageConfig,
    LanguageLossConfig,
)
from rlinf_async.backends.language import (
    FAMILIES,
    SEEING,
    check_family,
    sees_images,
)
from rlinf_async.backends.parts import EngineRun, TrainerRun, engines, language_trainers
from rlinf_async.config import ConfigError, MissingExtra
from rlinf_async.data.config import NO_VERIFIER
from rlinf_async.parallel.splits import nearest_divisors
from rlinf_async.runtime.jobs.language.checks.episodes import (
    check_branches,
    check_episode_data,
    check_episodes,
)
from rlinf_async.runtime.jobs.language.checks.models import check_comparison
from rlinf_async.runtime.jobs.language.checks.named import (
    SETS,
    Setting,
    at_setting,
    check_reads_text,
    config_of,
    data_sections,
    samplings,
)
from rlinf_async.runtime.jobs.language.config import ActorConfig, LanguageConfig

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
    described = config_of(path) if path else config.model.config
    where = ("model", "path") if path else ("model", "config", "model_type")
    _check_images(config, described, where)
    asked = EngineRun(rollout.engine, rollout.where, rollout.sampling, described, where)
    with at_setting(where):
        rollout.part.check(asked)
    _check_routes(config, described)
    actor = config.actor
    if not actor.part.has_weights:
        return
    actor.part.check(TrainerRun("actor", described, where, config.actor_parts, actor.trainer))
    if not config.has_critic:
        return
    if config.critic.path and (read := config_of(config.critic.path)):
        described, where = read, ("critic", "path")
        with at_setting(where):
            check_family(described)
        check_reads_text(described, where, "critic")
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
    check_branches(config)


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
    for where, sampling in samplings(config).items():
        for name in sampling.further:
            if name not in config.rollout.part.honours:
                others = [one for one in engines.paths if name in engines.load(one).honours]
                raise ConfigError(
                    f"the engine {config.rollout.backend!r} does not say that it honours {name}: "
                    f"leave it out, or set rollout.backend to one that does ({', '.join(others)})",
                    path=(*where, name),
                )


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
        check_episode_data(config, one.data, (*SETS, name, "data"))
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


def _nearest(number: int, divisor: int) -> str:
    below = number // divisor * divisor
    above = below + divisor
    return f"{below} or {above}" if below else str(above)
