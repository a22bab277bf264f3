"""A tiny language model learns to say digits: a run described, started and watched in Python.

    python examples/train_from_python.py

The run is a process of its own and ends with this one. Its folder, below runs/, is like that of
`rlinf-async train`.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path

import rlinf_async as ra
from rlinf_async.language import (
    ActorConfig,
    DataConfig,
    EvaluationConfig,
    GenerationSettings,
    LanguageConfig,
    LanguageOptimizerConfig,
    ModelConfig,
    Sampling,
    TrainingConfig,
)
from rlinf_async.rewards import Answer

TINY = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


def digits(answer: Answer) -> float:
    """The share of digits in an answer of eight characters."""
    return sum(one.isdigit() for one in answer.text) / 8


def config(prompts: Path) -> LanguageConfig:
    """Twenty iterations of GRPO from random weights."""
    return LanguageConfig(
        name="digits",
        model=ModelConfig(config=TINY, tokenizer="arithmetic"),
        data=DataConfig(path=str(prompts), verifier=f"{Path(__file__).resolve()}:digits"),
        training=TrainingConfig(iterations=20, prompts=8, group_size=8),
        rollout=GenerationSettings(sampling=Sampling(max_tokens=8)),
        actor=ActorConfig(optimizer=LanguageOptimizerConfig(lr=1e-2), micro_batch_size=64),
        evaluation=EvaluationConfig(samples=0),
    )


async def main() -> None:
    """Train, and print what it has come to."""
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.jsonl"
        lines = [json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) for n in range(64)]
        prompts.write_text("\n".join(lines) + "\n")
        async with await ra.train(config(prompts)) as run:
            async for row in run:
                if row["iteration"] % 5 == 4:
                    print(f"iteration {row['iteration']:.0f}: reward {row['reward']:.2f}")
            summary = await run
    [first] = run.samples(iteration=0, best=1)
    [last] = run.samples(iteration=summary.iterations - 1, best=1)
    print(f"best answer at first: {first['completion']!r}, at last: {last['completion']!r}")
    print(f"{summary.outcome}, everything is in {run.folder}")


if __name__ == "__main__":
    asyncio.run(main())
