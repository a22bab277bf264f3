"""Two FSDP ranks against one: ``python -m tests.backends.vision_language.sharded`` does 10 updates.

Of the model and the settings of ``examples/vla_reach.toml``, on what its policy does in its
environment. Prints the largest difference of any weight, and of the gradient norm, after them.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from rlinf_async.backends.fsdp.config import EmbodiedTrainerConfig
from rlinf_async.backends.fsdp.embodied import EmbodiedTrainer
from rlinf_async.backends.policies.serving import PolicyServer
from rlinf_async.config import Document
from rlinf_async.messages.converting import ObservationWriter
from rlinf_async.messages.embodied import Trajectory
from rlinf_async.messages.spaces import ObservationArray
from rlinf_async.runtime.jobs.embodied import EmbodiedConfig
from rlinf_async.runtime.jobs.embodied.settings import described, fitted
from rlinf_async.workers.env import make_env
from tests.backends.fsdp_helpers import in_processes, load_result, save_result

EXAMPLE = Path(__file__).parents[3] / "examples" / "vla_reach.toml"
CHUNKS, ENVS = 8, 16
"""of a trajectory"""


def example(world_size: int) -> EmbodiedTrainerConfig:
    """Of the example."""
    config = Document.read(EXAMPLE).to(EmbodiedConfig)
    trainer = fitted(config, described(config)).actor
    share = 2 * CHUNKS * ENVS // world_size
    ppo = msgspec.structs.replace(trainer.ppo, minibatch_size=share)
    return msgspec.structs.replace(trainer, ppo=ppo)


def played(config: EmbodiedTrainerConfig, stage: int) -> Trajectory:
    """What the untrained policy does in the environment of the example, in its first episodes."""
    env_config = Document.read(EXAMPLE).to(EmbodiedConfig).env
    # Its bounds are those of the policy, and its actions are taken from chunks below.
    env_config = msgspec.structs.replace(env_config, action_chunk=1, actions="clip")
    policy = config.fsdp.policy
    trainer, server = EmbodiedTrainer(config, 1, 0), PolicyServer(policy, seed=stage)
    server.load(trainer.publish())
    envs = [make_env(env_config) for _ in range(ENVS)]
    writer = ObservationWriter(envs[0].observation_space, env_config.name)
    shape = (CHUNKS, ENVS, policy.action_chunk)
    reward, executed = np.zeros(shape, np.float32), np.zeros(shape, np.bool_)
    terminated, truncated = np.zeros(shape[:2], np.bool_), np.zeros(shape[:2], np.bool_)
    seen = writer.spec.empty(CHUNKS + 1, ENVS)
    answers = []

    def show(step: int, env: int, observation: Any) -> None:
        row: ObservationArray = seen[step]
        writer.write(observation, row[env])

    for env, one in enumerate(envs):
        show(0, env, one.reset(seed=1000 * stage + env)[0])
    for step in range(CHUNKS):
        answers.append(server.act(seen[step]))
        chunks = answers[-1].action.reshape(ENVS, policy.action_chunk, -1)
        for env, one in enumerate(envs):
            observation: Any = None
            for index, action in enumerate(chunks[env]):
                observation, gained, ended, cut, _ = one.step(action)
                reward[step, env, index], executed[step, env, index] = gained, True
                if ended or cut:
                    terminated[step, env], truncated[step, env] = ended, cut
                    observation, _ = one.reset()
                    break
            show(step + 1, env, observation)
    return Trajectory(
        iteration=0,
        env_rank=0,
        stage=stage,
        observation=seen[:-1],
        action=np.stack([one.action for one in answers]),
        log_prob=np.stack([one.log_prob for one in answers]),
        value=np.stack([*(one.value for one in answers), server.value(seen[-1])]),
        reward=reward.sum(-1),
        terminated=terminated,
        truncated=truncated,
        final_value=np.zeros(shape[:2], np.float32),
        version=np.zeros(CHUNKS, np.int64),
        action_reward=reward,
        executed=executed,
    )


def train(rank: int, world_size: int, folder: Path, updates: int) -> None:
    """Take ``updates`` optimizer steps, each on everything that the ranks have."""
    config = example(world_size)
    epochs = msgspec.structs.replace(config.ppo, epochs=updates)
    config = msgspec.structs.replace(config, ppo=epochs)
    mine = [played(config, stage) for stage in range(rank, 2, world_size)]
    trainer = EmbodiedTrainer(config, world_size, rank)
    metrics = trainer.train(mine)
    state = trainer.manager.get_model_state_dict(everywhere=True)
    save_result(folder, rank, {"metrics": dict(metrics), "state": state})


def differences(updates: int, folder: Path) -> tuple[float, float]:
    """The largest difference of weights, and of the gradient norm, between two ranks and one."""
    single, double = folder / "single", folder / "double"
    single.mkdir()
    double.mkdir()
    train(0, 1, single, updates)
    expected = load_result(single, 0)
    found: list[Any] = in_processes(train, 2, double, updates)
    weights = max(
        float((one["state"][name] - tensor).abs().max())
        for one in found
        for name, tensor in expected["state"].items()
    )
    norm = max(abs(one["metrics"]["grad_norm"] - expected["metrics"]["grad_norm"]) for one in found)
    return weights, norm


def main() -> int:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        weights, norm = differences(10, Path(folder))
    reached = weights < 1e-5 and norm < 1e-5
    print(
        f"{EXAMPLE.name}: 10 updates, two ranks against one: weights within {weights:.1e}, "
        f"gradient norm within {norm:.1e}"
    )
    print("reached: 1e-5" if reached else "NOT reached: 1e-5")
    return 0 if reached else 1


if __name__ == "__main__":
    raise SystemExit(main())
