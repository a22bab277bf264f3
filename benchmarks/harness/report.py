"""One run of a bench from the command line: tables for a person, JSON for a program."""

from __future__ import annotations

import datetime
import pathlib
from collections.abc import Iterator, Sequence

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.harness.model import (
    FELL_SHORT,
    HELD,
    NOT_MEASURED,
    BarVerdict,
    Bench,
    Case,
    Results,
    Sample,
    judge,
    selected,
)
from benchmarks.harness.peers import PeerStore, default_store
from benchmarks.harness.run import BENCHMARKS, Machine, folder_of, measure, this_machine
from rlinf_async.config import UsageError

_LARGE = ((1e12, "T"), (1e9, "G"), (1e6, "M"))
_COLOURS = {HELD: "green", FELL_SHORT: "red", NOT_MEASURED: "yellow"}


class CaseReport(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of one case."""

    samples: list[Sample]
    medians: Sample
    peer: tuple[str, ...] = ()
    """What its virtualenv was made from; empty where our own interpreter ran it."""
    gap: str = ""
    """Why there are no samples."""


class BenchReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about one run of a bench."""

    bench: str
    started: datetime.datetime
    machine: Machine
    repetitions: int
    cases: dict[str, CaseReport]
    bars: list[BarVerdict]
    notes: tuple[str, ...] = ()

    @property
    def fell_short(self) -> int:
        """Number of bars that fell short."""
        return _count(self.bars, FELL_SHORT)

    @property
    def last_line(self) -> str:
        """``N bars held, M fell short``."""
        held = _count(self.bars, HELD)
        return f"{held} bar{'' if held == 1 else 's'} held, {self.fell_short} fell short"


def case_reports(bench: Bench, results: Results) -> dict[str, CaseReport]:
    """Return what each case measured, in the bench's order."""
    return {case.name: _case_report(case, results) for case in bench.cases}


def show(report: BenchReport, console: Console) -> None:
    """Print the tables, the notes, and the last line."""
    console.print(_measurements(report))
    console.print(_bars(report))
    machine = report.machine
    load = machine.load_average[0]
    console.print(
        f"{machine.cores} cores of {machine.cpu}, Python {machine.python}, load {load:.1f}",
        highlight=False,
    )
    for note in report.notes:
        console.print(note, highlight=False)
    if unmeasured := _count(report.bars, NOT_MEASURED):
        console.print(f"{unmeasured} not measured", highlight=False)
    console.print(report.last_line, highlight=False)


def number(value: float) -> str:
    """A measurement with as many digits as mean something: ``0.25``, ``12,345``, ``3.243 G``."""
    for limit, prefix in _LARGE:
        if abs(value) >= limit:
            return f"{value / limit:.4g} {prefix}"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _case_report(case: Case, results: Results) -> CaseReport:
    peer = case.peer.pins if case.peer else ()
    if case.name in results.gaps:
        return CaseReport(samples=[], medians={}, peer=peer, gap=str(results.gaps[case.name]))
    metrics = results.metrics(case.name)
    medians = {metric: results.median(case.name, metric) for metric in metrics}
    return CaseReport(samples=results.samples[case.name], medians=medians, peer=peer)


def _measurements(report: BenchReport) -> Table:
    table = Table(title=f"{report.bench}: medians of {report.repetitions}", title_justify="left")
    table.add_column("case")
    table.add_column("metric", no_wrap=True)
    table.add_column("median", justify="right", no_wrap=True)
    repeated = report.repetitions > 1
    if repeated or any(case.gap for case in report.cases.values()):
        table.add_column("lowest .. highest" if repeated else "", justify="right", overflow="fold")
    for name, case in report.cases.items():
        for row in _rows(name, case):
            table.add_row(*row[: len(table.columns)])
        table.add_section()
    return table


def _rows(name: str, case: CaseReport) -> Iterator[Sequence[str]]:
    if case.gap:
        yield name, "", "", case.gap
    for position, (metric, median) in enumerate(case.medians.items()):
        values = [sample[metric] for sample in case.samples]
        low, high = number(min(values)), number(max(values))
        spread = f"{low} .. {high}" if len(values) > 1 else ""
        label = "" if position else name
        yield label, metric, number(median), spread


def _bars(report: BenchReport) -> Table:
    table = Table(title="bars", title_justify="left")
    table.add_column("bar")
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("target", justify="right", no_wrap=True)
    table.add_column("verdict", overflow="fold")
    for verdict in report.bars:
        table.add_row(verdict.bar, _value(verdict), _target(verdict), _outcome(verdict))
    return table


def _value(verdict: BarVerdict) -> str:
    return "" if verdict.value is None else f"{number(verdict.value)}{verdict.unit}"


def _target(verdict: BarVerdict) -> str:
    if verdict.target is None:
        return ""
    sign = "<=" if verdict.at_most else ">="
    return f"{sign} {number(verdict.target)}{verdict.unit}"


def _outcome(verdict: BarVerdict) -> Text:
    text = f"{verdict.outcome}: {verdict.reason}" if verdict.reason else verdict.outcome
    return Text(text, style=_COLOURS[verdict.outcome])


def _count(bars: Sequence[BarVerdict], outcome: str) -> int:
    return sum(verdict.outcome == outcome for verdict in bars)


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
) -> BenchReport:
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
    return BenchReport(
        bench=bench.name,
        started=started,
        machine=machine,
        repetitions=repetitions,
        cases=case_reports(bench, results),
        bars=[judge(bar, results) for bar in bench.bars],
        notes=bench.notes,
    )
