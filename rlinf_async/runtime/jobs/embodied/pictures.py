"""Pictures of a run in environments: its learning curve, and a video of the trained policy."""

from __future__ import annotations

import sys
from collections.abc import Callable

from rlinf_async.observe.pictures import draw_learning_curve
from rlinf_async.observe.progress import ProgressState, ProgressView
from rlinf_async.observe.run_folder import RunFolder
from rlinf_async.runtime.jobs.checkpoints import checkpoint_of
from rlinf_async.runtime.jobs.embodied.playing import TrainedPolicy, film_run
from rlinf_async.runtime.jobs.embodied.settings import EnvironmentSettings
from rlinf_async.runtime.jobs.run import Draw
from rlinf_async.runtime.jobs.view import Headline


def pictures(
    config: EnvironmentSettings,
    folder: RunFolder,
    title: str,
    headline: Callable[[], Headline],
    trained: TrainedPolicy,
) -> dict[str, Draw]:
    """The learning curve, and a video of the trained policy where one is configured.

    ``headline`` is the top line of the view while the video is made.
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
    if config.evaluation.video_episodes and not config.judging_env.many_in_a_call:
        found["video"] = lambda: draw_video(trained, folder, headline())
    return found


def draw_video(trained: TrainedPolicy, folder: RunFolder, headline: Headline) -> None:
    """Record the trained policy, for ``evaluation.video_seconds`` at most.

    Raises:
        VideoError: the environment does not render, or fails meanwhile.
        UsageError: the environment cannot be made any more, or there is no checkpoint.
    """
    checkpoint, wanted = checkpoint_of(folder.path, None), trained.config.evaluation
    with ProgressView() as view:
        note = f"video: {wanted.video_episodes} episodes, {wanted.video_seconds:g} s at most"
        view.update(ProgressState(**headline._asdict(), note=note))
        made = film_run(trained, checkpoint, folder.video)
    if made.cut:
        print(
            f"{trained.config.name}: the video was ended after evaluation.video_seconds = "
            f"{wanted.video_seconds:g}, in episode {len(made.returns)} of {wanted.video_episodes}",
            file=sys.stderr,
        )
