"""What is gained when devices follow the work, on toy backends whose seconds are those of devices.

The same three devices, one actor and two rollout workers, with and without the policy ``tail``.
The gain depends on how long training takes beside generation: so other costs are measured, too.
"""

from __future__ import annotations

from benchmarks.harness import Bar, Bench, Case

POLICIES = ("static", "tail")
FACTORS = ("0.5", "2")
"""of the seconds of training a token"""

BENCH = Bench(
    name="scheduler",
    summary="step time of a run whose actor grows into rollout workers' devices, against static",
    cases=tuple(
        Case(policy, ("{python}", "{here}/toys.py", policy, "{out}", "4", "1"), cores=2)
        for policy in POLICIES
    )
    + tuple(
        Case(
            f"{policy}, training x {factor}",
            ("{python}", "{here}/toys.py", policy, "{out}", "2", factor),
            cores=2,
        )
        for factor in FACTORS
        for policy in POLICIES
    ),
    bars=(
        Bar(
            name="step time, static / tail",
            cases=POLICIES,
            value=lambda results: (
                results.median("static", "step_seconds") / results.median("tail", "step_seconds")
            ),
            target=lambda _: 1.2,
            unit="x",
        ),
    ),
    repetitions=1,
    notes=(
        "toys: 4 iterations, with other costs 2, of 64 samples in 8 global batches",
        "strictly on-policy; no CPU",
    ),
)
