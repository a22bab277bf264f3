"""What an embodied run leaves to look at: the learning curve, and the trained policy at work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlinf_async.observe.errors import ObserveError, VideoError
from rlinf_async.observe.learning_curve import draw_learning_curve
from rlinf_async.observe.run_folder import RunFolder
from rlinf_async.observe.video import record_video
from rlinf_async.runtime.jobs.embodied.config import EmbodiedConfig
from rlinf_async.runtime.jobs.embodied.reached import load_reached
from rlinf_async.runtime.jobs.in_folder import Draw
from rlinf_async.workers.env import EnvError, describe_env, make_env
from rlinf_async.workers.env.spaces import ActionReader, ObservationWriter

if TYPE_CHECKING:
    from rlinf_async.messages.embodied import Floats


def pictures(config: EmbodiedConfig, folder: RunFolder, title: str) -> dict[str, Draw]:
    """The learning curve, and the film of the trained policy where it is asked for."""

    def curve() -> None:
        draw_learning_curve(
            folder.metrics,
            folder.learning_curve,
            title=title,
            target=config.evaluation.target_success_rate,
        )

    found: dict[str, Draw] = {"learning curve": curve}
    if config.evaluation.video_episodes:
        found["video"] = lambda: film(config, folder)
    return found


def film(config: EmbodiedConfig, folder: RunFolder) -> None:
    """Record the trained policy.

    Raises:
        VideoError: the environment does not render, or fails while it is filmed.
        UsageError: it cannot be made any more.
    """
    try:
        _film(config, folder)
    except EnvError as error:
        raise VideoError(str(error)) from error


def _film(config: EmbodiedConfig, folder: RunFolder) -> None:
    policy = _trained_policy(config, folder.checkpoints)
    env = make_env(config.env)
    try:
        writer = ObservationWriter(env.observation_space, config.env.name)
        reader = ActionReader(env.action_space, config.env.name, config.env.actions)
    finally:
        env.close()
    row = np.zeros((1, describe_env(config.env).observation_size), np.float32)

    def act(observation: Any) -> Any:
        writer.write(observation, row[0])
        return reader.read(policy(row.copy()), 1)[0]

    record_video(
        lambda: make_env(config.env, render_mode="rgb_array"),
        act,
        folder.video,
        episodes=config.evaluation.video_episodes,
        seed=config.evaluation.seed,
    )


def _trained_policy(config: EmbodiedConfig, checkpoints: Path) -> Callable[[Floats], Any]:
    """The deterministic policy of the newest checkpoint."""
    from rlinf_async.backends.registry import load_policy_backend, load_trainer_backend

    reached = load_reached(checkpoints)
    if reached is None:
        raise ObserveError(f"there is no checkpoint in {checkpoints}")
    trainer = load_trainer_backend("fsdp")(config.actor, 1, 0)
    trainer.load_checkpoint(checkpoints / reached.checkpoint)
    policy = load_policy_backend("torch")(config.actor.fsdp.policy, 0, "cpu")
    policy.load(trainer.publish())
    return policy.mode
