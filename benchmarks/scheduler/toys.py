"""One run of the language job with toy backends, whose time is that of devices.

    python toys.py static|tail OUT ITERATIONS FACTOR

One actor and two rollout workers have a device each. Response lengths have a long tail, so that
towards the end of an iteration one rollout worker is enough for what is left, while the actor still
has most of its samples to train. Training a token takes FACTOR times as long as usual. Prints the
seconds of training, and of each iteration.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

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
from rlinf_async.scheduling import SchedulingConfig

SAMPLES, GLOBAL_BATCHES = 64, 8
STEP, TOKEN, UPDATE, LOAD, MOVE = 0.02, 0.004, 0.02, 0.02, 0.05
"""seconds of a decoding step, of training a token, of an optimizer step, of taking weights, of
changing the actor's strategy"""
MODEL = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


def configured(policy: str, data: Path, iterations: int, factor: float) -> LanguageConfig:
    """The run's configuration."""
    return LanguageConfig(
        name="scheduler",
        model=ModelConfig(config=MODEL, tokenizer="arithmetic"),
        data=DataConfig(path=str(data), verifier="exact", shuffle=False),
        training=TrainingConfig(
            iterations=iterations, prompts=SAMPLES, group_size=1, checkpoint_every=0
        ),
        observe=ObserveConfig(sinks=()),
        rollout=GenerationSettings(
            backend="toy",
            sampling=Sampling(max_tokens=1000),
            toy=ToyEngineConfig(
                slots=SAMPLES // 2,
                seconds_per_step=STEP,
                load_seconds=LOAD,
                mean_tokens=40.0,
                tail=1.0,
            ),
        ),
        actor=ActorConfig(
            backend="toy",
            micro_batch_size=1,
            global_batches=GLOBAL_BATCHES,
            toy=ToyTrainerConfig(
                seconds_per_token=factor * TOKEN, seconds_per_step=UPDATE, seconds_to_move=MOVE
            ),
        ),
        evaluation=EvaluationConfig(samples=0),
        scheduler=SchedulingConfig(policy=policy),
        cluster=ClusterConfig(backend="process", rollout_workers=2),
    )


def main(policy: str, out: Path, iterations: int, factor: float) -> None:
    """Run it, and print what it took."""
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch) / "sums.jsonl"
        lines = [json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) for n in range(600)]
        data.write_text("\n".join(lines) + "\n")
        summary = LanguageRL().run(
            configured(policy, data, iterations, factor), out / "run", resume=False
        )
    print(
        json.dumps(
            {
                "seconds": summary.train_seconds,
                "step_seconds": summary.train_seconds / iterations,
                "missing": SAMPLES * iterations - summary.samples,
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
