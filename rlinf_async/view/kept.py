"""The samples of a run as the page shows them: a page of a list, and one with its tokens.

A page begins after a record (a keyset), not at a number: what a run writes meanwhile, or removes,
moves no record from one page to another. Order and choice are made of the index of the samples,
which has 100,000 of them in a few megabytes: no page reads more records than it shows.
"""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from rlinf_async.observe.files import RunFolderError
from rlinf_async.observe.samples import FOLDER, KINDS, OUTCOMES, SampleIndex, segments

ORDERS: Final = ("written", "iteration", "reward", "tokens", "group")
"""what a list can be ordered by: columns of the index, or as they were written"""
PREVIEW: Final = 160
"""characters of prompt and completion in a list"""
MOST: Final = 200
"""records of a page"""
_KEY: Final = re.compile(r"(-?\d{1,18})\.([01])\.(-?\d{1,18})\.(-?\d{1,9})")


class Query(msgspec.Struct, kw_only=True, frozen=True):
    """Which records of a run are listed, and in which order."""

    order: str = "written"
    descending: bool = True
    kind: Literal["training", "evaluation"] | None = None
    iteration: int | None = None
    name: str | None = None
    failed: bool = False
    after: str | None = None
    """key of the record before the first one; None: from the beginning"""
    count: int = 50


class _Preview(msgspec.Struct):
    prompt: str = ""
    completion: str = ""


class KeptSamples:
    """The samples of a run.

    Args:
        run: its folder.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._index: SampleIndex | None = None
        self._lock = threading.Lock()
        self._ordered: tuple[Any, NDArray[np.int64]] | None = None
        self._generation = 0

    def page(self, query: Query) -> dict[str, Any]:
        """A page of the list that is asked for.

        Raises:
            RunFolderError: the samples cannot be read, or there is no such order.
        """
        if query.order not in ORDERS:
            raise RunFolderError(f"the order {query.order!r} is not known: {', '.join(ORDERS)}")
        with self._lock:
            index = self._fresh()
            chosen = self._chosen(index, query)
            first = self._place(index, chosen, query.after)
            shown = chosen[first : first + max(1, min(query.count, MOST))]
            return {
                "all": len(index),
                "chosen": len(chosen),
                "first": first,
                "rows": [_listed(index, int(number)) for number in shown],
            }

    def record(self, key: str) -> dict[str, Any]:
        """One record, with the texts of its tokens.

        Raises:
            KeyError: there is none of this key, or none any more.
            RunFolderError: the samples cannot be read.
        """
        with self._lock:
            index = self._fresh()
            number = _number(index, key)
            found = [] if number is None else index.read([number])
            if not found:
                raise KeyError(key)
            record = found[0]
            for name in ("tokens", "prompt_tokens"):
                if isinstance(record.get(name), list):
                    record[f"{name}_texts"] = index.texts(record[name])
            return {"key": key, "record": record}

    def _fresh(self) -> SampleIndex:
        if self._index is None:
            self._index = SampleIndex(self._run)
        elif self._index.refresh():
            self._generation += 1
        return self._index

    def _chosen(self, index: SampleIndex, query: Query) -> NDArray[np.int64]:
        """The numbers of all records of the list, in its order; kept for its next page."""
        wanted = msgspec.structs.astuple(msgspec.structs.replace(query, after=None, count=0))
        key = (self._generation, wanted)
        if self._ordered is not None and self._ordered[0] == key:
            return self._ordered[1]
        chosen = index.choose(
            iteration=query.iteration, name=query.name, failed=query.failed, kind=query.kind
        )
        if query.order == "written":
            chosen = chosen[::-1] if query.descending else chosen
        else:
            chosen = index.ordered(chosen, query.order, descending=query.descending)
        self._ordered = key, chosen
        return chosen

    def _place(self, index: SampleIndex, chosen: NDArray[np.int64], after: str | None) -> int:
        """Where in the list the page begins; at its beginning where the record is gone."""
        number = None if after is None else _number(index, after)
        found = np.flatnonzero(chosen == number) if number is not None else np.zeros(0, np.int64)
        return int(found[0]) + 1 if len(found) else 0


def _number(index: SampleIndex, key: str) -> int | None:
    """The number of a record in the index as it is now; None where it is not there any more."""
    parts = _KEY.fullmatch(key)
    if parts is None:
        raise RunFolderError(f"{key[:80]!r} names no sample")
    step, kind, group, at = map(int, parts.groups())
    rows = index.rows
    fits = (rows["group"] == group) & (rows["index"] == at)
    found = np.flatnonzero(fits & (rows["step"] == step) & (rows["kind"] == kind))
    return int(found[-1]) if len(found) else None


def _listed(index: SampleIndex, number: int) -> dict[str, Any]:
    row = index.rows[number]
    preview = _Preview()
    for line in index.lines([number]):
        preview = msgspec.json.decode(line, type=_Preview)
    success = int(row["success"])
    return {
        "key": f"{row['step']}.{row['kind']}.{row['group']}.{row['index']}",
        "name": f"{row['group']}/{row['index']}",
        "iteration": int(row["iteration"]),
        "tokens": int(row["tokens"]),
        "reward": None if np.isnan(row["reward"]) else float(row["reward"]),
        "kind": KINDS[row["kind"]],
        "outcome": OUTCOMES[row["outcome"]],
        "success": None if success < 0 else bool(success),
        "prompt": preview.prompt[-PREVIEW:],
        "completion": preview.completion[:PREVIEW],
    }


def newest_segment(run: Path) -> Path | None:
    """The file to which a run writes its samples now; None where it has none."""
    return max(segments(run / FOLDER), default=None)
