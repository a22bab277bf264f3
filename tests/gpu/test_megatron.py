"""`MegatronTrainer` on the device: the numbers of FSDP on the CPU, memory that it gives back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from rlinf_async.backends.fsdp.language.trainer import PolicyTrainer
from rlinf_async.backends.language_training.config import LanguageModelConfig
from rlinf_async.backends.megatron.config import MegatronConfig, MegatronTrainerConfig
from tests.backends.language.kit import QWEN3, UNTIED, samples, weights
from tests.gpu.kit import DEVICE, assert_near, held
from tests.gpu.test_language_trainer import LOSS, OPTIMIZER, WIDE, learn, policy

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.filterwarnings("ignore")
"""megatron-core warns of its own defaults; the package says so once in a process"""


@pytest.fixture(autouse=True)
def _own_process_group() -> Iterator[None]:
    """A rank on its own makes torch's default group, which goes when its process does."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def megatron(device: str, model: dict[str, Any], **fields: Any) -> Any:
    from rlinf_async.backends.megatron.trainer import MegatronTrainer

    described = LanguageModelConfig(config=model)
    config = MegatronTrainerConfig(
        megatron=MegatronConfig(model=described, optimizer=OPTIMIZER, device=device, **fields),
        loss=LOSS,
        reference=True,
    )
    return MegatronTrainer(config, 1, 0)


@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize("model", [QWEN3, UNTIED], ids=["tied", "untied"])
def test_float32_learns_what_fsdp_learns_on_the_cpu(
    model: dict[str, Any], distributed: bool
) -> None:
    here, there = megatron(DEVICE, model, distributed_optimizer=distributed), policy("cpu", model)
    compare(here, there, 1e-4, 1e-3, 1e-4)
    batch = samples()
    for one, two in zip(here.log_probs(batch), there.log_probs(batch), strict=True):
        np.testing.assert_allclose(one, two, atol=1e-3, rtol=0)


def test_a_device_that_megatron_would_not_keep_to_is_refused() -> None:
    with pytest.raises(ValueError, match="set CUDA_VISIBLE_DEVICES='' for this process"):
        megatron("cpu", QWEN3)


@pytest.mark.parametrize("distributed", [True, False])
def test_bfloat16_learns_about_what_float32_learns(distributed: bool) -> None:
    fields = {"distributed_optimizer": distributed, "precision": "bfloat16"}
    compare(megatron(DEVICE, UNTIED, **fields), policy("cpu", UNTIED), 0.05, 0.2, 2e-2)


def compare(here: Any, there: PolicyTrainer, loss: float, norm: float, weight: float) -> None:
    for mine, theirs in zip(learn(here), learn(there), strict=True):
        assert mine["skipped"] == 0.0
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=loss)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], abs=norm, rel=norm)
    assert_near(weights(here), weights(there), weight)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_an_offloaded_trainer_holds_no_memory_and_goes_on_as_if_it_had_not_been(
    precision: str,
) -> None:
    before = held()
    trainer = megatron(DEVICE, WIDE, precision=precision)
    learn(trainer, 1)
    onloaded = held() - before
    assert onloaded > 3 * 4 * 10_000_000
    state = {name: one.clone() for name, one in weights(trainer).items()}
    trainer.offload()
    assert held() - before < 1 << 24
    assert_near(weights(trainer), state, 0.0)  # it can be published meanwhile
    assert held() - before < 1 << 24
    trainer.onload()
    assert held() - before == pytest.approx(onloaded, rel=0.05)
    again = megatron(DEVICE, WIDE, precision=precision)
    learn(again, 1)
    within = 1e-4 if precision == "float32" else 1e-2
    for mine, theirs in zip(learn(trainer, 2), learn(again, 2), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=within)


@pytest.mark.parametrize("onto", [DEVICE, "fsdp", "fsdp on the cpu"])
def test_a_checkpoint_goes_on_under_either_backend(tmp_path: Path, onto: str) -> None:
    trainer = megatron(DEVICE, QWEN3)
    learn(trainer)
    trainer.save_checkpoint(tmp_path / "one", {"note": 7})
    resumed: Any = megatron(DEVICE, QWEN3) if onto == DEVICE else None
    if resumed is None:
        resumed = policy(DEVICE if onto == "fsdp" else "cpu", QWEN3)
    assert resumed.load_checkpoint(tmp_path / "one") == [{"note": 7}]
    assert_near(weights(resumed), weights(trainer), 0.0)
    mine, theirs = learn(resumed, 1)[0], learn(trainer, 1)[0]
    assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-4)
    assert_near(weights(resumed), weights(trainer), 1e-4)
