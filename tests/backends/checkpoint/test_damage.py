"""Whatever reads a damaged checkpoint names it, or has exactly what was written."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from safetensors.torch import load_file
from torch import Tensor

from rlinf_async.backends.checkpoint.exporting import Export, Resharding
from rlinf_async.backends.checkpoint.folders import CheckpointError
from rlinf_async.backends.fsdp.language.trainer import PolicyTrainer
from rlinf_async.backends.language_training.config import LanguageModelConfig
from rlinf_async.backends.megatron.config import MegatronConfig, MegatronTrainerConfig
from tests.backends.checkpoint.damage import KINDS, OF_A_MODEL, Damage, copied, damages
from tests.backends.checkpoint.kit import contents, model_folder, trained, trainer_of
from tests.backends.fsdp_helpers import in_processes, save_result

Tensors = dict[str, Tensor]
Reader = Callable[[Path], Tensors]
EXAMPLES: Final = 60 * int(os.environ.get("EXAMPLES", "1"))


class Written:
    """A checkpoint of two data ranks and two tensor ranks, and one of an earlier step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = model_folder(folder / "model", hidden=32, tied=True)
        self.trainer = trainer_of(self.model)
        self.trainer.save_checkpoint(folder / "earlier")
        trained(self.model, folder / "whole")
        Resharding(folder / "whole", dp=2, tp=2).run(folder / "later")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return Written(tmp_path_factory.mktemp("written"))


def exported(folder: Path) -> Tensors:
    out = folder.with_name("exported")
    shutil.rmtree(out, ignore_errors=True)
    Export(folder).run(out)
    return load_file(out / "model.safetensors")


def resharded(folder: Path) -> Tensors:
    out = folder.with_name("resharded")
    shutil.rmtree(out, ignore_errors=True)
    Resharding(folder, dp=3, tp=1).run(out)
    return contents(out)


class Resuming:
    """A trainer that loads; where that fails, it has what it had before."""

    def __init__(self, trainer: Any, folder: Path, state: Callable[[Any], Tensors]) -> None:
        self._trainer, self._earlier, self._state = trainer, folder / "earlier", state
        trainer.load_checkpoint(self._earlier)
        self._before = state(trainer)

    def __call__(self, folder: Path) -> Tensors:
        try:
            self._trainer.load_checkpoint(folder)
        except CheckpointError:
            assert differing(self._state(self._trainer), self._before) == []
            raise
        found = self._state(self._trainer)
        self._trainer.load_checkpoint(self._earlier)
        return found


def state_of_fsdp(trainer: PolicyTrainer) -> Tensors:
    """Weights, moments and step counters, copied."""
    manager = trainer.manager
    found = {name: one.clone() for name, one in manager.model.state_dict().items()}
    for name, one in manager.model.named_parameters():
        for key, value in manager.optimizer.state.get(one, {}).items():
            found[f"{name}.{key}"] = value.clone()
    return found


def state_of_megatron(trainer: Any) -> Tensors:
    from rlinf_async.backends.megatron.weights import kept_of

    found = {}
    for held in trainer.manager.held:
        kept = kept_of(trainer.manager.optimizer, held.parameter)
        assert kept is not None
        found[held.name] = kept.main.detach().clone()
        found |= {f"{held.name}.{key}": one.clone() for key, one in kept.state.items()}
    return found


def differing(found: Tensors, expected: Tensors) -> list[str]:
    """Names of tensors that differ in a bit."""
    return [
        name
        for name in found.keys() | expected.keys()
        if name not in found or name not in expected or not torch.equal(found[name], expected[name])
    ]


def check_all(reader: Reader, written: Path, kinds: Sequence[str] = OF_A_MODEL) -> None:
    """Read checkpoints with all kinds of damage."""
    expected = reader(copied(written / "later", written / "damaged"))

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(damages(kinds))
    def check(damage: Damage) -> None:
        folder = copied(written / "later", written / "damaged")
        done = damage(folder)
        error, found = "", dict[str, Tensor]()
        try:
            found = reader(folder)
        except CheckpointError as caught:
            error = str(caught)
        assert str(folder) in error if error else differing(found, expected) == [], done

    check()


@pytest.mark.parametrize(
    ("reader", "kinds"), [(contents, KINDS), (resharded, KINDS), (exported, OF_A_MODEL)]
)
def test_damage_is_named_or_of_no_consequence(
    written: Written, reader: Reader, kinds: Sequence[str]
) -> None:
    check_all(reader, written.folder, kinds)


def test_a_resumed_trainer_has_what_was_saved_or_what_it_had_before(written: Written) -> None:
    check_all(Resuming(written.trainer, written.folder, state_of_fsdp), written.folder)


def by_megatron(rank: int, world_size: int, folder: Path, written: Path) -> None:
    from rlinf_async.backends.megatron.trainer import MegatronTrainer

    trainer = MegatronTrainer(
        MegatronTrainerConfig(
            megatron=MegatronConfig(model=LanguageModelConfig(path=str(written / "model")))
        ),
        world_size,
        rank,
    )
    check_all(Resuming(trainer, written, state_of_megatron), written)
    save_result(folder, rank, "done")


def test_so_has_one_of_megatron(written: Written, tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    assert in_processes(by_megatron, 1, tmp_path, written.folder) == ["done"]
