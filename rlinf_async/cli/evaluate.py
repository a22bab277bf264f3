"""``rlinf-async evaluate``: a trained policy acts again, a trained model answers again."""

from __future__ import annotations

import contextlib
import pathlib
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click
import msgspec
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from rlinf_async.cli.jobs import Session
from rlinf_async.cli.runs import NO_TERMINAL_WIDTH, as_usage
from rlinf_async.cli.train import config_of, job_of, sorted_tokens
from rlinf_async.config import ConfigError, Document, UsageError
from rlinf_async.config.load import path_of
from rlinf_async.observe.run_folder import MARKER, check_is_run
from rlinf_async.runtime.jobs import AnsweringJob, Job

if TYPE_CHECKING:  # what a job needs is loaded for that job
    from rlinf_async.observe.evaluations import Evaluated
    from rlinf_async.runtime.jobs.embodied.playing import TrainedPolicy
    from rlinf_async.runtime.jobs.embodied.settings import EnvironmentSettings
    from rlinf_async.workers.env import EvaluatedEpisode

TRAINED: Final = "trained"
"""name, as of a checkpoint, of the model that a run leaves at its end"""
OWN: Final = "data"
"""name of the set that ``--data...`` describes"""
MAY_DIFFER: Final = ("evaluation", "rollout", "reward", "episode", "cluster")
"""sections that an evaluation has another use for than a training"""
INHERITED: Final = (
    *("split", "prompt_column", "reference_column", "verifier", "verifier_column", "chat"),
    "image_column",
    *("chat_template", "chat_options", "system_prompt", "max_prompt_tokens", "too_long"),
)
"""settings of a run's data that hold for other data, too"""

_file = click.Path(path_type=pathlib.Path, dir_okay=False)


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": True},
    options_metavar="[OPTIONS] [--section.field VALUE]...",
)
@click.argument("tokens", nargs=-1, type=click.UNPROCESSED, metavar="RUN|FOLDER")
@click.option(
    "--checkpoint",
    metavar="NAME",
    help="This one (version-000010, 10, best; trained: the model at the end), not the newest.",
)
@click.option(
    "--episodes", type=click.IntRange(min=1), help="As in the run's own evaluation when left out."
)
@click.option(
    "--seed", type=click.IntRange(min=0), help="The same, of the episodes, or of the answers."
)
@click.option("--pictures", metavar="FILE.png", type=_file, help="Six pictures of an episode.")
@click.option("--video", metavar="FILE.mp4", type=_file, help="The same episode as a video.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
@click.pass_obj
def evaluate(
    session: Session,
    tokens: tuple[str, ...],
    checkpoint: str | None,
    episodes: int | None,
    seed: int | None,
    pictures: pathlib.Path | None,
    video: pathlib.Path | None,
    as_json: bool,
) -> None:
    """Evaluate what a run has trained, or the language model in a folder.

    The deterministic policy of a run in environments acts in them: the episodes are those of the
    run's own evaluation, unless another number or seed is given. Pictures and video show the first
    that succeeded; where none did, or the environment does not say, the one with the largest
    return.

    A language model answers the prompts of the run's own evaluation, or those that are given:
    --data.path FILE --data.verifier NAME, with --samples, --temperature and the other settings of
    an evaluation set.
    """
    _check_suffix("--pictures", pictures, ".png")
    _check_suffix("--video", video, ".mp4")
    folder, settings = _folder_of(tokens)
    films = {"--pictures": pictures, "--video": video}
    if (folder / "config.json").is_file() and not (folder / MARKER).exists():
        what = _Model(folder, settings, None, seed)
        if checkpoint is not None:
            raise UsageError(f"--checkpoint: {folder} is a model, not a run: leave it out")
        document = _of_model(what)
    else:
        with as_usage():
            check_is_run(folder)
        what = _Model(folder, settings, checkpoint, seed)
        document = Document.read(str(folder / "config.toml"))
    job = job_of(session, document)
    if isinstance(job, AnsweringJob):
        given = [name for name, path in films.items() if path is not None]
        given += ["--episodes"] if episodes is not None else []
        if given:
            raise UsageError(f"{given[0]}: a language model acts in no environment: leave it out")
        _print_answers(what, *_answers(job, document, what), as_json=as_json)
        return
    if settings:
        raise UsageError(
            f"--{next(iter(settings))}: a policy is evaluated with the settings of its run: leave "
            "it out"
        )
    paths = [path for path in films.values() if path is not None]
    trained = trained_by(job, document, folder, single=bool(paths))
    played, shown = _play(trained, folder, checkpoint, episodes, seed, paths)
    _print_played(folder, played, shown, as_json=as_json)


def _folder_of(tokens: Sequence[str]) -> tuple[pathlib.Path, dict[str, str | None]]:
    """The folder, and ``{"section.field": "value"}``."""
    folders, settings = sorted_tokens(tokens)
    if len(folders) != 1:
        found = f", found {len(folders)}: {', '.join(folders)}" if folders else ""
        raise click.UsageError(f"which run? Give one folder of a run, or of a model{found}.")
    return pathlib.Path(folders[0]).expanduser(), settings


# ---- language models


class _Model(NamedTuple):
    """What is to be evaluated, and how."""

    folder: pathlib.Path
    """of a run, or of the model itself"""
    settings: Mapping[str, str | None]
    checkpoint: str | None
    seed: int | None


def _of_model(what: _Model) -> Document:
    """The configuration for a model's folder; its data are described by settings."""
    if not any(path_of(name)[0] == "data" for name in what.settings):
        raise UsageError(
            f"{what.folder} is a model: which prompts is it to answer? Give --data.path FILE "
            "--data.verifier NAME, or --data.tasks"
        )
    document = Document("command line", "")
    document.tables |= {
        "job": "language_rl",
        "name": what.folder.name,
        "model": {"path": str(what.folder)},
        "data": {},
        "training": {"iterations": 1, "prompts": 1},
        "evaluation": {"samples": 0},
    }
    return document


def _with_data(document: Document, what: _Model) -> dict[str, str | None]:
    """Put the prompts that ``--data...`` describes in the place of those of the configuration;
    return the other settings.

    Raises:
        UsageError: a setting that no evaluation has a use for.
    """
    from rlinf_async.runtime.jobs.language.config import EvaluationSetConfig

    of_a_set = {*EvaluationSetConfig.__struct_fields__}
    of_model = not (what.folder / MARKER).exists()
    own, others = dict[str, str | None](), dict[str, str | None]()
    for name, text in what.settings.items():
        path = path_of(name)
        if path[0] in of_a_set:
            own[name] = text
        elif path[0] in MAY_DIFFER or (of_model and path == ("model", "tokenizer")):
            others[name] = text
        else:
            raise UsageError(
                f"--{name}: an evaluation has no use for it; it takes settings of "
                f"{', '.join(MAY_DIFFER)} and data, and those of a set: "
                f"{', '.join(f'--{one}' for one in sorted(of_a_set - {'data'}))}"
            )
    data = {name: text for name, text in own.items() if path_of(name)[0] == "data"}
    if own and not data:
        raise UsageError(
            f"--{next(iter(own))} is of the prompts that --data.path or --data.tasks names: give "
            "one of them, or set it as --evaluation.sets.NAME..."
        )
    if not own:
        return others
    tables, names = document.tables, {path_of(name)[1:2] for name in data}
    base = {name: one for name, one in tables["data"].items() if name in INHERITED}
    if ("tasks",) in names:
        base.pop("image_column", None)
    if names & {("verifier",), ("verifier_column",), ("tasks",)}:
        base = {name: one for name, one in base.items() if not name.startswith("verifier")}
    evaluation = {**tables.get("evaluation", {}), "samples": 0, "sets": {OWN: {"data": base}}}
    for name in ("every", "target_accuracy", "target_reward"):
        evaluation.pop(name, None)
    tables["evaluation"] = evaluation
    if of_model:
        others |= data  # a configuration has data: the same
    return others | {f"evaluation.sets.{OWN}.{name}": text for name, text in own.items()}


def _answers(
    job: AnsweringJob, document: Document, what: _Model
) -> tuple[str | None, int, Sequence[Evaluated]]:
    """Name of the checkpoint, seed, and figures."""
    from rlinf_async.runtime.jobs.swapping import with_swaps

    overrides = _with_data(document, what)
    config = config_of(job, document, overrides)
    config, _ = with_swaps(config, what.folder if (what.folder / MARKER).exists() else None)
    seed = config.seed if what.seed is None else what.seed
    with _weights(what, config) as (name, folder), _counted() as count:
        try:
            found = job.answers(config, folder, seed=seed, on_answer=count)
        except ConfigError as error:
            raise document.located(error, overrides) from error
    version = int(name.rpartition("-")[2]) if name and name != TRAINED else None
    return name, seed, [msgspec.structs.replace(one, version=version) for one in found]


@contextlib.contextmanager
def _weights(what: _Model, config: Any) -> Iterator[tuple[str | None, pathlib.Path]]:
    """The name of the checkpoint, and a folder with its model while the block runs."""
    run = what.folder
    if not (run / MARKER).exists():
        yield None, run
        return
    if what.checkpoint == TRAINED:
        if not (run / TRAINED).is_dir():
            raise UsageError(f"--checkpoint {TRAINED}: {run} has left no model: it has not ended")
        yield TRAINED, run / TRAINED
        return
    from rlinf_async.runtime.jobs.checkpoints import checkpoint_of

    checkpoint = checkpoint_of(run, what.checkpoint)
    if not config.rollout.part.has_weights:  # said where it is looked at
        yield checkpoint.name, checkpoint
        return
    with tempfile.TemporaryDirectory(prefix="rlinf-async-evaluate-") as into:
        folder = pathlib.Path(into) / "model"
        _export(checkpoint, folder, config.actor.publish_precision)
        yield checkpoint.name, folder


def _export(checkpoint: pathlib.Path, folder: pathlib.Path, precision: str) -> None:
    """Write the model of a checkpoint as rollout workers were given it."""
    import torch

    from rlinf_async.backends.checkpoint.exporting import Export
    from rlinf_async.backends.checkpoint.folders import CheckpointError

    try:
        Export(checkpoint, dtype=getattr(torch, precision)).run(folder)
    except CheckpointError as error:
        raise UsageError(str(error)) from error


@contextlib.contextmanager
def _counted() -> Iterator[Any]:
    """A bar of the answers in a terminal; nothing elsewhere."""
    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("answers", total=None)
        yield lambda done, wanted: progress.update(task, completed=done, total=wanted)


def _print_answers(
    what: _Model,
    checkpoint: str | None,
    seed: int,
    found: Sequence[Evaluated],
    *,
    as_json: bool,
) -> None:
    if as_json:
        told = {
            "folder": str(what.folder),
            "checkpoint": checkpoint,
            "seed": seed,
            "sets": {one.name: one for one in found},
        }
        click.echo(msgspec.json.format(msgspec.json.encode(told)).decode())
        return
    name = f"{what.folder}{f', {checkpoint}' if checkpoint else ''}"
    click.echo(f"{name}: {sum(one.samples for one in found)} answers, seed {seed}")
    table = Table("set", "prompts", "answers", "figure", "value", "95 % interval")
    for one in found:
        figures = {"accuracy": one.accuracy, "mean reward": one.reward}
        figures |= {f"pass@{k}": each for k, each in one.pass_at.items()}
        if one.accuracy is not None:
            del figures["mean reward"]
        head = (one.name, str(one.prompts), str(one.samples))
        for figure, each in figures.items():
            if each is not None:
                known = each.low is not None and each.high is not None
                interval = f"{each.low:.3f} to {each.high:.3f}" if known else ""
                table.add_row(*head, figure, f"{each.value:.3f}", interval)
                head = ("", "", "")
        if one.unscored:
            table.add_row(*head, "not scored", str(one.unscored), "")
    console = Console()
    (console if console.is_terminal else Console(width=NO_TERMINAL_WIDTH)).print(table)
    for one in found:
        if one.unscored:
            click.echo(f"{one.name}: the first that was not scored: {one.why}", err=True)


# ---- policies


def _print_played(
    run: pathlib.Path, played: Mapping[str, Any], shown: Sequence[str], *, as_json: bool
) -> None:
    if as_json:
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
    trained: TrainedPolicy,
    run: pathlib.Path,
    checkpoint: str | None,
    count: int | None,
    seed: int | None,
    films: Sequence[pathlib.Path],
) -> tuple[dict[str, Any], list[str]]:
    """The figures, and a line for each file that was written."""
    from rlinf_async.runtime.jobs.checkpoints import checkpoint_of
    from rlinf_async.runtime.jobs.embodied.playing import play

    folder, wanted = checkpoint_of(run, checkpoint), trained.config.evaluation
    first = wanted.seed if seed is None else seed
    played = play(trained, folder, episodes=count or wanted.episodes, seed=first, films=films)
    lines = []
    for path, made in zip(films, played.films, strict=True):
        ended = {True: ": success", False: ": no success", None: ""}[made.successes[0]]
        lines.append(f"{path}: episode {played.shown}, {made.frames} frames{ended}")
    return _figures(run, folder.name, first, played.episodes, trained.config), lines


def trained_by(
    job: Job, document: Document, run: pathlib.Path, *, single: bool = False
) -> TrainedPolicy:
    """What the run's job needs to read its policy; ``single``: in environments that render."""
    from rlinf_async.runtime.jobs.embodied.playing import PlayingJob

    if not isinstance(job, PlayingJob):
        raise UsageError(
            f"{run} is a run of {document.tables['job']!r}, whose policy acts in no environment; "
            "summary.json has its evaluation"
        )
    config = config_of(job, document, {})
    try:
        trained = job.trained(config)
        if single:
            trained = trained._replace(config=_shown_singly(trained.config))
        return trained
    except ConfigError as error:
        raise document.located(error) from error


def _shown_singly(config: EnvironmentSettings) -> EnvironmentSettings:
    """The settings with the environment that evaluations judge made one by one."""
    from rlinf_async.runtime.jobs.embodied.playing import single_env

    replace = msgspec.structs.replace
    env = single_env(config.judging_env)
    if config.evaluation.env is None:
        return replace(config, env=env)
    return replace(config, evaluation=replace(config.evaluation, env=env))


def _figures(
    run: pathlib.Path,
    checkpoint: str,
    seed: int,
    episodes: Sequence[EvaluatedEpisode],
    config: EnvironmentSettings,
) -> dict[str, Any]:
    from rlinf_async.runtime.jobs.checkpoints import load_progress
    from rlinf_async.runtime.jobs.embodied.run import (
        EmbodiedProgress,
        evaluated_rate,
        mean_return,
        unreported,
    )

    progress = load_progress(run / "checkpoints", EmbodiedProgress)
    rate = evaluated_rate(episodes, progress, config)
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
