"""What recording costs a run, and how large its files are."""

from __future__ import annotations

from benchmarks.harness import Bench, Case, bound

RUNS = ("items", "embodied", "grpo", "samples")
WHAT = {
    "items": "small items between two processes",
    "embodied": "PPO on HalfCheetah",
    "grpo": "GRPO on sums",
    "samples": "GRPO on sums that keeps its samples, as by default",
}


def _case(kind: str) -> Case:
    command = ("{python}", "{here}/cost.py", kind, "{out}")
    return Case(WHAT[kind], command, cores=2, timeout=900)


BENCH = Bench(
    name="recording",
    summary="runs that record all their channels against the same without, in turning order",
    cases=tuple(map(_case, RUNS)),
    bars=(
        *(
            bound(
                f"speed with / without, {WHAT[kind]}",
                (WHAT[kind], "speed"),
                at_least=0.99 if kind == "samples" else 0.95,
                unit="x",
            )
            for kind in RUNS
        ),
        *(
            bound(
                f"bytes of the files / zstd -3 of the payload, {WHAT[kind]}",
                (WHAT[kind], "size"),
                at_most=1.2,
                unit="x",
            )
            for kind in ("embodied", "grpo")
        ),
    ),
    repetitions=1,
    notes=(
        "speed: median of the quotients of pairs of runs, one after the other, each first in turn",
        "items: 64 bytes each, of which most of a recording is when, and by whom",
    ),
)
