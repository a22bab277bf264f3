"""What trains: for each backend its actor, its critic, and the configuration of their trainers.

::

    [actor], [critic], [warm_start] --Learner--> Backend.trainer --> the trainer's own configuration
                                                 Backend.actor, Backend.critic: the workers

The devices of a language run's roles, and what follows from them for engines and trainers.

Which devices the actors and the rollout workers of a scheduled run are launched on.

::

    device     0  1 | 2      3      4
    actor      0  1 |        3      2      idle members at first, from the last rollout worker on
    rollout         | 0      1      2      rollout worker 0 always serves
    guests     3    |                      start when the actors lend devices for the first time

Actors and rollout workers have devices of their own; beyond theirs actors are launched on those of
rollout workers, too, and hold nothing there until a worker has given its device back. So are the
``scheduler.guests`` among the rollout workers on devices of the actors: their engines start once
the actors have given these back.

The folder of a model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from rlinf_async.algorithms.config import LanguageAdvantageConfig, LanguageLossConfig
from rlinf_async.backends.base import OptimizerConfig, SchedulerConfig
from rlinf_async.backends.fsdp.language.config import LanguageFSDPConfig, LanguageTrainerConfig
from rlinf_async.backends.language_training.config import LanguageModelConfig
from rlinf_async.backends.megatron.config import MegatronConfig, MegatronTrainerConfig
from rlinf_async.backends.toy.config import ToyPolicyConfig
from rlinf_async.backends.vllm.config import GPU_MEMORY
from rlinf_async.config import ConfigError
from rlinf_async.runtime.jobs.language.config import LanguageConfig, MegatronOptions, RolloutConfig
from rlinf_async.runtime.jobs.placement import LaunchOptions, Plan, Role, make_plan
from rlinf_async.runtime.launching import VISIBLE, Ranks
from rlinf_async.workers.actor import FSDPActor, LanguageActor, MegatronActor
from rlinf_async.workers.base import Device
from rlinf_async.workers.critic import FSDPCritic, LanguageCritic, MegatronCritic

HYBRID = (("actor", "critic", "inference"), ("rollout",))
"""rollout workers have devices of their own; the others share"""
LEARNERS = ("actor", "critic")


def plan_roles(config: LanguageConfig, devices: Sequence[Device]) -> Plan:
    """The devices of every worker of the run.

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
    computes = config.actor.backend != "toy"
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
            count=cluster.critics,
            asked=asked.critic,
            accelerated=computes,
            takes_turns=True,
            one_device=True,
        ),
        Role(
            name="inference",
            count=cluster.inference_workers,
            asked=asked.inference,
            accelerated=computes,
            one_device=True,
        ),
        Role(
            name="rollout",
            count=cluster.rollout_workers,
            asked=asked.rollout,
            accelerated=computes,
            takes_turns=config.rollout.vllm.sleep is not False,
            one_device=config.rollout.backend == "transformers",
        ),
        Role(
            name="reward",
            count=cluster.reward_workers,
            asked=asked.reward,
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


def placed(config: LanguageConfig, plan: Plan) -> LanguageConfig:
    """The configuration with the numbers of workers and the engine's settings of the plan.

    Raises:
        ConfigError: the engine's settings contradict the plan, or roles that take turns on their
            devices are to run ahead.
    """
    _check_turns(config, plan)
    replace = msgspec.structs.replace
    cluster = replace(
        config.cluster, actors=plan.count("actor"), rollout_workers=plan.count("rollout")
    )
    return replace(config, cluster=cluster, rollout=_rollout(config, plan))


def environment_of(config: LanguageConfig, plan: Plan, learner: str) -> dict[str, str]:
    """Environment variables of an actor's or critic's processes.

    Megatron computes on any GPU that its process sees: where it is to have none, it sees none.
    """
    backend = config.actor.backend if learner == "actor" else config.critic_backend
    environment = dict(config.cluster.environment)
    on_gpus = any(one.kind != "cpu" for one in plan.machine)
    if backend == "megatron" and on_gpus and not plan.accelerated(learner):
        return {VISIBLE: ""} | environment
    return environment


def takes_turns(plan: Plan) -> bool:
    """Whether rollout workers share devices with learners: then either generate or learn."""
    return any(plan.shared("rollout", learner) for learner in LEARNERS)


def _check_turns(config: LanguageConfig, plan: Plan) -> None:
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
    if config.actor.strategy == "fsdp1" and offloads and on_gpus:
        raise ConfigError(
            "actors that share GPUs with rollout workers or critics have to be offloaded, which "
            "fsdp1 cannot on several GPUs: use 'fsdp2', or give each role its own devices",
            path=("actor", "strategy"),
        )


def _rollout(config: LanguageConfig, plan: Plan) -> RolloutConfig:
    vllm = config.rollout.vllm
    if config.rollout.backend != "vllm":
        return config.rollout
    if not plan.accelerated("rollout"):
        if any(one.kind != "cpu" for one in plan.machine) and not _computes_on_cpus():
            raise ConfigError(
                "rollout workers are to have no GPU, but the installed vLLM computes on GPUs alone "
                "and would take those of other roles: give them devices, or set rollout.backend "
                "to 'transformers'",
                path=("cluster", "placement", "rollout"),
            )
        return config.rollout
    devices = plan.devices_per_worker("rollout")
    if vllm.tensor_parallel not in (None, devices):
        raise ConfigError(
            f"tensor_parallel is {vllm.tensor_parallel}, but each rollout worker has {devices} "
            "devices: leave it out, or set devices_per_worker in cluster.placement.rollout",
            path=("rollout", "vllm", "tensor_parallel"),
        )
    memory = GPU_MEMORY * plan.memory_share("rollout")
    engine = msgspec.structs.replace(
        vllm,
        tensor_parallel=devices,
        gpu_memory=memory if vllm.gpu_memory is None else vllm.gpu_memory,
        sleep=takes_turns(plan) or config.scheduled if vllm.sleep is None else vllm.sleep,
    )
    return msgspec.structs.replace(config.rollout, vllm=engine)


def _computes_on_cpus() -> bool:
    """Whether the installed vLLM is built for CPUs; True also where none is installed."""
    try:
        return "cpu" in version("vllm")
    except PackageNotFoundError:
        return True  # the build for CPUs may have a name of its own


class Layout(msgspec.Struct, frozen=True):
    """Devices by number: their positions in the plan's machine, or, without accelerators, one for
    each worker."""

    actor: tuple[int, ...]
    """of each launched rank; the first ones train between two iterations"""
    instances: tuple[tuple[int, ...], ...]
    """of each rollout worker, guests last"""
    hosts: dict[int, int]
    """host of each device"""
    accelerated: bool


def layout_of(config: LanguageConfig, plan: Plan) -> Layout:
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
    return Layout((*own, *beyond)[:launched], (*instances, *guests), hosts, accelerated)


def _homes(
    config: LanguageConfig, plan: Plan
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...], bool]:
    if plan.accelerated("actor") and plan.accelerated("rollout"):
        own = tuple(device for rank in plan.ranks["actor"] for device in rank)
        return own, tuple(plan.ranks["rollout"]), True
    actors = config.actors
    homes = tuple((actors + number,) for number in range(config.rollout_workers))
    return tuple(range(actors)), homes, False


def options(
    role: Literal["actor", "rollout"],
    layout: Layout | None,
    plan: Plan,
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


class Learner(msgspec.Struct, frozen=True, kw_only=True):
    """A model that is trained, in whichever backend."""

    model: LanguageModelConfig
    device: str
    precision: Literal["float32", "bfloat16"]
    optimizer: OptimizerConfig
    scheduler: SchedulerConfig
    loss: LanguageLossConfig
    advantage: LanguageAdvantageConfig = LanguageAdvantageConfig()
    value_clip: float | None = None
    reference: bool = False
    engine_tolerance: float | None = None
    publish_precision: Literal["float32", "bfloat16", "float16"] = "float32"
    seed: int
    strategy: Literal["fsdp2", "fsdp1"] = "fsdp2"
    """of FSDP"""
    tp: int = 1
    pp: int = 1
    megatron: MegatronOptions = MegatronOptions()


class Backend(NamedTuple):
    """The workers of a backend, and their trainers."""

    actor: type[LanguageActor]
    critic: type[LanguageCritic]
    actor_trainer: str
    """registered name"""
    critic_trainer: str
    trainer: Callable[[Learner], Any]


def _fsdp(one: Learner) -> LanguageTrainerConfig:
    return LanguageTrainerConfig(
        fsdp=LanguageFSDPConfig(
            model=one.model,
            device=one.device,
            precision=one.precision,
            strategy=one.strategy,
            optimizer=one.optimizer,
            scheduler=one.scheduler,
        ),
        **_common(one),
    )


def _megatron(one: Learner) -> MegatronTrainerConfig:
    return MegatronTrainerConfig(
        megatron=MegatronConfig(
            model=one.model,
            device=one.device,
            precision=one.precision,
            optimizer=one.optimizer,
            scheduler=one.scheduler,
            tp=one.tp,
            pp=one.pp,
            **msgspec.structs.asdict(one.megatron),
        ),
        **_common(one),
    )


def _common(one: Learner) -> dict[str, Any]:
    names = (
        *("advantage", "loss", "value_clip", "reference", "publish_precision", "seed"),
        "engine_tolerance",
    )
    return {name: getattr(one, name) for name in names}


def _toy(_: Learner) -> Any:
    raise AssertionError("a toy's configuration is [actor.toy]")


BACKENDS = {
    "fsdp": Backend(FSDPActor, FSDPCritic, "fsdp", "fsdp_critic", _fsdp),
    "megatron": Backend(MegatronActor, MegatronCritic, "megatron", "megatron_critic", _megatron),
    "toy": Backend(LanguageActor, LanguageCritic, "toy", "toy", _toy),
}
"""``actor.backend``, ``critic.backend`` -> what trains"""


def actor_config(config: LanguageConfig, model: Path, device: str) -> Any:
    """The actors' trainer's own configuration; ``device`` is that of each, in its process."""
    return _policy(config, model, device, config.actor.backend)


def inference_backend(config: LanguageConfig) -> str:
    """The trainer that inference workers compute log-probs with: one device has the whole model."""
    return "toy" if config.actor.backend == "toy" else "fsdp"


def inference_config(config: LanguageConfig, model: Path, device: str) -> Any:
    """The inference workers' trainer's own configuration."""
    return _policy(config, model, device, inference_backend(config))


def critic_config(config: LanguageConfig, model: Path, device: str) -> Any:
    """The critics' trainer's own configuration: the actor's, but for what ``[critic]`` says."""
    actor, critic = config.actor, config.critic
    if config.critic_backend == "toy":
        return actor.toy
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
        megatron=config.critic_megatron,
    )
    return BACKENDS[config.critic_backend].trainer(learner)


def supervised_config(config: LanguageConfig, model: Path, device: str) -> Any:
    """The trainer's own configuration of a warm start, by the actors' backend."""
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
        megatron=actor.megatron,
    )
    return BACKENDS[actor.backend].trainer(learner)


def _policy(config: LanguageConfig, model: Path, device: str, backend: str) -> Any:
    actor = config.actor
    if backend == "toy":
        return ToyPolicyConfig(loss=actor.loss, **msgspec.structs.asdict(actor.toy))
    learner = Learner(
        model=_described(config, model),
        device=device,
        precision=actor.precision,
        optimizer=actor.optimizer,
        scheduler=actor.scheduler,
        advantage=actor.advantage,
        loss=actor.loss,
        reference=config.needs_reference,
        engine_tolerance=config.weights_tolerance,
        publish_precision=actor.publish_precision,
        seed=config.seed,
        strategy=actor.strategy,
        tp=actor.tp,
        pp=actor.pp,
        megatron=actor.megatron,
    )
    return BACKENDS[backend].trainer(learner)


def _described(
    config: LanguageConfig, folder: Path, *, checkpointing: bool = True
) -> LanguageModelConfig:
    return LanguageModelConfig(
        path=str(folder),
        random=not has_weights(folder),
        activation_checkpointing=checkpointing and config.actor.activation_checkpointing,
    )
