"""Prometheus: the newest row, and the live status of the run, at ``/metrics``.

The text format 0.0.4, served by the standard library. The status is that of ``status.json``, which
`rlinf-async status` shows. Metrics of rows are one family, with their names as a label: any name
is kept as it is.
"""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from rlinf_async.config.registry import ConfigError
from rlinf_async.observe.run_folder import STATUS
from rlinf_async.observe.sinks.part import Outcome, Row, SinkPart, SinkRun

if TYPE_CHECKING:  # a configuration has no use for them
    from rlinf_async.observe.progress import ProgressState
    from rlinf_async.observe.status import Status

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
READ_SECONDS: Final = 10.0
"""seconds that a client has to ask"""


class PrometheusConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of ``prometheus``."""

    port: int = 9464
    """0: any free one, which ``sinks/prometheus.json`` names"""
    address: str = "127.0.0.1"
    """IP address to listen on; ``0.0.0.0`` lets every host that reaches this one read"""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port is {self.port}; it must be from 0 to 65535")
        try:
            ip_address(self.address)
        except ValueError:
            raise ValueError(f"address is {self.address!r}; it must be an IP address") from None


class PrometheusSink(SinkPart):
    """See the module."""

    Config = PrometheusConfig
    factory = "rlinf_async.observe.sinks.prometheus:PrometheusClient"

    def check(self, settings: PrometheusConfig, where: tuple[str, ...]) -> None:
        """Refuse a port that is taken, and an address that this host does not have."""
        try:
            with socket.socket(_family(settings.address)) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((settings.address, settings.port))
        except OSError as error:
            at = f"{settings.address}, port {settings.port}"
            raise ConfigError(
                f"cannot listen on {at}: {error.strerror}; choose another one, or port 0 for any",
                path=(*where, "port"),
            ) from error


class PrometheusClient:
    """The endpoint."""

    def __init__(self, settings: PrometheusConfig, run: SinkRun, kept: dict[str, str]) -> None:
        self._run = run
        self._newest: Row | None = None
        self._metrics: dict[str, float] = {}
        """newest value of each metric: rows of evaluations have others than those of iterations"""
        self._rows = 0
        handler = type("Handler", (_Handler,), {"page": staticmethod(self.page)})
        kind = type("Server", (_Server,), {"address_family": _family(settings.address)})
        self._server: ThreadingHTTPServer = kind((settings.address, settings.port), handler)
        host = f"[{settings.address}]" if ":" in settings.address else settings.address
        self.kept = {"where": f"http://{host}:{self._server.server_address[1]}/metrics"}
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def write(self, rows: Sequence[Row]) -> None:
        """Show the newest of these rows."""
        for row in rows:
            self._metrics |= row.metrics
        self._newest = rows[-1]
        self._rows += len(rows)

    def close(self, outcome: Outcome) -> None:
        """Close the endpoint."""
        self._server.shutdown()
        self._server.server_close()

    def page(self) -> str:
        """The answer to a scrape."""
        families = [*_of_rows(self._newest, self._rows, self._metrics.copy())]
        status = _status(Path(self._run.folder))
        if status is not None:
            families += _of_status(status)
        return "".join(_text(one, {"run": self._run.name}) for one in families)


class _Server(ThreadingHTTPServer):
    daemon_threads = True


class _Handler(BaseHTTPRequestHandler):
    """Answers ``GET /metrics``."""

    timeout = READ_SECONDS
    page: Any
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path.partition("?")[0] not in ("/metrics", "/metrics/"):
            self.send_error(404, "the metrics are at /metrics")
            return
        body = self.page().encode()
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing for each scrape."""


class Family(NamedTuple):
    """Metrics of one name."""

    name: str
    kind: str
    help: str
    samples: Iterable[tuple[Mapping[str, str], float]]


def _of_rows(row: Row | None, count: int, metrics: Mapping[str, float]) -> Iterator[Family]:
    yield Family("rows_total", "counter", "Rows of metrics in this start.", [({}, count)])
    if row is None:
        return
    yield Family("step", "gauge", "Step of the newest row.", [({}, row.step)])
    yield Family("row_timestamp_seconds", "gauge", "When it was written.", [({}, row.time)])
    values = [({"name": name}, value) for name, value in metrics.items()]
    yield Family("metric", "gauge", "Metrics of the newest row that has them, by name.", values)


def _of_status(status: Status) -> Iterator[Family]:
    shown = status.shown
    yield Family(
        "status_timestamp_seconds", "gauge", "When the status was written.", [({}, status.time)]
    )
    yield Family("ending", "gauge", "1 while the run ends.", [({}, float(status.ending))])
    yield Family("iteration", "gauge", "Iterations that were trained.", [({}, shown.iteration)])
    if shown.iterations is not None:
        yield Family("iterations", "gauge", "Iterations of the run.", [({}, shown.iterations)])
    yield from _of_channels(shown)
    yield from _of_workers(shown)


def _of_channels(shown: ProgressState) -> Iterator[Family]:
    views = [({"channel": one.name}, one) for one in shown.channels]
    depths = [(label, float(one.depth)) for label, one in views]
    yield Family("channel_depth", "gauge", "Items in a channel.", depths)
    limits = [(label, float(one.capacity)) for label, one in views if one.capacity is not None]
    yield Family("channel_capacity", "gauge", "Items that a channel takes.", limits)
    rates = [
        (label, one.items_per_second) for label, one in views if one.items_per_second is not None
    ]
    yield Family("channel_items_per_second", "gauge", "Items taken from it.", rates)
    # Several receivers of one worker are edges of the same name.
    edges: dict[str, tuple[float, float]] = {}
    for one in shown.edges:
        count, nbytes = edges.get(one.name, (0.0, 0.0))
        edges[one.name] = count + one.items_per_second, nbytes + one.bytes_per_second
    items = [({"edge": name}, both[0]) for name, both in edges.items()]
    yield Family("edge_items_per_second", "gauge", "Items along an edge.", items)
    sizes = [({"edge": name}, both[1]) for name, both in edges.items()]
    yield Family("edge_bytes_per_second", "gauge", "Bytes along an edge.", sizes)
    waits: dict[tuple[str, str, str], float] = {}
    for wait in shown.waits:
        key = wait.party, wait.operation, wait.channel
        waits[key] = max(waits.get(key, 0.0), wait.seconds)
    longest = [
        ({"party": party, "operation": operation, "channel": channel}, seconds)
        for (party, operation, channel), seconds in waits.items()
    ]
    yield Family("wait_seconds", "gauge", "How long a party has waited on a channel.", longest)


def _of_workers(shown: ProgressState) -> Iterator[Family]:
    views = [({"worker": one.name}, one) for one in shown.workers]
    live = [(label, float(one.live)) for label, one in views]
    yield Family("worker_up", "gauge", "1 while its process runs.", live)
    restarts = [(label, float(one.restarts)) for label, one in views]
    yield Family("worker_restarts_total", "counter", "Restarts of a worker.", restarts)
    waiting = [(label, one.waiting_seconds) for label, one in views]
    yield Family("worker_waiting_seconds", "gauge", "How long it has waited; 0: busy.", waiting)


def _text(family: Family, labels: Mapping[str, str]) -> str:
    """The lines of a family; none where it has no sample."""
    name = f"rlinf_async_{family.name}"
    lines = [
        f"{name}{{{_labels({**labels, **own})}}} {_number(value)}\n"
        for own, value in family.samples
    ]
    head = f"# HELP {name} {family.help}\n# TYPE {name} {family.kind}\n"
    return head + "".join(lines) if lines else ""


def _labels(labels: Mapping[str, str]) -> str:
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(float(value))


def _status(folder: Path) -> Status | None:
    """The status of the run; None while there is none."""
    from rlinf_async.observe.status import Status

    try:
        return msgspec.json.decode((folder / STATUS).read_bytes(), type=Status)
    except (OSError, msgspec.DecodeError):
        return None


def _family(address: str) -> socket.AddressFamily:
    is_v6 = isinstance(ip_address(address), IPv6Address)
    return socket.AF_INET6 if is_v6 else socket.AF_INET
