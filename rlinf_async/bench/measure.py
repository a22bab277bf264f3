"""Runs a bench's cases alternating, so that a slow minute of the machine affects all of them."""

from __future__ import annotations

import importlib.util
import pathlib
import sys
from collections.abc import Callable, Sequence

from rlinf_async.bench.execute import CaseFailed, CaseSkipped, run_case
from rlinf_async.bench.model import Bench, Case
from rlinf_async.bench.peers import PeerMissing, PeerStore
from rlinf_async.bench.results import Absence, Gap, Results

Say = Callable[[str], None]


def measure(
    bench: Bench,
    here: pathlib.Path,
    *,
    store: PeerStore,
    with_peers: bool,
    repetitions: int,
    say: Say,
) -> Results:
    """All samples of a bench; a case that cannot run is a gap with its reason."""
    results = Results()
    pythons = _interpreters(bench, store, with_peers, results, say)
    for repetition in range(repetitions):
        for case in _rotated(bench.cases, repetition):
            if case.name in results.gaps:
                continue
            say(f"{case.name} ({repetition + 1} of {repetitions})")
            try:
                sample = run_case(case, python=pythons[case.name], here=here, repetition=repetition)
            except CaseSkipped as skipped:
                results.drop(case.name, Gap(Absence.SKIPPED, str(skipped)))
            except CaseFailed as error:
                results.drop(case.name, Gap(Absence.FAILED, str(error)))
            else:
                results.add(case.name, sample)
    return results


def _interpreters(
    bench: Bench, store: PeerStore, with_peers: bool, results: Results, say: Say
) -> dict[str, str]:
    """The interpreter of each case that can run; the others become gaps."""
    pythons = {}
    for case in bench.cases:
        found = _interpreter(case, store, with_peers, say)
        if isinstance(found, Gap):
            results.drop(case.name, found)
        else:
            pythons[case.name] = found
    return pythons


def _interpreter(case: Case, store: PeerStore, with_peers: bool, say: Say) -> str | Gap:
    absent = [name for name in case.requires if importlib.util.find_spec(name) is None]
    if absent:
        return Gap(Absence.MISSING, f"pip install {' '.join(absent)}")
    if case.peer is None:
        return sys.executable
    if not with_peers:
        return Gap(Absence.NOT_ASKED)
    if not store.is_made(case.peer):
        say(f"installing {case.peer.name}, once")
    try:
        return str(store.python(case.peer))
    except PeerMissing as error:
        return Gap(Absence.MISSING, str(error))


def _rotated(cases: Sequence[Case], by: int) -> list[Case]:
    """The cases in another order each time: none is always first."""
    shift = by % len(cases)
    return [*cases[shift:], *cases[:shift]]
