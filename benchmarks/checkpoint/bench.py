"""How long training stands still for a checkpoint that a thread writes beside it."""

from __future__ import annotations

from benchmarks.harness import Bar, Bench, Case

CASE = "57 M parameters and Adam"

BENCH = Bench(
    name="checkpoint",
    summary="training's stall while a checkpoint is written beside it",
    cases=(
        Case(
            CASE,
            ("{python}", "{here}/beside_training.py", "{out}"),
            requires=("transformers",),
            cores=2,
        ),
    ),
    bars=(
        Bar(
            name="stall / time of writing",
            cases=(CASE,),
            value=lambda results: results.median(CASE, "stalled_share"),
            target=lambda _: 0.05,
            at_most=True,
        ),
    ),
    repetitions=1,
    notes=(
        "stall: until training may go on, and before its next optimizer step",
        "writing: from the call until all is synced; medians of 5 checkpoints",
    ),
)
