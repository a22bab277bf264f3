"""``rlinf-async train`` and ``rlinf-async check``."""

from __future__ import annotations

import contextlib
import difflib
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.table import Table

from rlinf_async.cli.failures import FAILED, OK
from rlinf_async.cli.jobs import Session
from rlinf_async.config import ConfigError, Document, UsageError, to_toml
from rlinf_async.config.load import Overrides
from rlinf_async.observe.run_folder import MARKER, foreign_entries
from rlinf_async.runtime.jobs import InspectingJob, Job, PlacingJob
from rlinf_async.runtime.jobs.checkpoints import resuming_from
from rlinf_async.runtime.jobs.placement import PlacementPlan
from rlinf_async.runtime.launching import stated_devices
from rlinf_async.workers.base import Device

JOB = "job"
SHOWN_RANKS = 64
"""workers of a role that are shown in full; of more only the first half of as many, and the last"""
NO_RUN = "--resume needs --out DIR: which run is to go on?"
RECORDED = "recording.channels"
NOT_RESUMED = "--checkpoint chooses where to resume: give --resume, too"

_settings = {"ignore_unknown_options": True, "allow_interspersed_args": True}


@click.command(
    context_settings=_settings,
    options_metavar="[OPTIONS] [--section.field VALUE]...",
)
@click.option(
    "--out", metavar="DIR", type=click.Path(path_type=pathlib.Path), help="The run folder."
)
@click.option("--resume", is_flag=True, help="Go on where the run in --out DIR was.")
@click.option(
    "--checkpoint",
    metavar="NAME",
    help="With --resume: from this one (version-000010, 10, best), not from the newest.",
)
@click.option("--seed", type=int, help="The same as the setting 'seed' in the file.")
@click.option(
    "--record",
    metavar="CHANNELS",
    help="Write down what passes these channels: generated,scored, or all.",
)
@click.option("--traceback", is_flag=True, help="Show the driver's traceback if the run fails.")
@click.argument("tokens", nargs=-1, type=click.UNPROCESSED, metavar="FILE.toml")
@click.pass_obj
def train(
    session: Session,
    out: pathlib.Path | None,
    resume: bool,
    checkpoint: str | None,
    seed: int | None,
    record: str | None,
    traceback: bool,
    tokens: tuple[str, ...],
) -> int:
    """Run the job that FILE.toml describes.

    Every setting of the file can be given here too, by its path: --actor.fsdp.optimizer.lr 1e-4.
    Exit code 1 where the run failed, or fell short of the target that the file sets.
    """
    session.traceback = traceback
    if resume and out is None:
        raise UsageError(NO_RUN)
    if checkpoint is not None and not resume:
        raise UsageError(NOT_RESUMED)
    file, overrides = split_tokens(tokens, out)
    if seed is not None:
        overrides["seed"] = str(seed)
    if record is not None:
        if RECORDED in overrides:
            raise UsageError(f"--record and --{RECORDED} are the same: give one of them")
        overrides[RECORDED] = _listed(record)
    job, config = _read(session, file, overrides, _options(train))
    _check_folder(out, resume)
    resumed: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if out is not None and checkpoint is not None:
        resumed = resuming_from(out, checkpoint)
    with resumed:
        summary = job.run(config, out, resume)
    return FAILED if summary.outcome == "fell short" else OK


@click.command(
    context_settings=_settings,
    options_metavar="[OPTIONS] [--section.field VALUE]...",
)
@click.option("--show", is_flag=True, help="Print every setting with the value a run would have.")
@click.option(
    "--devices", metavar="MACHINE", help="Check for another machine: 8xH100, 2x8xH100, 16xcpu."
)
@click.argument("tokens", nargs=-1, type=click.UNPROCESSED, metavar="FILE.toml")
@click.pass_obj
def check(session: Session, show: bool, devices: str | None, tokens: tuple[str, ...]) -> None:
    """Say whether the run that FILE.toml describes could start; start nothing.

    Prints which worker would get which device.
    """
    file, overrides = split_tokens(tokens)
    machine = None if devices is None else _stated(devices)
    job, config = _read(session, file, overrides, _options(check), machine, inspect=not show)
    if show:
        click.echo(to_toml(config), nl=False)
        return
    if isinstance(job, PlacingJob):
        _print_plan(job.plan(config, machine))
    click.echo(f"{file}: ok")


def _listed(names: str) -> str:
    """Names with commas between them, as a setting has them; some have spaces."""
    return msgspec.json.encode([name.strip() for name in names.split(",")]).decode()


def _print_plan(plan: PlacementPlan) -> None:
    """Print a table of the workers, and the accelerators that none of them has."""
    table = Table("role", "rank", "host", "device", "memory")
    for row in plan.rows():
        count = plan.count(row.role)
        if count > SHOWN_RANKS and SHOWN_RANKS // 2 <= row.rank < count - 1:
            if row.rank == count - 2:
                table.add_row(row.role, "...", "", "", "")
            continue
        hosts = {device.host for device in row.devices}
        devices = ", ".join(str(device) for device in row.devices)
        share = "" if row.memory_share is None else f"{row.memory_share:.0%}"
        if row.in_turns:
            share = f"{share} in turns".strip()
        table.add_row(row.role, str(row.rank), "".join(hosts) or "-", devices or "cpu", share)
    console = Console()
    console.print(table)
    if unused := plan.unused:
        names = [f"{one.host} {one}".strip() for one in unused[:SHOWN_RANKS]]
        more = f" and {len(unused) - len(names)} more" if len(unused) > len(names) else ""
        console.print(f"not used: {', '.join(names)}{more}")


def _stated(text: str) -> tuple[Device, ...]:
    try:
        return stated_devices(text)
    except ValueError as error:
        raise UsageError(f"--devices: {error}") from None


def split_tokens(
    tokens: Sequence[str], out: pathlib.Path | None = None
) -> tuple[str, dict[str, str | None]]:
    """The configuration file and ``{"section.field": "value"}``.

    ``--section.field=value`` is the same; a flag without a value has None. ``out`` is the run
    folder, if one was named: a file that is missing may be in there.
    Raises `click.UsageError` unless there is exactly one file.
    """
    files, overrides = sorted_tokens(tokens)
    return _only(files, out), overrides


def sorted_tokens(tokens: Sequence[str]) -> tuple[list[str], dict[str, str | None]]:
    """The files or folders among the words of a command, and ``{"section.field": "value"}``."""
    files: list[str] = []
    overrides: dict[str, str | None] = {}
    rest = list(tokens)
    while rest:
        token = rest.pop(0)
        if not token.startswith("--"):
            files.append(token)
            continue
        name, equals, value = token.removeprefix("--").partition("=")
        given = equals or (rest and not rest[0].startswith("--"))
        overrides[name] = (value if equals else rest.pop(0)) if given else None
    return files, overrides


def _only(files: Sequence[str], out: pathlib.Path | None) -> str:
    if len(files) == 1:
        return files[0]
    if not files:
        kept = None if out is None else out / "config.toml"
        if kept is not None and kept.is_file():
            raise click.UsageError(
                f"which configuration? Give the FILE.toml of the run; {kept} is what it ran with."
            )
        raise click.UsageError("which configuration? Give a FILE.toml (see examples/).")
    raise click.UsageError(
        f"one configuration file at a time, found {len(files)}: {', '.join(files)}. "
        "A setting is written --section.field value."
    )


def _read(
    session: Session,
    file: str,
    overrides: Overrides,
    options: Iterable[str],
    machine: Sequence[Device] | None = None,
    inspect: bool = False,
) -> tuple[Job, Any]:
    """The job that a file names, and its checked configuration.

    ``options`` are those of the command: a misspelled option is read as a setting. ``machine``: the
    devices of another machine, to check for. ``inspect``: check what the run would read, too.
    """
    document = Document.read(file)
    job = job_of(session, document)
    try:
        config = config_of(job, document, overrides)
    except ConfigError as error:
        raise _with_options(error, overrides, options) from error
    try:
        if machine is None:
            job.check(config)
        elif isinstance(job, PlacingJob):
            job.check(config, machine)
        else:
            raise UsageError(f"--devices: {type(job).__name__} places no workers on devices")
        if inspect and isinstance(job, InspectingJob):
            job.inspect(config, machine)
    except ConfigError as error:
        raise document.located(error, overrides) from error
    return job, config


def _options(command: click.Command) -> list[str]:
    return [name for one in command.params if isinstance(one, click.Option) for name in one.opts]


def job_of(session: Session, document: Document) -> Job:
    """The job that a file names; raises `ConfigError` where there is none."""
    name = document.tables.get(JOB)
    if not isinstance(name, str):
        raise ConfigError(
            "the file must say which job it is for, at its top: "
            f'{JOB} = "embodied_ppo" or {JOB} = "language_rl"',
            path=(JOB,),
            origin=document.name,
        )
    try:
        return session.find_job(name)
    except ConfigError as error:
        raise document.located(error) from None


def _with_options(error: ConfigError, overrides: Overrides, options: Iterable[str]) -> ConfigError:
    """The error for ``--outt runs/a``, read as a setting: with the option that may be meant."""
    flag = "--" + ".".join(error.path)
    if len(error.path) != 1 or error.path[0] not in overrides:
        return error
    close = difflib.get_close_matches(flag, list(options), n=1)
    misspelled = close and close[0] != flag  # an option may set a setting of its name: --seed
    hint = f"; did you mean the option {close[0]}?" if misspelled else ""
    return ConfigError(error.problem + hint, path=error.path, origin=error.origin)


def config_of(job: Job, document: Document, overrides: Overrides) -> Any:
    """The document as the job's Struct, which need not have the field ``job``.

    Raises:
        ConfigError: of a name, a type or a value.
    """
    name = document.tables.get(JOB)
    if overrides.get(JOB, name) != name:
        raise ConfigError(
            f"the file is for {name!r}, and its settings are that job's: leave it out",
            path=(JOB,),
            origin=f"command line (--{JOB})",
        )
    names = {field.encode_name for field in msgspec.structs.fields(job.config_type)}
    read = document if JOB in names else document.without(JOB)
    return read.to(job.config_type, overrides)


def _check_folder(out: pathlib.Path | None, resume: bool) -> None:
    """Refuse a folder that holds a run or other files; a run is never overwritten."""
    if out is None:
        return
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out}: is a file; name a folder")
    if resume:
        return
    if (out / MARKER).exists():
        raise UsageError(
            f"--out {out}: holds a run already; add --resume to go on with it, or name another"
        )
    foreign = foreign_entries(out) if out.is_dir() else []
    if foreign:
        more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
        raise UsageError(
            f"--out {out}: is no run's folder and holds {foreign[0]!r}{more}; "
            "name an empty or a new folder"
        )
