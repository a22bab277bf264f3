"""The transformers engine under adapters that are published alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlinf_async.backends.fsdp.language.trainer import PolicyTrainer
from rlinf_async.backends.transformers.config import TransformersEngineConfig
from rlinf_async.backends.transformers.engine import TransformersEngine
from rlinf_async.messages.weights import WeightsMismatch
from rlinf_async.weights.pack import pack, unpack
from tests.backends.adapters import publisher, serves_each_version
from tests.backends.models import make_model, qwen3
from tests.backends.transformers.kit import engine_of


@pytest.fixture
def trainer(tmp_path: Path) -> PolicyTrainer:
    return publisher(tmp_path)


async def test_each_version_of_an_adapter_is_served_over_the_weights_of_the_folder(
    tmp_path: Path, trainer: PolicyTrainer
) -> None:
    config = TransformersEngineConfig(model=str(tmp_path), weights="adapter")
    engine = TransformersEngine(config)
    try:
        await engine.start()
        assert engine.version == -1
        await serves_each_version(engine, trainer)
    finally:
        await engine.close()


async def test_what_is_no_adapter_of_the_model_changes_nothing(
    tmp_path: Path, trainer: PolicyTrainer
) -> None:
    tensors = unpack(trainer.publish())
    name = "model.layers.1.mlp.up_proj.lora_B.weight"
    wrong = {
        f"{name}' is": {**tensors, name: torch.zeros(3, 4)},
        "unexpected 'model.layers.7": {
            **tensors,
            "model.layers.7.mlp.up_proj.lora_A.weight": torch.zeros(4, 64),
            "model.layers.7.mlp.up_proj.lora_B.weight": torch.zeros(128, 4),
        },
        f"missing '{name}": {key: one for key, one in tensors.items() if key != name},
    }
    config = TransformersEngineConfig(model=str(tmp_path), weights="adapter")
    engine = TransformersEngine(config)
    try:
        await engine.start()
        for loaded in (False, True):
            for said, changed in wrong.items():
                with pytest.raises(WeightsMismatch, match=said):
                    await engine.load(pack(changed, 1))
            assert engine.version == (0 if loaded else -1)
            if not loaded:
                await engine.load(trainer.publish())
        fewer = {key: one for key, one in tensors.items() if "layers.0" in key}
        with pytest.raises(WeightsMismatch, match="missing"):
            await engine.load(pack(fewer, 1))
    finally:
        await engine.close()


async def test_an_engine_that_waits_for_whole_weights_takes_no_adapter(
    tmp_path: Path, trainer: PolicyTrainer
) -> None:
    async with engine_of(tmp_path / "other", make_model(qwen3(tied=False))) as engine:
        with pytest.raises(WeightsMismatch, match=r"an adapter \(LoRA\) alone, but the engine"):
            await engine.load(trainer.publish())
        assert engine.version == 0
