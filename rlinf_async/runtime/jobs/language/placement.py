"""The devices of a language run's roles, and what follows from them for engines and trainers."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

import msgspec

from rlinf_async.backends.vllm.config import GPU_MEMORY
from rlinf_async.config import ConfigError
from rlinf_async.runtime.devices import VISIBLE
from rlinf_async.runtime.jobs.language.config import LanguageConfig
from rlinf_async.runtime.jobs.language.sections import RolloutConfig
from rlinf_async.runtime.jobs.placement import Plan, Role
from rlinf_async.runtime.jobs.planning import make_plan
from rlinf_async.workers.context import Device

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
