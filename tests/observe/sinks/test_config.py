"""The section ``[observe]``."""

from __future__ import annotations

import importlib.util
from typing import Any

import msgspec
import pytest

from rlinf_async.config import ConfigError, Document
from rlinf_async.config.registry import MissingExtra
from rlinf_async.observe.sinks.config import ObserveConfig, check_sinks
from rlinf_async.observe.sinks.part import flat, plain_tables
from rlinf_async.runtime.jobs.embodied.settings import EmbodiedConfig

RUN = """
[env]
id = "CartPole-v1"
[training]
total_steps = 64
steps_per_iteration = 8
"""
PART = "tests.observe.sinks.parts:Part"


def read(text: str, **flags: str) -> EmbodiedConfig:
    named = {name.replace("__", "."): value for name, value in flags.items()}
    return Document("run.toml", text).to(EmbodiedConfig, named)


def test_the_sinks_are_read_under_their_former_name_too() -> None:
    assert read(RUN + "metrics = []").observe.sinks == ()
    assert read(RUN, training__metrics="wandb").observe.sinks == ("wandb",)
    assert read(RUN + "metrics = []", observe__sinks="wandb").observe.sinks == ("wandb",)
    assert read(RUN).observe.sinks == ("tensorboard",)


def test_both_names_at_once_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"run.toml:7: training.metrics: .*observe.sinks now"):
        read(RUN + "metrics = []\n[observe]\nsinks = []")


@pytest.mark.parametrize(
    ("settings", "path", "message"),
    [
        ({"sinks": ["wanb"]}, "sinks", "did you mean 'wandb'"),
        ({"sinks": [PART], "options": {PART: {"gat": ""}}}, f"options.{PART}.gat", "gate"),
        (
            {"sinks": [PART], "options": {PART: {"hangs": True, "gate": "x"}}},
            f"options.{PART}.gate",
            "no use where it hangs",
        ),
        ({"options": {PART: {}}}, f"options.{PART}", "does not name"),
        (
            {"sinks": ["tensorboard"], "options": {"tensorboard": {"x": 1}}},
            "options.tensorboard",
            "it has no settings",
        ),
        (
            {"sinks": ["mlflow"], "mlflow": {"tracking_uri": "host:5000"}},
            "mlflow.tracking_uri",
            "no address of a tracking server",
        ),
        ({"sinks": ["trackio"], "trackio": {"space": "me"}}, "trackio.space", "'user/name'"),
    ],
)
def test_what_is_wrong_is_named_before_a_worker_starts(
    settings: dict[str, Any],
    path: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    with pytest.raises(ConfigError, match=message) as raised:
        check_sinks(msgspec.convert(settings, ObserveConfig))
    assert ".".join(raised.value.path) == f"observe.{path}"


def test_a_sink_that_is_named_twice_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="sinks has 'wandb' twice"):
        msgspec.convert({"sinks": ["wandb", "wandb"]}, ObserveConfig)


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_a_package_that_is_missing_is_named_with_its_extra(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=rf"the metrics sink '{name}'.*rlinf-async\[{name}\]"):
        check_sinks(ObserveConfig(sinks=(name,)))


def test_rows_go_nowhere_without_a_key(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    netrc = tmp_path_factory.mktemp("home") / "netrc"
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(netrc))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    with pytest.raises(ConfigError, match="'online' needs a key") as raised:
        check_sinks(ObserveConfig(sinks=("wandb",)))
    assert raised.value.path == ("observe", "wandb", "mode")
    netrc.write_text("machine api.wandb.ai login user password 0123456789\n")
    netrc.chmod(0o600)
    check_sinks(ObserveConfig(sinks=("wandb",)))


def test_environment_variables_of_a_configuration_are_not_sent() -> None:
    class Role(msgspec.Struct):
        env_vars: dict[str, str]
        devices: str = "0"

    class Config(msgspec.Struct):
        actor: Role
        lr: float = 0.5
        betas: tuple[float, ...] = (0.9, 0.999)

    tables = plain_tables(Config(Role({"TOKEN": "secret"})))
    assert flat(tables) == {"actor.devices": "0", "lr": 0.5, "betas": "[0.9, 0.999]"}
