"""A real run and its simulation: do they agree on the seconds of a step?

Two rollout workers and two actors in processes of their own, calibrated as `rlinf-async calibrate`
does, and simulated.
"""

from __future__ import annotations

from benchmarks.harness import Bar, Bench, Case, bound

KINDS = {"toy": (), "transformers": ("transformers",), "vllm": ("vllm", "transformers")}
"""what generates, and the modules that it needs"""


def _agreement(kind: str) -> Bar:
    return bound(
        f"{kind}: smaller over larger of real and simulated step time",
        (kind, "agreement"),
        at_least=1.0 / 1.1,
        unit="x",
    )


BENCH = Bench(
    name="calibrate",
    summary="step time of a real run against that of its calibrated simulation",
    cases=tuple(
        Case(kind, ("{python}", "{here}/real.py", kind, "{out}"), requires=modules, cores=2)
        for kind, modules in KINDS.items()
    ),
    bars=tuple(_agreement(kind) for kind in KINDS),
    repetitions=1,
    notes=("2 rollout workers and 2 actors; strictly on-policy; 12, 10 and 10 iterations",),
)
