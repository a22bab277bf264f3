"""One run of the language job with toy backends, whose time is that of devices.

    python toys.py TAIL pipelined|turns OUT

Prints seconds of training, and what they could be at least: in an iteration every sample runs at
once, is trained when it is there, and the last may not have arrived before its length allows::

    bound = max over j of ( arrival of sample j + training of sample j and of all that come later )
            + optimizer step + loading the new weights

Lengths are drawn from the samples' seeds, so they are known beforehand. ``turns`` generates all of
an iteration before it trains any.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from rlinf_async.backends.toy.config import ToyEngineConfig, ToyTrainerConfig
from rlinf_async.backends.toy.engine import response_length
from rlinf_async.data import DataConfig, Prompts, load_tokenizer
from rlinf_async.messages.language import Request, Sampling
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
from rlinf_async.runtime.jobs.language.model import make_model_folder
from rlinf_async.runtime.jobs.language.samples import Ledger

SAMPLES, ITERATIONS = 32, 6
STEP, TOKEN, UPDATE, LOAD = 0.02, 0.0006, 0.02, 0.02
"""seconds of a decoding step, of training a token, of an optimizer step, of taking weights"""
MEAN_TOKENS = 40.0
MODEL = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


def configured(tail: float, pipelined: bool, data: Path) -> LanguageConfig:
    return LanguageConfig(
        name="overlap",
        model=ModelConfig(config=MODEL, tokenizer="arithmetic"),
        data=DataConfig(path=str(data), verifier="exact", shuffle=False),
        training=TrainingConfig(
            iterations=ITERATIONS, prompts=SAMPLES, group_size=1, checkpoint_every=0
        ),
        observe=ObserveConfig(sinks=()),
        rollout=GenerationSettings(
            backend="toy",
            sampling=Sampling(max_tokens=1000),
            toy=ToyEngineConfig(
                slots=SAMPLES,
                seconds_per_step=STEP,
                load_seconds=LOAD,
                mean_tokens=MEAN_TOKENS,
                tail=tail,
            ),
        ),
        actor=ActorConfig(
            backend="toy",
            pipelined=pipelined,
            micro_batch_size=1,
            toy=ToyTrainerConfig(seconds_per_token=TOKEN, seconds_per_step=UPDATE),
        ),
        evaluation=EvaluationConfig(samples=0),
        cluster=ClusterConfig(backend="process"),
    )


def requests(config: LanguageConfig, folder: Path) -> list[list[Request]]:
    """Those that the run is going to make."""
    prompts = Prompts(config.data, load_tokenizer(make_model_folder(config.model, folder)))
    training = config.training
    books = Ledger(
        prompts=training.prompts,
        group_size=training.group_size,
        max_staleness=0,
        sampling=config.rollout.sampling,
        seed=config.seed,
    )
    return [
        books.admit([next(prompts) for _ in range(SAMPLES)]) for _ in range(training.iterations)
    ]


def bounds(config: LanguageConfig, iteration: list[Request]) -> tuple[float, float]:
    """Least seconds of one iteration: overlapped, and in turns."""
    known = []
    for one in iteration:
        length = response_length(config.rollout.toy, one.seed)
        known.append((length * STEP, (len(one.prompt.token_ids) + length) * TOKEN))
    later, overlapped = 0.0, 0.0
    for arrival, training in sorted(known, reverse=True):
        later += training
        overlapped = max(overlapped, arrival + later)
    rest = UPDATE + LOAD
    return overlapped + rest, max(known)[0] + later + rest


def main(tail: float, mode: str, out: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch) / "sums.jsonl"
        lines = [json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) for n in range(400)]
        data.write_text("\n".join(lines) + "\n")
        config = configured(tail, mode == "pipelined", data)
        least = [bounds(config, one) for one in requests(config, Path(scratch) / "model")]
        summary = LanguageRL().run(config, out / "run", resume=False)
    measured = {
        "seconds": summary.train_seconds,
        "bound": sum(one for one, _ in least),
        "bound_in_turns": sum(one for _, one in least),
    }
    measured["over_bound"] = summary.train_seconds / measured["bound"]
    print(json.dumps(measured))


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
