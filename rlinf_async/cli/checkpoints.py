"""Commands that need no run: ``export`` and ``reshard`` of a checkpoint, and ``bench`` against the
bars and against others.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import pathlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, Literal, NamedTuple, cast

import click
from click.core import ParameterSource
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from rlinf_async.cli.jobs import Session
from rlinf_async.cli.train import job_of
from rlinf_async.config import Document, UsageError
from rlinf_async.config.counts import MOST_WORKERS
from rlinf_async.observe.files import ObserveError, explaining
from rlinf_async.observe.model_card import write_card
from rlinf_async.observe.run_folder import MARKER
from rlinf_async.runtime.jobs import Job

CHECKOUT = pathlib.Path(__file__).resolve().parents[2]
"""Where ``benchmarks/`` lies beside the package, in a source checkout"""
UNITS = ("bytes", "KiB", "MiB", "GiB")

_folder = click.Path(path_type=pathlib.Path)
_ranks = click.IntRange(1, MOST_WORKERS)


OF_POLICIES = ("torchscript", "pt2", "onnx")
"""forms that a policy for robots can have, and a language model cannot"""
LEROBOT = "lerobot"
OF_LANGUAGE = ("dtype", "model", "shard_size")
"""options of language models alone"""


@click.command()
@click.argument("checkpoint", metavar="RUN|CHECKPOINT|DEMONSTRATIONS", type=_folder)
@click.argument("out", type=_folder)
@click.option(
    "--to",
    "form",
    type=click.Choice(["folder", *OF_POLICIES, LEROBOT]),
    default="folder",
    show_default=True,
    help="Of a policy for robots: its weights, or one graph with everything in it, or, of one "
    "that lerobot defines (smolvla, pi0), its folder. Of demonstrations: lerobot.",
)
@click.option(
    "--checkpoint",
    "name",
    metavar="NAME",
    help="Of the run: version-000010, or 10, or best; the newest when left out.",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    help="Of the weights; as they were trained when left out.",
)
@click.option(
    "--model",
    type=_folder,
    help="Folder with config.json and tokenizer; those in the checkpoint when left out.",
)
@click.option(
    "--shard-size",
    type=click.FloatRange(min=0, min_open=True),
    default=5.0,
    show_default=True,
    help="Largest file, in GB.",
)
@click.option(
    "--fps",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    help="Of demonstrations: steps of the environment in a second, for LeRobot's time stamps.",
)
@click.pass_context
def export(
    context: click.Context,
    checkpoint: pathlib.Path,
    out: pathlib.Path,
    form: str,
    name: str | None,
    dtype: Literal["float32", "bfloat16", "float16"] | None,
    model: pathlib.Path | None,
    shard_size: float,
    fps: int,
) -> None:
    """Write what a run has trained as a folder OUT that others load.

    A language model becomes a Hugging Face folder, for transformers and vLLM. A policy for robots
    leaves with its spaces, statistics and action post-processing: Policy.load reads it without the
    framework's runtime, and ONNX Runtime or libtorch its graph. Name a run, for its newest
    checkpoint or that of --checkpoint, or the folder of a checkpoint. A folder of demonstrations
    becomes a data set in LeRobot's format.
    """
    from rlinf_async.data.demonstrations import FILE

    if (checkpoint / FILE).is_file():
        _refuse_given(context, "of a checkpoint, not of demonstrations", "name", *OF_LANGUAGE)
        _export_demonstrations(checkpoint, out, form, fps)
        return
    _refuse_given(context, "of demonstrations, not of a checkpoint", "fps")
    if name is not None:
        checkpoint = _named_checkpoint(checkpoint, name)
    found = _run_of_policy(context.obj, checkpoint)
    if found is not None:
        _refuse_given(context, "of language models, not of policies", *OF_LANGUAGE)
        _export_policy(found, checkpoint, out, form)
        return
    if form != "folder":
        raise UsageError(
            f"--to {form}: {checkpoint} is not of a run in environments; a language model is "
            "exported as a folder: leave it out"
        )
    if not shard_size < math.inf:
        raise UsageError(f"--shard-size {shard_size}: must be a finite number")
    with _as_usage(checkpoint, out):
        import torch

        from rlinf_async.backends.checkpoint.exporting import Export

        with _checking(checkpoint):
            made = Export(
                checkpoint,
                dtype=None if dtype is None else getattr(torch, dtype),
                model=model,
                shard_bytes=max(1, int(shard_size * 1e9)),
            )
        with _progress("exporting", made.total_bytes) as advance:
            done = made.run(out, advance)
        _write_card(made.checkpoint, out)
    click.echo(f"{out}: {done.tensors} tensors, {_size(done.bytes)}")


def _refuse_given(context: click.Context, of: str, *names: str) -> None:
    """Refuse options of these names that were given."""
    for name in names:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            option = "checkpoint" if name == "name" else name.replace("_", "-")
            raise UsageError(f"--{option}: is {of}: leave it out")


def _export_demonstrations(source: pathlib.Path, out: pathlib.Path, form: str, fps: int) -> None:
    from rlinf_async.data.config import DataError
    from rlinf_async.data.lerobot_export import write_lerobot

    if form != LEROBOT:
        raise UsageError(
            f"--to {form}: {source} holds demonstrations, which can be written as a data set in "
            "LeRobot's format: say --to lerobot"
        )
    with _as_usage(source, out):
        try:
            steps = write_lerobot(source, out, fps)
        except DataError as error:
            raise UsageError(str(error)) from error
    click.echo(f"{out}: {steps} steps, a data set in LeRobot's format (v3.0)")


def _named_checkpoint(run: pathlib.Path, name: str) -> pathlib.Path:
    """The folder of a checkpoint of the run in this folder."""
    from rlinf_async.runtime.jobs.checkpoints import named_checkpoint

    if not (run / MARKER).is_file():
        raise UsageError(f"--checkpoint {name}: {run} is not the folder of a run: leave it out")
    return named_checkpoint(run, name)


class _PolicyRun(NamedTuple):
    """A run in environments."""

    job: Job
    document: Document
    folder: pathlib.Path
    checkpoint: str | None
    """None: the newest"""


def _run_of_policy(session: Session, path: pathlib.Path) -> _PolicyRun | None:
    """The run in environments of this folder, or of this checkpoint; None for anything else."""
    from rlinf_async.runtime.jobs.embodied.playing import PlayingJob

    single = path.parent.name == "checkpoints"
    run = path.parent.parent if single else path
    if not ((run / MARKER).is_file() and (run / "config.toml").is_file()):
        return None
    document = Document.read(str(run / "config.toml"))
    job = job_of(session, document)
    if not isinstance(job, PlayingJob):
        return None
    return _PolicyRun(job, document, run, path.name if single else None)


def _export_policy(run: _PolicyRun, source: pathlib.Path, out: pathlib.Path, form: str) -> None:
    from rlinf_async.cli.evaluate import trained_by
    from rlinf_async.runtime.jobs.checkpoints import checkpoint_of
    from rlinf_async.runtime.jobs.embodied.leaving import COMPARED, leave

    checkpoint = checkpoint_of(run.folder, run.checkpoint, to="export")
    with _as_usage(source, out):
        trained = trained_by(run.job, run.document, run.folder)
        left = leave(trained, checkpoint, out, cast(Any, form))
    click.echo(
        f"{out}: policy {left.name!r} of {left.env}, version {left.version}, as {form}, "
        f"{_size(left.bytes)}"
    )
    click.echo(
        f"largest difference to the trained policy: {left.difference:.1e} ({COMPARED} observations)"
    )
    click.echo(
        f"one action takes {1e3 * left.median:.3f} ms; 99 of 100 take at most "
        f"{1e3 * left.slowest:.3f} ms"
    )


def _write_card(checkpoint: pathlib.Path, out: pathlib.Path) -> None:
    """Write the card of the model of a checkpoint that lies in a run's folder."""
    run, number = checkpoint.parent.parent, checkpoint.name.rpartition("-")[2]
    if (run / "config.toml").is_file() and number.isdigit():
        write_card(run, out, version=int(number))


@click.command()
@click.argument("checkpoint", metavar="IN", type=_folder)
@click.argument("out", type=_folder)
@click.option("--dp", type=_ranks, default=1, show_default=True, help="Data-parallel ranks.")
@click.option("--tp", type=_ranks, default=1, show_default=True, help="Tensor-parallel ranks.")
def reshard(checkpoint: pathlib.Path, out: pathlib.Path, dp: int, tp: int) -> None:
    """Write the checkpoint IN anew as OUT, as DP x TP ranks would have written it.

    Weights, moments and what each rank kept of its own; nothing is lost, so the way back gives the
    same bits. A critic's checkpoint inside IN is cut too, all else in it is copied. IN is a
    checkpoint's folder; or a run's, and OUT then is a run's folder too, with the newest checkpoint:
    `train --resume` goes on from it.
    """
    with _as_usage(checkpoint, out):
        from rlinf_async.backends.checkpoint.exporting import Resharding

        with _checking(checkpoint):
            made = Resharding(checkpoint, dp=dp, tp=tp)
        with _progress(f"resharding to dp={dp} tp={tp}", made.total_bytes) as advance:
            done = made.run(out, advance)
    click.echo(f"{out}: {done.ranks} ranks (dp={dp} tp={tp}), {_size(done.bytes)}")
    for what, names in (("cut too", done.cut), ("copied", done.copied)):
        if names:
            click.echo(f"{what}: {', '.join(names)}")
    if done.of_run:
        click.echo(f"to go on from it: rlinf-async train FILE.toml --resume --out {out}")


@contextlib.contextmanager
def _as_usage(source: pathlib.Path, out: pathlib.Path) -> Iterator[None]:
    """Report checkpoints and sizes that do not fit as wrong input, and a full disk, too."""
    try:
        from rlinf_async.backends.checkpoint.streaming import check_new

        check_new(out)  # before gigabytes are read
        yield
    except OSError as error:
        path = pathlib.Path(error.filename or out)
        try:
            with explaining("read" if path.is_relative_to(source) else "write", path):
                raise
        except ObserveError as explained:
            raise UsageError(str(explained)) from error
    except Exception as error:
        from rlinf_async.backends.checkpoint.folders import CheckpointError
        from rlinf_async.parallel import ParallelError

        if isinstance(error, (CheckpointError, ParallelError)):
            raise UsageError(str(error)) from error
        raise


@contextlib.contextmanager
def _checking(checkpoint: pathlib.Path) -> Iterator[None]:
    """Show in a terminal that the checkpoint is being checked: every byte is read first."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(f"checking {checkpoint}"):
        yield


def _size(count: int) -> str:
    """A number of bytes in a readable unit."""
    power = next(at for at in (3, 2, 1, 0) if count >= 1024**at or at == 0)
    return f"{count / 1024**power:.{2 if power else 0}f} {UNITS[power]}"


@contextlib.contextmanager
def _progress(doing: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar in a terminal; nothing elsewhere."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(doing, total=total)
        yield lambda count: progress.advance(task, count)


@click.command()
@click.argument("name", required=False)
@click.option("--list", "listed", is_flag=True, help="Name the benches, one line each.")
@click.option("--peers", is_flag=True, help="Measure the others too (installs them once).")
@click.option(
    "--case", "cases", multiple=True, help="Only cases whose name holds this; repeatable."
)
@click.option("--repetitions", type=click.IntRange(min=1), help="How often each case is run.")
@click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, path_type=pathlib.Path),
    help="Write every measurement to this file.",
)
def bench(
    name: str | None,
    listed: bool,
    peers: bool,
    cases: tuple[str, ...],
    repetitions: int | None,
    json_file: pathlib.Path | None,
) -> int:
    """Run the bench NAME: ours and the others alternating, medians, and each bar's verdict."""
    harness = _bench_harness()
    if listed:
        for one in harness.all_benches():
            click.echo(f"{one.name:12} {one.summary}")
        return 0
    if name is None:
        raise click.UsageError("which bench? --list names them.")
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise UsageError(f"--json {json_file}: the folder {json_file.parent} does not exist")
    code: int = harness.run_bench(
        harness.bench_named(name),
        with_peers=peers,
        cases=cases,
        repetitions=repetitions,
        json_file=json_file,
    )
    return code


def _bench_harness() -> ModuleType:
    """The harness in ``benchmarks/`` of the checkout that is installed."""
    if not (CHECKOUT / "benchmarks" / "harness").is_dir():
        raise UsageError(
            f"no benches in {CHECKOUT / 'benchmarks'}: they come with a source checkout, "
            "installed by 'pip install -e .'"
        )
    sys.path.insert(0, str(CHECKOUT))
    return importlib.import_module("benchmarks.harness")
