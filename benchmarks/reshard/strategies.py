"""Megatron's tp=2 -> tp=2 x pp=2 -> dp=2 of a language model with its Adam state: one line of JSON.

Live, or with ``--restart`` by a checkpoint: save, new processes, load; once for each change, whose
seconds are told one by one. Seconds of a restart are from the start of the new processes until all
ranks have loaded.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from rlinf_async.backends.base import OptimizerConfig
from rlinf_async.backends.language_training.config import LanguageModelConfig
from rlinf_async.backends.megatron.config import MegatronConfig, MegatronTrainerConfig
from rlinf_async.backends.megatron.trainer import MegatronTrainer
from rlinf_async.parallel import Strategy

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.reshard.ranks import argument_parser, in_ranks, timed_together

FIRST = Strategy(tp=2)
THEN = (Strategy(tp=2, pp=2), Strategy(dp=2))
LAUNCHED = 4
HIDDEN, LAYERS, VOCABULARY = 768, 12, 8192


def config(parameters: float, strategy: Strategy) -> MegatronTrainerConfig:
    """A Qwen3 of about so many parameters; 100e6 has 12 layers."""
    per_layer = 9 * HIDDEN * HIDDEN + HIDDEN * HIDDEN * 3
    layers = max(2, 2 * round((parameters - VOCABULARY * HIDDEN) / per_layer / 2))
    model = {
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "num_hidden_layers": layers,
        "intermediate_size": 3 * HIDDEN,
        "num_attention_heads": 12,
        "num_key_value_heads": 6,
        "head_dim": 64,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
    }
    return MegatronTrainerConfig(
        megatron=MegatronConfig(
            model=LanguageModelConfig(config=model),
            optimizer=OptimizerConfig(lr=1e-4, eps=1e-8),
            tp=strategy.tp,
            pp=strategy.pp,
        )
    )


def take_a_step(trainer: MegatronTrainer) -> None:
    """Give the optimizer its moments, by made-up gradients."""
    for one in trainer.manager.held:
        parameter: Any = one.parameter
        parameter.main_grad.fill_(1e-3)
    trainer.manager.optimizer_step(1.0)


def fingerprint(trainer: MegatronTrainer) -> str:
    """A digest of the whole weights, on rank 0."""
    seen = xxhash.xxh3_128()
    for name, one in sorted(trainer.manager.whole_weights(torch.float32).items()):
        seen.update(name.encode())
        seen.update(one.numpy().data)
    return seen.hexdigest()


def live(rank: int, ranks: int, parameters: float) -> dict[str, Any]:
    """One of four launched ranks."""
    trainer = MegatronTrainer(config(parameters, FIRST), ranks, rank)
    trainer.rescale(FIRST, timeout=120.0, bucket_bytes=16 << 20)
    if trainer.manager.active:
        take_a_step(trainer)
    before = fingerprint(trainer)
    found: dict[str, Any] = {"sent": 0}
    for strategy in THEN:
        with timed_together() as seconds:
            report = trainer.rescale(strategy, timeout=120.0, bucket_bytes=16 << 20)
        found[strategy.sizes] = seconds[0]
        found["sent"] += report.sent_bytes
    if fingerprint(trainer) != before:
        raise SystemExit(f"rank {rank} does not hold what it had")
    return found


def first(rank: int, ranks: int, parameters: float, folder: Path) -> dict[str, Any]:
    """The run before the first restart."""
    trainer = MegatronTrainer(config(parameters, FIRST), ranks, rank)
    take_a_step(trainer)
    return {"fingerprint": fingerprint(trainer), **saved(trainer, folder / "0")}


def middle(rank: int, ranks: int, parameters: float, folder: Path) -> dict[str, Any]:
    """The run after the first restart, which saves for the second."""
    trainer, at = loaded(MegatronTrainer(config(parameters, THEN[0]), ranks, rank), folder / "0")
    return {"loaded": at, **saved(trainer, folder / "1")}


def last(rank: int, ranks: int, parameters: float, folder: Path) -> dict[str, Any]:
    """The run after the second."""
    trainer, at = loaded(MegatronTrainer(config(parameters, THEN[1]), ranks, rank), folder / "1")
    return {"loaded": at, "fingerprint": fingerprint(trainer)}


def saved(trainer: MegatronTrainer, path: Path) -> dict[str, float]:
    with timed_together() as seconds:
        trainer.save_checkpoint(path)
    return {"saved": seconds[0]}


def loaded(trainer: MegatronTrainer, path: Path) -> tuple[MegatronTrainer, float]:
    trainer.load_checkpoint(path)
    dist.barrier()
    return trainer, time.monotonic()


def restarted(parameters: float, folder: Path) -> dict[str, float]:
    """Save, restart, load, twice."""
    given = (parameters, folder)
    before = in_ranks(first, FIRST.world_size, folder, *given)
    starts = [time.monotonic()]
    between = in_ranks(middle, THEN[0].world_size, folder, *given, method="spawn")
    starts.append(time.monotonic())
    after = in_ranks(last, THEN[1].world_size, folder, *given, method="spawn")
    if before[0]["fingerprint"] != after[0]["fingerprint"]:
        raise SystemExit("what was loaded is not what was saved")
    save = (before[0]["saved"], between[0]["saved"])
    restart = (between[0]["loaded"] - starts[0], after[0]["loaded"] - starts[1])
    line: dict[str, float] = {"save_seconds": sum(save), "load_seconds": sum(restart)}
    return line | {
        _key(strategy): one + other
        for strategy, one, other in zip(THEN, save, restart, strict=True)
    }


def _key(strategy: Strategy) -> str:
    """Where the line of JSON has the seconds of a change to a strategy."""
    return f"seconds_to_tp{strategy.tp}pp{strategy.pp}dp{strategy.dp}"


def main() -> None:
    parser = argument_parser("Megatron: tp=2 -> tp=2 x pp=2 -> dp=2", parameters=100e6)
    parser.add_argument("--restart", action="store_true", help="by a checkpoint and new processes")
    asked = parser.parse_args()
    if asked.restart:
        print(json.dumps(restarted(asked.parameters, asked.folder)))
        return
    found = in_ranks(live, LAUNCHED, asked.folder, asked.parameters)
    line = {_key(one): found[0][one.sizes] for one in THEN}
    line["sent_bytes"] = sum(one["sent"] for one in found)
    print(json.dumps(line))


if __name__ == "__main__":
    main()
