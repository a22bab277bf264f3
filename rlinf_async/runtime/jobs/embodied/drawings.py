"""The pictures of an embodied run: its learning curve, and a video of the trained policy."""

from __future__ import annotations

import sys
from collections.abc import Callable

from rlinf_async.observe.learning_curve import draw_learning_curve
from rlinf_async.observe.progress import ProgressState, ProgressView
from rlinf_async.observe.run_folder import RunFolder
from rlinf_async.runtime.jobs.embodied.playing import (
    Checkpointed,
    checkpoint_of,
    film,
    trained_policy,
)
from rlinf_async.runtime.jobs.embodied.settings import EnvironmentSettings
from rlinf_async.runtime.jobs.run import Draw
from rlinf_async.runtime.jobs.view import Headline


def pictures(
    config: EnvironmentSettings,
    folder: RunFolder,
    title: str,
    headline: Callable[[], Headline],
    make_trainer: Callable[[], Checkpointed],
) -> dict[str, Draw]:
    """The learning curve, and a video of the trained policy where one is configured.

    ``headline`` is the top line of the view that shows how far the video has come;
    ``make_trainer`` builds what reads the checkpoint.
    """

    def curve() -> None:
        draw_learning_curve(
            folder.metrics,
            folder.learning_curve,
            title=title,
            target=config.evaluation.target_success_rate,
        )

    found: dict[str, Draw] = {"learning curve": curve}
    # A simulator of many environments has no picture of one.
    if config.evaluation.video_episodes and not config.env.many_in_a_call:
        found["video"] = lambda: draw_video(config, folder, headline(), make_trainer)
    return found


def draw_video(
    config: EnvironmentSettings,
    folder: RunFolder,
    headline: Headline,
    make_trainer: Callable[[], Checkpointed],
) -> None:
    """Record the trained policy, for ``evaluation.video_seconds`` at most.

    Raises:
        VideoError: the environment does not render, or fails meanwhile.
        UsageError: the environment cannot be made any more, or there is no checkpoint.
    """
    policy = trained_policy(config, checkpoint_of(folder.path, None), make_trainer)
    wanted = config.evaluation
    with ProgressView() as view:

        def show(episode: int, frames: int) -> None:
            note = f"video: episode {episode + 1} of {wanted.video_episodes}, {frames} frames"
            view.update(ProgressState(**headline._asdict(), note=note))

        made = film(
            config.env,
            policy,
            folder.video,
            episodes=wanted.video_episodes,
            seed=wanted.seed,
            time_limit=wanted.video_seconds,
            on_frame=show,
        )
    if made.cut:
        print(
            f"{config.name}: the video was ended after evaluation.video_seconds = "
            f"{wanted.video_seconds:g}, in episode {len(made.returns)} of {wanted.video_episodes}",
            file=sys.stderr,
        )
