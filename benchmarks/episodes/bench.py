"""What tools cost the engine, and the endpoint over a call of the coroutine's own."""

from __future__ import annotations

from benchmarks.harness import Bench, Case, bound

TOOLS = "256 open episodes, with tools of 0.1 to 2 s and without"
VLLM = "the same, over vLLM"
TURNS = "turns of an episode, native and over HTTP"

BENCH = Bench(
    name="episodes",
    summary="an engine whose episodes wait for tools; a turn over the endpoint, and native",
    cases=(
        Case(
            TOOLS,
            ("{python}", "{here}/tools.py"),
            requires=("transformers",),
            cores=2,
            timeout=600,
        ),
        Case(
            VLLM,
            ("{python}", "{here}/tools.py", "--engine", "vllm"),
            requires=("transformers", "vllm"),
            cores=2,
            timeout=600,
        ),
        Case(
            TURNS,
            ("{python}", "{here}/endpoint.py"),
            requires=("transformers", "starlette", "uvicorn"),
            cores=2,
            timeout=300,
        ),
    ),
    bars=(
        *(
            bound(f"tokens/s {name} / without", (case, "ratio"), at_least=0.95, unit="x")
            for name, case in (("with tools", TOOLS), ("with tools, vLLM", VLLM))
        ),
        bound("ms that a turn takes longer", (TURNS, "added_ms"), at_most=2.0, unit="ms"),
        bound("CPU of a turn / native", (TURNS, "cpu_ratio"), at_most=1.1, unit="x"),
    ),
    repetitions=3,
    notes=(
        "tools: 768 episodes of 1 to 6 turns, 256 open, 64 slots; the same requests put again,",
        "256 at a time; pairs of measurements in one run, while all episodes are open",
        "8 turns with calls of a tool, 16 tools in the prompt; the agent in a process of its own",
        "CPU: of the process of the episodes, with an engine that answers at once: template,",
        "tokenizer, parsing, the wait for another process, and, over HTTP, the server",
    ),
)
