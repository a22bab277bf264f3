"""Live rescales against save, restart and load; moving shards against memcpy; planning."""

from __future__ import annotations

from benchmarks.harness import Bench, Case, bound, quotient

LIVE, MEMORY, RESTART = "live rescale", "memory of a live rescale", "save, restart, load"
PAIR, PLAN = "one rank to another", "plan"
TOUCH = "touching the new shards alone"
MEGATRON, MEGATRON_RESTART = "Megatron: live rescale", "Megatron: save, restart, load"


def _case(name: str, script: str, *more: str, cores: int = 2) -> Case:
    command = ("{python}", "{here}/" + script, "{out}", *more)
    return Case(name, command, cores=cores, timeout=900)


BENCH = Bench(
    name="reshard",
    summary="live rescale of 200 M parameters with Adam against a checkpoint and a restart",
    cases=(
        _case(LIVE, "live.py"),
        _case(TOUCH, "touch.py"),
        _case(RESTART, "restart.py"),
        _case(PAIR, "pair.py"),
        _case(MEMORY, "live.py", "--memory"),
        _case(MEGATRON, "strategies.py"),
        _case(MEGATRON_RESTART, "strategies.py", "--restart"),
        Case(PLAN, ("{python}", "{here}/planning.py")),
    ),
    bars=(
        quotient(
            "seconds of save, restart, load / of live rescale",
            (RESTART, "seconds"),
            (LIVE, "seconds"),
            at_least=10.0,
        ),
        *(
            quotient(
                f"Megatron, {name}: seconds of save, restart, load / of live rescale",
                (MEGATRON_RESTART, f"seconds_to_{key}"),
                (MEGATRON, f"seconds_to_{key}"),
                at_least=8.0,
            )
            for name, key in (
                ("tp=2 -> tp=2 x pp=2", "tp2pp2dp1"),
                ("tp=2 x pp=2 -> dp=2", "tp1pp1dp2"),
            )
        ),
        quotient(
            "bytes/s of one rank to another / memcpy's",
            (PAIR, "bytes_per_second"),
            (PAIR, "memcpy_bytes_per_second"),
            at_least=0.3,
        ),
        bound(
            "memory beside old and new shards, 2 -> 4, by rank",
            (MEMORY, "buckets_per_rank_to_4"),
            at_most=1.0,
            unit=" buckets",
        ),
        bound(
            "memory beside old and new shards, 4 -> 2, by rank",
            (MEMORY, "buckets_per_rank_to_2"),
            at_most=1.0,
            unit=" buckets",
        ),
        bound(
            "slowest plan, 1,024 ranks and 1,011 tensors, seconds of a core",
            (PLAN, "slowest_seconds"),
            at_most=2.0,
            unit=" s",
        ),
    ),
    repetitions=3,
    notes=(
        "2.4 GB of weights and moments, dp 2 -> 4 -> 2, on two cores; a bucket is 16 MiB",
        "Megatron: 100 M parameters with Adam, tp=2 -> tp=2 x pp=2 -> dp=2, of four ranks",
        "a restart is from the start of new processes until all ranks have loaded",
        "touching: what the machine takes to hand out the memory of the new shards, nothing moved;",
        "live_over_touch: a live rescale of the same minute by that. No bar",
        "memcpy: both ranks at once, a core each",
    ),
)
