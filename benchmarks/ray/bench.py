"""What Ray costs: whole jobs against the same on processes, and launches against bare actors.

What goes over channels on Ray is measured by the bench `channels`.
"""

from __future__ import annotations

import pathlib

from benchmarks.harness import Bench, Case, bound, quotient

ROOT = pathlib.Path(__file__).resolve().parents[2]
EMBODIED, LANGUAGE = "embodied job", "language job"
OURS, BARE = "launch of 64: ours", "launch of 64: bare actors"


def _case(name: str, script: str, *arguments: str, requires: tuple[str, ...] = ()) -> Case:
    return Case(
        name,
        ("{python}", f"{{here}}/{script}", *arguments),
        requires=("ray", *requires),
        cores=2,
        environment={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        timeout=300,
    )


BENCH = Bench(
    name="ray",
    summary="both jobs on Ray against processes, and launches against bare actors",
    cases=(
        _case(EMBODIED, "jobs.py", "embodied", "{out}", requires=("torch", "gymnasium_robotics")),
        _case(LANGUAGE, "jobs.py", "language", "{out}", requires=("torch", "transformers")),
        _case(OURS, "launch.py", "ours"),
        _case(BARE, "launch.py", "bare"),
    ),
    bars=(
        *(
            bound(
                f"{job}, seconds after start, Ray / processes",
                (job, "ray_over_process"),
                at_most=1.15,
                unit="x",
            )
            for job in (EMBODIED, LANGUAGE)
        ),
        *(
            bound(f"{job}, largest difference of losses", (job, "loss_difference"), at_most=1e-6)
            for job in (EMBODIED, LANGUAGE)
        ),
        quotient(
            "launch of 64 and a call of each / bare actors",
            (OURS, "seconds"),
            (BARE, "seconds"),
            at_most=1.5,
        ),
    ),
    repetitions=3,
    notes=(
        "jobs: the example's settings cut short, one process for each worker on both sides",
        "launch: 1 % of a core for each; Ray runs before, its own start is not counted",
    ),
)
