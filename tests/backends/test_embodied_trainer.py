"""Trajectories in, weights out; and the policy server that answers with them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from rlinf_async.algorithms.config import AdvantageConfig
from rlinf_async.backends.base import (
    OptimizerConfig,
    PolicyOutputError,
)
from rlinf_async.backends.fsdp.config import EmbodiedTrainerConfig, FSDPConfig, PPOConfig
from rlinf_async.backends.fsdp.embodied import EmbodiedTrainer
from rlinf_async.backends.parts import policy_backends, trainers
from rlinf_async.backends.policies.base import Policy
from rlinf_async.backends.policies.config import PolicyConfig
from rlinf_async.backends.policies.serving import PolicyServer
from rlinf_async.config.registry import UnknownName
from rlinf_async.messages.embodied import Trajectory
from rlinf_async.messages.weights import WeightsError, WeightUpdate
from rlinf_async.weights.pack import unpack
from tests.backends.fsdp_helpers import POLICY, in_processes, save_result

CONFIG = EmbodiedTrainerConfig(
    fsdp=FSDPConfig(policy=POLICY, optimizer=OptimizerConfig(lr=1e-2)),
    ppo=PPOConfig(epochs=2, minibatch_size=8, normalize_advantage="batch"),
    seed=4,
)


def collected(seed: int, env_rank: int, stage: int, steps: int = 6) -> Trajectory:
    draw = np.random.default_rng([seed, env_rank, stage])

    def normal(*shape: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        return draw.normal(size=shape).astype(np.float32)

    return Trajectory(
        iteration=seed,
        env_rank=env_rank,
        stage=stage,
        observation=2.0 + 3.0 * normal(steps, 2, 5),
        action=normal(steps, 2, 3),
        log_prob=normal(steps, 2) - 4.0,
        value=normal(steps + 1, 2),
        reward=5.0 * normal(steps, 2),
        terminated=draw.random((steps, 2)) < 0.1,
        truncated=draw.random((steps, 2)) < 0.1,
        final_value=normal(steps, 2),
        version=np.zeros(steps, np.int64),
    )


def iteration(seed: int) -> list[Trajectory]:
    return [collected(seed, env_rank, stage) for env_rank in range(2) for stage in range(2)]


def anew(batch: list[Trajectory]) -> list[Trajectory]:
    """The same of env workers that were restarted."""
    return [msgspec.structs.replace(one, incarnation=1) for one in batch]


def weights(trainer: EmbodiedTrainer) -> dict[str, torch.Tensor]:
    return unpack(trainer.publish())


def assert_same_weights(left: WeightUpdate, right: WeightUpdate) -> None:
    expected = unpack(right)
    for name, tensor in unpack(left).items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-6, rtol=1e-5)


def test_one_iteration_changes_weights_statistics_and_version_together() -> None:
    trainer = EmbodiedTrainer(CONFIG, 1, 0)
    before = weights(trainer)
    metrics = trainer.train(iteration(0))
    after = weights(trainer)
    assert trainer.version == trainer.publish().version == 1
    assert all(not torch.equal(before[name], after[name]) for name in after)
    assert after["observation_normalizer.count"].item() == 4 * 6 * 2
    seen = np.concatenate([one.observation.reshape(-1, 5) for one in iteration(0)])
    np.testing.assert_allclose(
        after["observation_normalizer.mean"].numpy(), seen.mean(0), rtol=1e-5
    )
    assert metrics["updates"] == 2 * 6
    assert "explained_variance" in metrics


def test_the_order_of_arrival_does_not_matter() -> None:
    first, second = EmbodiedTrainer(CONFIG, 1, 0), EmbodiedTrainer(CONFIG, 1, 0)
    first.train(iteration(0))
    second.train(iteration(0)[::-1])
    assert first.publish().checksum == second.publish().checksum


def test_the_seed_decides_the_first_weights_and_disturbs_nobody() -> None:
    before = torch.get_rng_state()
    checksums = {EmbodiedTrainer(CONFIG, 1, 0).publish().checksum for _ in range(2)}
    other = EmbodiedTrainer(msgspec.structs.replace(CONFIG, seed=5), 1, 0).publish().checksum
    assert len(checksums) == 1
    assert other not in checksums
    assert torch.equal(torch.get_rng_state(), before)


def test_normalisers_that_are_switched_off_stay_as_they_were() -> None:
    config = msgspec.structs.replace(CONFIG, normalize_observation=False, normalize_reward=False)
    trainer = EmbodiedTrainer(config, 1, 0)
    trainer.train(iteration(0))
    assert weights(trainer)["observation_normalizer.count"].item() == 0
    assert weights(trainer)["return_normalizer.count"].item() == 0


def test_the_discounted_return_runs_on_from_one_iteration_to_the_next() -> None:
    trainer = EmbodiedTrainer(CONFIG, 1, 0)
    gamma = CONFIG.advantage.gamma
    running, everything = np.zeros(2), []
    for seed in range(2):
        one = collected(seed, 0, 0)
        trainer.train([one])
        for step in range(6):
            running = gamma * running + one.reward[step]
            everything.append(running.copy())
            running[one.terminated[step] | one.truncated[step]] = 0.0
    variance = weights(trainer)["return_normalizer.variance"].item()
    assert variance == pytest.approx(np.var(everything), rel=1e-4)


def test_a_restarted_env_worker_begins_its_discounted_returns_anew() -> None:
    trainer = EmbodiedTrainer(CONFIG, 1, 0)
    gamma = CONFIG.advantage.gamma
    everything = []
    for life in range(2):
        one = collected(life, 0, 0)
        trainer.train([msgspec.structs.replace(one, incarnation=life)])
        running = np.zeros(2)
        for step in range(6):
            running = gamma * running + one.reward[step]
            everything.append(running.copy())
            running[one.terminated[step] | one.truncated[step]] = 0.0
    variance = weights(trainer)["return_normalizer.variance"].item()
    assert variance == pytest.approx(np.var(everything), rel=1e-4)


def test_a_resumed_run_equals_one_whose_environments_began_anew_there(tmp_path: Path) -> None:
    trainer, resumed = EmbodiedTrainer(CONFIG, 1, 0), EmbodiedTrainer(CONFIG, 1, 0)
    trainer.train(iteration(0))
    trainer.save_checkpoint(tmp_path / "checkpoint")
    expected = [trainer.train(anew(iteration(seed))) for seed in (1, 2)]
    resumed.load_checkpoint(tmp_path / "checkpoint")
    assert [resumed.train(iteration(seed)) for seed in (1, 2)] == expected
    assert resumed.version == 3
    assert resumed.publish().checksum == trainer.publish().checksum


def test_no_trajectories_and_uneven_ones_are_refused() -> None:
    trainer = EmbodiedTrainer(CONFIG, 1, 0)
    with pytest.raises(ValueError, match=r"trajectories of \[\] steps"):
        trainer.train([])
    with pytest.raises(ValueError, match=r"trajectories of \[6, 5\] steps"):
        trainer.train([collected(0, 0, 0), collected(0, 0, 1, steps=5)])


def test_a_language_model_is_no_policy() -> None:
    config = msgspec.structs.replace(
        CONFIG, fsdp=msgspec.structs.replace(CONFIG.fsdp, pretrained="nowhere")
    )
    with pytest.raises(ValueError, match="pretrained is 'nowhere'"):
        EmbodiedTrainer(config, 1, 0)


def train_half(rank: int, world_size: int, folder: Path, strategy: str) -> None:
    fsdp = msgspec.structs.replace(CONFIG.fsdp, strategy=strategy)
    ppo = PPOConfig(epochs=2, minibatch_size=24, normalize_advantage="batch")
    trainer = EmbodiedTrainer(msgspec.structs.replace(CONFIG, fsdp=fsdp, ppo=ppo), world_size, rank)
    metrics = dict(trainer.train([one for one in iteration(0) if one.env_rank == rank]))
    trainer.save_checkpoint(folder / "checkpoint")
    state = {name: tensor.clone() for name, tensor in weights(trainer).items()}
    save_result(folder, rank, {"metrics": metrics, "weights": state})


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp1"])
def test_two_actors_with_half_of_the_envs_each_train_like_one(
    tmp_path: Path, strategy: str
) -> None:
    results = in_processes(train_half, 2, tmp_path, strategy)
    ppo = PPOConfig(epochs=2, minibatch_size=48, normalize_advantage="batch", fused=False)
    alone = EmbodiedTrainer(msgspec.structs.replace(CONFIG, ppo=ppo), 1, 0)
    metrics = alone.train(iteration(0))
    loaded = EmbodiedTrainer(CONFIG, 1, 0)
    loaded.load_checkpoint(tmp_path / "checkpoint")
    assert loaded.version == 1
    assert_same_weights(loaded.publish(), alone.publish())
    for name, tensor in weights(alone).items():
        torch.testing.assert_close(results[0]["weights"][name], tensor, atol=1e-6, rtol=1e-5)
    assert results[1]["weights"] == {}
    grad_norms = [result["metrics"]["grad_norm"] for result in results]
    assert grad_norms == pytest.approx([metrics["grad_norm"]] * 2, rel=1e-5)


def uneven(rank: int, world_size: int, folder: Path, behind: int = 0) -> None:
    """Train on shares of unequal size, for which a policy acted that is so many versions old."""
    trainer = EmbodiedTrainer(CONFIG, world_size, rank)
    shares = iteration(0)[: rank + 1]
    for one in shares:
        one.version = one.version - behind
    try:
        trainer.train(shares)
    except ValueError as error:
        save_result(folder, rank, str(error))


def test_ranks_with_unequal_shares_are_told_so_instead_of_hanging(tmp_path: Path) -> None:
    errors = in_processes(uneven, 2, tmp_path)
    assert errors[0] == errors[1]
    assert "the number of samples differs between the ranks: [12, 24]" in errors[0]


def test_the_server_answers_with_the_published_weights() -> None:
    trainer, server = EmbodiedTrainer(CONFIG, 1, 0), PolicyServer(POLICY, seed=1)
    trainer.train(iteration(0))
    assert server.version == -1
    server.load(trainer.publish())
    assert server.version == 1
    observation = collected(5, 0, 0).observation[0]
    observation.flags.writeable = False
    answer = server.act(observation)
    policy = trainer.manager.model
    assert isinstance(policy, Policy)
    expected = policy.evaluate(torch.tensor(observation), torch.from_numpy(answer.action))
    np.testing.assert_allclose(answer.log_prob, expected.log_prob.detach(), atol=1e-5)
    np.testing.assert_allclose(answer.value, expected.value.detach(), atol=1e-6)
    np.testing.assert_allclose(server.value(observation), answer.value, atol=1e-6)
    assert answer.action.dtype == answer.log_prob.dtype == answer.value.dtype == np.float32
    assert server.mode(observation).shape == (2, 3)


def test_the_same_seed_samples_the_same_actions() -> None:
    update = EmbodiedTrainer(CONFIG, 1, 0).publish()
    observation = collected(5, 0, 0).observation[0]
    servers = [PolicyServer(POLICY, seed=seed) for seed in (1, 1, 2)]
    for server in servers:
        server.load(update)
    first, second, other = (server.act(observation).action for server in servers)
    np.testing.assert_array_equal(first, second)
    assert (first != other).any()


def test_a_discrete_server_answers_with_whole_numbers() -> None:
    config = PolicyConfig(name="mlp_categorical", observation_size=5, action_size=4)
    answer = PolicyServer(config).act(np.zeros((3, 5), np.float32))
    assert answer.action.dtype == np.int64
    assert answer.action.shape == answer.log_prob.shape == answer.value.shape == (3,)


def test_weights_of_another_policy_leave_the_server_as_it_was() -> None:
    server = PolicyServer(msgspec.structs.replace(POLICY, hidden_sizes=(9,)))
    with pytest.raises(WeightsError, match="version 0 does not fit the model"):
        server.load(EmbodiedTrainer(CONFIG, 1, 0).publish())
    assert server.version == -1


def test_an_observation_with_nan_is_an_error_and_not_an_action() -> None:
    server = PolicyServer(POLICY)
    with pytest.raises(PolicyOutputError, match="weights version -1"):
        server.act(np.full((1, 5), np.nan, np.float32))


def test_backends_are_found_by_name() -> None:
    trainer = trainers.load("fsdp").make(CONFIG, 1, 0)
    server = policy_backends.load("torch").make(POLICY, 0, "cpu")
    server.load(trainer.publish())
    assert server.version == trainer.version == 0


def test_an_unknown_backend_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownName, match=r"did you mean 'fsdp'\? \(known: 'fsdp'\)"):
        trainers.load("fdsp")
    with pytest.raises(UnknownName, match=r"known: 'torch'"):
        policy_backends.load("zzz")


def test_configuration_and_registry_do_not_import_torch() -> None:
    modules = "rlinf_async.backends.base, rlinf_async.backends.fsdp.config"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_bucket_size_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="bucket_bytes is 0"):
        EmbodiedTrainerConfig(bucket_bytes=0, advantage=AdvantageConfig())
