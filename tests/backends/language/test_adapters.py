"""LoRA: what peft computes, on one rank and on two; what is published, kept, and written."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from rlinf_async.backends.checkpoint.exporting import Export, Resharding
from rlinf_async.backends.checkpoint.folders import CheckpointError
from rlinf_async.backends.fsdp.language.config import LanguageTrainerConfig
from rlinf_async.backends.fsdp.language.publishing import hugging_face_state
from rlinf_async.backends.fsdp.language.trainer import CriticTrainer, PolicyTrainer
from rlinf_async.backends.language_training.config import (
    LanguageModelConfig,
    PublishedAdapterConfig,
)
from rlinf_async.backends.language_training.lora import (
    ADAPTER_FOLDER,
    PEFT_PREFIX,
    is_of_adapter,
    targeted,
)
from rlinf_async.backends.megatron.config import MegatronConfig, MegatronTrainerConfig
from rlinf_async.backends.transformers.tensors import model_without_memory
from rlinf_async.channels.wire import shared_bytes
from rlinf_async.messages.weights import WeightsMismatch
from rlinf_async.parallel import Strategy
from rlinf_async.weights.pack import pack, unpack
from tests.backends.fsdp_helpers import in_processes, load_result, save_result
from tests.backends.language.kit import (
    QWEN3,
    UNTIED,
    gradients,
    micro_batches,
    samples,
    trainer_config,
    weights,
)
from tests.backends.language.test_publishing_in_place import assert_same as assert_same_update

LORA = PublishedAdapterConfig(rank=4, alpha=6.0)
UNEVEN = PublishedAdapterConfig(rank=3, alpha=6.0)
QWEN2 = {name: value for name, value in QWEN3.items() if name != "head_dim"}
MODELS: dict[str, tuple[dict[str, Any], PublishedAdapterConfig]] = {
    "qwen3": (QWEN3, LORA),
    "untied, by name": (
        UNTIED,
        PublishedAdapterConfig(rank=3, targets=("q_proj", "layers.1.mlp.up_proj")),
    ),
    "qwen2, which has biases": (QWEN2 | {"model_type": "qwen2"}, LORA),
}
MIXTURE = QWEN3 | {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
}


def a_trainer(
    model: dict[str, Any] | None = None,
    lora: PublishedAdapterConfig = LORA,
    ranks: tuple[int, int] = (1, 0),
    **fields: Any,
) -> PolicyTrainer:
    return PolicyTrainer(trainer_config(model, lora=lora, **fields), *ranks)


def of_adapter(trainer: PolicyTrainer) -> dict[str, Tensor]:
    named = trainer.manager.model.named_parameters()
    return {name: one.detach() for name, one in named if is_of_adapter(name)}


def disturb(trainer: PolicyTrainer) -> None:
    """Make the adapter one that changes something, as training does."""
    generator = torch.Generator().manual_seed(3)
    for one in of_adapter(trainer).values():
        one.add_(0.1 * torch.randn(one.shape, generator=generator))


def train(trainer: PolicyTrainer, steps: int = 1) -> None:
    for _ in range(steps):
        batch = trainer.compute_advantages(samples(4))
        trainer.training_step(micro_batches(batch, 8))


def peft_model(
    trainer: PolicyTrainer, model: Mapping[str, Any], lora: PublishedAdapterConfig
) -> Any:
    """What peft makes of the same base, with the same adapter."""
    peft: Any = importlib.import_module("peft")
    config = transformers.AutoConfig.for_model(**model)
    auto: Any = transformers.AutoModelForCausalLM
    base = auto.from_config(config, attn_implementation="sdpa")
    state = trainer.language.state_dict()
    base.load_state_dict({name: one for name, one in state.items() if not is_of_adapter(name)})
    wanted: Any = list(lora.targets) or "all-linear"
    settings = peft.LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=wanted, task_type="CAUSAL_LM"
    )
    made = peft.get_peft_model(base, settings)
    ours = {PEFT_PREFIX + name: one for name, one in state.items() if is_of_adapter(name)}
    names = {name.replace(".default.", "."): name for name, _ in made.named_parameters()}
    parameters = dict(made.named_parameters())
    theirs = {name for name in names if is_of_adapter(name)}
    assert theirs == ours.keys()
    with torch.no_grad():
        for name, one in ours.items():
            parameters[names[name]].copy_(one)
    return made


def logits(model: Any) -> Tensor:
    ids = torch.arange(1, 24)[None] * 5 % QWEN3["vocab_size"]  # type: ignore[operator]
    with torch.no_grad():
        found: Tensor = model(input_ids=ids).logits
    return found


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_are_those_of_peft(name: str) -> None:
    model, lora = MODELS[name]
    trainer = a_trainer(model, lora)
    disturb(trainer)
    theirs = peft_model(trainer, model, lora)
    torch.testing.assert_close(logits(trainer.language), logits(theirs), atol=1e-6, rtol=0.0)
    ids = torch.arange(2, 40)[None] * 7 % QWEN3["vocab_size"]  # type: ignore[operator]
    for one in (trainer.language, theirs):
        one.zero_grad()
        one(input_ids=ids, labels=ids).loss.backward()
    expected = {
        one.replace(".default.", "."): parameter.grad
        for one, parameter in theirs.named_parameters()
        if parameter.requires_grad
    }
    found = dict(trainer.language.named_parameters())
    assert len(expected) == len([one for one in found.values() if one.requires_grad])
    for full, gradient in expected.items():
        ours = found[full.removeprefix(PEFT_PREFIX)].grad
        assert ours is not None
        assert gradient is not None
        torch.testing.assert_close(ours, gradient, atol=1e-6, rtol=1e-5, msg=full)


def test_gradients_of_a_policy_loss_do_not_depend_on_how_samples_are_cut() -> None:
    whole, cut = a_trainer(UNTIED), a_trainer(UNTIED, checkpointing=True)
    disturb(whole)
    disturb(cut)
    batch = whole.compute_advantages(samples(4))
    expected = gradients(whole, batch, len(batch))
    found = gradients(cut, batch[::-1], 3)
    assert expected.keys() == of_adapter(whole).keys()
    for name, one in expected.items():
        torch.testing.assert_close(found[name], one, atol=1e-6, rtol=1e-4, msg=name)


def test_training_leaves_the_base_as_it_is_to_the_last_bit_and_has_moments_of_the_adapter() -> None:
    trainer = a_trainer()
    state = trainer.language.state_dict()
    base = {name: one.clone() for name, one in state.items() if not is_of_adapter(name)}
    first = {name: one.clone() for name, one in of_adapter(trainer).items()}
    train(trainer, 2)
    trainer.publish()
    after = trainer.language.state_dict()
    for name, one in base.items():
        assert torch.equal(after[name], one), name
    assert all(not torch.equal(one, first[name]) for name, one in of_adapter(trainer).items())
    optimizer = trainer.manager.optimizer
    assert len(optimizer.state) == len(first)
    assert all(
        not one.requires_grad for one in trainer.language.parameters() if one not in optimizer.state
    )


def test_what_is_published_is_the_base_and_the_product_of_the_factors() -> None:
    trainer = a_trainer()
    plain = PolicyTrainer(trainer_config(), 1, 0)
    unchanged = weights(trainer)
    for name, one in weights(plain).items():
        assert torch.equal(unchanged[name], one), name
    train(trainer)
    factors = {name.removeprefix("language."): one for name, one in of_adapter(trainer).items()}
    adapted = 0
    for name, one in weights(trainer).items():
        stem, expected = name.removesuffix(".weight"), unchanged[name]
        if f"{stem}.lora_A.weight" in factors:
            adapted += 1
            a, b = factors[f"{stem}.lora_A.weight"], factors[f"{stem}.lora_B.weight"]
            expected = expected + (b @ a) * (LORA.alpha / LORA.rank)
            assert not torch.equal(one, unchanged[name])
        assert torch.equal(one, expected), name
    assert adapted == 2 * 7
    plain.load(trainer.publish())
    for found, wanted in zip(plain.log_probs(samples()), trainer.log_probs(samples()), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5)
    with pytest.raises(WeightsMismatch, match=r"missing '.*lora_A.weight'"):
        trainer.load(plain.publish())


def test_an_adapter_alone_is_taken_by_a_trainer_of_inference_workers() -> None:
    published = PublishedAdapterConfig(rank=4, alpha=6.0, publish="adapter")
    trainer = a_trainer(lora=published)
    other = a_trainer(lora=msgspec.structs.replace(published, alpha=4.0), reference=True)
    train(trainer, 2)
    trainer.end_iteration()
    update = trainer.publish()
    assert sum(len(one.data) for one in update.buckets) == 4 * sum(
        one.numel() for one in of_adapter(trainer).values()
    )
    other.load(update)
    assert other.version == 1
    for found, wanted in zip(other.log_probs(samples()), trainer.log_probs(samples()), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_the_reference_is_the_model_without_its_adapter() -> None:
    trainer = a_trainer(reference=True)
    expected = PolicyTrainer(trainer_config(), 1, 0).log_probs(samples())
    train(trainer)
    assert set(trainer.manager.kept["ref"]) == of_adapter(trainer).keys()
    found = trainer.log_probs(samples(), reference=True)
    for one, wanted in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, wanted)
    assert not np.array_equal(trainer.log_probs(samples())[0], expected[0])


def test_a_run_goes_on_from_its_checkpoint_as_if_it_had_not_ended(tmp_path: Path) -> None:
    one = a_trainer(reference=True)
    train(one, 2)
    one.end_iteration()
    one.save_checkpoint(tmp_path / "checkpoint")
    other = a_trainer(reference=True, seed=0)
    other.load_checkpoint(tmp_path / "checkpoint")
    train(one)
    train(other)
    for name, tensor in weights(one).items():
        assert torch.equal(weights(other)[name], tensor), name
    for theirs, ours in zip(
        other.log_probs(samples(), reference=True),
        one.log_probs(samples(), reference=True),
        strict=True,
    ):
        np.testing.assert_array_equal(theirs, ours)


def folder_of_a_model(folder: Path) -> Path:
    PolicyTrainer(trainer_config(UNTIED), 1, 0).save_pretrained(folder)
    return folder


def over_folder(folder: Path) -> LanguageTrainerConfig:
    config = trainer_config(lora=LORA)
    described = LanguageModelConfig(path=str(folder))
    fields: dict[str, Any] = {"optimizer": config.fsdp.optimizer}
    fsdp = type(config.fsdp)(model=described, **fields)
    return LanguageTrainerConfig(fsdp=fsdp, lora=LORA)


def test_peft_and_transformers_load_what_is_left_and_a_checkpoint_exports_the_same(
    tmp_path: Path,
) -> None:
    base = folder_of_a_model(tmp_path / "base")
    trainer = PolicyTrainer(over_folder(base), 1, 0)
    train(trainer, 2)
    trainer.save_pretrained(tmp_path / "trained")
    trainer.save_checkpoint(tmp_path / "checkpoint")
    Export(tmp_path / "checkpoint").run(tmp_path / "exported")
    expected = logits(trainer.language)
    peft: Any = importlib.import_module("peft")
    auto: Any = transformers.AutoModelForCausalLM
    for name in ("trained", "exported"):
        merged = auto.from_pretrained(tmp_path / name)
        torch.testing.assert_close(logits(merged), expected, atol=1e-5, rtol=0.0)
        adapter = tmp_path / name / ADAPTER_FOLDER
        found = peft.PeftModel.from_pretrained(auto.from_pretrained(base), adapter)
        torch.testing.assert_close(logits(found), expected, atol=1e-6, rtol=0.0)
        again = peft.AutoPeftModelForCausalLM.from_pretrained(adapter)
        assert torch.equal(logits(again), logits(found))
    for name, one in auto.from_pretrained(tmp_path / "trained").state_dict().items():
        assert torch.equal(one, merged.state_dict()[name]), name
    with pytest.raises(CheckpointError, match=r"holds an adapter \(LoRA\).*use tp=1"):
        Resharding(tmp_path / "checkpoint", dp=1, tp=2)


# ---- several ranks


def share(trainer: PolicyTrainer) -> list[Any]:
    size, rank = trainer.manager.world_size, trainer.manager.rank
    return [one for one in samples(4) if one.group % size == rank]


def two_steps(trainer: PolicyTrainer, steps: int = 2) -> list[float]:
    norms = []
    for _ in range(steps):
        batch = trainer.compute_advantages(share(trainer))
        norms.append(trainer.training_step(micro_batches(batch, len(batch)))["grad_norm"])
    return norms


def on_ranks(rank: int, world_size: int, folder: Path) -> None:
    """Train, publish in place, write, train on fewer ranks and again on all."""
    trainer = a_trainer(lora=UNEVEN, reference=True, ranks=(world_size, rank), bucket_bytes=1 << 12)
    norms = two_steps(trainer)
    found = trainer.publish(shared_bytes)
    state = hugging_face_state(trainer.manager)
    assert_same_update(found, pack(state, trainer.version, 1 << 12))
    update = {name: one.clone() for name, one in unpack(found).items()}
    trainer.save_checkpoint(folder / "checkpoint")
    trainer.save_pretrained(folder / "trained")
    for ranks in (1, world_size):
        trainer.rescale(Strategy(dp=ranks), timeout=60.0, bucket_bytes=1 << 12)
        if trainer.manager.active:
            norms += two_steps(trainer, 1)
            kept = trainer.manager.kept["ref"]
            assert kept.keys() == of_adapter(trainer).keys()
    reference = [torch.from_numpy(one) for one in trainer.log_probs(samples(), reference=True)]
    last = {name: one.clone() for name, one in unpack(trainer.publish()).items()}
    result = {"norms": norms, "update": update, "last": last, "reference": reference}
    save_result(folder, rank, result)


def alone(folder: Path) -> dict[str, Any]:
    trainer = a_trainer(lora=UNEVEN, reference=True)
    norms = two_steps(trainer)
    update = {name: one.clone() for name, one in weights(trainer).items()}
    norms += two_steps(trainer, 2)
    reference = [torch.from_numpy(one) for one in trainer.log_probs(samples(), reference=True)]
    return {"norms": norms, "update": update, "last": weights(trainer), "reference": reference}


def test_two_ranks_train_publish_and_rescale_as_one_does(tmp_path: Path) -> None:
    expected = alone(tmp_path)
    first, _ = in_processes(on_ranks, 2, tmp_path)
    assert first["norms"] == pytest.approx(expected["norms"], rel=1e-4)
    for name in ("update", "last"):
        assert first[name].keys() == expected[name].keys()
        for tensor, one in expected[name].items():
            torch.testing.assert_close(first[name][tensor], one, atol=1e-5, rtol=0.0, msg=tensor)
    for found, wanted in zip(first["reference"], expected["reference"], strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-6)
    assert load_result(tmp_path, 1)["norms"] == first["norms"][:2] + first["norms"][3:]
    # A single rank goes on from the checkpoint of two.
    resumed = a_trainer(lora=UNEVEN, reference=True)
    resumed.load_checkpoint(tmp_path / "checkpoint")
    for tensor, one in weights(resumed).items():
        torch.testing.assert_close(one, first["update"][tensor], atol=1e-6, rtol=0.0, msg=tensor)
    assert two_steps(resumed, 1) == pytest.approx(first["norms"][2:3], rel=1e-4)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "trained").state_dict()
    for tensor, one in first["update"].items():
        assert torch.equal(merged[tensor], one), tensor


# ---- what cannot be adapted


@pytest.mark.parametrize(
    ("model", "targets", "message"),
    [
        (QWEN3, ("q_prj",), "no layer of the model is called 'q_prj'; nearest: 'q_proj'"),
        (UNTIED, ("lm_head",), "'lm_head' is the head over the vocabulary, which is not adapted"),
        (QWEN3, ("embed_tokens",), "'embed_tokens' is a Embedding, but only linear layers can"),
        (MIXTURE, ("experts",), "'experts' is a Qwen3MoeExperts, but only linear layers can"),
    ],
)
def test_targets_that_cannot_be_adapted_are_named(
    model: dict[str, Any], targets: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        targeted(model_without_memory(model), targets)


def test_of_a_mixture_of_experts_the_attention_is_adapted() -> None:
    names = {name.rpartition(".")[2] for name in targeted(model_without_memory(MIXTURE), ())}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj"}
    trainer = a_trainer(MIXTURE)
    train(trainer)
    assert len(weights(trainer)) > 0


def test_settings_that_say_nothing_and_trainers_that_cannot_are_refused() -> None:
    said_alone: list[dict[str, Any]] = [{"alpha": 32.0}, {"targets": ("q_proj",)}]
    for given in said_alone:
        with pytest.raises(ValueError, match="but rank is 0, and so there is no adapter: set rank"):
            PublishedAdapterConfig(**given)
    with pytest.raises(ValueError, match="lora needs strategy 'fsdp2'"):
        trainer_config(lora=LORA, fsdp={"strategy": "fsdp1"})
    with pytest.raises(ValueError, match="a critic trains all its weights"):
        CriticTrainer(trainer_config(lora=LORA), 1, 0)
    described = LanguageModelConfig(config=QWEN3)
    with pytest.raises(ValueError, match="Megatron trains all weights"):
        MegatronTrainerConfig(megatron=MegatronConfig(model=described), lora=LORA)
