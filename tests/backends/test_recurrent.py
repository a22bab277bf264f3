"""A recurrent policy: one step at a time as over whole sequences, and trained on these."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from rlinf_async.backends.fsdp.config import EmbodiedTrainerConfig, FSDPConfig, PPOConfig
from rlinf_async.backends.fsdp.embodied import EmbodiedTrainer
from rlinf_async.backends.fsdp.rollout_batch import flat_batch, of_sequences
from rlinf_async.backends.policies.config import PolicyConfig
from rlinf_async.backends.policies.recurrent import MEMORY, STARTS, GruPolicy
from rlinf_async.backends.policies.serving import RecurrentPolicyServer, serve_policy
from rlinf_async.messages.embodied import Actions, Observations, Trajectory
from rlinf_async.messages.spaces import STATE, ActionSpec, choices, continuous, flat_spec
from rlinf_async.workers.env.stage import StageOutcome, after_step
from rlinf_async.workers.rollout.policy import answer_all
from tests.backends.fsdp_helpers import in_processes, load_result, save_result

STEPS, ENVS, MEMORY_SIZE = 12, 4, 6


def config(action: ActionSpec) -> PolicyConfig:
    return PolicyConfig(
        name="gru",
        observation_size=3,
        action_size=action.outputs,
        observation=flat_spec(3),
        action=action,
        hidden_sizes=(5,),
        memory_size=MEMORY_SIZE,
    )


def seeded(action: ActionSpec) -> GruPolicy:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        policy = GruPolicy(config(action))
    with torch.no_grad():  # the heads begin near 0, which would agree with anything
        for parameter in policy.actor.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator()))
    return policy


def test_the_memory_is_that_of_torchs_own_cell() -> None:
    policy = seeded(choices(3))
    seen, memory = torch.randn(8, 3), torch.randn(8, MEMORY_SIZE)
    _, after = policy.mode_and_remember({STATE: seen, MEMORY: memory})
    expected = policy.gates(policy.encoder(seen).tanh(), memory)
    torch.testing.assert_close(after, expected)


@pytest.mark.parametrize("action", [choices(3), continuous(2), choices(2, 3)], ids=str)
def test_whole_sequences_agree_with_single_steps_which_forget_when_an_episode_begins(
    action: ActionSpec,
) -> None:
    policy = seeded(action)
    random = torch.Generator().manual_seed(1)
    state = torch.randn(ENVS, STEPS, 3, generator=random)
    starts = (torch.rand(ENVS, STEPS, generator=random) < 0.3).float()
    before = memory = torch.randn(ENVS, MEMORY_SIZE, generator=random)
    actions: list[Tensor] = []
    log_probs: list[Tensor] = []
    values: list[Tensor] = []
    for step in range(STEPS):
        memory = memory * (1.0 - starts[:, step, None])
        seen = {STATE: state[:, step], MEMORY: memory}
        values.append(policy.value(seen))
        answer, memory = policy.act_and_remember(seen, random)
        actions.append(answer.action)
        log_probs.append(answer.log_prob)
        torch.testing.assert_close(answer.value, values[-1])
    sequences = {**policy.normalized({STATE: state}), MEMORY: before, STARTS: starts}
    whole = policy(sequences, torch.stack(actions, 1))
    torch.testing.assert_close(whole.log_prob, torch.stack(log_probs, 1), rtol=0, atol=1e-5)
    torch.testing.assert_close(whole.value, torch.stack(values, 1), rtol=0, atol=1e-5)
    assert whole.entropy.shape == (ENVS, STEPS)


def test_an_episode_that_ends_is_forgotten_and_its_last_value_remembers() -> None:
    memory = np.arange(8, dtype=np.float32).reshape(4, 2) + 1.0
    outcome = StageOutcome(
        reward=np.zeros(4, np.float32),
        terminated=np.array([True, False, False, False]),
        truncated=np.array([False, True, False, False]),
        final_observation=np.zeros((1, 3), np.float32),
        episodes=[],
        valid=np.array([True, True, False, True]),
    )
    after, final = after_step(memory, outcome)
    assert after is not None
    assert final is not None
    assert after.tolist() == [[0, 0], [0, 0], [0, 0], [7, 8]]
    assert final.tolist() == [[3, 4]]
    assert memory[0].tolist() == [1, 2]  # what was sent stays as it was
    assert after_step(None, outcome) == (None, None)


def served(trainer: EmbodiedTrainer) -> RecurrentPolicyServer:
    server = serve_policy(trainer.config.fsdp.policy, 5)
    assert isinstance(server, RecurrentPolicyServer)
    server.load(trainer.publish())
    return server


def question(sequence: int, envs: int, **more: object) -> Observations:
    seen = np.full((envs, 3), sequence, np.float32)
    fields: dict[str, object] = {"env_rank": 0, "stage": 0, "incarnation": 0, "min_version": 0}
    return Observations(**fields, sequence=sequence, observation=seen, **more)  # type: ignore[arg-type]


def test_questions_that_share_a_forward_pass_keep_their_memories_apart() -> None:
    action = choices(3)
    server = served(EmbodiedTrainer(trainer_config(action), 1, 0))
    memory = np.random.default_rng(0).standard_normal((2, MEMORY_SIZE)).astype(np.float32)
    asked = [
        question(1, 3),
        question(2, 2, memory=memory, final_observation=np.ones((1, 3), np.float32),
                 final_memory=memory[1:]),
        question(3, 2, memory=memory, deterministic=True),
    ]  # fmt: skip
    answers = {answer.sequence: answer for _, answer in answer_all(server, asked)}
    nothing = np.zeros((3, MEMORY_SIZE), np.float32)
    for number, rows in ((1, nothing), (2, memory), (3, memory)):
        mode, after = server.mode_from(asked[number - 1].observation, rows)
        assert remembered(answers[number]) == pytest.approx(after, abs=1e-6)
    assert answers[3].action.tolist() == mode.tolist()  # type: ignore[union-attr]
    expected = server.value_from(np.ones((1, 3), np.float32), memory[1:])
    np.testing.assert_allclose(answers[2].final_value, expected, atol=1e-6)  # type: ignore[arg-type]


def remembered(answer: Actions) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    assert answer.memory is not None
    return answer.memory


def trainer_config(action: ActionSpec) -> EmbodiedTrainerConfig:
    return EmbodiedTrainerConfig(
        fsdp=FSDPConfig(policy=config(action)),
        ppo=PPOConfig(epochs=2, minibatch_size=2 * STEPS),
    )


def trajectory(server: RecurrentPolicyServer, stage: int) -> Trajectory:
    """Sampled by the server, in episodes that end at random, beginning with a memory."""
    random = np.random.default_rng(stage)
    ends = random.random((2, STEPS, ENVS)) < 0.15
    seen = random.standard_normal((STEPS, ENVS, 3)).astype(np.float32)
    first = memory = random.standard_normal((ENVS, MEMORY_SIZE)).astype(np.float32)
    answers = []
    for step in range(STEPS):
        answer = server.act_from(seen[step], memory)
        answers.append(answer)
        memory = remembered_after(answer.memory, ends[0, step] | ends[1, step])
    return Trajectory(
        iteration=0,
        env_rank=0,
        stage=stage,
        observation=seen,
        action=np.stack([one.action for one in answers]),
        log_prob=np.stack([one.log_prob for one in answers]),
        value=np.stack([*(one.value for one in answers), server.value_from(seen[0], memory)]),
        reward=random.standard_normal((STEPS, ENVS)).astype(np.float32),
        terminated=ends[0],
        truncated=ends[1] & ~ends[0],
        final_value=np.zeros((STEPS, ENVS), np.float32),
        version=np.zeros(STEPS, np.int64),
        memory=first,
    )


def remembered_after(
    memory: np.ndarray[tuple[int, ...], np.dtype[np.float32]] | None,
    ended: np.ndarray[tuple[int, ...], np.dtype[np.bool_]],
) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    assert memory is not None
    return np.where(ended[:, None], np.float32(0.0), memory)


@pytest.mark.parametrize("action", [choices(3), continuous(2)], ids=str)
def test_before_the_first_update_the_trainers_log_probs_are_those_of_the_rollout(
    action: ActionSpec,
) -> None:
    trainer = EmbodiedTrainer(trainer_config(action), 1, 0)
    server = served(trainer)
    both = [trajectory(server, stage) for stage in range(2)]
    batch = flat_batch(trainer.manager, trainer._policy, both, trainer.config)
    found = trainer.manager.model(batch.observation, batch.action)
    assert found.log_prob.shape == (2 * ENVS, STEPS)
    torch.testing.assert_close(found.log_prob, batch.log_prob, rtol=0, atol=1e-4)
    torch.testing.assert_close(found.value, batch.value, rtol=0, atol=1e-4)
    metrics = trainer.train(both)
    assert trainer.version == 1
    assert metrics["updates"] == 2 * 2 * ENVS / 2
    assert all(np.isfinite(number) for number in metrics.values())


def test_micro_batches_and_masked_steps_do_not_change_what_is_learnt() -> None:
    learnt = []
    for micro in (None, STEPS):
        ppo = PPOConfig(epochs=1, minibatch_size=2 * STEPS, micro_batch_size=micro)
        trainer = EmbodiedTrainer(
            EmbodiedTrainerConfig(fsdp=FSDPConfig(policy=config(choices(3))), ppo=ppo), 1, 0
        )
        one = trajectory(served(trainer), 0)
        one.valid = np.ones((STEPS, ENVS), np.bool_)
        one.valid[3, 1] = False
        one.reward[3, 1] = 0.0
        trainer.train([one])
        learnt.append([value.detach().clone() for value in trainer.manager.model.parameters()])
    for left, right in zip(*learnt, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-6)


def test_minibatches_are_of_whole_sequences() -> None:
    sizes = of_sequences(PPOConfig(minibatch_size=48, micro_batch_size=12), 12)
    assert (sizes.minibatch_size, sizes.micro_batch_size) == (4, 1)
    with pytest.raises(ValueError, match="whole sequences of 12 steps"):
        of_sequences(PPOConfig(minibatch_size=40), 12)


def train_on_all(rank: int, world_size: int, folder: Path) -> None:
    """Three optimizer steps, each on everything that the ranks have."""
    settings = trainer_config(continuous(2))
    size = 2 * ENVS * STEPS // world_size  # each rank would normalise the advantages of its own
    ppo = PPOConfig(epochs=3, minibatch_size=size, normalize_advantage="none")
    trainer = EmbodiedTrainer(msgspec.structs.replace(settings, ppo=ppo), world_size, rank)
    torch.manual_seed(7)  # the same policy acts, whatever the number of ranks
    server = serve_policy(settings.fsdp.policy, 5)
    assert isinstance(server, RecurrentPolicyServer)
    both = [trajectory(server, stage) for stage in range(2)]
    metrics = trainer.train(both[rank::world_size])
    state = trainer.manager.get_model_state_dict(everywhere=True)
    save_result(folder, rank, {"metrics": dict(metrics), "state": state})


def test_two_ranks_train_a_memory_like_one(tmp_path: Path) -> None:
    single, double = tmp_path / "single", tmp_path / "double"
    single.mkdir()
    double.mkdir()
    train_on_all(0, 1, single)
    expected = load_result(single, 0)
    assert expected["metrics"]["updates"] == 3
    for found in in_processes(train_on_all, 2, double):
        assert found["state"].keys() == expected["state"].keys()
        for name, tensor in expected["state"].items():
            torch.testing.assert_close(found["state"][name], tensor, rtol=0, atol=1e-5)
        assert found["metrics"]["grad_norm"] == pytest.approx(
            expected["metrics"]["grad_norm"], abs=1e-5
        )
