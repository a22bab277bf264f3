"""Random schedules with faults, in virtual time, held against what must hold in every one.

::

    python -m tests.simulate.schedules --count 10000      # seeds 0 .. 9999, on all cores
    python -m tests.simulate.schedules --seed 17          # that one again, event by event the same

Invariants: no device is held twice, and none by nobody that is not free or lost; every sample is
trained exactly once; the actor's strategy always fits; no token is older than ``max_staleness``;
built-in policies decide nothing that is invalid; no run is faster than `at_best`; when an iteration
is over everybody is at home, as far as hosts are there.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor

from rlinf_async.backends.cost.config import CostEngineConfig, CostTrainerConfig, LogNormal
from rlinf_async.simulate import SimulationConfig, SimulationRecord, simulate
from rlinf_async.simulate.bounds import at_best
from rlinf_async.simulate.config import FaultConfig, HardwareConfig, ScalingPolicyConfig, WorkConfig

POLICIES = ("static", "turns", "tail", "greedy", "longest_first")


def scenario(seed: int) -> SimulationConfig:
    """The run of this seed."""
    rng = random.Random(seed)
    devices = rng.choice([4, 6, 8])
    mini_batches = rng.choice([1, 2])
    group = rng.choice([1, 2])
    prompts = mini_batches * rng.choice([4, 8]) // group
    sizes = [n for n in range(1, devices) if (prompts // mini_batches) % n == 0]
    every = [0.0, 0.0, rng.uniform(1.0, 20.0)]
    return SimulationConfig(
        name=f"schedule {seed}",
        seed=seed,
        generation=CostEngineConfig(
            decode_seconds=0.01,
            sequence_seconds=rng.choice([0.0001, 0.002]),
            prefill_seconds=rng.choice([0.0, 1e-4]),
            load_seconds=rng.choice([0.0, 0.5]),
            move_seconds=rng.choice([0.0, 0.3]),
            slots=rng.choice([1, 4, 16]),
            lengths=LogNormal(median=100.0, ratio=rng.choice([1.0, 8.0]), longest=800),
        ),
        actor=CostTrainerConfig(
            token_seconds=rng.choice([1e-4, 3e-3]),
            step_seconds=0.1,
            rescale_seconds=rng.choice([0.0, 0.5]),
            move_seconds=rng.choice([0.0, 0.3]),
        ),
        work=WorkConfig(
            iterations=2,
            prompts_per_device=prompts / devices,
            group_size=group,
            mini_batches=mini_batches,
            max_staleness=rng.choice([0, 0, 1]),
            prompt_tokens=10,
        ),
        hardware=HardwareConfig(
            devices=devices,
            devices_per_host=2,
            actor_devices=rng.choice(sizes),
            instance_widths=rng.choice([(1,), (1, 2)]),
        ),
        scheduler=ScalingPolicyConfig(policy=rng.choice(POLICIES), every=rng.choice([0.05, 0.3])),
        faults=FaultConfig(
            crash_every=rng.choice(every),
            slow_every=rng.choice(every),
            slow_seconds=2.0,
            host_lost_every=rng.choice(every),
            host_seconds=rng.uniform(0.5, 5.0),
        ),
    )


def run(seed: int) -> SimulationRecord:
    """Run the schedule of a seed, and hold it against the invariants (see the module)."""
    config = scenario(seed)
    record = simulate(config, shuffled=True, check=True, max_steps=200_000)
    result = record.result
    expected = config.work.iterations * config.samples
    assert result.samples == expected, f"{result.samples} samples were trained, not {expected}"
    assert len(set(record.trained)) == expected, "a sample was trained twice"
    assert result.lag_max <= config.work.max_staleness, f"a token is {result.lag_max} versions old"
    least = at_best(config, record.lengths)
    assert result.seconds >= (1.0 - 1e-6) * least, f"{result.seconds} s, but {least} s at best"
    assert not result.fault, f"policy {result.policy}: {result.fault}"
    return record


def failure(seed: int) -> str:
    """What is wrong with the schedule of a seed; empty: nothing."""
    try:
        run(seed)
    except BaseException as error:
        return f"seed {seed}: {type(error).__name__}: {str(error)[:600]}"
    return ""


def main(arguments: list[str] | None = None) -> int:
    """Run one seed, or many."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, help="this one alone")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # engines that die are part of it
    try:
        return tried(options)
    finally:
        logging.disable(before)


def tried(options: argparse.Namespace) -> int:
    """Run what was asked for."""
    if options.seed is not None:
        print(scenario(options.seed))
        print(run(options.seed).result)
        return 0
    began = time.perf_counter()
    seeds = range(options.first, options.first + options.count)
    with ProcessPoolExecutor(options.processes) as pool:
        failures = [text for text in pool.map(failure, seeds, chunksize=50) if text]
    seconds = time.perf_counter() - began
    for text in failures[:20]:
        print(text)
        replay = f"python -m tests.simulate.schedules --seed {text.split()[1].rstrip(':')}"
        print(f"  replay: {replay}")
    print(f"{options.count} schedules in {seconds:.1f} s: {len(failures)} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
