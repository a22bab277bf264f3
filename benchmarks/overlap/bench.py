"""What is gained by generating and training at a time, and how near it comes to what is possible.

The toy backends' seconds are those of devices (they wait, the CPU is free): what is left above the
critical path is what the framework itself adds. ``tail`` is the sigma of the log-normal response
lengths. The real backends, vLLM and FSDP, have a core each.
"""

from __future__ import annotations

from benchmarks.harness import Bar, Bench, Case, bound

TAILS = ("0.0", "0.5", "1.0")
REAL = "vLLM and FSDP"


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
    summary="pipelined generation and training against their critical path, and against turns",
    cases=(
        *(_case(mode, tail) for tail in TAILS for mode in ("pipelined", "turns")),
        Case(
            REAL,
            ("{python}", "{here}/real.py", "--pairs", "10"),
            requires=("vllm", "transformers"),
            cores=2,
        ),
    ),
    bars=(
        *(_over_bound(tail) for tail in TAILS),
        bound(
            "pipelined samples/s / in turns, vLLM and FSDP on a core each",
            (REAL, "speedup"),
            at_least=1.3,
            unit="x",
        ),
    ),
    repetitions=1,
    notes=(
        "toys: 6 iterations of 32 samples, strictly on-policy; device seconds, no CPU",
        "vLLM and FSDP: 5 M parameters, 128 samples an iteration, strictly on-policy",
        "vLLM and FSDP: medians of 10 iterations of each way, in turning order",
    ),
)
