"""`MegatronModelManager`: memory that is given back, and batches that code brings itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlinf_async.backends.base import OptimizerConfig
from rlinf_async.backends.language_training.config import LanguageModelConfig
from rlinf_async.backends.megatron.config import MegatronConfig, MegatronTrainerConfig
from tests.backends.fsdp_helpers import in_processes, save_result
from tests.backends.language.kit import QWEN3, micro_batches, samples

pytest.importorskip("megatron.core")

OPTIMIZER = OptimizerConfig(lr=1e-2, eps=1e-6, max_grad_norm=0.5)


def made(world_size: int, rank: int, *, layers: Any = 2, **fields: Any) -> Any:
    from rlinf_async.backends.megatron.trainer import MegatronTrainer

    described = LanguageModelConfig(config=QWEN3 | {"num_hidden_layers": layers})
    config = MegatronTrainerConfig(
        megatron=MegatronConfig(model=described, optimizer=OPTIMIZER, **fields)
    )
    return MegatronTrainer(config, world_size, rank)


def learn(trainer: Any, steps: int) -> list[float]:
    at = trainer.data_rank
    batch = [one for one in samples(4) if one.group % at.size == at.rank]
    ready = trainer.compute_advantages(batch)
    return [trainer.training_step(iter(micro_batches(ready, 4)))["grad_norm"] for _ in range(steps)]


def give_back_and_go_on(rank: int, world_size: int, folder: Path) -> None:
    """Each way of keeping weights and moments; what was learnt with and without a break."""
    from rlinf_async.backends.megatron.memory import float32_copies

    found = {}
    for precision in ("bfloat16", "float32"):
        for distributed in (True, False):
            fields = {"precision": precision, "distributed_optimizer": distributed}
            expected = learn(made(world_size, rank, **fields), 4)
            trainer = made(world_size, rank, **fields)
            norms = learn(trainer, 2)
            manager = trainer.manager
            copies = list(float32_copies(manager.optimizer))
            assert bool(copies) == (precision == "bfloat16")
            for _ in range(2):
                manager.offload_megatron_copy_params([manager.optimizer])
                assert all(not one.untyped_storage().size() for one in copies)
            for _ in range(2):
                manager.load_megatron_copy_params([manager.optimizer])
            assert [id(one) for one in float32_copies(manager.optimizer)] == [*map(id, copies)]
            weights = [one.parameter for one in manager.held]
            for keep in (True, False):
                for _ in range(2):
                    manager.memory.offload_optimizer()
                    if not keep:
                        manager.memory.offload_weights()
                sizes = [one.untyped_storage().size() for one in weights]
                assert all(sizes) if keep else not any(sizes)
                assert not manager.models[0].buffers[0].grad_data.untyped_storage().size()
                for _ in range(2):
                    manager.memory.load_weights()
                    manager.memory.load_optimizer()
            assert [id(one.parameter) for one in manager.held] == [*map(id, weights)]
            found[str(fields)] = [norms + learn(trainer, 2), expected]
    save_result(folder, rank, found)


def test_training_goes_on_after_memory_was_given_back(tmp_path: Path) -> None:
    for result in in_processes(give_back_and_go_on, 2, tmp_path):
        assert len(result) == 4
        for norms, expected in result.values():
            assert norms == expected


def padded_batch(batch: list[Any]) -> tuple[Tensor, Tensor, Tensor]:
    longest = max(one.tokens for one in batch)
    ids, mask = torch.zeros(2, len(batch), longest, dtype=torch.int64)
    for row, one in enumerate(batch):
        tokens = np.concatenate([one.prompt_ids, one.response_ids])
        ids[row, longest - len(tokens) :] = torch.from_numpy(tokens.astype(np.int64))
        mask[row, longest - len(tokens) :] = 1
    return ids, mask, (mask.cumsum(1) - 1).clamp(min=0)


def forward_own_batches(rank: int, world_size: int, folder: Path) -> None:
    from rlinf_async.backends.megatron.forward import vocabulary_statistics

    trainer = made(world_size, rank, tp=2, sequence_parallel=True)
    manager = trainer.manager
    batch = samples(2)
    for one in batch:
        one.temperature = 0.5
    expected = trainer.log_probs(batch if rank == 0 else [])
    ids, mask, positions = padded_batch(batch)

    def process(logits: Tensor, labels: Tensor, group: Any) -> dict[str, Tensor]:
        ones = torch.ones(len(labels))
        return {"log_probs": vocabulary_statistics(logits, labels, ones, 61, group).log_prob}

    arguments = {"labels": ids.roll(-1, 1), "group": manager.grid.groups.tp}
    (model,) = manager.models
    for pack in (True, False):
        found = manager.custom_forward(
            model, ids, mask, positions, True, pack_seqs=pack, temperature=0.5,
            logits_processor=process, logits_processor_args=arguments,
        )["log_probs"]  # fmt: skip
        assert found.shape == ids.shape
        for row, one in enumerate(batch):
            numbers = found[row, ids.shape[1] - 1 - len(one.response_ids) : -1]
            np.testing.assert_allclose(numbers.detach().numpy(), expected[row], atol=1e-5)
        assert not found[mask == 0].any()
    logits = manager.custom_forward(model, ids, mask, positions, True)
    assert logits.shape == (*ids.shape, 31)  # 61, made even
    with pytest.raises(ValueError, match="more than max_batch_seqlen = 4"):
        manager.custom_forward(model, ids, mask, positions, True, max_batch_seqlen=4)
    with pytest.raises(ValueError, match="sequence_parallel is False, but the model was built"):
        manager.custom_forward(model, ids, mask, positions, False)
    first, last = (manager.model_provider_func(*ends) for ends in ((True, False), (False, True)))
    assert hasattr(first, "embedding")
    assert not hasattr(first, "output_layer")
    assert hasattr(last, "output_layer")
    assert not hasattr(last, "embedding")
    one, other = manager.make_data_iterator_list(iter("abc"), vpp_size=2)
    assert [*zip(one, other, strict=True)] == [*zip("abc", "abc", strict=True)]
    save_result(folder, rank, None)


def test_code_can_bring_its_own_padded_batches(tmp_path: Path) -> None:
    in_processes(forward_own_batches, 2, tmp_path)


def compute_gradients_twice(rank: int, world_size: int, folder: Path) -> None:
    """Norms of the gradients that the optimizer would step, after one call and after two."""
    found = {}
    for name, fields in {"tp2": {"tp": 2}, "pp2": {"pp": 2}, "dp2": {}}.items():
        trainer = made(world_size, rank, **fields)
        at = trainer.data_rank
        batch = [one for one in samples(4) if one.group % at.size == at.rank]
        ready = trainer.compute_advantages(batch)
        norms = []
        for _ in range(2):
            trainer.forward_backward(iter(micro_batches(ready, 4)))
            gradients = [one.parameter.main_grad for one in trainer.manager.held]
            norms.append(float(torch.stack([one.norm() for one in gradients]).norm()))
        found[name] = norms
    save_result(folder, rank, found)


def test_gradients_are_those_of_the_last_batch_alone(tmp_path: Path) -> None:
    """They are reduced in place: what was reduced before cannot be added to."""
    for result in in_processes(compute_gradients_twice, 2, tmp_path):
        for once, twice in result.values():
            assert once > 0.0
            assert twice == pytest.approx(once, rel=1e-6)


def test_a_model_with_dropout_is_refused() -> None:
    from rlinf_async.backends.megatron.config import architecture_of
    from rlinf_async.parallel import ModelMismatch

    with pytest.raises(ModelMismatch, match=r"attention_dropout=0\.1 \(only 0\)"):
        architecture_of({**QWEN3, "attention_dropout": 0.1})
