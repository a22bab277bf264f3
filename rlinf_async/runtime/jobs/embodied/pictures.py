"""What a run leaves to look at: the learning curve, who was busy when, and the trained policy at
work.

A picture that cannot be made does not undo the training: it is said, and the run's other results
stand.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlinf_async.config import UsageError
from rlinf_async.observe.errors import ObserveError
from rlinf_async.observe.learning_curve import draw_learning_curve
from rlinf_async.observe.perfetto import read_perfetto
from rlinf_async.observe.run_folder import RunFolder
from rlinf_async.observe.summary import EmbodiedSummary
from rlinf_async.observe.timeline import draw_timeline
from rlinf_async.observe.video import record_video
from rlinf_async.runtime.jobs.embodied.config import EmbodiedConfig
from rlinf_async.runtime.jobs.embodied.reached import load_reached
from rlinf_async.workers.env import EnvError, describe_env, make_env
from rlinf_async.workers.env.spaces import ActionReader, ObservationWriter

if TYPE_CHECKING:
    from rlinf_async.messages.embodied import Floats


def draw_pictures(
    config: EmbodiedConfig, folder: RunFolder, summary: EmbodiedSummary, left_out: Mapping[str, int]
) -> bool:
    """Draw all pictures; problems are printed and noted in the summary. Whether there were any.

    Args:
        left_out: by worker, how many spans the trace does not have.
    """
    title = f"{config.name}: {config.env.name}"
    drawings: dict[str, Callable[[], object]] = {
        "learning curve": lambda: draw_learning_curve(
            folder.metrics,
            folder.learning_curve,
            title=title,
            target=config.evaluation.target_success_rate,
        ),
        "timeline": lambda: draw_busy(config, folder, left_out),
    }
    if config.evaluation.video_episodes:
        drawings["video"] = lambda: film(config, folder)
    for name, draw in drawings.items():
        try:
            draw()
        except (ObserveError, EnvError, UsageError) as error:
            summary.extra[name] = f"not made: {error}"
            print(f"the {name} was not made: {error}", file=sys.stderr)
    return bool(summary.extra)


def draw_busy(config: EmbodiedConfig, folder: RunFolder, left_out: Mapping[str, int]) -> None:
    """Draw who was busy when, from the trace; also of a run that failed."""
    title = f"{config.name}: {config.env.name}"
    draw_timeline(read_perfetto(folder.trace), folder.timeline, title=title, left_out=left_out)


def film(config: EmbodiedConfig, folder: RunFolder) -> None:
    """Record the trained policy."""
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
