"""A training group over Megatron: its numbers are those of FSDP, whatever cuts the model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rlinf_async.messages.language import LanguageTrainReport
from rlinf_async.parallel import ModelMismatch
from rlinf_async.runtime.ray.training import RayTrainGroup, TrainArgs, create_placement_group
from tests.runtime.ray.training.kit import args, batch, columns
from tests.runtime.ray.training.test_critic import ours, with_reference
from tests.runtime.ray.training.test_worker import rank, rollout

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.xdist_group("ray")

METRICS = ("loss", "grad_norm", "entropy", "ratio", "approx_kl", "ref_kl", "tokens")


def megatron(**fields: Any) -> TrainArgs:
    """The ratio is to what old weights computed, and the loss has a KL to the first ones."""
    fields = {
        "use_rollout_logprobs": False,
        "use_kl_loss": True,
        "kl_loss_coef": 0.1,
        "keep_old_actor": True,
        "offload_train": True,
        **fields,
    }
    return args(**fields)


def of_fsdp(folder: str, rollouts: int) -> list[LanguageTrainReport]:
    """The reports of one rank of FSDP, which is saved before the last rollout, and goes on."""
    given = megatron(save=folder, load=folder)

    async def train(numbers: range) -> list[LanguageTrainReport]:
        async with rank(given, with_ref=True) as worker:
            reports = [
                await worker.train_rollout(rollout(at, given, log_probs=False), rollout_id=at)
                for at in numbers
            ]
            await worker.save(numbers[-1])
        return reports

    async def both() -> list[LanguageTrainReport]:
        return await train(range(rollouts - 1)) + await train(range(rollouts - 1, rollouts))

    return asyncio.run(both())


def near(
    report: LanguageTrainReport, wanted: LanguageTrainReport, metrics: Sequence[str] = METRICS
) -> None:
    for name in metrics:
        assert report.metrics[name] == pytest.approx(wanted.metrics[name], rel=1e-4, abs=1e-6), name


def data(number: int) -> dict[str, Any]:
    return columns(batch(number), log_probs=False)


def test_it_trains_saves_and_goes_on_under_another_strategy_as_fsdp_trains(
    ray: Any, tmp_path: Path
) -> None:
    wanted = of_fsdp(str(tmp_path / "fsdp"), 3)
    folder = str(tmp_path / "megatron")
    given = megatron(
        train_backend="megatron", tensor_model_parallel_size=2, save=folder, load=folder
    )
    pg = create_placement_group(2)
    group = RayTrainGroup(given, 1, 2, pg)
    try:
        assert ray.get(group.async_init(with_ref=True)) == [0, 0]
        for at in range(2):
            reports = ray.get(group.async_train(at, [ray.put(data(at))]))
            for report in reports:
                near(report, wanted[at])
            assert [report.samples for report in reports] == [16, 0]  # rank 0 reads for both
        config = ray.get(group.actors[1].__ray_call__.remote(lambda one: one.train_parallel_config))
        assert config == {"dp_size": 1}
        for tag in ("ref", "old_actor", "rollout_actor", "actor"):
            ray.get([one.switch_weights.remote(tag) for one in group.actors])
        group.offload(["weights"])
        group.save_model(1)
        asleep = ray.get(
            group.actors[1].__ray_call__.remote(lambda one: sorted(one._worker.asleep))
        )
        assert asleep == ["weights"]
        with pytest.raises(ValueError, match=r"given 8 samples .* of a rollout is 16 .* 1 data ra"):
            ray.get(group.async_train(2, {name: one[:8] for name, one in data(2).items()}))
    finally:
        group.shutdown()
    cut = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 2}
    given = megatron(train_backend="megatron", save=folder, load=folder, **cut)
    group = RayTrainGroup(given, 1, 2, pg)
    try:
        assert ray.get(group.async_init(with_ref=True)) == [2, 2]
        for report in ray.get(group.async_train(2, data(2))):
            near(report, wanted[2])
    finally:
        group.shutdown()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tensor_model_parallel_size": 3}, "2 ranks are no multiple of tensor_model_parallel_siz"),
        (
            {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 4},
            "pipeline_model_parallel_size 4 = 4, which hold one copy of the model",
        ),
        ({"model_config": {"model_type": "gpt2"}}, "does not train model_type 'gpt2'; it trains"),
    ],
)
def test_what_does_not_fit_is_refused_before_a_rank_is_started(
    fields: dict[str, Any], message: str
) -> None:
    given = megatron(**{"train_backend": "megatron", "tensor_model_parallel_size": 2, **fields})
    pg: Any = None  # is not looked at
    with pytest.raises((ValueError, ModelMismatch), match=message):
        RayTrainGroup(given, 1, 2, pg)


def test_actor_and_critic_of_two_tensor_ranks_are_as_those_of_fsdp(ray: Any) -> None:
    given = args(
        advantage_estimator="ppo", kl_coef=0.1, num_critic_only_steps=1, critic_lr=2e-3, lambd=0.9
    )
    valued, trained = ours(given)
    cut = {"train_backend": "megatron", "tensor_model_parallel_size": 2}
    given = msgspec.structs.replace(given, **cut)
    pg = create_placement_group(2)
    actor = RayTrainGroup(given, 1, 2, pg, num_gpus_per_actor=0.4)
    critic = RayTrainGroup(given, 1, 2, pg, num_gpus_per_actor=0.4, role="critic")
    try:
        begun = actor.async_init(with_ref=True), critic.async_init()
        assert [ray.get(one) for one in begun] == [[0, 0], [0, 0]]
        actor.connect(critic)
        alone = columns(batch(0, version=0))
        with pytest.raises(ValueError, match="needs reference log-probs"):
            ray.get(critic.async_train(0, alone)[0])
        alone["ref_log_probs"] = [s.ref_log_prob for s in with_reference(0)]
        for report in ray.get(critic.async_train(0, alone)):
            near(report, valued[0], ("loss", "value", "grad_norm"))
        both = ray.put(columns(batch(1, version=0)))
        training = critic.async_train(1, both), actor.async_train(1, both)
        critics, actors = (ray.get(one) for one in training)
        for report in critics:
            near(report, valued[1], ("loss", "value", "value_error", "grad_norm"))
        for report in actors:
            near(report, trained, ("loss", "grad_norm", "entropy", "ratio", "tokens"))
    finally:
        actor.shutdown()
        critic.shutdown()


def test_a_strategy_that_does_not_divide_the_model_is_refused(tmp_path: Path) -> None:
    given = megatron(train_backend="megatron", tensor_model_parallel_size=8)
    pg: Any = None
    with pytest.raises(ValueError, match=r"tensor_model_parallel_size 8 .* do not divide the mod"):
        RayTrainGroup(given, 1, 8, pg)
