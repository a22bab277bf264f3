"""One real run, calibrated and simulated.

    python real.py toy|transformers|vllm OUT [--iterations N]

Prints the seconds of a step, real and simulated. With ``toy`` they are those of devices; else two
engines generate with a tiny model that has random weights, and FSDP trains it in two processes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Literal

from rlinf_async.backends.toy.config import ToyEngineConfig, ToyTrainerConfig
from rlinf_async.data import DataConfig
from rlinf_async.messages.language import Sampling
from rlinf_async.observe.sinks.config import ObserveConfig
from rlinf_async.runtime.jobs.language.config import (
    ActorConfig,
    ClusterConfig,
    EvaluationConfig,
    GenerationSettings,
    LanguageConfig,
    ModelConfig,
    TrainingConfig,
)
from rlinf_async.runtime.jobs.language.job import LanguageRL
from rlinf_async.simulate import simulate
from rlinf_async.simulate.calibrate import calibrate, simulation_of

Kind = Literal["toy", "transformers", "vllm"]
ITERATIONS: dict[Kind, int] = {"toy": 12, "transformers": 10, "vllm": 10}
MODEL = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


def configured(kind: Kind, data: Path, iterations: int) -> LanguageConfig:
    """The run's configuration."""
    toy = kind == "toy"
    return LanguageConfig(
        name=f"simulated {kind}",
        model=ModelConfig(config=MODEL, tokenizer="arithmetic"),
        data=DataConfig(path=str(data), verifier="exact", shuffle=False),
        training=TrainingConfig(
            iterations=iterations,
            prompts=16,
            group_size=4,
            checkpoint_every=0,
            export=False,
        ),
        observe=ObserveConfig(sinks=()),
        rollout=GenerationSettings(
            backend=kind,
            sampling=Sampling(max_tokens=150 if toy else 96),
            toy=ToyEngineConfig(
                slots=64,
                seconds_per_step=0.008,
                seconds_per_sequence=0.0001,
                load_seconds=0.02,
                mean_tokens=40.0,
                tail=1.0,
            ),
        ),
        actor=ActorConfig(
            backend="toy" if toy else "fsdp",
            micro_batch_size=4,
            global_batches=2,
            toy=ToyTrainerConfig(seconds_per_token=0.0005, seconds_per_step=0.02),
        ),
        evaluation=EvaluationConfig(samples=0),
        cluster=ClusterConfig(backend="process", rollout_workers=2, actors=2),
    )


def main(kind: Kind, out: Path, iterations: int) -> None:
    """Run it, simulate it, and print both."""
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch) / "sums.jsonl"
        lines = [json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) for n in range(600)]
        data.write_text("\n".join(lines) + "\n")
        summary = LanguageRL().run(configured(kind, data, iterations), out / "run", resume=False)
    found = calibrate(out / "run")
    config = simulation_of(found)
    assert config is not None  # the folder has a configuration
    result = simulate(config).result
    simulated = result.seconds / len(result.step_seconds)
    print(
        json.dumps(
            {
                "seconds": summary.train_seconds,
                "step_seconds": found.step_seconds,
                "simulated_step_seconds": simulated,
                "agreement": min(simulated, found.step_seconds)
                / max(simulated, found.step_seconds),
                "missing": iterations * 64 - summary.samples,
                **{f"{fit.name}_error": fit.error for fit in found.fits},
            }
        )
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="One real run, calibrated and simulated.")
    parser.add_argument("kind", choices=ITERATIONS)
    parser.add_argument("out", type=Path)
    parser.add_argument("--iterations", type=int)
    given = parser.parse_args()
    main(given.kind, given.out, given.iterations or ITERATIONS[given.kind])
