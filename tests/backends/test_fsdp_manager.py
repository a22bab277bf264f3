"""`FSDPModelManager` at world size 1, method by method."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from rlinf_async.backends.base import OptimizerConfig, SchedulerConfig, lr_factor
from rlinf_async.backends.fsdp.checkpoint import LossScaler
from rlinf_async.backends.fsdp.config import FSDPConfig
from rlinf_async.backends.fsdp.manager import FSDPModelManager
from rlinf_async.backends.policies.config import PolicyConfig
from rlinf_async.backends.policies.mlp import MlpGaussianPolicy
from rlinf_async.config.registry import UnknownName
from tests.backends.fsdp_helpers import (
    POLICY,
    backward,
    changed,
    config,
    copied,
    samples,
    set_up,
    train_steps,
)


def test_the_model_is_the_registered_policy() -> None:
    assert isinstance(set_up(config()).model, MlpGaussianPolicy)


def test_an_unknown_policy_is_an_error_with_the_nearest_name() -> None:
    policy = msgspec.structs.replace(POLICY, name="mlp_gausian")
    with pytest.raises(UnknownName, match="did you mean 'mlp_gaussian'"):
        set_up(FSDPConfig(policy=policy))


def test_a_pretrained_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no config\.json in that folder"):
        set_up(config(pretrained=str(tmp_path)))


def test_a_missing_transformers_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModuleNotFoundError, match="'transformers' is not installed"):
        set_up(config(pretrained=str(tmp_path)))


def test_a_rank_outside_the_world_is_refused() -> None:
    with pytest.raises(ValueError, match="rank is 2; with world_size 2"):
        FSDPModelManager(config(), 2, 2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_device_is_named() -> None:
    with pytest.raises(ValueError, match="device is 'cuda:1', but torch sees 0 CUDA devices"):
        FSDPModelManager(config(device="cuda:1"), 1, 0)


def test_the_value_parameters_have_a_group_of_their_own() -> None:
    manager = set_up(config(optimizer=OptimizerConfig(lr=0.1, value_lr=0.2)))
    groups = {group["name"]: group for group in manager.optimizer.param_groups}
    assert groups["policy"]["lr"] == 0.1
    assert groups["value"]["lr"] == 0.2
    critic = {id(p) for n, p in manager.model.named_parameters() if n.startswith("critic.")}
    assert {id(p) for p in groups["value"]["params"]} == critic
    assert len(groups["policy"]["params"]) + len(critic) == len(list(manager.model.parameters()))


def test_a_step_returns_the_norm_before_clipping_and_the_rates() -> None:
    manager = set_up(config(optimizer=OptimizerConfig(lr=0.1, max_grad_norm=0.01)))
    backward(manager)
    gradients = [p.grad for p in manager.model.parameters() if p.grad is not None]
    expected = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))
    norm, lrs = manager.optimizer_step()
    assert norm == pytest.approx(expected, rel=1e-5)
    assert norm > 0.01
    assert lrs == [0.1, 0.1]


@pytest.mark.parametrize("limit", [0.01, 1e9, None])
def test_the_step_equals_clipping_and_adam_of_torch(limit: float | None) -> None:
    manager = set_up(config(optimizer=OptimizerConfig(lr=0.1, max_grad_norm=limit)))
    reference = set_up(config()).model
    adam = torch.optim.AdamW(reference.parameters(), lr=0.1, eps=1e-5, weight_decay=0.0)
    batch = samples(0)
    for _ in range(3):
        backward(manager)
        manager.optimizer_step()
        evaluation = reference(batch.observation, batch.action)
        torch.autograd.backward(evaluation.log_prob.mean() + evaluation.value.mean())
        torch.nn.utils.clip_grad_norm_(reference.parameters(), limit or math.inf)
        adam.step()
        adam.zero_grad()
    for ours, theirs in zip(manager.model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


def test_gradients_are_zero_after_the_step() -> None:
    manager = set_up(config())
    backward(manager)
    manager.optimizer_step()
    assert all(not p.grad.any() for p in manager.model.parameters() if p.grad is not None)


def test_gradients_made_outside_of_the_buffer_count_too() -> None:
    manager, other = set_up(config()), set_up(config())
    manager.optimizer.zero_grad(set_to_none=True)
    backward(manager)
    backward(other)
    assert manager.optimizer_step()[0] == pytest.approx(other.optimizer_step()[0])


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_skips_the_step_and_says_so(
    poison: float, caplog: pytest.LogCaptureFixture
) -> None:
    manager = set_up(config(scheduler=SchedulerConfig(kind="linear", total_steps=10)))
    before, rates = copied(manager), [group["lr"] for group in manager.optimizer.param_groups]
    backward(manager, poison)
    with caplog.at_level(logging.WARNING):
        norm, _ = manager.optimizer_step()
    assert not math.isfinite(norm)
    assert "this optimizer step is skipped (1 so far)" in caplog.text
    assert changed(before, manager) == set()
    assert (manager.steps, manager.skipped_steps) == (0, 1)
    assert [group["lr"] for group in manager.optimizer.param_groups] == rates
    backward(manager)
    assert math.isfinite(manager.optimizer_step()[0])
    assert changed(before, manager) != set()


def test_critic_warmup_freezes_all_but_the_value_until_it_is_over() -> None:
    manager = set_up(config(critic_warmup_steps=2))
    before = copied(manager)
    for _ in range(2):
        backward(manager)
        manager.optimizer_step()
    assert changed(before, manager) == {n for n in before if n.startswith("critic.")}
    backward(manager)
    manager.optimizer_step()
    assert {"actor.0.weight", "log_std"} <= changed(before, manager)


def test_critic_warmup_leaves_the_frozen_gradients_out_of_the_norm() -> None:
    warm, plain = set_up(config(critic_warmup_steps=1)), set_up(config())
    backward(warm)
    backward(plain)
    critic = [p.grad for n, p in plain.model.named_parameters() if n.startswith("critic.")]
    expected = math.sqrt(sum(float(g.square().sum()) for g in critic if g is not None))
    assert warm.optimizer_step()[0] == pytest.approx(expected, rel=1e-5)


def test_critic_warmup_without_a_critic_is_refused() -> None:
    manager = FSDPModelManager(config(), 1, 0)
    manager.setup_model_and_optimizer()
    manager._value_names = set()
    with pytest.raises(ValueError, match="critic_warmup_steps is set, but the model names no"):
        manager.build_optimizer(manager.model, enable_critic_warmup=True)


def test_a_resumed_run_is_still_in_critic_warmup(tmp_path: Path) -> None:
    manager = set_up(config(critic_warmup_steps=2))
    backward(manager)
    manager.optimizer_step()
    manager.save_checkpoint(tmp_path / "checkpoint")
    resumed = set_up(config(critic_warmup_steps=2))
    resumed.load_checkpoint(tmp_path / "checkpoint")
    before = copied(resumed)
    for expected in (True, False):
        backward(resumed)
        resumed.optimizer_step()
        assert ("log_std" not in changed(before, resumed)) is expected


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (SchedulerConfig(), [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        (SchedulerConfig(warmup_steps=3), [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]),
        (SchedulerConfig(kind="linear", total_steps=4), [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]),
        (
            SchedulerConfig(kind="linear", total_steps=5, warmup_steps=1, min_factor=0.2),
            [0.5, 1.0, 0.8, 0.6, 0.4, 0.2],
        ),
        (
            SchedulerConfig(kind="cosine", total_steps=4),
            [1.0, 0.5 + math.sqrt(0.125), 0.5, 0.5 - math.sqrt(0.125), 0.0, 0.0],
        ),
    ],
)
def test_the_learning_rate_follows_its_schedule(
    schedule: SchedulerConfig, expected: list[float]
) -> None:
    manager = set_up(config(optimizer=OptimizerConfig(lr=2.0), scheduler=schedule))
    seen: list[float] = []
    for _ in expected:
        backward(manager)
        seen.append(manager.optimizer_step()[1][0])
    assert seen == pytest.approx([2.0 * factor for factor in expected])
    assert [lr_factor(step, schedule) for step in range(6)] == pytest.approx(expected)


def test_the_loss_scaler_halves_on_overflow_and_doubles_after_good_steps() -> None:
    scaler = LossScaler(enabled=True, growth_interval=2)
    start = scaler.factor
    scaler.update(finite=False)
    assert scaler.factor == start / 2
    scaler.update(finite=True)
    scaler.update(finite=True)
    assert scaler.factor == start


def test_loss_scaling_does_not_change_the_gradient_norm() -> None:
    scaled, plain = set_up(config(precision="float16")), set_up(config())
    assert scaled.grad_scaler.enabled
    assert not plain.build_grad_scaler(False).enabled
    backward(scaled)
    backward(plain)
    assert scaled.optimizer_step()[0] == pytest.approx(plain.optimizer_step()[0], rel=1e-5)


def test_an_overflow_lowers_the_scale_and_skips() -> None:
    manager = set_up(config(precision="float16"))
    backward(manager, 1e38)
    manager.optimizer_step()
    assert manager.grad_scaler.factor == 2.0**15
    assert manager.skipped_steps == 1


def test_lower_precision_computes_near_full_precision() -> None:
    lower, full = set_up(config(precision="bfloat16")), set_up(config())
    low, high = train_steps(lower, range(2)), train_steps(full, range(2))
    assert low != high
    torch.testing.assert_close(torch.tensor(low), torch.tensor(high), atol=0.1, rtol=0.1)
    assert all(p.dtype == torch.float32 for p in lower.model.parameters())


def test_micro_batches_give_the_numbers_of_the_whole_minibatch() -> None:
    whole = train_steps(set_up(config()), range(3))
    parts = train_steps(set_up(config()), range(3), micro_batches=4)
    torch.testing.assert_close(torch.tensor(parts), torch.tensor(whole), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: OptimizerConfig(lr=0.0), r"lr is 0\.0"),
        (lambda: OptimizerConfig(value_lr=-1.0), r"value_lr is -1\.0"),
        (lambda: OptimizerConfig(betas=(0.9, 1.0)), r"betas is \(0\.9, 1\.0\)"),
        (lambda: OptimizerConfig(eps=0.0), r"eps is 0\.0"),
        (lambda: OptimizerConfig(weight_decay=-0.1), r"weight_decay is -0\.1"),
        (lambda: OptimizerConfig(max_grad_norm=0.0), r"max_grad_norm is 0\.0"),
        (lambda: SchedulerConfig(warmup_steps=-1), "warmup_steps is -1"),
        (lambda: SchedulerConfig(kind="cosine"), "total_steps is 0; a cosine schedule"),
        (lambda: SchedulerConfig(min_factor=2.0), r"min_factor is 2\.0"),
        (lambda: FSDPConfig(critic_warmup_steps=-1), "critic_warmup_steps is -1"),
        (
            lambda: FSDPConfig(critic_warmup_steps=1, strategy="fsdp1"),
            "critic_warmup_steps needs strategy 'fsdp2'",
        ),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(
    build: Callable[[], object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_an_unfinished_policy_configuration_is_refused() -> None:
    with pytest.raises(ValueError, match="fill in the environment's sizes first"):
        set_up(FSDPConfig(policy=PolicyConfig()))
