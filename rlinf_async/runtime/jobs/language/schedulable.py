"""Whether a language run can have a scheduler: what would otherwise fail in its middle."""

from __future__ import annotations

from rlinf_async.config import ConfigError
from rlinf_async.runtime.jobs.language.config import LanguageConfig
from rlinf_async.runtime.jobs.placement import Plan
from rlinf_async.scheduling import load_policy

POLICY = ("scheduler", "policy")
SIMULATED = {
    "greedy": "it decides by measured rates, which a real run does not tell it yet",
    "longest_first": "it moves requests between instances that serve, which a real run cannot yet",
}
"""policies that a real run cannot carry out"""


def check_scheduler(config: LanguageConfig, plan: Plan) -> None:
    """Refuse a policy that is not known, and a run whose actors cannot change.

    Raises:
        ConfigError: names the setting, the reason, and what to do.
    """
    policy = config.scheduler.policy
    if policy == "static":
        return
    load_policy(policy, POLICY)
    if policy in SIMULATED:
        raise ConfigError(
            f"policy {policy!r} is for simulations alone: {SIMULATED[policy]}; use 'tail'",
            path=POLICY,
        )
    _check_actors(config, plan)
    _check_sizes(config)


def _check_actors(config: LanguageConfig, plan: Plan) -> None:
    actor = config.actor
    wanted = f"scheduler.policy is {config.scheduler.policy!r}: set it to 'static', or "
    if actor.backend not in ("fsdp", "toy") or actor.strategy == "fsdp1":
        name = "backend" if actor.backend not in ("fsdp", "toy") else "strategy"
        raise ConfigError(
            f"the scheduler changes the ranks of fsdp2 actors alone so far, not of "
            f"{getattr(actor, name)!r}: {wanted}use actor.backend = 'fsdp' with strategy = 'fsdp2'",
            path=("actor", name),
        )
    if actor.epochs > 1:
        raise ConfigError(
            f"epochs is {actor.epochs}: from the second on samples are on their ranks already, and "
            f"{wanted}set epochs to 1",
            path=("actor", "epochs"),
        )
    if config.has_critic:
        raise ConfigError(
            f"there are {config.cluster.critics} critics, whose ranks are paired with the actors' "
            f"and would have to change with them, and {wanted}train without critics",
            path=("cluster", "critics"),
        )
    if any(plan.accelerated(role) for role in ("actor", "rollout")):
        raise ConfigError(
            "actors that take over the accelerators of rollout workers are not supported yet, and "
            f"{wanted}run on CPUs",
            path=POLICY,
        )
    if config.cluster.backend == "local" and actor.backend != "toy":
        raise ConfigError(
            f"ranks that change need a process each, and {wanted}use backend = 'process'",
            path=("cluster", "backend"),
        )


def _check_sizes(config: LanguageConfig) -> None:
    if config.rollout_workers < 2:
        raise ConfigError(
            f"scheduler.policy is {config.scheduler.policy!r}, but there is only "
            f"{config.rollout_workers} rollout worker, which has to serve: use 2 or more",
            path=("cluster", "rollout_workers"),
        )
    if config.actor.global_batches < 2:
        raise ConfigError(
            f"scheduler.policy is {config.scheduler.policy!r}, but actors change between two "
            f"global batches and an iteration has {config.actor.global_batches}: use 2 or more",
            path=("actor", "global_batches"),
        )
    if config.launched_actors == config.actors:
        most = config.actors + config.rollout_workers - 1
        raise ConfigError(
            f"scheduler.policy is {config.scheduler.policy!r}, but no more than {config.actors} of "
            f"up to {most} actors can share {config.training.prompts} prompts in "
            f"{config.actor.global_batches} global batches of whole groups"
            + (
                f" and micro-batches of {config.actor.micro_batch_size}"
                if config.actor.micro_batch_size
                else ""
            )
            + ": use prompts that more actors divide, or fewer global batches",
            path=("training", "prompts"),
        )
