"""`MegatronTrainer` under every strategy learns and publishes what FSDP does on one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlinf_async.algorithms.config import LanguageAdvantageConfig, LanguageLossConfig
from rlinf_async.backends.base import OptimizerConfig
from rlinf_async.backends.fsdp.language.config import LanguageTrainerConfig
from rlinf_async.backends.fsdp.language.trainer import PolicyTrainer
from rlinf_async.backends.language_training.config import LanguageModelConfig
from rlinf_async.backends.megatron.config import MegatronConfig, MegatronTrainerConfig
from rlinf_async.parallel import StrategyError
from rlinf_async.weights.pack import unpack
from tests.backends.fsdp_helpers import in_processes, save_result
from tests.backends.language import kit as language
from tests.backends.language.kit import micro_batches, samples, trainer_config

pytest.importorskip("megatron.core")

LOSS = LanguageLossConfig(kl_coefficient=0.05, entropy_coefficient=0.01)
WHITENED = LanguageAdvantageConfig(name="reinforce++")
OPTIMIZER = OptimizerConfig(lr=1e-2, eps=1e-6, weight_decay=0.1, max_grad_norm=0.5)
STEPS = 2
# The padding token is in some samples: its embedding learns nothing.
FIELDS = {"num_hidden_layers": 4, "pad_token_id": 3}
TIED, UNTIED = (one | FIELDS for one in (language.QWEN3, language.UNTIED))
STRATEGIES: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "tp2": {"tp": 2, "sequence_parallel": True},
        "pp2": {"pp": 2},
        "pp2, interleaved": {"pp": 2, "virtual_stages": 2},
        "dp2": {"overlap": True},
        "dp2, copies of the optimizer": {"distributed_optimizer": False},
    },
    4: {
        "tp2pp2": {"tp": 2, "pp": 2},
        "tp2dp2": {"tp": 2},
        "pp2dp2": {"pp": 2, "overlap": True},
        "pp2dp2, interleaved": {"pp": 2, "virtual_stages": 2, "overlap": True},
    },
}


def learn(trainer: Any, steps: int = STEPS) -> list[dict[str, float]]:
    """Train on this data rank's groups; the metrics of each step."""
    at = trainer.data_rank
    batch = [one for one in samples(4) if one.group % at.size == at.rank] if at.is_io else []
    metrics = []
    for _ in range(steps):
        reference = trainer.log_probs(batch, reference=True)
        previous = trainer.log_probs(batch)
        arriving: Any = ()
        if at.is_io:
            for one, before, first in zip(batch, previous, reference, strict=True):
                one.prev_log_prob, one.ref_log_prob, one.advantage = before, first, None
            ready = trainer.normalize_advantages(trainer.compute_advantages(batch))
            arriving = micro_batches(ready, 2)
        metrics.append(dict(trainer.training_step(iter(arriving))))
    trainer.end_iteration()
    return metrics


def everything(trainer: Any) -> dict[str, Any]:
    """Train in both ways; what came of it."""
    metrics = learn(trainer)
    at = trainer.data_rank
    batch = [one for one in samples(4) if one.group % at.size == at.rank] if at.is_io else []
    for one in batch:
        one.advantage = np.zeros(len(one.response_ids), np.float32)
    metrics.append(dict(trainer.supervised_step(iter(micro_batches(batch, 4)))))
    log_probs = [torch.from_numpy(one) for one in trainer.log_probs(batch)]
    return {"metrics": metrics, "state": unpack(trainer.publish()), "log_probs": log_probs}


def fsdp_config(model: dict[str, Any]) -> LanguageTrainerConfig:
    fsdp = {"optimizer": OPTIMIZER}
    return trainer_config(model, loss=LOSS, advantage=WHITENED, reference=True, fsdp=fsdp)


def megatron_config(model: dict[str, Any], **fields: Any) -> MegatronTrainerConfig:
    return MegatronTrainerConfig(
        megatron=MegatronConfig(
            model=LanguageModelConfig(config=model),
            optimizer=OPTIMIZER,
            **fields,
        ),
        loss=LOSS,
        advantage=WHITENED,
        reference=True,
        max_tokens_per_forward=40,
    )


def learn_everywhere(rank: int, world_size: int, folder: Path, model: dict[str, Any]) -> None:
    from rlinf_async.backends.megatron.trainer import MegatronTrainer

    found = {}
    for name, fields in STRATEGIES[world_size].items():
        trainer = MegatronTrainer(megatron_config(model, **fields), world_size, rank)
        found[name] = everything(trainer) | {"data_rank": list(trainer.data_rank)}
        trainer.save_pretrained(folder / f"{name} {world_size}")
    save_result(folder, rank, found)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("model", [TIED, UNTIED], ids=["tied", "untied"])
def test_every_strategy_learns_and_publishes_what_fsdp_does(
    tmp_path: Path, model: dict[str, Any], world_size: int
) -> None:
    results = in_processes(learn_everywhere, world_size, tmp_path, model)
    config = fsdp_config(model)
    expected = everything(PolicyTrainer(config, 1, 0))
    for name in STRATEGIES[world_size]:
        ranks = [one[name] for one in results]
        readers = [tuple(one["data_rank"][:2]) for one in ranks if one["data_rank"][2]]
        assert sorted(readers) == [(at, len(readers)) for at in range(len(readers))]
        for one in ranks:
            assert_same(one["metrics"], expected["metrics"])
        published = ranks[0]["state"]
        assert published.keys() == expected["state"].keys()
        for tensor, numbers in expected["state"].items():
            torch.testing.assert_close(published[tensor], numbers, atol=1e-4, rtol=0, msg=name)
        assert all(not one["state"] for one in ranks[1:])
        if len(readers) == 1:
            for one in ranks:
                for found, numbers in zip(one["log_probs"], expected["log_probs"], strict=True):
                    torch.testing.assert_close(found, numbers, atol=1e-3, rtol=0)
        check_folder(tmp_path / f"{name} {world_size}", published)


def check_folder(folder: Path, published: dict[str, torch.Tensor]) -> None:
    from transformers import AutoModelForCausalLM

    written = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    for name, numbers in published.items():
        assert np.array_equal(written[name].numpy(), numbers.numpy()), name
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1  # weights as the config


CHANGES: dict[str, dict[str, Any]] = {
    "tp2pp2": {"tp": 2, "pp": 2},
    "tp2dp2": {"tp": 2, "overlap": True},
    "interleaved": {"pp": 2, "virtual_stages": 2},
    "pp2dp2": {"pp": 2, "distributed_optimizer": False},
}


def go_on_from_each_other(rank: int, world_size: int, folder: Path, model: dict[str, Any]) -> None:
    from rlinf_async.backends.megatron.trainer import MegatronTrainer

    metrics, before = [], "fsdp"
    for name, fields in CHANGES.items():
        trainer = MegatronTrainer(megatron_config(model, **fields), world_size, rank)
        extras = trainer.load_checkpoint(folder / before)
        if before != "fsdp":
            assert extras == [{"rank": at} for at in range(world_size)]
        metrics += learn(trainer, 1)
        trainer.save_checkpoint(folder / name, {"rank": rank})
        before = name
    save_result(folder, rank, metrics)


@pytest.mark.parametrize("model", [TIED, UNTIED], ids=["tied", "untied"])
def test_any_strategy_and_fsdp_go_on_from_the_checkpoints_of_any_other(
    tmp_path: Path, model: dict[str, Any]
) -> None:
    config = fsdp_config(model)
    first = PolicyTrainer(config, 1, 0)
    expected = learn(first, 1)
    first.save_checkpoint(tmp_path / "fsdp")
    expected += learn(first, 4)
    for metrics in in_processes(go_on_from_each_other, 4, tmp_path, model):
        assert_same(metrics, expected[1:])
    last = PolicyTrainer(config, 1, 0)
    last.load_checkpoint(tmp_path / "pp2dp2")
    assert (last.version, last.manager.steps) == (5, 5)
    assert_same(learn(last, 2), learn(first, 2))


def assert_same(metrics: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    for step, numbers in enumerate(expected):
        for field, number in numbers.items():
            if field != "micro_batches":
                where = f"step {step}, {field}"
                assert metrics[step][field] == pytest.approx(number, rel=1e-4, abs=1e-5), where


def test_ranks_that_do_not_make_up_the_strategy_are_refused() -> None:
    from rlinf_async.backends.megatron.config import strategy_of

    config = megatron_config(TIED, tp=2, pp=2).megatron
    with pytest.raises(StrategyError, match=r"tp=2 x pp=2 does not divide 6 ranks; nearest: 4, 8"):
        strategy_of(config, 6)
