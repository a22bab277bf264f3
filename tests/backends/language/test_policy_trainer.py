"""Samples in, a better language model out, on one rank."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import pytest
import torch
import transformers

from rlinf_async.algorithms.config import LanguageAdvantageConfig, LanguageLossConfig
from rlinf_async.backends.base import (
    OffloadedError,
    OptimizerConfig,
    TrainingDiverged,
)
from rlinf_async.backends.fsdp.config import FSDPError
from rlinf_async.backends.fsdp.language.config import LanguageFSDPConfig, LanguageTrainerConfig
from rlinf_async.backends.fsdp.language.trainer import PolicyTrainer
from rlinf_async.backends.language_training.config import LanguageModelConfig, SupervisedConfig
from rlinf_async.backends.language_training.supervised import Example, fit_supervised
from rlinf_async.backends.parts import language_trainers
from rlinf_async.config.registry import UnknownName, load_entry_point
from rlinf_async.messages.language import TrainingSample
from rlinf_async.messages.weights import WeightsError
from tests.backends.language.kit import (
    QWEN3,
    UNTIED,
    assert_close,
    gradients,
    micro_batches,
    samples,
    trainer_config,
    weights,
)

LOSSES = [
    LanguageLossConfig(),
    LanguageLossConfig(
        clip_high=0.3,
        dual_clip=2.0,
        entropy_coefficient=0.01,
        kl_coefficient=0.1,
        aggregation="sequence-mean-token-mean",
    ),
    LanguageLossConfig(name="gspo", aggregation="sequence-mean-token-sum", off_policy="truncated"),
    LanguageLossConfig(name="reinforce", off_policy="decoupled", early_stop_ratio=1.05),
]


def ready(trainer: PolicyTrainer, groups: int = 4) -> list[TrainingSample]:
    """Samples whose previous log-probs are near the trainer's: ratios near 1, some clipped."""
    batch = samples(groups)
    random = np.random.default_rng(1)
    for one, log_prob in zip(batch, trainer.log_probs(batch), strict=True):
        noise = random.normal(scale=0.2, size=len(log_prob)).astype(np.float32)
        one.prev_log_prob = log_prob + noise
        one.log_prob = one.prev_log_prob + noise[::-1]
    return trainer.compute_advantages(batch)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name + "/" + loss.aggregation)
@pytest.mark.parametrize("size", [1, 5, 16])
def test_gradients_do_not_depend_on_how_samples_are_cut(
    loss: LanguageLossConfig, size: int
) -> None:
    whole = PolicyTrainer(trainer_config(loss=loss), 1, 0)
    cut = PolicyTrainer(trainer_config(loss=loss), 1, 0)
    batch = ready(whole)
    expected = gradients(whole, batch, len(batch))
    assert max(float(tensor.abs().max()) for tensor in expected.values()) > 1e-3
    assert_close(gradients(cut, batch[::-1], size), expected, 1e-6)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name + "/" + loss.aggregation)
def test_a_step_is_that_of_the_formulas_over_each_sample_alone(loss: LanguageLossConfig) -> None:
    """The loss of the whole batch, put together by hand from transformers' own logits."""
    config = trainer_config(loss=loss, fsdp={"optimizer": OptimizerConfig(max_grad_norm=None)})
    trainer = PolicyTrainer(config, 1, 0)
    batch = ready(trainer)
    by_hand = _loss_by_hand(PolicyTrainer(config, 1, 0), batch, loss)
    assert trainer.training_step(micro_batches(batch, 3))["loss"] == pytest.approx(
        by_hand, rel=1e-4, abs=1e-6
    )


def _loss_by_hand(
    trainer: PolicyTrainer, batch: list[TrainingSample], loss: LanguageLossConfig
) -> float:
    language: Any = trainer.language
    per_sample: list[list[float]] = []
    for one in batch:
        if not one.scored:
            continue
        ids = torch.from_numpy(np.concatenate([one.prompt_ids, one.response_ids])).long()
        with torch.no_grad():
            logits = language(input_ids=ids[None]).logits[0, len(one.prompt_ids) - 1 : -1]
        log_p = (logits.double() / one.temperature).log_softmax(-1)
        now = log_p.gather(-1, ids[len(one.prompt_ids) :, None])[:, 0].numpy()
        entropy = -(log_p.exp() * log_p).sum(-1).numpy()
        assert one.prev_log_prob is not None
        assert one.ref_log_prob is not None
        assert one.advantage is not None
        log_ratio = now - one.prev_log_prob
        ratio = np.exp(log_ratio)
        going = not (loss.early_stop_ratio and ratio.mean() > loss.early_stop_ratio)
        if loss.name == "gspo":
            ratio = np.full(len(now), math.exp(log_ratio.mean()))
        tokens = []
        for t in range(len(now)):
            advantage = float(one.advantage[t])
            if loss.name == "reinforce":
                number = -advantage * now[t]
            else:
                held = min(max(ratio[t], 1 - loss.clip_low), 1 + loss.clip_high)
                number = -min(ratio[t] * advantage, held * advantage)
                if loss.dual_clip and advantage < 0:
                    number = min(number, -loss.dual_clip * advantage)
            weight = math.exp(one.prev_log_prob[t] - one.log_prob[t])
            if loss.off_policy == "truncated":
                number *= min(weight, 2.0)
            elif loss.off_policy == "decoupled":
                number *= weight if weight <= 2.0 else 0.0
            difference = float(one.ref_log_prob[t]) - now[t]
            k3 = math.exp(difference) - 1 - difference
            number += loss.kl_coefficient * min(k3, loss.k3_limit)
            tokens.append(going * (number - loss.entropy_coefficient * entropy[t]))
        per_sample.append(tokens)
    every = [number for tokens in per_sample for number in tokens]
    if loss.aggregation == "token-mean":
        return sum(every) / len(every)
    mean = loss.aggregation == "sequence-mean-token-mean"
    totals = [sum(tokens) / (len(tokens) if mean else 1) for tokens in per_sample]
    return sum(totals) / len(totals)


def test_samples_without_a_gradient_are_spared_and_still_count() -> None:
    sparing, thorough = (PolicyTrainer(trainer_config(skip_silent=one), 1, 0) for one in (1, 0))
    batch = ready(sparing)
    for one in batch[:4]:  # a group of equal rewards
        one.advantage = np.zeros_like(one.response_ids, np.float32)
    found, expected = gradients(sparing, batch, 4), gradients(thorough, batch, 4)
    assert_close(found, expected, 1e-7)
    assert sparing.training_step(micro_batches(batch, 4))["tokens"] == sum(
        int(one.loss_mask.sum()) for one in batch[4:] if one.scored
    )


def test_samples_that_were_not_scored_change_nothing() -> None:
    trainer, other = (PolicyTrainer(trainer_config(), 1, 0) for _ in range(2))
    batch = ready(trainer)
    scored = [one for one in batch if one.scored]
    assert len(scored) < len(batch)
    assert_close(gradients(trainer, batch, 5), gradients(other, scored, 5), 1e-7)


def test_a_batch_without_any_score_takes_no_step() -> None:
    trainer = PolicyTrainer(trainer_config(), 1, 0)
    trainer.training_step(micro_batches(ready(trainer), 8))  # momentum to move by
    before = weights(trainer)
    batch = [one for one in ready(trainer) if not one.scored]
    metrics = trainer.training_step(micro_batches(batch, 1))
    assert metrics["empty"] == 1.0
    assert_close(weights(trainer), before, 0.0)
    assert trainer.manager.steps == 1


def test_a_group_of_equal_rewards_moves_nothing_at_all() -> None:
    trainer = PolicyTrainer(trainer_config(), 1, 0)
    before = weights(trainer)
    batch = [msgspec.structs.replace(one, reward=0.3) for one in samples(1)]
    metrics = trainer.training_step(micro_batches(trainer.compute_advantages(batch), 4))
    assert metrics["loss"] == metrics["grad_norm"] == 0.0
    assert_close(weights(trainer), before, 0.0)


def test_activation_checkpointing_gives_the_same_gradients() -> None:
    plain = PolicyTrainer(trainer_config(), 1, 0)
    checkpointing = PolicyTrainer(trainer_config(checkpointing=True), 1, 0)
    batch = ready(plain)
    assert_close(gradients(checkpointing, batch, 8), gradients(plain, batch, 8), 1e-7)


def test_logits_in_chunks_give_the_same_gradients() -> None:
    plain = PolicyTrainer(trainer_config(), 1, 0)
    chunked = PolicyTrainer(trainer_config(logit_chunk_bytes=4 * 61 * 7), 1, 0)
    batch = ready(plain)
    assert_close(gradients(chunked, batch, 8), gradients(plain, batch, 8), 1e-6)


def test_bfloat16_trains_float32_weights_to_about_the_same_place() -> None:
    exact, rough = (
        PolicyTrainer(trainer_config(fsdp={"precision": one}), 1, 0)
        for one in ("float32", "bfloat16")
    )
    batch = ready(exact)
    found, expected = (one.training_step(micro_batches(batch, 8)) for one in (rough, exact))
    assert found["loss"] == pytest.approx(expected["loss"], abs=0.02)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.1)
    assert all(parameter.dtype == torch.float32 for parameter in rough.manager.model.parameters())


def test_whitened_advantages_have_mean_0_and_deviation_1_over_tokens() -> None:
    config = trainer_config(advantage=LanguageAdvantageConfig(name="reinforce++"))
    trainer = PolicyTrainer(config, 1, 0)
    assert trainer.normalizes
    batch = trainer.normalize_advantages(ready(trainer))
    every = np.concatenate([one.advantage[one.loss_mask] for one in batch])  # type: ignore[index]
    assert every.mean() == pytest.approx(0.0, abs=1e-6)
    assert every.std(ddof=1) == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("proximal", ["auto", "behaviour", "current"])
def test_what_the_ratio_compares_with(proximal: Any) -> None:
    loss = LanguageLossConfig(proximal=proximal)
    trainer = PolicyTrainer(trainer_config(loss=loss), 1, 0)
    batch = ready(trainer)
    now = trainer.log_probs(batch)
    ratios = []
    for one, log_prob in zip(batch, now, strict=True):
        old = {"auto": one.prev_log_prob, "behaviour": one.log_prob, "current": log_prob}[proximal]
        assert old is not None
        ratios += np.exp(log_prob - old)[one.loss_mask].tolist()
    found = trainer.training_step(micro_batches(batch, 6))["ratio"]
    assert found == pytest.approx(np.mean(ratios), rel=1e-5)


@pytest.mark.parametrize("proximal", ["auto", "current"])
def test_log_probs_that_were_recomputed_a_version_ago_are_the_proximal_ones(
    proximal: Literal["auto", "current"],
) -> None:
    loss = LanguageLossConfig(proximal=proximal, off_policy="truncated", off_policy_cap=1000.0)
    trainer = PolicyTrainer(trainer_config(loss=loss), 1, 0)
    batch = ready(trainer)
    for one, log_prob in zip(batch, trainer.log_probs(batch), strict=True):
        one.prev_log_prob = log_prob
    trainer.training_step(micro_batches(ready(trainer), 6))
    trainer.end_iteration()
    now = trainer.log_probs(batch)
    ratios: list[float] = []
    off_policy: list[float] = []
    for one, newest in zip(batch, now, strict=True):
        assert one.prev_log_prob is not None
        assert np.abs(newest - one.prev_log_prob).max() > 1e-4
        old = {"auto": one.prev_log_prob, "current": newest}[proximal]
        ratios += np.exp(newest - old)[one.loss_mask].tolist()
        off_policy += np.exp(old - one.log_prob)[one.loss_mask].tolist()
    found = trainer.training_step(micro_batches(batch, 6))
    assert found["ratio"] == pytest.approx(np.mean(ratios), rel=1e-5)
    assert found["off_policy_weight"] == pytest.approx(np.mean(off_policy), rel=1e-5)


@pytest.mark.parametrize("model", [QWEN3, UNTIED], ids=["tied", "untied"])
def test_published_weights_are_those_of_transformers_and_tied_ones_come_once(
    model: dict[str, Any], tmp_path: Path
) -> None:
    trainer = PolicyTrainer(trainer_config(model), 1, 0)
    published = weights(trainer)
    assert ("lm_head.weight" in published) is not model["tie_word_embeddings"]
    trainer.save_pretrained(tmp_path)
    automatic: Any = transformers.AutoModelForCausalLM
    loaded = automatic.from_pretrained(tmp_path)
    assert type(loaded).__name__ == "Qwen3ForCausalLM"
    names = dict(loaded.named_parameters())
    assert_close(
        {name: published[name] for name in names}, {k: v.data for k, v in names.items()}, 0
    )
    again = PolicyTrainer(from_folder(tmp_path), 1, 0)
    assert_close(weights(again), published, 0.0)


def from_folder(folder: Path, **model: Any) -> LanguageTrainerConfig:
    described = LanguageModelConfig(path=str(folder), **model)
    return LanguageTrainerConfig(fsdp=LanguageFSDPConfig(model=described))


def test_weights_that_were_published_can_be_loaded_and_damaged_ones_cannot() -> None:
    trainer, other = (PolicyTrainer(trainer_config(seed=seed), 1, 0) for seed in (0, 1))
    trainer.training_step(micro_batches(ready(trainer), 8))
    trainer.end_iteration()
    update = trainer.publish()
    other.load(update)
    assert other.version == update.version == 1
    assert other.publish().checksum == update.checksum
    data = update.buckets[0].data.copy()
    data[7] ^= 1
    bucket = msgspec.structs.replace(update.buckets[0], data=data)
    before = weights(other)
    with pytest.raises(WeightsError):
        other.load(msgspec.structs.replace(update, buckets=(bucket, *update.buckets[1:])))
    assert_close(weights(other), before, 0.0)


def test_weights_published_in_half_precision_are_taken_by_a_float32_model() -> None:
    trainer = PolicyTrainer(trainer_config(publish_precision="bfloat16"), 1, 0)
    published = weights(trainer)
    assert all(tensor.dtype == torch.bfloat16 for tensor in published.values())
    other = PolicyTrainer(trainer_config(seed=3), 1, 0)
    other.load(trainer.publish())
    assert_close({k: v.bfloat16() for k, v in weights(other).items()}, published, 0.0)


def test_reference_log_probs_stay_those_of_the_first_weights() -> None:
    trainer = PolicyTrainer(trainer_config(reference=True), 1, 0)
    batch = ready(trainer)
    first = trainer.log_probs(batch)
    trainer.training_step(micro_batches(batch, 8))
    now = trainer.log_probs(batch)
    reference = trainer.log_probs(batch, reference=True)
    for before, after, kept in zip(first, now, reference, strict=True):
        np.testing.assert_array_equal(before, kept)
        assert np.abs(after - kept).max() > 1e-4
    for before, after in zip(now, trainer.log_probs(batch), strict=True):
        np.testing.assert_array_equal(before, after)  # its own weights are back


def test_reference_log_probs_without_reference_weights_say_what_to_set() -> None:
    with pytest.raises(FSDPError, match=r"set reference = true"):
        PolicyTrainer(trainer_config(), 1, 0).log_probs(samples(1), reference=True)


def test_a_checkpoint_goes_on_with_the_same_numbers(tmp_path: Path) -> None:
    trainer = PolicyTrainer(trainer_config(reference=True), 1, 0)
    batch = ready(trainer)
    trainer.training_step(micro_batches(batch, 8))
    trainer.end_iteration()
    trainer.save_checkpoint(tmp_path / "one", {"position": 7})
    resumed = PolicyTrainer(trainer_config(reference=True), 1, 0)
    assert resumed.load_checkpoint(tmp_path / "one") == [{"position": 7}]
    assert resumed.version == 1
    steps = [one.training_step(micro_batches(batch, 8)) for one in (trainer, resumed)]
    assert steps[0] == steps[1]
    assert_close(weights(resumed), weights(trainer), 0.0)
    kept = [one.log_probs(batch, reference=True) for one in (trainer, resumed)]
    for ours, theirs in zip(*kept, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_an_offloaded_trainer_refuses_to_compute_until_it_is_back() -> None:
    trainer = PolicyTrainer(trainer_config(), 1, 0)
    batch = ready(trainer)
    trainer.offload()
    for work in (
        lambda: trainer.log_probs(batch),
        lambda: trainer.training_step(micro_batches(batch, 8)),
    ):
        with pytest.raises(OffloadedError, match=r"call onload\(\) first"):
            work()
    trainer.onload()
    other = PolicyTrainer(trainer_config(), 1, 0)
    assert_close(gradients(trainer, batch, 8), gradients(other, batch, 8), 0.0)


def test_offloading_gives_the_memory_to_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = PolicyTrainer(trainer_config(), 1, 0)
    offloaded: list[bool] = []
    monkeypatch.setattr(
        torch.cuda, "empty_cache", lambda: offloaded.append(trainer.manager.param_offloaded)
    )
    trainer.offload()
    assert offloaded == [True]  # torch gives back what was freed before


@pytest.mark.parametrize("field", ["prev_log_prob", "advantage"])
def test_a_loss_that_is_not_finite_stops_before_the_weights_change(field: str) -> None:
    trainer = PolicyTrainer(trainer_config(), 1, 0)
    batch = ready(trainer)
    before = weights(trainer)
    getattr(batch[0], field)[0] = math.nan
    with pytest.raises(TrainingDiverged, match=r"the loss is nan after 0 optimizer steps"):
        trainer.training_step(micro_batches(batch, 8))
    assert_close(weights(trainer), before, 0.0)
    metrics = trainer.training_step(micro_batches(ready(trainer), 8))  # nothing of it was kept
    assert math.isfinite(metrics["grad_norm"])


def test_a_gradient_that_is_not_finite_skips_the_step_and_says_so() -> None:
    trainer = PolicyTrainer(trainer_config(), 1, 0)
    batch = ready(trainer)
    first: Any = next(trainer.manager.model.parameters())
    hook = first.register_hook(lambda grad: grad * math.inf)
    assert trainer.training_step(micro_batches(batch, 8))["skipped"] == 1.0
    hook.remove()
    assert trainer.training_step(micro_batches(batch, 8))["skipped"] == 0.0


def test_a_sample_without_an_advantage_is_named() -> None:
    trainer = PolicyTrainer(trainer_config(), 1, 0)
    with pytest.raises(ValueError, match=r"sample 0/0 has no advantage"):
        trainer.training_step(micro_batches(samples(1), 4))


def test_a_supervised_phase_teaches_the_answers() -> None:
    config = trainer_config(fsdp={"optimizer": OptimizerConfig(lr=1e-2)})
    trainer = PolicyTrainer(config, 1, 0)
    examples = [
        Example(np.array([at, 1], np.int32), np.array([60 - at, 3, 2], np.int32))
        for at in range(5, 25)
    ]
    losses = fit_supervised(trainer, examples, SupervisedConfig(steps=150, batch_size=10))
    assert losses[0] > 3.0
    assert losses[-1] < 0.05
    language: Any = trainer.language
    for one in examples[:5]:
        logits = language(input_ids=torch.from_numpy(one.prompt_ids).long()[None]).logits
        assert int(logits[0, -1].argmax()) == one.response_ids[0]


def test_a_supervised_step_has_no_ratio_and_leaves_the_weights_of_no_version() -> None:
    trainer = PolicyTrainer(trainer_config(loss=LanguageLossConfig(proximal="step")), 1, 0)
    batch = trainer.compute_advantages(samples())
    before = [one.prev_log_prob for one in batch]
    for one in batch:
        one.prev_log_prob = None
    trainer.supervised_step(micro_batches(batch, 4))
    with pytest.raises(ValueError, match="fill it in with first_log_probs"):
        trainer.training_step(micro_batches(batch, 4))
    for one, log_prob in zip(batch, before, strict=True):
        one.prev_log_prob = log_prob
    assert "engine_actor_tokens" not in trainer.training_step(micro_batches(batch, 4))
    trainer.end_iteration()
    assert "engine_actor_tokens" in trainer.training_step(micro_batches(batch, 4))


def test_supervised_batches_that_cannot_be_filled_are_refused() -> None:
    trainer = PolicyTrainer(trainer_config(), 1, 0)
    with pytest.raises(ValueError, match=r"0 examples do not fill one batch of batch_size 64"):
        fit_supervised(trainer, [], SupervisedConfig(steps=1))


def test_the_seed_decides_random_weights_and_disturbs_nobody() -> None:
    before = torch.get_rng_state()
    checksums = [
        PolicyTrainer(trainer_config(seed=seed), 1, 0).publish().checksum for seed in (4, 4, 5)
    ]
    assert checksums[0] == checksums[1] != checksums[2]
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("content", "model", "says"),
    [
        (None, {}, r"there is no such folder"),
        ({}, {}, r"there is no config\.json in it"),
        ({"config.json": "{"}, {}, r"config\.json cannot be used"),
        ({"config.json": '{"model_type": "nothing"}'}, {}, r"config\.json cannot be used"),
        ({"config.json": '{"model_type": "qwen3"}'}, {}, r"there are no weights in it"),
    ],
)
def test_a_folder_that_cannot_be_used_says_why(
    tmp_path: Path, content: dict[str, str] | None, model: dict[str, Any], says: str
) -> None:
    folder = tmp_path / "model"
    if content is not None:
        folder.mkdir()
        for name, text in content.items():
            (folder / name).write_text(text)
    with pytest.raises(ValueError, match=says):
        PolicyTrainer(from_folder(folder, **model), 1, 0)


def test_weights_that_lack_tensors_of_the_configuration_are_refused(tmp_path: Path) -> None:
    PolicyTrainer(trainer_config(), 1, 0).save_pretrained(tmp_path)
    described = msgspec.json.decode((tmp_path / "config.json").read_bytes())
    described["num_hidden_layers"] = 3
    described.pop("layer_types", None)
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(described))
    with pytest.raises(ValueError, match=r"lack \d+ tensors of its config\.json: model\.layers\.2"):
        PolicyTrainer(from_folder(tmp_path), 1, 0)


def test_weights_of_other_sizes_than_the_configurations_are_refused(tmp_path: Path) -> None:
    PolicyTrainer(trainer_config(), 1, 0).save_pretrained(tmp_path)
    described = msgspec.json.decode((tmp_path / "config.json").read_bytes())
    size, wider = described["intermediate_size"], 2 * described["intermediate_size"]
    (tmp_path / "config.json").write_bytes(
        msgspec.json.encode(described | {"intermediate_size": wider})
    )
    says = rf"0\.mlp\.down_proj\.weight, is \[\d+, {size}\] in the file and \[\d+, {wider}\] by"
    with pytest.raises(ValueError, match=says):
        PolicyTrainer(from_folder(tmp_path), 1, 0)


def test_a_folder_with_only_a_configuration_begins_at_random_where_asked_to(
    tmp_path: Path,
) -> None:
    PolicyTrainer(trainer_config(), 1, 0).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    again = PolicyTrainer(from_folder(tmp_path, random=True), 1, 0)
    assert_close(weights(again), weights(PolicyTrainer(trainer_config(), 1, 0)), 0.0)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, "neither was given"),
        ({"path": "a", "config": QWEN3}, "both were given"),
        ({"config": {"hidden_size": 3}}, "config has no model_type"),
    ],
)
def test_a_model_is_a_folder_or_a_configuration(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        LanguageModelConfig(**fields)


def test_trainers_are_found_by_name() -> None:
    assert load_entry_point(language_trainers.load("fsdp").factory) is PolicyTrainer
    with pytest.raises(UnknownName, match=r"did you mean 'fsdp_critic'"):
        language_trainers.load("fsdp_critics")
