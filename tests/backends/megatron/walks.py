"""Ways through the whole product of tensor, stage and data ranks, each 1 or 2, on eight real ranks.

``python -m tests.backends.megatron.walks`` takes every way from one strategy to another, before the
first optimizer step and after: tied, untied and a critic; the optimizer's state shared by data
ranks, also overlapped, or copied. After each change an optimizer step is made; then the checkpoint
that was written under the strategy before is loaded under the new one, and the step is made again.
The test takes half of the ways, eight of them under each setting.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from torch import Tensor

from rlinf_async.algorithms.config import LanguageAdvantageConfig
from rlinf_async.backends.base import OptimizerConfig
from rlinf_async.parallel import Strategy
from rlinf_async.weights.pack import unpack
from tests.backends.checkpoint.damage import read
from tests.backends.fsdp_helpers import in_processes, save_result
from tests.backends.language.kit import micro_batches, samples
from tests.backends.megatron.rescaling import (
    BUCKET,
    LIMIT,
    assert_same_as_stepped,
    config,
    one_step,
)

EVERY: Final = [Strategy(tp=tp, pp=pp, dp=dp) for tp, pp, dp in itertools.product((1, 2), repeat=3)]
RANKS: Final = 8
GROUPS: Final = 2
"""of samples of an optimizer step: as many as there are data ranks"""
OPTIMIZER = OptimizerConfig(lr=1e-3, eps=1e-6, weight_decay=0.1, max_grad_norm=0.5)
SETTINGS: Final[dict[str, dict[str, Any]]] = {
    "tied, distributed optimizer": {"kind": "tied"},
    "tied, copies of the optimizer": {"kind": "tied", "distributed_optimizer": False},
    "untied, distributed optimizer": {"kind": "untied"},
    "untied, copies of the optimizer": {"kind": "untied", "distributed_optimizer": False},
    "tied, overlapped": {"kind": "tied", "overlap": True},
    "critic, distributed optimizer": {"kind": "tied", "critic": True},
}
MOST: Final = (1e-6, 1e-5, 0.0, 1e-6, 1e-6)
"""what `differences` may be"""
Walk = Sequence[int]
"""rows of `EVERY`, one after the other"""


def round_trip(step: int) -> list[int]:
    """All strategies once, and the first again. Those of the steps 1, 3, 5 and 7 have no way in
    common."""
    return [at * step % len(EVERY) for at in range(len(EVERY) + 1)]


def every_way() -> list[int]:
    """A walk that takes each way from a strategy to one, itself among them, exactly once."""
    left = {at: list(range(len(EVERY))) for at in range(len(EVERY))}
    stack, walk = [0], list[int]()
    while stack:  # Hierholzer
        if left[stack[-1]]:
            stack.append(left[stack[-1]].pop())
        else:
            walk.append(stack.pop())
    return walk[::-1]


def change(trainer: Any, to: int) -> None:
    """Change the strategy; what is published and what would be exported stay the same."""
    before = weights_of(trainer)
    trainer.rescale(EVERY[to], timeout=LIMIT, bucket_bytes=BUCKET)
    assert_same(weights_of(trainer), before)
    assert_same_as_stepped(trainer.manager)


def weights_of(trainer: Any) -> dict[str, Tensor]:
    """The whole weights, on rank 0."""
    manager = trainer.manager
    if not manager.active:
        return {}
    whole: dict[str, Tensor] = manager.whole_weights(torch.float32)
    if not trainer.critic:
        assert_same(unpack(trainer.publish()), whole)
    return whole


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], one) for name, one in expected.items())


def walk_along(trainer: Any, walk: Walk, folder: Path | None) -> dict[str, Any]:
    """Losses, gradient norms and learning rates, of a step after each change, and of the same one
    after a checkpoint of the strategy before was loaded."""
    for to in walk:
        change(trainer, to)
    rows, again = [a_step(trainer, 0)], list[list[float]]()
    for at, to in enumerate(walk[1:], 1):
        if folder is not None:
            trainer.save_checkpoint(folder / str(at))
            assert_stored_once(folder / str(at))
        change(trainer, to)
        rows.append(a_step(trainer, at))
        if folder is not None:
            if trainer.manager.active:
                trainer.load_checkpoint(folder / str(at))
            again.append(a_step(trainer, at))
    return {"rows": rows, "again": again, "weights": weights_of(trainer)}


def assert_stored_once(checkpoint: Path) -> None:
    """Copies of tensor ranks, data ranks and stages are in one file."""
    layouts = [read(file)[1] for file in checkpoint.glob("*.safetensors")]
    stored = [str(box[:3]) for one in layouts for boxes in one["boxes"].values() for box in boxes]
    assert len(stored) == len(set(stored))


def a_step(trainer: Any, at: int) -> list[float]:
    """Loss, gradient norm and learning rate of an optimizer step; none on an idle rank."""
    if not trainer.critic or not trainer.manager.active:
        return one_step(trainer, at, GROUPS)
    data = trainer.data_rank
    batch = samples(GROUPS, seed=at)
    batch = [one for one in batch if one.group % data.size == data.rank] if data.is_io else []
    for one, value in zip(batch, trainer.values(batch), strict=False):
        one.value, one.returns, one.advantage = value, None, None
    arriving: Any = micro_batches(trainer.compute_advantages(batch), 2) if data.is_io else ()
    found = trainer.training_step(iter(arriving))
    trainer.end_iteration()
    return [found["loss"], found["grad_norm"], found["lr"]]


def trainer_of(setting: str, ranks: int, rank: int, **fields: Any) -> Any:
    from rlinf_async.backends.megatron.trainer import MegatronCriticTrainer, MegatronTrainer

    asked = SETTINGS[setting] | fields
    critic = asked.pop("critic", False)
    made = config(optimizer=OPTIMIZER, **asked)
    if not critic:
        return MegatronTrainer(made, ranks, rank)
    advantage = LanguageAdvantageConfig(name="gae", gae_lambda=0.9)
    made = msgspec.structs.replace(made, advantage=advantage, reference=False)
    return MegatronCriticTrainer(made, ranks, rank)


def walking(
    rank: int, world_size: int, folder: Path, walks: Mapping[str, Walk], saving: Collection[str]
) -> None:
    """The runs that change."""
    found = {}
    for setting, walk in walks.items():
        start = time.monotonic()
        trainer = trainer_of(setting, world_size, rank)
        found[setting] = walk_along(trainer, walk, folder / setting if setting in saving else None)
        if rank == 0:
            print(f"{setting}: {len(walk) - 1} ways, {time.monotonic() - start:.0f} s", flush=True)
    save_result(folder, rank, found)


def staying(rank: int, world_size: int, folder: Path, steps: dict[str, int]) -> None:
    """The runs that do not."""
    found = {}
    for setting, count in steps.items():
        trainer = trainer_of(setting, 1, 0, tp=1)
        rows = [a_step(trainer, at) for at in range(count)]
        found[setting] = {"rows": rows, "weights": weights_of(trainer)}
    save_result(folder, rank, found)


def differences(
    folder: Path, walks: Mapping[str, Walk], saving: Collection[str]
) -> dict[str, list[float]]:
    """By how much loss, gradient norm, learning rate, and weights differ at most from those of a
    run that never changes, and steps that are made again where checkpoints are written (``saving``)
    from the first; by setting."""
    (folder / "staying").mkdir()
    steps = {setting: len(walk) for setting, walk in walks.items()}
    [expected] = in_processes(staying, 1, folder / "staying", steps)
    found = in_processes(walking, RANKS, folder, dict(walks), tuple(saving))[0]
    worst = {}
    for setting in walks:
        one, other = found[setting], expected[setting]
        columns = (Tensor(one["rows"]) - Tensor(other["rows"])).abs().max(0).values.tolist()
        weights = [float((one["weights"][n] - w).abs().max()) for n, w in other["weights"].items()]
        again = [
            abs(x - y)
            for row, same in zip(one["again"], one["rows"][1:], strict=setting in saving)
            for x, y in zip(row, same, strict=True)
        ]
        worst[setting] = [*columns, max(weights), max(again, default=0.0)]
    return worst


def main() -> None:
    """Take every way under every setting; a line each."""
    walks = dict.fromkeys(SETTINGS, every_way())
    with tempfile.TemporaryDirectory() as folder:
        found = differences(Path(folder), walks, walks)
    for setting, worst in found.items():
        print(
            f"{setting}: loss, grad norm, lr, weights, steps made again differ by at most {worst}"
        )
    if any(a > b for worst in found.values() for a, b in zip(worst, MOST, strict=True)):
        raise SystemExit(f"more than {MOST}")


if __name__ == "__main__":
    main()
