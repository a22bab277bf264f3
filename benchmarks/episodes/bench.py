"""What the endpoint of episodes costs over a call of the coroutine's own."""

from __future__ import annotations

from benchmarks.harness import Bench, Case, bound

TURNS = "turns of an episode, native and over HTTP"

BENCH = Bench(
    name="episodes",
    summary="a turn over the endpoint against one of the coroutine's own",
    cases=(
        Case(
            TURNS,
            ("{python}", "{here}/endpoint.py"),
            requires=("transformers", "starlette", "uvicorn"),
            cores=2,
            timeout=300,
        ),
    ),
    bars=(
        bound("ms that a turn takes longer", (TURNS, "added_ms"), at_most=2.0, unit="ms"),
        bound("CPU of a turn / native", (TURNS, "cpu_ratio"), at_most=1.1, unit="x"),
    ),
    repetitions=3,
    notes=(
        "8 turns with calls of a tool, 16 tools in the prompt; the agent in a process of its own",
        "CPU: of the process of the episodes, with an engine that costs nothing, and what",
        "a turn costs there beside it: template, tokenizer, parsing, and, over HTTP, the server",
    ),
)
