"""How near generation and training come to the least time that their dependencies allow.

Backends are toys whose seconds are those of devices (they wait, the CPU is free): what is left is
what the framework itself adds. ``tail`` is the sigma of the log-normal response lengths.
"""

from __future__ import annotations

from rlinf_async.bench import Bar, Bench, Case

TAILS = ("0.0", "0.5", "1.0")


def _case(mode: str, tail: str) -> Case:
    return Case(
        f"{mode}, tail {tail}",
        ("{python}", "{here}/toys.py", tail, mode, "{out}"),
        cores=2,
    )


def _over_bound(tail: str) -> Bar:
    name = f"pipelined, tail {tail}"
    return Bar(
        name=f"pipelined seconds / critical path, tail {tail}",
        cases=(name,),
        value=lambda results: results.median(name, "over_bound"),
        target=lambda _: 1.05,
        unit="x",
        at_most=True,
    )


BENCH = Bench(
    name="overlap",
    summary="pipelined generation and training against their critical path",
    cases=tuple(_case(mode, tail) for tail in TAILS for mode in ("pipelined", "turns")),
    bars=tuple(_over_bound(tail) for tail in TAILS),
    repetitions=1,
    notes=("6 iterations of 32 samples, strictly on-policy; toy backends: device seconds, no CPU",),
)
