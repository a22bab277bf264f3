"""Runs that are slowed at a random place, in virtual time: is the bottleneck named that was made,
and does the advice gain what is predicted?

::

    python -m tests.observe.bottlenecks --count 100 --seed 0

Each run has random numbers of workers, and roles that need about equally long. One of them is made
2 to 5 times slower. What is named is right if it is this role; or, where another one still limits,
if the advice gains at least as much as the slowed role does at its old speed. Then the advice is
followed, and the run simulated again.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from rlinf_async.backends.cost.config import (
    CostEngineConfig,
    CostTrainerConfig,
    EnvCostConfig,
    EpisodeCostConfig,
    InferenceCostConfig,
    LogNormal,
)
from rlinf_async.observe.bottleneck import Advice, Bottleneck, analyse
from rlinf_async.simulate import SimulationConfig, simulate
from rlinf_async.simulate.config import HardwareConfig, ScalingPolicyConfig, WorkConfig
from tests.observe.embodied_costs import EmbodiedCosts, simulate_embodied

CLOSE = 0.15
"""relative error of a predicted gain that is close"""
AS_MUCH = 1.02
"""times the seconds of the run at its old speed that are as good"""
Scenario = SimulationConfig | EmbodiedCosts


class Outcome(msgspec.Struct, kw_only=True):
    """What became of one run."""

    seed: int
    slowed: str
    factor: float
    found: Bottleneck
    right: bool
    real: float | None = None
    """how many times as fast the run became by the advice"""

    @property
    def error(self) -> float | None:
        """Relative error of the predicted gain."""
        if self.real is None or self.found.advice is None:
            return None
        return abs(self.found.advice.factor / self.real - 1.0)

    def __str__(self) -> str:
        error = "" if self.error is None else f", really {self.real:.2f} x ({self.error:.0%} off)"
        verdict = "right" if self.right else "WRONG"
        slowed = f"{self.slowed} slowed {self.factor:.1f} x"
        return f"{self.seed}: {slowed}: {verdict}: {self.found.text}{error}"


# ---- language


def language(rng: random.Random, seed: int) -> SimulationConfig:
    """A run whose roles need about equally long."""
    rollouts, actors = rng.choice([2, 3, 4, 6]), rng.choice([1, 2])
    inference = rng.choice([0, 0, 1, 2])
    mini_batches, group = rng.choice([1, 2]), rng.choice([2, 4])
    prompts = rng.choice([16, 32])
    samples, slots = prompts * group, rng.choice([4, 8, 16])
    lengths = LogNormal(median=200.0, ratio=rng.choice([1.5, 3.0, 5.0]), longest=1200)
    mean = float(lengths.many(4096, 1).mean())

    def seconds() -> float:
        return rng.uniform(12.0, 30.0)

    episodes = EpisodeCostConfig()
    turns = 1.0
    if rng.random() < 0.3:
        turns, workers = 2.0, rng.choice([1, 2])
        concurrent = max(2, samples // (workers * rng.choice([3, 4])))
        rounds = samples / (workers * concurrent)
        episodes = EpisodeCostConfig(
            turns=(1, 2, 3), tool_seconds=(0.5 * seconds() / rounds,), concurrent=concurrent,
            workers=workers, given_tokens=20,
        )  # fmt: skip
    together = min(slots, samples / rollouts)
    step = seconds() * rollouts * together / (samples * mean * turns)
    processes = rng.choice([2, 4, 8])
    devices = rollouts + actors + inference
    return SimulationConfig(
        name=f"bottleneck {seed}",
        seed=seed,
        generation=CostEngineConfig(
            decode_seconds=step * 0.7,
            sequence_seconds=step * 0.3 / together,
            prefill_seconds=1e-5,
            load_seconds=rng.choice([0.0, 0.5]),
            slots=slots,
            lengths=lengths,
        ),
        actor=CostTrainerConfig(
            token_seconds=seconds() * actors / (samples * (mean * turns + 100)),
            step_seconds=0.1,
            publish_seconds=rng.choice([0.0, 0.5]),
        ),
        work=WorkConfig(
            iterations=10,
            prompts_per_device=prompts / devices,
            group_size=group,
            mini_batches=mini_batches,
            max_staleness=rng.choice([0, 1, 1, 2]),
            prompt_tokens=100,
            pipelined=rng.random() < 0.5,
        ),
        hardware=HardwareConfig(devices=devices, devices_per_host=64, actor_devices=actors),
        inference=InferenceCostConfig(
            devices=inference,
            token_seconds=seconds() * inference / (samples * (mean * turns + 100)),
            batch=8,
        )
        if inference
        else InferenceCostConfig(),
        env=EnvCostConfig(steps=1, step_seconds=seconds() * processes / samples, workers=processes),
        episode=episodes,
        scheduler=ScalingPolicyConfig(policy="static", every=0.5),
    )


def roles_of(config: SimulationConfig) -> list[str]:
    """The roles that can be slowed."""
    found = ["rollout", "actor", "reward"]
    found += ["inference"] if config.inference.devices else []
    return found + (["episode"] if config.episode.turns else [])


def slower(config: SimulationConfig, role: str, factor: float) -> SimulationConfig:
    """The same run, with one role slowed."""
    replace = msgspec.structs.replace
    one, generation = config, config.generation
    if role == "rollout":
        generation = replace(
            generation,
            decode_seconds=generation.decode_seconds * factor,
            sequence_seconds=generation.sequence_seconds * factor,
        )
        return replace(one, generation=generation)
    if role == "actor":
        seconds = one.actor.token_seconds * factor
        return replace(one, actor=replace(one.actor, token_seconds=seconds))
    if role == "reward":
        return replace(one, env=replace(one.env, step_seconds=one.env.step_seconds * factor))
    if role == "inference":
        seconds = one.inference.token_seconds * factor
        return replace(one, inference=replace(one.inference, token_seconds=seconds))
    assert not isinstance(one.episode.tool_seconds, msgspec.Struct)
    waits = tuple(seconds * factor for seconds in one.episode.tool_seconds)
    return replace(one, episode=replace(one.episode, tool_seconds=waits))


def followed(config: SimulationConfig, advice: Advice) -> SimulationConfig:
    """The same run, with the advice followed."""
    replace = msgspec.structs.replace
    work, hardware = config.work, config.hardware
    if advice.max_staleness is not None:
        return replace(config, work=replace(work, max_staleness=advice.max_staleness))
    more, role = advice.more, advice.role
    if role == "reward":
        return replace(config, env=replace(config.env, workers=config.env.workers * (1 + more)))
    if role == "episode":
        workers = config.episode.workers + more
        return replace(config, episode=replace(config.episode, workers=workers))
    inference = config.inference
    if role == "inference":
        more *= inference.devices
        inference = replace(inference, devices=inference.devices + more)
    devices = hardware.devices + more
    actors = hardware.actor_devices + (more if role == "actor" else 0)
    return replace(
        config,
        inference=inference,
        work=replace(work, prompts_per_device=config.prompts / devices),
        hardware=replace(hardware, devices=devices, actor_devices=actors),
    )


def measured(scenario: Scenario) -> Bottleneck:
    """Simulate it, and analyse what was recorded."""
    if isinstance(scenario, EmbodiedCosts):
        return analyse(simulate_embodied(scenario))
    return analyse(simulate(scenario, waits=True).waits)


def one_run(seed: int) -> Outcome:
    """Slow a run, name what limits it, follow the advice."""
    rng = random.Random(seed)
    factor = rng.uniform(2.0, 5.0)
    follow: Callable[[Advice], Scenario]
    plain: Scenario
    if rng.random() < 0.35:
        costs = EmbodiedCosts.drawn(rng)
        slowed, plain = rng.choice(costs.roles), costs
        limited = costs.slower(slowed, factor)
        found = measured(limited)
        follow = limited.followed
    else:
        config = language(rng, seed)
        slowed, plain = rng.choice(roles_of(config)), config
        slow_config = slower(config, slowed, factor)
        found = measured(slow_config)

        follow = partial(followed, slow_config)

    outcome = Outcome(
        seed=seed, slowed=slowed, factor=factor, found=found, right=found.role == slowed
    )
    if found.advice is not None:
        then = measured(follow(found.advice)).seconds
        outcome.real = found.seconds / then
        if not outcome.right:
            outcome.right = then <= AS_MUCH * measured(plain).seconds
    return outcome


def main(arguments: Sequence[str] | None = None) -> int:
    """Carry out runs, and print the shares."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    chosen = parser.parse_args(arguments)
    began = time.perf_counter()
    outcomes = []
    for seed in range(chosen.seed, chosen.seed + chosen.count):
        outcomes.append(one_run(seed))
        print(outcomes[-1], flush=True)
    right = sum(one.right for one in outcomes)
    errors = [one.error for one in outcomes if one.error is not None]
    close = sum(error <= CLOSE for error in errors)
    print(
        f"{right} of {len(outcomes)} named right; a gain predicted in {len(errors)}, within "
        f"{CLOSE:.0%} in {close}; {time.perf_counter() - began:.0f} s"
    )
    return 0 if right >= 0.9 * len(outcomes) and close >= 0.9 * len(errors) else 1


if __name__ == "__main__":
    sys.exit(main())
