"""An actor and a critic in pairs: their numbers are those of our actor and critic."""

from __future__ import annotations

from typing import Any

import pytest

import rlinf_async as ra
from rlinf_async.messages.language import LanguageTrainReport, SampleGroup
from rlinf_async.runtime.ray.training import RayTrainGroup, TrainArgs, create_placement_group
from rlinf_async.runtime.ray.training.args import batches, trainer_config
from rlinf_async.workers.actor import FSDPActor
from rlinf_async.workers.critic import FSDPCritic
from tests.runtime.ray.training.kit import GROUP, args, batch, columns
from tests.runtime.ray.training.test_group import equal

pytestmark = pytest.mark.xdist_group("ray")


def with_reference(rollout: int) -> list[Any]:
    """Samples with the log-probs of the first weights, which are the reference."""
    from rlinf_async.backends.fsdp.language.trainer import PolicyTrainer

    found = batch(rollout, version=0)
    config = trainer_config(args(), critic=False, reference=False, device="cpu")
    for sample, log_prob in zip(found, PolicyTrainer(config, 1, 0).log_probs(found), strict=True):
        sample.ref_log_prob = log_prob
    return found


def ours(given: TrainArgs) -> tuple[list[LanguageTrainReport], LanguageTrainReport]:
    """Reports of our critic, of two rollouts, and of our actor, of the second."""

    async def train() -> tuple[list[LanguageTrainReport], LanguageTrainReport]:
        config = trainer_config(given, critic=False, reference=False, device="cpu")
        critic_config = trainer_config(
            given.for_role("critic"), critic=True, reference=False, device="cpu"
        )
        valued, trained = [], None
        async with ra.Cluster.local() as cluster:
            groups = cluster.channel(SampleGroup, name="groups", capacity=64)
            values = cluster.channel(SampleGroup, name="values", capacity=64)
            alone = cluster.channel(SampleGroup, name="alone", capacity=64)
            critics = await cluster.launch(FSDPCritic, critic_config, batches(given))
            actors = await cluster.launch(FSDPActor, config, batches(given))
            with groups.receiver.clone("test"), values.sender.clone("test"), alone.receiver:
                for rollout, target in enumerate((alone, values)):
                    found = prepared[rollout]
                    for number, start in enumerate(range(0, len(found), GROUP)):
                        one = SampleGroup(
                            iteration=rollout, group=number, samples=found[start : start + GROUP]
                        )
                        await groups.sender.put(one, key=0)
                    valued += await critics.call(
                        FSDPCritic.value_and_train, groups.receiver, target.sender
                    )
                (trained,) = await actors.call(FSDPActor.run_training, values.receiver)
        return valued, trained

    prepared = [with_reference(rollout) for rollout in range(2)]
    return ra.run(train())


def test_a_critic_trains_alone_at_first_and_then_values_what_its_actor_trains(ray: Any) -> None:
    given = args(
        advantage_estimator="ppo", kl_coef=0.1, num_critic_only_steps=1, critic_lr=2e-3, lambd=0.9
    )
    valued, trained = ours(given)
    pg = create_placement_group(1)
    actor = RayTrainGroup(given, 1, 1, pg, num_gpus_per_actor=0.4)
    critic = RayTrainGroup(given, 1, 1, pg, num_gpus_per_actor=0.4, role="critic")
    try:
        begun = actor.async_init(with_ref=True), critic.async_init()
        assert [ray.get(one) for one in begun] == [[0], [0]]
        actor.connect(critic)
        alone = columns(batch(0, version=0))
        alone["ref_log_probs"] = [s.ref_log_prob for s in with_reference(0)]
        with pytest.raises(ValueError, match="rollout 0 is trained by the critic alone"):
            ray.get(actor.async_train(0, alone))
        equal(ray.get(critic.async_train(0, alone)), valued[0], ("loss", "value", "grad_norm"))
        data = ray.put(columns(batch(1, version=0)))
        training = critic.async_train(1, data), actor.async_train(1, data)
        critics, actors = (ray.get(one) for one in training)
        equal(critics, valued[1], ("loss", "value", "value_error", "grad_norm"))
        equal(actors, trained)
        with pytest.raises(RuntimeError, match="engines take the weights of an actor"):
            ray.get(critic.actors[0].update_weights.remote())
    finally:
        actor.shutdown()
        critic.shutdown()
