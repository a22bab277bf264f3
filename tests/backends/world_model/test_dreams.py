"""Many environments in a model of pictures, numbers, a text and choices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from rlinf_async.backends.base import OptimizerConfig
from rlinf_async.backends.fsdp.config import ShardingConfig
from rlinf_async.backends.world_model.config import (
    WorldModelInfo,
    WorldModelSizes,
    WorldModelTrainerConfig,
)
from rlinf_async.backends.world_model.dreaming import Dreams
from rlinf_async.backends.world_model.model import WorldModel
from rlinf_async.backends.world_model.trainer import WorldModelTrainer
from rlinf_async.config import ConfigError
from rlinf_async.data.config import DataError
from rlinf_async.data.demonstrations import read_episodes
from rlinf_async.runtime.jobs.embodied.playing import record_demonstrations
from rlinf_async.runtime.jobs.embodied.settings import (
    DemonstrationsConfig,
    EmbodiedConfig,
    EmbodiedTrainingConfig,
)
from rlinf_async.workers.env import describe_env
from rlinf_async.workers.env.config import EnvConfig

ENVS = "tests.jobs.world_model.envs"
SIZES = WorldModelSizes(latent_size=16, hidden_sizes=(32,), channels=(8,), horizon=5)


@pytest.fixture(scope="module")
def learner(tmp_path_factory: pytest.TempPathFactory) -> WorldModelTrainer:
    """A model of episodes with pictures, which has learnt a little."""
    folder = tmp_path_factory.mktemp("recorded")
    env = EnvConfig(entry_point=f"{ENVS}:Line", kwargs={"choices": True, "seen": True})
    reality = EmbodiedConfig(
        env=env, training=EmbodiedTrainingConfig(total_steps=1, steps_per_iteration=1)
    )
    wanted = DemonstrationsConfig(policy=f"{ENVS}:wander", episodes=12)
    record_demonstrations(reality, wanted, folder, keep_failures=True)
    spec = describe_env(env)
    info = WorldModelInfo(
        env=env.name, observation=spec.observation, action=spec.action, sizes=SIZES
    )
    config = WorldModelTrainerConfig(
        info=info,
        fsdp=ShardingConfig(optimizer=OptimizerConfig(lr=3e-3)),
        folders=(str(folder),),
        held_out=2,
        batch_size=16,
    )
    return WorldModelTrainer(config, 1, 0)


@pytest.fixture(scope="module")
def file(learner: WorldModelTrainer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    first = learner.train(10)
    last = [learner.train(30) for _ in range(3)][-1]
    for name in ("picture_loss", "state_loss", "reward_loss"):
        assert last[name] < 0.6 * first[name], name
    measured = learner.measure()
    assert measured["picture_error_k"] < measured["still_picture_error_k"]
    path = tmp_path_factory.mktemp("model") / "world_model.safetensors"
    learner.export(path)
    return path


def played(dreams: Dreams, seed: int, steps: int) -> list[Any]:
    shown, _ = dreams.reset(seed=seed)
    return [shown, *(dreams.step(np.array([2, step % 3, 1])) for step in range(steps))]


def test_rewards_are_predicted_in_units_of_how_they_differ() -> None:
    """Those that are always the same are their mean, and ask nothing of the network."""
    spec = describe_env(EnvConfig(entry_point=f"{ENVS}:Line", kwargs={"choices": True}))
    info = WorldModelInfo(env="line", observation=spec.observation, action=spec.action, sizes=SIZES)
    model = WorldModel(info)
    state = torch.zeros(4, spec.observation.state_size)
    for paid, zero, one in (([1.0] * 4, 1.0, 2.0), ([-1.0, -1.0, 1.0, 1.0], 0.0, 1.0)):
        model.take_statistics(state, torch.tensor(paid), {})
        assert model.rewards_of(torch.tensor([0.0, 1.0])).tolist() == pytest.approx([zero, one])


def test_it_shows_and_takes_what_the_environment_does(file: Path) -> None:
    dreams = Dreams(file, 3)
    assert dreams.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    assert dreams.single_action_space == spaces.Discrete(3)
    shown, _ = dreams.reset(seed=1)
    assert shown["picture"].shape == (3, 8, 8, 3)
    assert shown["picture"].dtype == np.uint8
    assert shown["state"].shape == (3, 1)
    assert set(shown["word"]) <= {"left", "near"}
    after, reward, terminated, truncated, _ = dreams.step(np.array([0, 1, 2]))
    assert after["word"] == shown["word"]  # a text is held
    assert reward.shape == terminated.shape == truncated.shape == (3,)


def test_an_episode_is_cut_after_the_horizon_and_the_next_begins(file: Path) -> None:
    dreams = Dreams(file, 3, horizon=2, success="terminated")
    _, first, second = played(dreams, 0, 2)
    assert not (first[2] | first[3]).any()
    shown, _, terminated, truncated, info = second
    assert (terminated ^ truncated).all()
    assert info["_final_obs"].all()
    assert info["final_info"]["is_success"].tolist() == terminated.tolist()
    assert not np.array_equal(info["final_obs"]["state"], shown["state"])
    starts = {one.observation["state"][0, 0].item() for one in read_episodes(recorded_in(file))}
    assert {one.item() for one in shown["state"]} <= starts


def recorded_in(file: Path) -> Path:
    """The folder of the episodes that the model was learnt from."""
    return next(file.parent.parent.glob("recorded*"))


def test_the_same_seed_is_the_same_dream(file: Path) -> None:
    one, same, other = (played(Dreams(file, 3), seed, 6) for seed in (4, 4, 5))
    assert np.array_equal(one[-1][0]["picture"], same[-1][0]["picture"])
    assert [step[1].tolist() for step in one[1:]] == [step[1].tolist() for step in same[1:]]
    assert [step[1].tolist() for step in one[1:]] != [step[1].tolist() for step in other[1:]]


def test_what_a_model_was_not_trained_for_is_refused(file: Path) -> None:
    with pytest.raises(ConfigError, match="trained to predict 1 to 5 steps"):
        Dreams(file, 3, horizon=6)
    with pytest.raises(ConfigError, match="'first' or 'anywhere'"):
        Dreams(file, 3, begins="nowhere")  # type: ignore[arg-type]


def test_a_text_that_changes_is_refused(learner: WorldModelTrainer) -> None:
    from rlinf_async.backends.world_model.recorded import load_recorded

    config = learner.config
    folder = Path(config.folders[0])
    changed = folder / "episode_000003.npz"
    arrays = dict(np.load(changed))
    arrays["word"][-1] = 65
    before = changed.read_bytes()
    np.savez_compressed(changed, **arrays)
    try:
        with pytest.raises(DataError, match=r"episode 3 of .* the text 'word' changes"):
            load_recorded(config.folders, config.info, 2)
    finally:
        changed.write_bytes(before)
