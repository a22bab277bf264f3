"""``rlinf-async simulate`` and ``rlinf-async calibrate``."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence

import click
import msgspec
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table

from rlinf_async.cli.train import split_tokens
from rlinf_async.config import ConfigError, Document, UsageError, to_toml
from rlinf_async.scheduling import load_policy
from rlinf_async.simulate import SimulationConfig, SimulationRecord, bounds, on_devices
from rlinf_async.simulate import calibrate as calibration
from rlinf_async.simulate import run as runs

ORACLE = "oracle"
"""name in ``--compare`` that is no policy: what one that knows every length could do"""


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": True},
    options_metavar="[OPTIONS] [--section.field VALUE]...",
)
@click.option("--devices", type=click.IntRange(min=2), help="Devices of the cluster.")
@click.option("--policy", help="The same as the setting 'scheduler.policy' in the file.")
@click.option(
    "--compare",
    metavar="A,B,...",
    help="The same run under these policies, and 'oracle', which knows every length.",
)
@click.option("--oracle", is_flag=True, help="Also what can be had at best, and where time goes.")
@click.option("--sweep", is_flag=True, help="Try every placement; print the best configuration.")
@click.option(
    "--picture",
    type=click.Path(dir_okay=False, path_type=pathlib.Path),
    help="Draw who held which devices when into this PNG file.",
)
@click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, path_type=pathlib.Path),
    help="Write every result to this file.",
)
@click.argument("tokens", nargs=-1, type=click.UNPROCESSED, metavar="FILE.toml")
def simulate(
    devices: int | None,
    policy: str | None,
    compare: str | None,
    oracle: bool,
    sweep: bool,
    picture: pathlib.Path | None,
    json_file: pathlib.Path | None,
    tokens: tuple[str, ...],
) -> int:
    """Simulate the run that FILE.toml describes: real workers, channels and policies, cost models
    instead of computation, and virtual time instead of time."""
    if sweep and picture is not None:
        raise UsageError("--picture: --sweep draws none; simulate the configuration that it prints")
    for option, file in (("--picture", picture), ("--json", json_file)):
        if file is not None and not file.absolute().parent.is_dir():
            raise UsageError(f"{option} {file}: the folder {file.parent} does not exist")
    config = _config(tokens, devices, policy)
    policies = [config.scheduler.policy] if compare is None else _policies(compare)
    knows_all = oracle or ORACLE in policies
    policies = [one for one in policies if one != ORACLE]
    if not policies:
        raise UsageError("--compare oracle: name a policy that is held against it, too")
    if knows_all and sweep:
        raise UsageError("--oracle: simulate the configuration that --sweep prints with it")
    if knows_all and config.work.max_staleness:
        raise UsageError(
            f"{config.name}: work.max_staleness is {config.work.max_staleness}; the oracle plans "
            "iterations one by one, so it needs 0"
        )
    if knows_all and config.episode.turns:
        raise UsageError(
            f"{config.name}: samples are episodes (episode.turns); the oracle plans single answers"
        )
    try:
        configs = [runs.with_policy(config, one) for one in policies]
    except ValueError as error:
        raise UsageError(f"{config.name}: {error}") from None
    if sweep:
        return _compare_candidates(config, policies, json_file)
    records = _run(configs)
    _table(records, _limits(config, records[0], at_best=oracle) if knows_all else {})
    if oracle:
        _causes(records)
    if picture is not None:
        title = f"{config.name}: {config.hardware.devices} devices"
        runs.draw_devices(records, picture, title=title)
        click.echo(f"picture: {picture}")
    _write(records, json_file)
    return 0


def _config(tokens: Sequence[str], devices: int | None, policy: str | None) -> SimulationConfig:
    file, overrides = split_tokens(tokens)
    if policy is not None:
        overrides["scheduler.policy"] = policy
    document = Document.read(file)
    config = document.to(SimulationConfig, overrides)
    try:
        load_policy(config.scheduler.policy, ("scheduler", "policy"))
    except ConfigError as error:
        raise document.located(error, overrides) from None
    if devices is None or devices == config.hardware.devices:
        return config
    try:
        return on_devices(config, devices)
    except ValueError as error:
        raise UsageError(f"--devices {devices}: {error}") from None


def _policies(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise UsageError("--compare: names no policy")
    for name in names:
        if name != ORACLE:
            load_policy(name, ("--compare",))
    return names


def _run(configs: Sequence[SimulationConfig]) -> list[SimulationRecord]:
    records = []
    console = Console(stderr=True)
    with Progress(console=console, transient=True) as progress:
        for config in configs:
            task = progress.add_task(config.scheduler.policy, total=config.work.iterations)

            def advance(_number: int, _seconds: float, task: TaskID = task) -> None:
                progress.advance(task)

            def warn(message: str) -> None:
                console.print(f"warning: {message}")

            records.append(runs.simulate(config, on_step=advance, report=warn))
    return records


def _limits(
    config: SimulationConfig, record: SimulationRecord, *, at_best: bool
) -> dict[str, float]:
    """Return the samples per device-hour that could be had for the lengths of a record."""
    seconds = {ORACLE: bounds.oracle(config, record.lengths).seconds}
    if at_best:
        seconds["(lengths unknown)"] = bounds.all_alike(config, record.lengths).seconds
        seconds["(at best)"] = bounds.at_best(config, record.lengths)
    devices = config.hardware.devices
    return {name: record.result.samples * 3600.0 / devices / one for name, one in seconds.items()}


def _causes(records: Sequence[SimulationRecord]) -> None:
    """Print what the device-seconds of each policy went into."""
    causes = sorted({name for record in records for name in record.result.spent})
    table = Table(title="share of all device-seconds")
    for name in ("policy", *causes):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for record in records:
        shares = (record.result.spent.get(name, 0.0) for name in causes)
        table.add_row(record.result.policy, *(f"{share:.1%}" for share in shares))
    Console(width=150).print(table)


def _table(records: Sequence[SimulationRecord], limits: Mapping[str, float]) -> None:
    table = Table()
    names = ["policy", "samples/device-h", "gain", "step s", "rollout idle", "actor idle"]
    names += ["lag", "device-h", "cost", "decisions", "took s"]
    episodes = any(record.result.turns for record in records)
    names += ["samples/s", "turns", "tool s", "cut"] * episodes
    names += ["of oracle"] * bool(limits)
    for name in names:
        table.add_column(name, justify="left" if name == "policy" else "right")
    base = records[0].result.samples_per_device_hour
    for record in records:
        result = record.result
        acted = [
            f"{result.samples_per_second:,.2f}",
            f"{result.turns / result.samples:.2f}",
            f"{result.tool_seconds / result.samples:.2f}",
            f"{result.cut / result.samples:.0%}",
        ] * episodes
        share = [f"{result.samples_per_device_hour / limits[ORACLE]:.0%}"] if limits else []
        table.add_row(
            result.policy,
            f"{result.samples_per_device_hour:,.1f}",
            f"{result.samples_per_device_hour / base:.2f}",
            f"{result.seconds / len(result.step_seconds):,.1f}",
            f"{result.bubbles.get('rollout', 0.0):.0%}",
            f"{result.bubbles.get('actor', 0.0):.0%}",
            f"{result.lag_mean:.2f}",
            f"{result.device_hours:,.1f}",
            f"{result.cost:,.0f}",
            str(result.decisions),
            f"{result.real_seconds:.1f}",
            *acted,
            *share,
        )
    for name, rate in limits.items():
        table.add_row(name, f"{rate:,.1f}", f"{rate / base:.2f}")
    Console(width=170).print(table)


def _compare_candidates(
    config: SimulationConfig, policies: Sequence[str], json_file: pathlib.Path | None
) -> int:
    configs = list(runs.candidates(config, policies))
    if not configs:
        raise UsageError(
            f"no placement of actor and rollout fits {config.hardware.devices} devices"
        )
    records: list[SimulationRecord] = []

    def show(one: SimulationConfig, record: SimulationRecord) -> None:
        records.append(record)
        hardware, rate = one.hardware, record.result.samples_per_device_hour
        click.echo(
            f"{rate:10.1f} samples/device-h  actor {hardware.actor_devices:4d}  "
            f"instances of {hardware.instance_devices}  {one.scheduler.policy}"
        )

    best, _ = runs.sweep(configs, show)
    click.echo("\n# the best of them\n" + to_toml(best), nl=False)
    _write(records, json_file)
    return 0


def _write(records: Sequence[SimulationRecord], file: pathlib.Path | None) -> None:
    if file is not None:
        file.write_bytes(msgspec.json.format(msgspec.json.encode([r.result for r in records])))


@click.command()
@click.argument("run", type=click.Path(path_type=pathlib.Path))
def calibrate(run: pathlib.Path) -> None:
    """Fit the cost models of `simulate` to the language run in the folder RUN.

    Prints a simulation's file of the same run, how well the costs fit, and the seconds of a step,
    real and simulated.
    """
    found = calibration.calibrate(run)
    click.echo(f"# {found.iterations} iterations, {found.workers} rollout, {found.ranks} actor")
    for fit in found.fits:
        click.echo(f"# {fit.name}: {fit.measured:.4f} s on average, fitted within {fit.error:.1%}")
    config = calibration.simulation_of(found)
    if config is not None:
        result = runs.simulate(config).result
        simulated = result.seconds / len(result.step_seconds)
        click.echo(f"# step: {found.step_seconds:.4f} s real, {simulated:.4f} s simulated")
        click.echo(to_toml(config), nl=False)
        return
    for name, values in {"generation": found.generation, "actor": found.actor}.items():
        click.echo(f"\n[{name}]")
        for key, value in values.items():
            click.echo(f"{key} = {float(f'{value:.6g}')}")
        if name == "generation":
            lengths = ", ".join(map(str, found.lengths))
            click.echo(f'\n[generation.lengths]\ntype = "empirical"\ntokens = [{lengths}]')
