"""Every strategy trains as one process does, and as FSDP on the same batches.

``python -m tests.backends.megatron.equality`` trains 20 optimizer steps in float32, each on new
samples, and prints by how much losses, gradient norms and parameters differ at most: of each
strategy from one process of Megatron, and from FSDP. It fails above 1e-5 and 1e-4.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Final

import torch

from rlinf_async.backends.base import OptimizerConfig, SchedulerConfig
from rlinf_async.weights.pack import unpack
from tests.backends.fsdp_helpers import in_processes, save_result
from tests.backends.language.kit import QWEN3, UNTIED, trainer_config
from tests.backends.megatron.rescaling import config, step

STEPS: Final = 20
SHAPES = {"tied": QWEN3, "untied": UNTIED}
STRATEGIES: dict[int, dict[str, dict[str, Any]]] = {
    1: {"one": {"tp": 1}},
    2: {"TP2": {"tp": 2}, "PP2": {"tp": 1, "pp": 2}, "DP2": {"tp": 1}},
    4: {"TP2xPP2": {"tp": 2, "pp": 2}, "TP2xDP2": {"tp": 2}},
}
OPTIMIZER = OptimizerConfig(lr=1e-3, eps=1e-6, weight_decay=0.1, max_grad_norm=0.5)
FROM_ONE: Final = 1e-5
FROM_FSDP: Final = 1e-4


def trained(trainer: Any, steps: int) -> dict[str, Any]:
    """Loss, gradient norm and learning rate of each step, and the parameters after the last."""
    rows = [step(trainer, at) for at in range(steps)]
    return {"rows": rows, "weights": unpack(trainer.publish())}


def on_ranks(rank: int, world_size: int, folder: Path, kinds: list[str], steps: int) -> None:
    from rlinf_async.backends.megatron.trainer import MegatronTrainer

    found = {}
    for kind in kinds:
        for name, fields in STRATEGIES[world_size].items():
            asked = config(kind, optimizer=OPTIMIZER, **fields)
            found[kind, name] = trained(MegatronTrainer(asked, world_size, rank), steps)
    save_result(folder, rank, found)


def by_fsdp(kind: str, steps: int) -> dict[str, Any]:
    """The same with FSDP on one process, this one."""
    from rlinf_async.backends.fsdp.language.trainer import PolicyTrainer

    asked = config(kind)
    settings = trainer_config(
        SHAPES[kind],
        loss=asked.loss,
        advantage=asked.advantage,
        reference=True,
        fsdp={"optimizer": OPTIMIZER, "scheduler": asked.megatron.scheduler},
    )
    assert isinstance(settings.fsdp.scheduler, SchedulerConfig)
    return trained(PolicyTrainer(settings, 1, 0), steps)


def largest(found: dict[str, Any], expected: dict[str, Any]) -> list[float]:
    """The largest difference of losses, gradient norms and parameters."""
    rows = (torch.tensor(found["rows"]) - torch.tensor(expected["rows"])).abs().max(0).values
    assert found["weights"].keys() == expected["weights"].keys()
    weights = max(
        float((found["weights"][name] - one).abs().max())
        for name, one in expected["weights"].items()
    )
    return [float(rows[0]), float(rows[1]), weights]


def differences(
    folder: Path, kinds: list[str], steps: int
) -> dict[tuple[str, str], tuple[list[float], list[float]]]:
    """Of each model and strategy: from one process, and from FSDP."""
    found: dict[tuple[str, str], Any] = {}
    for world_size in STRATEGIES:
        (folder / str(world_size)).mkdir()
        results = in_processes(on_ranks, world_size, folder / str(world_size), kinds, steps)
        found |= results[0]
    expected = {kind: by_fsdp(kind, steps) for kind in kinds}
    return {
        (kind, name): (largest(one, found[kind, "one"]), largest(one, expected[kind]))
        for (kind, name), one in found.items()
    }


def main() -> None:
    """Print the figures of both models."""
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        found = differences(Path(folder), list(SHAPES), STEPS)
    for (kind, name), (from_one, from_fsdp) in found.items():
        failed |= max(from_one) > FROM_ONE or max(from_fsdp) > FROM_FSDP
        one, fsdp = (", ".join(f"{number:.1e}" for number in row) for row in (from_one, from_fsdp))
        print(
            f"{kind}, {name}: {STEPS} steps; loss, gradient norm, parameters differ from one "
            f"process by {one}; from FSDP by {fsdp}",
            flush=True,
        )
    if failed:
        raise SystemExit(f"more than {FROM_ONE} from one process, or {FROM_FSDP} from FSDP")


if __name__ == "__main__":
    main()
