"""A Megatron actor that changes its strategy in the middle of training, beside one that does not.

``python -m tests.backends.megatron.rescaling`` runs all of it: tied and untied, with and without
the distributed optimizer, overlapped, in bfloat16; every transition fails at every stage before it
succeeds; 20 optimizer steps each.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from rlinf_async.algorithms.config import LanguageAdvantageConfig, LanguageLossConfig
from rlinf_async.backends.base import OptimizerConfig, SchedulerConfig
from rlinf_async.backends.language_training.config import LanguageModelConfig
from rlinf_async.backends.megatron.config import MegatronConfig, MegatronTrainerConfig
from rlinf_async.backends.megatron.weights import kept_of
from rlinf_async.backends.rescale.transaction import RescaleError
from rlinf_async.backends.reshard import PeerLost
from rlinf_async.parallel import Strategy
from rlinf_async.weights.pack import unpack
from tests.backends.fsdp_helpers import in_processes, save_result
from tests.backends.language.kit import QWEN3, UNTIED, micro_batches, samples
from tests.backends.rescale.breaking import STAGES, break_it, nothing_to_mend
from tests.backends.reshard.memory import show_mistakes

BUCKET = 1 << 13
LIMIT = 60.0
"""seconds; a busy machine is slow"""
LAUNCHED = 4
RING = (
    Strategy(tp=2),
    Strategy(dp=2),
    Strategy(pp=2),
    Strategy(tp=2, pp=2),
    Strategy(),
)
SHAPES = {"tied": QWEN3, "untied": UNTIED}
Fault = tuple[str, str, int]
"""how, stage, rank"""


def config(kind: str, **fields: Any) -> MegatronTrainerConfig:
    """Launched as tp=2, dp=2."""
    optimizer = OptimizerConfig(lr=1e-2, eps=1e-6, weight_decay=0.1, max_grad_norm=0.5)
    settings: dict[str, Any] = {"tp": 2, "sequence_parallel": True, "optimizer": optimizer} | fields
    return MegatronTrainerConfig(
        megatron=MegatronConfig(
            model=LanguageModelConfig(config=SHAPES[kind]),
            scheduler=SchedulerConfig(kind="cosine", warmup_steps=3, total_steps=25),
            **settings,
        ),
        loss=LanguageLossConfig(kl_coefficient=0.05, entropy_coefficient=0.01),
        advantage=LanguageAdvantageConfig(name="reinforce++"),
        reference=True,
        max_tokens_per_forward=40,
    )


def step(trainer: Any, at: int, groups: int = 4) -> list[float]:
    """Loss, gradient norm and learning rate of one optimizer step on new samples."""
    data = trainer.data_rank
    batch = samples(groups, seed=at)
    batch = [one for one in batch if one.group % data.size == data.rank] if data.is_io else []
    reference = trainer.log_probs(batch, reference=True)
    arriving: Any = ()
    if data.is_io:
        for one, first in zip(batch, reference, strict=True):
            one.ref_log_prob, one.advantage = first, None
        ready = trainer.normalize_advantages(trainer.compute_advantages(batch))
        arriving = micro_batches(ready, 2)
    found = trainer.training_step(iter(arriving))
    trainer.end_iteration()
    return [found["loss"], found["grad_norm"], found["lr"]]


def one_step(trainer: Any, at: int, groups: int = 4) -> list[float]:
    """The same on an active rank; an idle one counts the iteration."""
    if trainer.manager.active:
        return step(trainer, at, groups)
    trainer.skip_iteration()
    return []


def fail(trainer: Any, strategy: Strategy, fault: Fault) -> tuple[str, str]:
    """What a rescale raises that fails at a stage on one rank."""
    how, stage, culprit = fault
    mend = nothing_to_mend
    if trainer.manager.rank == culprit:
        mend = break_it(how, stage)
    elif stage == "decide":  # who decides first decides for all: let it be the one that fails
        mend = break_it("late", stage)
    try:
        trainer.rescale(strategy, timeout=LIMIT, bucket_bytes=BUCKET)
    except (RescaleError, PeerLost) as error:
        return type(error).__name__, str(error)
    finally:
        mend()
    return "", ""


def around(
    trainer: Any, steps: int, faults: list[list[Fault]], found: dict[str, Any]
) -> dict[str, Any]:
    """Train on each strategy; before each change come its faults."""
    found |= {"rows": [], "faults": [], "reports": [], "random": []}
    at = 0
    for strategy, failures in zip(RING, faults, strict=True):
        before = trainer.manager.strategy
        for fault in failures:
            found["faults"].append([list(fault), *fail(trainer, strategy, fault)])
            assert trainer.manager.strategy == before
        if failures and trainer.manager.steps:  # the old model is usable
            found["rows"].append(one_step(trainer, at))
            at += 1
        random, weights = torch.get_rng_state(), unpack(trainer.publish())
        report = trainer.rescale(strategy, timeout=LIMIT, bucket_bytes=BUCKET)
        found["random"].append(torch.equal(random, torch.get_rng_state()))
        assert trainer.manager.strategy == report.new_strategy == strategy
        after = unpack(trainer.publish())
        assert all(torch.equal(after[name], one) for name, one in weights.items())
        assert_same_as_stepped(trainer.manager)
        found["reports"].append(
            [report.active, report.sent_bytes, report.kept_bytes, trainer.version]
        )
        while at < steps * (RING.index(strategy) + 1):
            found["rows"].append(one_step(trainer, at))
            at += 1
    return found


def assert_same_as_stepped(manager: Any) -> None:
    """The weights are those that the optimizer steps, rounded."""
    for one in manager.held:
        kept = kept_of(manager.optimizer, one.parameter)
        if kept is not None:
            part = one.parameter.view(-1)[kept.start : kept.start + kept.main.numel()]
            assert torch.equal(part, kept.main.view(-1).to(part.dtype)), one.name


def alone(rank: int, world_size: int, folder: Path, settings: dict[str, Any], steps: int) -> None:
    """The run that does not change."""
    from rlinf_async.backends.megatron.trainer import MegatronTrainer

    found = {}
    for name, (kind, fields) in settings.items():
        trainer = MegatronTrainer(config(kind, **fields, **{"tp": 1}), 1, 0)
        rows = [step(trainer, at) for at in range(steps * len(RING))]
        found[name] = {"rows": rows, "weights": unpack(trainer.publish())}
    save_result(folder, rank, found)


def changing(
    rank: int,
    world_size: int,
    folder: Path,
    settings: dict[str, Any],
    steps: int,
    faults: list[list[Fault]],
) -> None:
    """The run that does."""
    show_mistakes()
    from rlinf_async.backends.megatron.trainer import MegatronTrainer

    result: dict[str, Any] = {}
    for name, (kind, fields) in settings.items():
        trainer = MegatronTrainer(config(kind, **fields), world_size, rank)
        found: dict[str, Any] = {}
        around(trainer, steps, faults, found)
        found["weights"] = unpack(trainer.publish()) if rank == 0 else {}
        found["again"] = saved_and_loaded(trainer, folder / name, steps * len(RING))
        result[name] = found
    save_result(folder, rank, result)


def saved_and_loaded(trainer: Any, folder: Path, at: int) -> list[list[float]]:
    """One rank saves and takes a step; four load, and take it again. On rank 0."""
    trainer.save_checkpoint(folder)
    first = one_step(trainer, at)
    trainer.rescale(Strategy(tp=2, pp=2), timeout=LIMIT, bucket_bytes=BUCKET)
    trainer.load_checkpoint(folder)
    again = one_step(trainer, at)
    return [first, again] if trainer.manager.rank == 0 else []


MATRIX: dict[str, tuple[str, dict[str, Any]]] = {
    "tied, distributed optimizer": ("tied", {}),
    "tied, copies of the optimizer": ("tied", {"distributed_optimizer": False}),
    "untied, distributed optimizer": ("untied", {}),
    "untied, copies of the optimizer": ("untied", {"distributed_optimizer": False}),
    "untied, overlapped": ("untied", {"overlap": True}),
    "tied, overlapped": ("tied", {"overlap": True}),
}
ROUGH: dict[str, tuple[str, dict[str, Any]]] = {
    "tied, bfloat16": ("tied", {"precision": "bfloat16"}),
    "untied, bfloat16, copies": (
        "untied",
        {"precision": "bfloat16", "distributed_optimizer": False},
    ),
}

EXACT = (1e-5, 1e-4, 0.0, 1e-4)
"""what `differences` may be in float32"""
ROUNDED = (5e-2, 1.0, 0.0, 5e-2)
"""in bfloat16, which rounds otherwise on other ranks"""


def differences(found: list[Any], expected: dict[str, Any], name: str) -> list[float]:
    """The largest of loss, gradient norm, learning rate and weights."""
    rows = torch.tensor(found[0][name]["rows"])
    worst = (rows - torch.tensor(expected[name]["rows"])).abs().max(0).values.tolist()
    weights = expected[name]["weights"]
    worst.append(
        max(
            float((found[0][name]["weights"][key] - one).abs().max())
            for key, one in weights.items()
        )
    )
    return [float(one) for one in worst]


def main() -> None:
    """Run the whole matrix; a line for each setting."""
    # A rank that leaves `connect` without having asked for its groups breaks a contract: torch
    # counts them.
    kinds = [
        (how, stage)
        for stage in STAGES
        for how in ("raises", "raises after")
        if (how, stage)
        not in (("raises", "connect"), ("raises after", "propose"), ("raises after", "decide"))
    ]
    every: list[list[Fault]] = [
        [(how, stage, (number + at) % LAUNCHED) for number, (how, stage) in enumerate(kinds)]
        for at in range(len(RING))
    ]
    settings = MATRIX | ROUGH
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "alone").mkdir()
        [expected] = in_processes(alone, 1, Path(folder) / "alone", settings, 4)
        found = in_processes(changing, LAUNCHED, Path(folder), settings, 4, every)
    failed = False
    for name in settings:
        worst = differences(found, expected, name)
        outcomes = [kind for rank in found for _, kind, _ in rank[name]["faults"]]
        limits = EXACT if name in MATRIX else ROUNDED
        over = any(one > limit for one, limit in zip(worst, limits, strict=True))
        failed |= over or not all(outcomes)
        print(
            f"{name}: {len(expected[name]['rows'])} steps, {len(outcomes) // LAUNCHED} faults; "
            f"loss, grad norm, lr, weights differ by at most {worst}",
            flush=True,
        )
    if failed:
        raise SystemExit(f"more than {EXACT}, or in bfloat16 {ROUNDED}; or a fault was not noticed")


if __name__ == "__main__":
    main()
