"""What moving devices brings, simulated, as one table.

::

    python -m benchmarks.simulate                      # 32, 64, 256 and 1,024 devices
    python -m benchmarks.simulate --devices 32,64 examples/simulated_long_reasoning.toml

For each file and number of devices: samples per device-hour of each policy over those of ``static``
with the same number of actor devices, over those of ``static`` with the number that is best for it,
and as a share of what no policy can beat (`rlinf_async.simulate.bound`). The best number is looked
for on up to 64 devices; larger clusters get the same share of theirs.
"""

from __future__ import annotations

import argparse
import time

from rlinf_async.config import Document
from rlinf_async.simulate import SimulationConfig, on_devices, simulate
from rlinf_async.simulate.bound import at_best
from rlinf_async.simulate.config import placements
from rlinf_async.simulate.oracle import oracle
from rlinf_async.simulate.sweep import with_policy

FILES = ["examples/simulated_long_reasoning.toml", "examples/simulated_1024.toml"]
POLICIES = ["static", "turns", "tail", "greedy", "longest_first"]
SEARCHED = 64
"""devices up to which static's best placement is looked for"""


def best_share(config: SimulationConfig, devices: int) -> float:
    """Return the actor's share of the devices with which ``static`` is best."""
    tried = placements(with_policy(config, "static"), min(devices, SEARCHED))
    rates = {
        one.hardware.actor_devices: simulate(one).result.samples_per_device_hour for one in tried
    }
    return max(rates, key=lambda count: rates[count]) / min(devices, SEARCHED)


def with_actor(config: SimulationConfig, share: float) -> SimulationConfig:
    """Return the same with the number of actor devices that is nearest to a share."""
    devices = config.hardware.devices
    fitting = placements(config, devices)
    return min(fitting, key=lambda one: abs(one.hardware.actor_devices / devices - share))


def table(file: str, sizes: list[int], iterations: int, policies: list[str]) -> None:
    """Print the table of one file."""
    config = Document.read(file).to(SimulationConfig, {"work.iterations": str(iterations)})
    print(f"\n{config.name}: {file}", flush=True)
    print("devices  actor  policy          samples/device-h  same  best of oracle  of bound  CPU s")
    for devices in sizes:
        at_home = on_devices(config, devices)
        placed = with_actor(at_home, best_share(config, devices))
        best = simulate(with_policy(placed, "static")).result
        same = 0.0
        for policy in policies:
            began = time.process_time()
            record = simulate(with_policy(at_home, policy))
            rate = record.result.samples_per_device_hour
            same = same or rate
            least, known = at_best(at_home, record.lengths), oracle(at_home, record.lengths)
            print(
                f"{devices:7d} {at_home.hardware.actor_devices:6d}  {policy:14s} {rate:17.1f} "
                f"{rate / same:5.2f} {rate / best.samples_per_device_hour:5.2f} "
                f"{known.seconds / record.result.seconds:10.2f} "
                f"{least / record.result.seconds:9.2f} {time.process_time() - began:6.1f}",
                flush=True,
            )
        rate = best.samples_per_device_hour
        print(
            f"{devices:7d} {best.actor_devices:6d}  static         {rate:17.1f}  (best placement)"
        )


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", nargs="*", default=FILES)
    parser.add_argument("--devices", default="32,64,256,1024")
    parser.add_argument("--iterations", type=int, default=2)
    parser.add_argument("--policies", default=",".join(POLICIES))
    options = parser.parse_args()
    sizes = [int(one) for one in options.devices.split(",")]
    for file in options.files:
        table(file, sizes, options.iterations, options.policies.split(","))


if __name__ == "__main__":
    main()
