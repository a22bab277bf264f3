"""An optimizer step of `MegatronTrainer` on one process against a bare Megatron training loop.

Both train the same model on the same batches in one process, step by step in turns, so that a
machine that becomes slower slows both.
"""

from __future__ import annotations

from benchmarks.harness import Bench, Case, bound

SDPA, LOCAL = "against fused attention", "against Megatron's own attention"


def _case(name: str, attention: str) -> Case:
    command = ("{python}", "{here}/step.py", "--attention", attention)
    return Case(name, command, requires=("megatron", "transformers"))


BENCH = Bench(
    name="megatron",
    summary="an optimizer step of MegatronTrainer against a bare Megatron training loop",
    cases=(_case(SDPA, "fused"), _case(LOCAL, "local")),
    bars=(
        bound("our step / a bare one", (SDPA, "ratio"), at_most=1.15, unit="x"),
        bound(
            "our step / a bare one, Megatron's own attention",
            (LOCAL, "ratio"),
            at_most=1.15,
            unit="x",
        ),
    ),
    repetitions=1,  # which has twelve pairs of steps
    notes=(
        "Qwen3 with 13 M parameters, 16 samples of 127 tokens in 4 micro-batches, float32, a core",
        "bare: megatron-core's GPTModel, DDP, schedule, AdamW and cross-entropy",
        "ours: the same layers over packed rows, the PPO loss of the same tokens and its metrics",
        "ratio: median over 12 pairs of steps, one of each",
    ),
)
