"""A robot's loop at 50 Hz: which share of its steps misses its deadline, with and without answers
that are late."""

from __future__ import annotations

from benchmarks.harness import Bench, Case, bound

STEADY = "50 Hz, answers of 30 ms"
DELAYED = "the same, 5 % of the answers 200 ms later"


def _case(name: str, *more: str) -> Case:
    return Case(
        name,
        ("{python}", "{here}/arm.py", "600", *more),
        requires=("mujoco", "gymnasium"),
        cores=2,
        timeout=900,
    )


BENCH = Bench(
    name="real_time",
    summary="a simulated arm on wall time at 50 Hz for 10 minutes, chunks of 8 actions",
    cases=(_case(STEADY), _case(DELAYED, "--delayed", "0.05")),
    bars=(
        bound("steps that miss their deadline", (STEADY, "missed_share"), at_most=0.001),
        *(
            bound(f"{what}, {name}", (case, metric), at_most=0.0)
            for name, case in (("steady", STEADY), ("delayed", DELAYED))
            for what, metric in (("unsafe commands", "unsafe"), ("misses not counted", "uncounted"))
        ),
    ),
    repetitions=1,
    notes=(
        "a step has until half a period (10 ms) after it is due; a miss: no action, or sent later",
        "answers take 30 ms in another process, which waits as for an accelerator; one in three",
        "asks for thrice the speed, which is beyond the limits",
        "the loop's thread has a real-time priority (SCHED_FIFO 50) where the process may have one",
    ),
)
