"""What the rollout worker costs over bare vLLM, and what an update of its weights takes."""

from __future__ import annotations

from benchmarks.harness import Bar, Bench, Case, bound

UPDATE, TWO = "weight update", "two engines"
CONCURRENT = (64, 256)


def _rates(concurrent: int) -> str:
    return f"rollout worker and bare AsyncLLM, {concurrent} requests"


def _case(name: str, *command: str) -> Case:
    return Case(
        name, ("{python}", *command), requires=("vllm", "transformers"), cores=2, timeout=600
    )


def _rate(concurrent: int) -> Bar:
    return bound(
        f"tokens/s at {concurrent} requests / bare AsyncLLM's",
        (_rates(concurrent), f"ratio_{concurrent}"),
        at_least=0.97,
        unit="x",
    )


def _two_over_one(metric: str, engines: str) -> Bar:
    return Bar(
        name=f"seconds of an update of two engines {engines} / of one",
        cases=(UPDATE, TWO),
        value=lambda results: results.median(TWO, metric) / results.median(UPDATE, metric),
        target=lambda _: 1.5,
        unit="x",
        at_most=True,
    )


BENCH = Bench(
    name="rollout",
    summary="the rollout worker against bare vLLM; weights for a live engine",
    cases=(
        *(
            _case(_rates(count), "{here}/generate.py", "--concurrent", str(count))
            for count in CONCURRENT
        ),
        _case(UPDATE, "{here}/update.py", "1"),
        _case(TWO, "{here}/update.py", "2"),
    ),
    bars=(
        *(_rate(count) for count in CONCURRENT),
        Bar(
            name="seconds of an update / the engine's own load",
            cases=(UPDATE,),
            value=lambda results: (
                results.median(UPDATE, "update_seconds")
                / results.median(UPDATE, "own_load_seconds")
            ),
            target=lambda _: 1.5,
            unit="x",
            at_most=True,
        ),
        _two_over_one("update_seconds", "that generate"),
        _two_over_one("idle_update_seconds", "without requests"),
        Bar(
            name="requests dropped by updates",
            cases=(UPDATE, TWO),
            value=lambda results: max(
                max(results.values(case, "dropped")) for case in (UPDATE, TWO)
            ),
            target=lambda _: 0.0,
            at_most=True,
        ),
        Bar(
            name="log-prob difference after an update",
            cases=(UPDATE,),
            value=lambda results: max(results.values(UPDATE, "log_prob_difference")),
            target=lambda _: 1e-4,
            at_most=True,
        ),
    ),
    repetitions=1,
    notes=(
        "two cores for all processes of a case; 0.2 M parameters, 96 tokens at most, float32",
        "tokens/s: one engine, asked in both ways by turns; medians of 7 of each, and of 7 ratios",
        "updates: an FSDP actor and engines apart, 50 M parameters, medians of 3; engines have 16",
        "requests each, or none where it says idle",
    ),
)
