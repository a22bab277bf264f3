"""The bench harness: ours and the others alternating in one run, medians, a verdict for each bar.

A bench is a folder under ``benchmarks/`` whose ``bench.py`` defines ``BENCH``; its cases are
commands that print one line of JSON with what they measured::

    BENCH = Bench(
        name="channels",
        summary="in-process put and get",
        cases=(Case("ours", ("{python}", "{here}/ours.py")), Case("other", ...)),
        bars=(ratio("pairs", metric="pairs_per_s", ours="ours", theirs="other", at_least=0.8),),
    )
"""

from benchmarks.harness.model import (
    Absence,
    Bar,
    Bench,
    Case,
    CommandOutput,
    PeerSoftware,
    Results,
    best_of,
    bound,
    printed_json,
    quotient,
    ratio,
)
from benchmarks.harness.report import run_bench
from benchmarks.harness.run import all_benches, bench_named

__all__ = [
    "Absence",
    "Bar",
    "Bench",
    "Case",
    "CommandOutput",
    "PeerSoftware",
    "Results",
    "all_benches",
    "bench_named",
    "best_of",
    "bound",
    "printed_json",
    "quotient",
    "ratio",
    "run_bench",
]
