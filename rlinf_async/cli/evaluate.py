"""``rlinf-async evaluate``: a trained policy at work again, in figures and in pictures."""

from __future__ import annotations

import pathlib
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from rlinf_async.cli.jobs import Session
from rlinf_async.cli.train import config_of, job_of
from rlinf_async.config import ConfigError, Document, UsageError

if TYPE_CHECKING:
    from rlinf_async.runtime.jobs.embodied.playing import Trained
    from rlinf_async.workers.env import EvaluatedEpisode

_file = click.Path(path_type=pathlib.Path, dir_okay=False)


@click.command(short_help="Let a trained policy act again; film it.")
@click.argument("run", metavar="RUN", type=click.Path(path_type=pathlib.Path))
@click.option(
    "--checkpoint", metavar="NAME", help="This one (version-000010, or 10), not the newest."
)
@click.option(
    "--episodes", type=click.IntRange(min=1), help="As in the run's own evaluation when left out."
)
@click.option("--seed", type=click.IntRange(min=0), help="The same, of the episodes.")
@click.option("--pictures", metavar="FILE.png", type=_file, help="Six pictures of an episode.")
@click.option("--video", metavar="FILE.mp4", type=_file, help="The same episode as a video.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
@click.pass_obj
def evaluate(
    session: Session,
    run: pathlib.Path,
    checkpoint: str | None,
    episodes: int | None,
    seed: int | None,
    pictures: pathlib.Path | None,
    video: pathlib.Path | None,
    as_json: bool,
) -> None:
    """Let the deterministic policy of the run in the folder RUN act in its environment.

    The episodes are those of the run's own evaluation, unless another number or seed is given.
    Pictures and video show the first that succeeded; where none did, or the environment does not
    say, the one with the largest return.
    """
    _check_suffix("--pictures", pictures, ".png")
    _check_suffix("--video", video, ".mp4")
    films = [path for path in (pictures, video) if path is not None]
    played, shown = _play(session, run, checkpoint, episodes, seed, films)
    if as_json:
        import msgspec

        click.echo(msgspec.json.format(msgspec.json.encode(played)).decode())
        return
    rate, silent = played["success_rate"], played["success_unreported"]
    unsaid = f", {silent} of {played['episodes']} episodes did not say" if silent else ""
    click.echo(
        f"{run}, {played['checkpoint']}: {played['episodes']} episodes from seed {played['seed']}: "
        + ("" if rate is None else f"success rate {rate:.2f}{unsaid}, ")
        + f"return {played['return']:.2f} (standard deviation {played['return_deviation']:.2f}), "
        f"{played['length']:.1f} steps"
    )
    for line in shown:
        click.echo(line)


def _play(
    session: Session,
    run: pathlib.Path,
    checkpoint: str | None,
    count: int | None,
    seed: int | None,
    films: Sequence[pathlib.Path],
) -> tuple[dict[str, Any], list[str]]:
    """The figures, and a line for each file that was written."""
    from rlinf_async.runtime.jobs.embodied.playing import checkpoint_of, play

    trained = _trained(session, run, single=bool(films))
    folder, wanted = checkpoint_of(run, checkpoint), trained.config.evaluation
    first = wanted.seed if seed is None else seed
    played = play(trained, folder, episodes=count or wanted.episodes, seed=first, films=films)
    lines = []
    for path, made in zip(films, played.films, strict=True):
        ended = {True: ": success", False: ": no success", None: ""}[made.successes[0]]
        lines.append(f"{path}: episode {played.shown}, {made.frames} frames{ended}")
    return _figures(run, folder.name, first, played.episodes), lines


def _trained(session: Session, run: pathlib.Path, *, single: bool) -> Trained:
    """What the run's job needs to read its policy; ``single``: in environments that render."""
    import msgspec

    from rlinf_async.observe.errors import RunFolderError
    from rlinf_async.observe.run_folder import check_is_run
    from rlinf_async.runtime.jobs.embodied.playing import PlayingJob, single_env

    try:
        check_is_run(run)
    except RunFolderError as error:
        raise UsageError(str(error)) from error
    document = Document.read(str(run / "config.toml"))
    job = job_of(session, document)
    if not isinstance(job, PlayingJob):
        raise UsageError(
            f"{run} is a run of {document.tables['job']!r}, whose policy acts in no environment; "
            "summary.json has its evaluation"
        )
    config = config_of(job, document, {})
    try:
        if single:
            config = msgspec.structs.replace(config, env=single_env(config.env))
        return job.trained(config)
    except ConfigError as error:
        raise document.located(error) from error


def _figures(
    run: pathlib.Path, checkpoint: str, seed: int, episodes: Sequence[EvaluatedEpisode]
) -> dict[str, Any]:
    from rlinf_async.runtime.jobs.checkpoints import load_progress
    from rlinf_async.runtime.jobs.embodied.reports import (
        EmbodiedProgress,
        evaluated_rate,
        mean_return,
        unreported,
    )

    rate = evaluated_rate(episodes, load_progress(run / "checkpoints", EmbodiedProgress))
    return {
        "run": str(run),
        "checkpoint": checkpoint,
        "seed": seed,
        "episodes": len(episodes),
        "success_rate": rate,
        "success_unreported": None if rate is None else unreported(episodes),
        "return": mean_return(episodes),
        "return_deviation": statistics.pstdev(one.episode_return for one in episodes),
        "length": statistics.fmean(one.length for one in episodes),
    }


def _check_suffix(option: str, path: pathlib.Path | None, suffix: str) -> None:
    if path is None:
        return
    if path.suffix != suffix:
        raise UsageError(f"{option} {path}: give a file whose name ends with {suffix}")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{option} {path}: there is no folder {path.absolute().parent}")
