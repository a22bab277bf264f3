"""One run of a bench from the command line."""

from __future__ import annotations

import datetime
import pathlib
from collections.abc import Sequence

import msgspec
from rich.console import Console

from rlinf_async.bench.bars import judge
from rlinf_async.bench.discover import BENCHMARKS, folder_of
from rlinf_async.bench.machine import this_machine
from rlinf_async.bench.measure import measure
from rlinf_async.bench.model import Bench, selected
from rlinf_async.bench.peers import PeerStore, default_store
from rlinf_async.bench.report import Report, case_reports, show
from rlinf_async.config import UsageError


def run_bench(
    bench: Bench,
    *,
    with_peers: bool,
    cases: Sequence[str] = (),
    repetitions: int | None = None,
    json_file: pathlib.Path | None = None,
    benchmarks: pathlib.Path = BENCHMARKS,
    store: PeerStore | None = None,
) -> int:
    """Measure, print the tables, write the JSON; 1 where a bar fell short, else 0.

    Args:
        cases: only those whose name holds one of these, and the bars they suffice for.

    Raises:
        UsageError: one of ``cases`` is in no case's name.
    """
    try:
        chosen = selected(bench, cases) if cases else bench
    except ValueError as error:
        raise UsageError(f"--case: {error}") from None
    report = _measured(
        chosen,
        here=folder_of(bench, benchmarks),
        with_peers=with_peers,
        repetitions=repetitions or bench.repetitions,
        store=store or default_store(),
    )
    if json_file is not None:
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    show(report, Console())
    return 1 if report.fell_short else 0


def _measured(
    bench: Bench, *, here: pathlib.Path, with_peers: bool, repetitions: int, store: PeerStore
) -> Report:
    started, machine = datetime.datetime.now(datetime.UTC), this_machine()
    with Console(stderr=True).status(bench.name) as status:
        results = measure(
            bench,
            here,
            store=store,
            with_peers=with_peers,
            repetitions=repetitions,
            say=lambda what: status.update(f"{bench.name}: {what}"),
        )
    return Report(
        bench=bench.name,
        started=started,
        machine=machine,
        repetitions=repetitions,
        cases=case_reports(bench, results),
        bars=[judge(bar, results) for bar in bench.bars],
        notes=bench.notes,
    )
