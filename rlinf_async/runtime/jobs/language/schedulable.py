"""Whether a language run can have a scheduler: what would otherwise fail in its middle."""

from __future__ import annotations

from rlinf_async.config import ConfigError
from rlinf_async.runtime.jobs.language.backends import DeviceLayout, layout_of
from rlinf_async.runtime.jobs.language.config import LanguageConfig
from rlinf_async.runtime.jobs.placement import PlacementPlan
from rlinf_async.scheduling import load_policy

POLICY = ("scheduler", "policy")
GUESTS = ("scheduler", "guests")
PLACEMENT = ("cluster", "placement")


def check_scheduler(config: LanguageConfig, plan: PlacementPlan) -> None:
    """Refuse a policy that is not known, and a run whose actors cannot change.

    Raises:
        ConfigError: names the setting, the reason, and what to do.
    """
    policy, guests = config.scheduler.policy, config.scheduler.guests
    if policy == "static":
        if guests:
            raise ConfigError(
                f"guests is {guests}, but with scheduler.policy 'static' actors lend nothing: set "
                "it to 0, or use another policy",
                path=GUESTS,
            )
        return
    load_policy(policy, POLICY)
    if policy == "turns" and not guests:
        raise ConfigError(
            "policy 'turns' lends the actors' devices to rollout workers that are launched there: "
            "set scheduler.guests to their number, or use 'tail', 'greedy' or 'longest_first'",
            path=POLICY,
        )
    _check_guests(config, plan)
    _check_actors(config)
    _check_devices(config, plan)
    layout = layout_of(config, plan)
    _check_hosts(config, layout)
    _check_sizes(config, layout)


def _wanted(config: LanguageConfig) -> str:
    return f"scheduler.policy is {config.scheduler.policy!r}: set it to 'static', or "


def _check_guests(config: LanguageConfig, plan: PlacementPlan) -> None:
    guests, each = config.scheduler.guests, plan.devices_per_worker("rollout")
    if guests * each > config.actors:
        raise ConfigError(
            f"guests is {guests}, but there are only {config.actors} actors whose devices could be "
            f"lent{f', and each needs {each} devices' if each > 1 else ''}: use no more than "
            f"{config.actors // each}",
            path=GUESTS,
        )


def _check_hosts(config: LanguageConfig, layout: DeviceLayout) -> None:
    """A rollout worker has all of its devices on one host."""
    for guest in layout.instances[config.rollout_workers :]:
        if len({layout.hosts[device] for device in guest}) > 1:
            raise ConfigError(
                f"a guest would have devices {list(guest)} of the actors, which are on several "
                "hosts: use fewer guests, or give actors other devices by cluster.placement",
                path=GUESTS,
            )


def _check_actors(config: LanguageConfig) -> None:
    actor, wanted = config.actor, _wanted(config)
    actor.part.check_scheduled(actor.strategy, actor.trainer, wanted)
    if config.cluster.backend == "local" and actor.part.collective:
        raise ConfigError(
            f"ranks that change need a process each, and {wanted}use backend = 'process'",
            path=("cluster", "backend"),
        )


def _check_devices(config: LanguageConfig, plan: PlacementPlan) -> None:
    """The devices that move are whole ones, of one kind, and nobody else's."""
    wanted = _wanted(config)
    on_gpus = {role for role in ("actor", "rollout") if plan.accelerated(role)}
    if len(on_gpus) == 1:
        (role,) = on_gpus
        raise ConfigError(
            f"{role} workers have accelerators and the other role does not, so none can move: "
            f"{wanted}give both accelerators, or none",
            path=PLACEMENT,
        )
    if not on_gpus:
        return
    for one, other in (("rollout", "actor"), ("rollout", "critic"), ("actor", "critic")):
        if plan.shared(one, other):
            raise ConfigError(
                f"{one} and {other} workers share devices, which take turns for a whole iteration: "
                f"{wanted}give each role its own (placement = 'disaggregated')",
                path=PLACEMENT,
            )
    held = [device for rank in plan.ranks["rollout"] for device in rank]
    if len(set(held)) < len(held):
        raise ConfigError(
            "several rollout workers share a device, which could not be given away by one of them: "
            f"{wanted}set devices_per_worker to 1 or more",
            path=(*PLACEMENT, "rollout"),
        )
    rollout = config.rollout
    if kept := rollout.part.keeps_memory(rollout.engine):
        raise ConfigError(
            f"a rollout worker that gives its devices away has to free their memory, and {kept} is "
            f"false: {wanted}leave it out",
            path=(*rollout.where, kept),
        )


def _check_sizes(config: LanguageConfig, layout: DeviceLayout) -> None:
    if config.rollout_workers < 2:
        raise ConfigError(
            f"scheduler.policy is {config.scheduler.policy!r}, but there is only "
            f"{config.rollout_workers} rollout worker, which has to serve: use 2 or more",
            path=("cluster", "rollout_workers"),
        )
    if config.actor.global_batches * config.actor.epochs < 2:
        raise ConfigError(
            f"scheduler.policy is {config.scheduler.policy!r}, but actors change between two "
            f"global batches and an iteration has {config.actor.global_batches}: use 2 or more",
            path=("actor", "global_batches"),
        )
    if len(layout.actor) == config.actors:
        raise ConfigError(_no_size(config, layout), path=("training", "prompts"))


def _no_size(config: LanguageConfig, layout: DeviceLayout) -> str:
    most = config.actors + sum(map(len, layout.instances[1:]))
    together, batch = config.actor.model_ranks, config.actor.micro_batch_size
    return (
        f"scheduler.policy is {config.scheduler.policy!r}, but no more than {config.actors} of "
        f"up to {most} actors can share {config.training.prompts} prompts in "
        f"{config.actor.global_batches} global batches of whole groups"
        + (f" and micro-batches of {batch}" if batch else "")
        + (f", {together} actors for each copy of the model" if together > 1 else "")
        + ": use prompts that more actors divide, fewer global batches"
        + (", or more rollout workers" if together > 1 else "")
    )
