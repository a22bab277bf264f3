"""A real run and its simulation: do they agree on the seconds of a step?

Two rollout workers and two actors in processes of their own, calibrated as `rlinf-async calibrate`
does, and simulated.
"""

from __future__ import annotations

from rlinf_async.bench import Bar, Bench, Case, Results

KINDS = ("toy", "transformers")


def _disagreement(kind: str) -> Bar:
    def value(results: Results) -> float:
        ratio = results.median(kind, "simulated_step_seconds") / results.median(
            kind, "step_seconds"
        )
        return 1.0 / max(ratio, 1.0 / ratio)

    return Bar(
        name=f"{kind}: smaller over larger of real and simulated step time",
        cases=(kind,),
        value=value,
        target=lambda _: 1.0 / 1.1,
        unit="x",
    )


BENCH = Bench(
    name="calibrate",
    summary="step time of a real run against that of its calibrated simulation",
    cases=tuple(
        Case(kind, ("{python}", "{here}/real.py", kind, "{out}"), cores=2) for kind in KINDS
    ),
    bars=tuple(_disagreement(kind) for kind in KINDS),
    repetitions=1,
    notes=("2 rollout workers and 2 actors; strictly on-policy; 12 and 10 iterations",),
)
