"""What the libraries have stored of a run, read without their servers."""

from __future__ import annotations

import importlib
import json
import sqlite3
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

BLOCK = 32768


class Stored(NamedTuple):
    """A run in a store."""

    runs: int
    """number of runs there"""
    rows: list[tuple[int, float]]
    """step and value of the metric ``loss/kl``, in the order in which they were stored"""
    outcome: str
    config: str
    """learning rate in the configuration"""


def wandb(files: Path) -> Stored:
    """All offline runs of one id are one run, once they are synced."""
    rows, ids, outcome, rate = [], set(), "", ""
    for file in sorted(files.glob("wandb/offline-run-*/*.wandb")):
        for record in _wandb_records(file):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                ids.add(record.run.run_id)
                found = {one.key: one.value_json for one in record.run.config.update}
                rate = str(json.loads(found["actor"])["lr"])
            elif kind == "history":
                # A name with a slash is one key.
                items = {
                    one.key or "/".join(one.nested_key): one.value_json
                    for one in record.history.item
                }
                rows.append((int(items["_step"]), float(json.loads(items["loss/kl"]))))
            elif kind == "summary":
                for one in record.summary.update:
                    if one.key == "outcome":
                        outcome = json.loads(one.value_json)
    return Stored(len(ids), rows, outcome, rate)


def _wandb_records(file: Path) -> Iterator[Any]:
    """The records of a file: a log of LevelDB behind a header of 7 bytes."""
    protocol: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
    content, at, part = file.read_bytes(), 7, b""
    while True:
        left = BLOCK - at % BLOCK
        at += left if left < 7 else 0
        if at + 7 > len(content):
            return
        size, kind = struct.unpack("<HB", content[at + 4 : at + 7])
        part += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last piece
            record: Any = protocol.Record()
            record.ParseFromString(part)
            part = b""
            yield record


def mlflow(files: Path) -> Stored:
    """The database of the run folder."""
    with sqlite3.connect(files / "mlflow.db") as database:

        def ask(query: str) -> list[Any]:
            return database.execute(query).fetchall()

        [(state,)] = ask("select status from runs")
        [(outcome,)] = ask("select value from tags where key = 'outcome'")
        assert state == {"finished": "FINISHED", "failed": "FAILED"}.get(outcome, "KILLED")
        rows = ask("select step, value, is_nan from metrics where key = 'loss/kl' order by step")
        values = [(step, float("nan") if is_nan else value) for step, value, is_nan in rows]
        [(rate,)] = ask("select value from params where key = 'actor.lr'")
        return Stored(1, values, outcome, rate)


def trackio(files: Path) -> Stored:
    """The database of the run folder."""
    [file] = files.glob("trackio/*.db")
    with sqlite3.connect(file) as database:
        found = database.execute("select run_id, step, metrics from metrics order by id").fetchall()
        [(config,)] = database.execute("select config from configs").fetchall()
    rows = [(step, float(json.loads(metrics)["loss/kl"])) for _, step, metrics in found]
    return Stored(len({one[0] for one in found}), rows, "", str(json.loads(config)["actor.lr"]))
