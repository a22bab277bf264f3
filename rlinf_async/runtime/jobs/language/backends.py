"""Which devices the roles of a language run have, and what their engines and trainers are told.

::

    [actor], [critic], [warm_start] --Learner--> LanguageTrainerPart.config --> the trainer's own
    [rollout], devices ------------------------> EnginePart.placed ----------> the engine's own

Actors and rollout workers of a scheduled run::

    device     0  1 | 2      3      4
    actor      0  1 |        3      2      idle members at first, from the last rollout worker on
    rollout         | 0      1      2      rollout worker 0 always serves
    guests     3    |                      start when the actors lend devices for the first time

Each role has devices of its own; beyond these, actors are launched on those of rollout workers,
too, and hold nothing there until a worker has given its device back. So are the
``scheduler.guests`` among the rollout workers on devices of the actors: their engines start once
the actors have given these back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from rlinf_async.algorithms.config import LanguageLossConfig
from rlinf_async.backends.base import OptimizerConfig, SchedulerConfig
from rlinf_async.backends.language_training.config import (
    LanguageModelConfig,
    PublishedAdapterConfig,
)
from rlinf_async.backends.parts import (
    EngineDevices,
    LanguageTrainerPart,
    Learner,
    language_trainers,
)
from rlinf_async.config import ConfigError
from rlinf_async.runtime.jobs.language.config import (
    GenerationSettings,
    LanguageConfig,
    LearnerConfig,
)
from rlinf_async.runtime.jobs.placement import LaunchOptions, PlacementPlan, Role, make_plan
from rlinf_async.runtime.launching import VISIBLE, Ranks
from rlinf_async.workers.base import Device
from rlinf_async.workers.inference import EarlierVersions, TeacherQuestions

HYBRID = (("actor", "critic", "inference"), ("rollout",))
"""rollout workers have devices of their own; the others share"""
LEARNERS = ("actor", "critic")


def plan_roles(
    config: LanguageConfig, devices: Sequence[Device], *, learners: bool = True
) -> PlacementPlan:
    """The devices of every worker of the run; ``learners``: else of those that answer and score.

    Raises:
        ConfigError: a setting of the placement is wrong.
        MissingDevice: there are too few devices.
    """
    cluster, asked = config.cluster, config.placement
    actors, together = cluster.actors, config.actor.model_ranks
    if actors is None and cluster.critics:
        actors = cluster.critics // config.critic_parts.world_size * together or together
    if actors is None and all(one.kind == "cpu" for one in devices):
        actors = together
    computes, engine = config.actor.part.has_weights, config.rollout.part
    if not learners:
        actors, asked = 0, msgspec.structs.replace(asked, actor="", critic="", inference="")
    roles = [
        Role(
            name="actor",
            count=actors,
            asked=asked.actor,
            accelerated=computes,
            takes_turns=True,
            one_device=True,
            fits=config.fits_actors,
        ),
        Role(
            name="critic",
            count=cluster.critics if learners else 0,
            asked=asked.critic,
            accelerated=computes,
            takes_turns=True,
            one_device=True,
        ),
        Role(
            name="inference",
            count=cluster.inference_workers if learners else 0,
            asked=asked.inference,
            accelerated=computes,
            one_device=True,
        ),
        Role(
            name="rollout",
            count=cluster.rollout_workers,
            asked=asked.rollout,
            accelerated=computes,
            takes_turns=not engine.keeps_memory(config.rollout.engine),
            one_device=engine.one_device,
        ),
        Role(
            name="reward",
            count=cluster.reward_workers,
            asked=asked.reward,
            accelerated=False,
        ),
        Role(
            name="episode",
            count=cluster.episode_workers,
            asked=asked.episode,
            accelerated=False,
        ),
    ]
    return make_plan(
        roles,
        devices,
        preset=asked.preset,
        hybrid=HYBRID,
        node_groups=cluster.node_groups,
    )


def placed(config: LanguageConfig, plan: PlacementPlan) -> LanguageConfig:
    """The configuration with the numbers of workers and the engine's settings of the plan.

    Raises:
        ConfigError: the engine's settings contradict the plan, or roles that take turns on their
            devices are to run ahead.
    """
    _check_turns(config, plan)
    replace = msgspec.structs.replace
    actors = plan.count("actor") if "actor" in plan.ranks else config.cluster.actors
    cluster = replace(config.cluster, actors=actors, rollout_workers=plan.count("rollout"))
    return replace(config, cluster=cluster, rollout=_rollout(config, plan))


def environment_of(config: LanguageConfig, plan: PlacementPlan, learner: str) -> dict[str, str]:
    """Environment variables of an actor's or critic's processes.

    A trainer that computes on any GPU in sight sees none where it is to have none.
    """
    part = config.actor.part if learner == "actor" else config.critic_part
    return trainer_environment(part, plan, learner, config.cluster.environment)


def trainer_environment(
    part: LanguageTrainerPart, plan: PlacementPlan, role: str, environment: Mapping[str, str]
) -> dict[str, str]:
    """Environment variables of the processes of a role that trains by ``part``."""
    on_gpus = any(one.kind != "cpu" for one in plan.machine)
    if part.sees_every_gpu and on_gpus and not plan.accelerated(role):
        return {VISIBLE: "", **environment}
    return dict(environment)


def takes_turns(plan: PlacementPlan) -> bool:
    """Whether rollout workers share devices with learners: then either generate or learn."""
    return any(plan.shared("rollout", learner) for learner in LEARNERS)


def _check_turns(config: LanguageConfig, plan: PlacementPlan) -> None:
    staleness = config.training.max_staleness
    if takes_turns(plan) and staleness:
        raise ConfigError(
            f"max_staleness is {staleness}, but rollout workers share devices with actors or "
            "critics, and those that take turns cannot run ahead: set it to 0, or give each its "
            "own ('disaggregated')",
            path=("cluster", "placement"),
        )
    offloads = takes_turns(plan) or plan.shared("actor", "critic")
    learners = [one for one in LEARNERS if one in plan.ranks]
    on_gpus = any(plan.count(one) > 1 and plan.accelerated(one) for one in learners)
    strategy = config.actor.strategy
    if offloads and on_gpus and not config.actor.part.can_offload(strategy):
        raise ConfigError(
            "actors that share GPUs with rollout workers or critics have to be offloaded, which "
            f"{strategy} cannot on several GPUs: use 'fsdp2', or give each role its own devices",
            path=("actor", "strategy"),
        )


def _rollout(config: LanguageConfig, plan: PlacementPlan) -> GenerationSettings:
    rollout, accelerated = config.rollout, plan.accelerated("rollout")
    devices = EngineDevices(
        number=plan.devices_per_worker("rollout") if accelerated else 1,
        accelerated=accelerated,
        others=any(one.kind != "cpu" for one in plan.machine),
        share=plan.memory_share("rollout") if accelerated else 1.0,
        lent=takes_turns(plan) or config.scheduled,
    )
    settings = rollout.part.placed(rollout.engine, devices, rollout.where)
    if rollout.sampling.grammar:
        settings = rollout.part.with_formats(settings)
    if config.publishes_adapter:
        settings = rollout.part.with_adapter(settings, config.actor.lora.rank)
    return rollout.with_engine(settings)


class DeviceLayout(msgspec.Struct, frozen=True):
    """Devices by number: their positions in the plan's machine, or, without accelerators, one for
    each worker."""

    actor: tuple[int, ...]
    """device of each launched rank of the actor; the first ones train between two iterations"""
    instances: tuple[tuple[int, ...], ...]
    """devices of each rollout worker, guests last"""
    hosts: dict[int, int]
    """host of each device"""
    accelerated: bool


def layout_of(config: LanguageConfig, plan: PlacementPlan) -> DeviceLayout:
    """Return the devices of a run, whose numbers of workers are known."""
    own, instances, accelerated = _homes(config, plan)
    beyond = [device for one in reversed(instances[1:]) for device in one]
    most = len(own) + len(beyond)
    launched = max(
        (one for one in range(len(own), most + 1) if config.fits_actors(one)), default=len(own)
    )
    names = sorted({one.host for one in plan.machine})
    every = [*own, *(device for one in instances for device in one)]
    hosts = {one: names.index(plan.machine[one].host) if accelerated else 0 for one in every}
    each = plan.devices_per_worker("rollout")
    guests = tuple(own[one * each : (one + 1) * each] for one in range(config.scheduler.guests))
    return DeviceLayout((*own, *beyond)[:launched], (*instances, *guests), hosts, accelerated)


def _homes(
    config: LanguageConfig, plan: PlacementPlan
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...], bool]:
    if plan.accelerated("actor") and plan.accelerated("rollout"):
        own = tuple(device for rank in plan.ranks["actor"] for device in rank)
        return own, tuple(plan.ranks["rollout"]), True
    actors = config.actors
    homes = tuple((actors + number,) for number in range(config.rollout_workers))
    return tuple(range(actors)), homes, False


def options(
    role: Literal["actor", "rollout"],
    layout: DeviceLayout | None,
    plan: PlacementPlan,
    environment: dict[str, str],
) -> LaunchOptions:
    """Return what the workers of a role are launched with; ``layout``: of a scheduled run."""
    found = plan.options(role, environment)
    if layout is not None and layout.accelerated:
        alone = [(device,) for device in layout.actor]
        found["placement"] = Ranks(alone if role == "actor" else list(layout.instances))
    return found


def has_weights(folder: Path) -> bool:
    """Whether a model folder has weights."""
    return any(folder.glob("*.safetensors")) or any(folder.glob("*.bin"))


def actor_config(config: LanguageConfig, model: Path, device: str) -> Any:
    """The actors' trainer's own configuration; ``device`` is that of each, in its process."""
    return config.actor.part.config(_policy(config, model, device))


def inference_backend(actor: LearnerConfig) -> str:
    """The trainer that inference workers compute log-probs with: one device has the whole model."""
    return actor.part.inference or actor.backend


def inference_config(config: LanguageConfig, model: Path, device: str) -> Any:
    """The inference workers' trainer's own configuration. They take what engines take; their first
    weights, the reference, are those without the adapter."""
    part = language_trainers.load(inference_backend(config.actor))
    learner, lora = _policy(config, model, device), PublishedAdapterConfig()
    if config.publishes_adapter:  # whose scale is in its factors
        lora = msgspec.structs.replace(learner.lora, alpha=float(learner.lora.rank))
    return part.config(msgspec.structs.replace(learner, lora=lora))


def teacher_config(config: LanguageConfig, device: str) -> Any:
    """The trainer's own configuration of the teacher, in inference workers, or what it is made of
    where the teacher is an earlier version of the policy (`InferenceWorker`); None: there is none.
    """
    if config.teacher.every:
        return _teaching(config.actor, "", device)
    return teacher_of(config.actor, config.teacher.path, device) if config.needs_teacher else None


def earlier_versions(config: LanguageConfig, run: Path) -> EarlierVersions | None:
    """The versions of the policy that are its teachers; None: it has another one, or none.

    ``run``: the run's folder.
    """
    if not config.teacher.every:
        return None
    return EarlierVersions(
        folder=str((run / "teacher").absolute()),
        every=config.teacher.every,
        max_staleness=config.training.max_staleness,
    )


def teacher_questions(config: LanguageConfig, model: Path) -> TeacherQuestions | None:
    """What the teacher is asked about samples of the model in this folder; None: there is none."""
    if not config.needs_teacher:
        return None
    return TeacherQuestions(top_k=config.teacher.top_k, vocabulary=vocabulary_of(model))


def vocabulary_of(folder: Path) -> int:
    """Number of tokens that a model has."""
    described: dict[str, Any] = msgspec.json.decode((folder / "config.json").read_bytes())
    return int((described.get("text_config") or described)["vocab_size"])


def teacher_of(actor: LearnerConfig, path: str, device: str) -> Any:
    """The trainer's own configuration of a teacher of the actors: the model in this folder on one
    device, which is never trained."""
    learner = _teaching(actor, str(Path(path).expanduser()), device)
    return language_trainers.load(inference_backend(actor)).config(learner)


def _teaching(actor: LearnerConfig, folder: str, device: str) -> Learner:
    return Learner(
        model=LanguageModelConfig(path=folder),
        device=device,
        precision=actor.precision,
        options=actor.trainer,
    )


def critic_config(config: LanguageConfig, model: Path, device: str) -> Any:
    """The critics' trainer's own configuration: the actor's, but for what ``[critic]`` says."""
    actor, critic = config.actor, config.critic
    folder = Path(critic.path).expanduser() if critic.path else model
    learner = Learner(
        model=_described(config, folder),
        device=device,
        precision=critic.precision or actor.precision,
        optimizer=critic.optimizer,
        scheduler=critic.scheduler,
        advantage=actor.advantage,
        loss=LanguageLossConfig(aggregation=actor.loss.aggregation),
        value_clip=critic.value_clip,
        seed=config.seed,
        strategy=actor.strategy,
        tp=config.critic_tp,
        pp=config.critic_pp,
        options=config.critic_trainer,
    )
    return config.critic_part.config(learner)


def supervised_config(config: LanguageConfig, model: Path, device: str) -> Any:
    """The trainer's own configuration of a warm start, by the actors' backend. All weights are
    trained, also where an adapter is trained afterwards."""
    phase, actor = config.warm_start, config.actor
    learner = Learner(
        model=_described(config, model, checkpointing=False),
        device=device,
        precision=actor.precision,
        optimizer=OptimizerConfig(lr=phase.lr, eps=1e-8, max_grad_norm=1.0),
        scheduler=SchedulerConfig(
            kind="cosine",
            warmup_steps=min(phase.warmup_steps, phase.steps - 1),
            total_steps=phase.steps,
            min_factor=0.1,
        ),
        loss=LanguageLossConfig(name="supervised"),
        seed=config.seed,
        strategy=actor.strategy,
        tp=actor.tp,
        pp=actor.pp,
        options=actor.trainer,
    )
    return actor.part.config(learner)


def _policy(config: LanguageConfig, model: Path, device: str) -> Learner:
    actor = config.actor
    return Learner(
        model=_described(config, model),
        device=device,
        precision=actor.precision,
        optimizer=actor.optimizer,
        scheduler=actor.scheduler,
        advantage=actor.advantage,
        loss=actor.loss,
        reference=config.needs_reference,
        engine_tolerance=config.weights_tolerance,
        routing_replay=config.rollout.sampling.routing_replay,
        publish_precision=actor.publish_precision,
        lora=actor.lora,
        export_precision=config.training.export_precision,
        export_shard_bytes=max(1, int(config.training.export_shard_gb * 1e9)),
        seed=config.seed,
        strategy=actor.strategy,
        tp=actor.tp,
        pp=actor.pp,
        options=actor.trainer,
    )


def _described(
    config: LanguageConfig, folder: Path, *, checkpointing: bool = True
) -> LanguageModelConfig:
    return LanguageModelConfig(
        path=str(folder),
        random=not has_weights(folder),
        activation_checkpointing=checkpointing and config.actor.activation_checkpointing,
    )
