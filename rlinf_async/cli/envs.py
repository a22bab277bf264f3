"""``rlinf-async envs``: which simulators are here, and whether a policy fits their environments."""

from __future__ import annotations

import click
import msgspec
from rich.console import Console
from rich.table import Table

from rlinf_async.cli.failures import FAILED, OK
from rlinf_async.runtime.jobs.embodied.choosing import MadeEnv, asked, asked_all
from rlinf_async.workers.env import EnvConfig
from rlinf_async.workers.env import simulators as known
from rlinf_async.workers.env.simulators import Simulator


@click.command()
@click.option(
    "--simulator",
    type=click.Choice(["single", "vector", "envpool", "async"]),
    default="single",
    show_default=True,
    help="How ID is made, as in the setting 'env.simulator'.",
)
@click.option(
    "--kwargs", metavar="JSON", default="{}", help="Arguments of ID, as in the setting env.kwargs."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")
@click.argument("env", metavar="[ID]", required=False)
def envs(env: str | None, simulator: str, kwargs: str, as_json: bool) -> int:
    """List the known simulators: which are installed, what their environments show and take, and
    which policy fits them. With ID, look at that environment alone.

    Exit code 1 where ID cannot be made, or where no policy fits it.
    """
    if env is not None:
        return _one(_config(env, simulator, kwargs), as_json)
    here = [one for one in known.SIMULATORS if one.version is not None]
    fits = iter(asked_all([config for one in here for config in one.examples]))
    made = {one.name: [(config, next(fits)) for config in one.examples] for one in here}
    if as_json:
        click.echo(_json(known.SIMULATORS, made))
    else:
        _table(known.SIMULATORS, made)
    return OK


def _config(env: str, simulator: str, kwargs: str) -> EnvConfig:
    try:
        arguments = msgspec.json.decode(kwargs, type=dict)
    except msgspec.DecodeError as error:
        example = '{"render_mode": "rgb_array"}'
        raise click.UsageError(f"--kwargs {kwargs}: {error}; give an object: {example}") from None
    # A registered id that names its module ends with a version: "my_package:Reach-v1".
    module, _, function = env.rpartition(":")
    entry_point = env if module and function.isidentifier() else ""
    config = {
        "id": "" if entry_point else env,
        "entry_point": entry_point,
        "simulator": simulator,
        "kwargs": arguments,
        "stages": 1,
    }
    try:
        return msgspec.convert(config, EnvConfig)
    except msgspec.ValidationError as error:
        raise click.UsageError(str(error)) from None


def _one(config: EnvConfig, as_json: bool) -> int:
    fit = asked(config)
    code = FAILED if fit.problem else OK
    if as_json:
        click.echo(msgspec.json.encode(_row(config, fit)).decode())
        return code
    for name, value in _row(config, fit).items():
        if value not in (None, ""):
            click.echo(f"{name:12} {value}")
    return code


def _row(config: EnvConfig, fit: MadeEnv) -> dict[str, object]:
    row: dict[str, object] = {"env": config.name, "kwargs": config.kwargs or None}
    if fit.spec is not None:
        row |= {
            "shows": str(fit.spec.observation),
            "takes": str(fit.spec.action),
            "max steps": fit.spec.max_episode_steps,
        }
    return row | {"policy": fit.policy, "problem": fit.problem}


def _json(
    simulators: tuple[Simulator, ...], made: dict[str, list[tuple[EnvConfig, MadeEnv]]]
) -> str:
    rows = [
        {
            "simulator": one.name,
            "version": one.version,
            "install": f"pip install {one.install}",
            "note": one.note,
            "envs": [_row(config, fit) for config, fit in made.get(one.name, [])],
        }
        for one in simulators
    ]
    return msgspec.json.format(msgspec.json.encode(rows)).decode()


def _table(
    simulators: tuple[Simulator, ...], made: dict[str, list[tuple[EnvConfig, MadeEnv]]]
) -> None:
    table = Table("simulator", "version", "env", "shows", "takes", "policy")
    missing = [one for one in simulators if one.name not in made]
    for one in simulators:
        for config, fit in made.get(one.name, []):
            row = _row(config, fit)
            cells = [str(row.get(name, "")) for name in ("shows", "takes", "policy")]
            policy = cells.pop() or f"none: {fit.problem}"
            table.add_row(one.name, one.version, config.name, *cells, policy)
    Console(width=None if Console().is_terminal else 160).print(table)
    if missing:
        click.echo("\nnot installed:")
    for one in missing:
        note = f"   ({one.note})" if one.note else ""
        click.echo(f"  {one.name:20} pip install {one.install}{note}")
    click.echo(
        "\nAny other environment of Gymnasium, or your own: rlinf-async envs ID, or "
        "rlinf-async envs FILE.py:FUNCTION (or MODULE:FUNCTION)"
    )
