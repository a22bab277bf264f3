"""What moving devices brings, simulated, as one table.

::

    python -m benchmarks.simulate                      # 32, 64, 256 and 1,024 devices
    python -m benchmarks.simulate --devices 32,64 examples/simulated_long_reasoning.toml
    python -m benchmarks.simulate --devices 32 --best  # each policy where it is best

For each file and number of devices: samples per device-hour of each policy over those of ``static``
with the same number of actor devices, over those of ``static`` with the number that is best for it,
and as a share of what can be had: by who knows every length (`rlinf_async.simulate.bounds`),
who knows only how they are distributed (`rlinf_async.simulate.bounds`), and by nobody
(`rlinf_async.simulate.bounds`). The best number is looked for on up to 64 devices; larger clusters
get the same share of theirs. ``--best``: every policy has the number that is best for it.
"""

from __future__ import annotations

import argparse
import time

from rlinf_async.config import Document
from rlinf_async.simulate import SimulationConfig, on_devices, simulate
from rlinf_async.simulate.bounds import all_alike, at_best, oracle
from rlinf_async.simulate.config import placements
from rlinf_async.simulate.run import with_policy

FILES = ["examples/simulated_long_reasoning.toml", "examples/simulated_1024.toml"]
POLICIES = ["static", "turns", "tail", "greedy", "longest_first"]
SEARCHED = 64
"""devices up to which static's best placement is looked for"""


def best_share(config: SimulationConfig, devices: int, policy: str) -> float:
    """Return the actor's share of the devices with which a policy is best."""
    tried = placements(with_policy(config, policy), min(devices, SEARCHED))
    rates = {
        one.hardware.actor_devices: simulate(one).result.samples_per_device_hour for one in tried
    }
    return max(rates, key=lambda count: rates[count]) / min(devices, SEARCHED)


def with_actor(config: SimulationConfig, share: float) -> SimulationConfig:
    """Return the same with the number of actor devices that is nearest to a share."""
    devices = config.hardware.devices
    fitting = placements(config, devices)
    return min(fitting, key=lambda one: abs(one.hardware.actor_devices / devices - share))


def table(config: SimulationConfig, sizes: list[int], policies: list[str], *, best: bool) -> None:
    """Print the table of one file."""
    print(
        "devices  actor  policy          samples/device-h  same  best of oracle  of alike"
        "  of bound  CPU s"
    )
    for devices in sizes:
        at_home = on_devices(config, devices)
        placed = with_actor(at_home, best_share(config, devices, "static"))
        static = simulate(with_policy(placed, "static")).result
        same = 0.0
        for policy in policies:
            began = time.process_time()
            if best:
                at_home = with_actor(at_home, best_share(config, devices, policy))
            record = simulate(with_policy(at_home, policy))
            rate = record.result.samples_per_device_hour
            same = same or rate
            least, known = at_best(at_home, record.lengths), oracle(at_home, record.lengths)
            alike, took = all_alike(at_home, record.lengths), record.result.seconds
            print(
                f"{devices:7d} {at_home.hardware.actor_devices:6d}  {policy:14s} {rate:17.1f} "
                f"{rate / same:5.2f} {rate / static.samples_per_device_hour:5.2f} "
                f"{known.seconds / took:10.2f} {alike.seconds / took:9.2f} {least / took:9.2f} "
                f"{time.process_time() - began:6.1f}",
                flush=True,
            )
        rate = static.samples_per_device_hour
        print(
            f"{devices:7d} {static.actor_devices:6d}  static         {rate:17.1f}  (best placement)"
        )


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", nargs="*", default=FILES)
    parser.add_argument("--devices", default="32,64,256,1024")
    parser.add_argument("--iterations", type=int, default=2)
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--best", action="store_true")
    parser.add_argument("--seed", type=int)
    options = parser.parse_args()
    sizes = [int(one) for one in options.devices.split(",")]
    changes = {"work.iterations": str(options.iterations)}
    if options.seed is not None:
        changes["seed"] = str(options.seed)
    for file in options.files:
        config = Document.read(file).to(SimulationConfig, changes)
        print(f"\n{config.name}: {file}", flush=True)
        table(config, sizes, options.policies.split(","), best=options.best)


if __name__ == "__main__":
    main()
