"""``/metrics``, as Prometheus reads it."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Iterator

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from rlinf_async.config import ConfigError
from rlinf_async.observe.metrics import MetricsWriter
from rlinf_async.observe.progress import ChannelView, EdgeView, ProgressState, WaitView, WorkerView
from rlinf_async.observe.sinks.config import ObserveConfig, check_sinks
from rlinf_async.observe.sinks.opened import OpenSinks
from rlinf_async.observe.sinks.part import SinkRun
from rlinf_async.observe.sinks.prometheus import PrometheusConfig
from rlinf_async.observe.status import Status, write_status

ODD = 'a "quoted" \\ name\nof two lines{}'
STATUS = Status(
    time=1000.5,
    ending=False,
    grace_seconds=25.0,
    shown=ProgressState(
        run="run",
        iteration=3,
        channels=[
            ChannelView(name="groups", depth=2, capacity=4, items_per_second=1.5),
            ChannelView(name=ODD, depth=7),
        ],
        edges=[
            EdgeView(name="Actor[0] -> x", items_per_second=1.0, bytes_per_second=10.0),
            EdgeView(name="Actor[0] -> x", items_per_second=2.0, bytes_per_second=5.0),
        ],
        workers=[
            WorkerView(name="Actor[0]", restarts=2, waiting_for="groups", waiting_seconds=4.5),
            WorkerView(name="Reward[0]", live=False),
        ],
        waits=[WaitView(party="Actor[0].train", operation="get", channel="groups", seconds=4.5)],
    ),
)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Response]:
    """The page of a run with two rows and a status."""
    folder = tmp_path_factory.mktemp("runs")
    observe = ObserveConfig(sinks=("prometheus",), prometheus=PrometheusConfig(port=0))
    sinks = OpenSinks(observe, SinkRun(folder=str(folder), name=ODD))
    write_status(folder / "status.json", STATUS)
    with MetricsWriter(folder, sinks=sinks) as writer:
        writer.write(8, {"reward": 0.5, "loss/kl": math.nan, "up": math.inf, "down": -math.inf})
        writer.write(16, {"reward": 0.75})
        [process] = sinks._apart
        while not process.where:
            time.sleep(0.02)
        while "rlinf_async_step" not in (answer := httpx.get(process.where)).text or (
            " 16.0\n" not in answer.text
        ):
            time.sleep(0.02)
        assert httpx.get(process.where.replace("/metrics", "/other")).status_code == 404
        yield answer
    sinks.close("finished")


@pytest.fixture
def found(page: httpx.Response) -> dict[str, dict[tuple[str, ...], float]]:
    """Name of a metric -> values of its labels -> value."""
    read: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(page.text):
        assert family.documentation
        for one in family.samples:
            assert one.labels.pop("run") == ODD
            values = read.setdefault(one.name.removeprefix("rlinf_async_"), {})
            assert tuple(one.labels.values()) not in values  # Prometheus refuses a second one
            values[tuple(one.labels.values())] = one.value
    return read


def test_it_is_the_text_format_of_prometheus(page: httpx.Response) -> None:
    assert page.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"


def test_the_newest_row_is_shown_by_the_names_of_its_metrics(
    found: dict[str, dict[tuple[str, ...], float]],
) -> None:
    assert found["step"] == {(): 16.0}
    assert found["rows_total"] == {(): 2.0}
    metrics = found["metric"]
    assert math.isnan(metrics.pop(("loss/kl",)))
    assert metrics == {("reward",): 0.75, ("up",): math.inf, ("down",): -math.inf}


def test_the_status_is_that_of_the_run_folder(
    found: dict[str, dict[tuple[str, ...], float]],
) -> None:
    assert found["iteration"] == {(): 3.0}
    assert found["channel_depth"] == {("groups",): 2.0, (ODD,): 7.0}
    assert found["channel_capacity"] == {("groups",): 4.0}
    assert found["edge_items_per_second"] == {("Actor[0] -> x",): 3.0}
    assert found["worker_up"] == {("Actor[0]",): 1.0, ("Reward[0]",): 0.0}
    assert found["worker_restarts_total"] == {("Actor[0]",): 2.0, ("Reward[0]",): 0.0}
    assert found["wait_seconds"] == {("Actor[0].train", "get", "groups"): 4.5}


def test_it_listens_on_this_host_only() -> None:
    assert PrometheusConfig().address == "127.0.0.1"


def test_a_port_that_is_taken_is_refused_before_the_run() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        observe = ObserveConfig(sinks=("prometheus",), prometheus=PrometheusConfig(port=port))
        with pytest.raises(ConfigError, match=f"port {port}: Address already in use") as raised:
            check_sinks(observe)
    assert raised.value.path == ("observe", "prometheus", "port")


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"port": 70000}, "from 0 to 65535"), ({"address": "localhost"}, "must be an IP address")],
)
def test_settings_that_cannot_be_are_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.convert(settings, PrometheusConfig)
