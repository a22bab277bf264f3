"""Demonstrations in a folder of LeRobot's format (version 2): Parquet files, pictures in them.

::

    meta/info.json                            features, episodes, where the files are
    meta/tasks.jsonl                          the instructions
    data/chunk-000/episode_000000.parquet     a row for each step

``observation.state`` becomes the state, ``observation.images.NAME`` (or ``observation.image``) the
image called ``NAME``, and the task of a row the instruction. Pictures in videos are not read.
"""

from __future__ import annotations

import importlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from rlinf_async.config import MissingExtra
from rlinf_async.data.errors import DataError
from rlinf_async.messages.spaces import STATE, ObservationSpec, Part

INFO: Final = "meta/info.json"
TASKS: Final = "meta/tasks.jsonl"
DATA: Final = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"


def is_lerobot(folder: Path) -> bool:
    """Whether the folder is of this format."""
    return (folder / INFO).is_file()


def lerobot_info(folder: Path) -> dict[str, Any]:
    """Return what ``meta/info.json`` says; raises `DataError` where it cannot be read."""
    try:
        info: dict[str, Any] = json.loads((folder / INFO).read_text())
        info["features"]["action"]["shape"]
        info["total_episodes"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{str(folder / INFO)!r} is no description of LeRobot: {error!r}"
        ) from error
    return info


def lerobot_spec(folder: Path, wanted: ObservationSpec) -> ObservationSpec:
    """Return those of the ``wanted`` parts that the folder has, with its own shapes.

    Raises `DataError` for pictures in videos.
    """
    features = lerobot_info(folder)["features"]
    parts: list[Part] = []
    for part in wanted.parts:
        if part.kind == "text":
            if (folder / TASKS).is_file():
                parts.append(part)
            continue
        feature = features.get(_column(part, features))
        if feature is None:
            continue
        if feature["dtype"] == "video":
            raise DataError(
                f"{str(folder)!r} has {part.name!r} in videos, which are not read: export the data "
                "set with images (use_videos=False)"
            )
        parts.append(Part(name=part.name, kind=part.kind, shape=tuple(feature["shape"])))
    return ObservationSpec(tuple(parts))


def lerobot_arrays(folder: Path, spec: ObservationSpec) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Read the episodes: of each its file, an array for each part, ``[T, ...]``, and ``action``,
    float32.

    Raises:
        DataError: a file that is damaged, or has other columns.
        MissingExtra: pyarrow is not installed.
    """
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ModuleNotFoundError:
        raise MissingExtra("pyarrow", extra="llm", needed_for=str(folder)) from None
    info = lerobot_info(folder)
    tasks = _tasks(folder)
    for number in range(info["total_episodes"]):
        chunk = number // int(info.get("chunks_size", 1000))
        name = info.get("data_path", DATA).format(episode_chunk=chunk, episode_index=number)
        try:
            table = parquet.read_table(folder / name)
            arrays = {
                "action": np.array(table["action"].to_pylist(), np.float32),
                **{part.name: _part(table, part, info["features"], tasks) for part in spec.parts},
            }
        except (OSError, ValueError, KeyError) as error:
            raise DataError(f"{str(folder / name)!r} is no episode of LeRobot: {error}") from error
        yield folder / name, arrays


def _column(part: Part, features: dict[str, Any]) -> str:
    if part.kind == "state":
        return f"observation.{STATE}"
    named = f"observation.images.{part.name}"
    return named if named in features else f"observation.{part.name}"


def _part(table: Any, part: Part, features: dict[str, Any], tasks: dict[int, str]) -> Any:
    if part.kind == "text":
        rows = [tasks[index].encode()[: part.shape[0]] for index in table["task_index"].to_pylist()]
        text = b"".join(row.ljust(part.shape[0], b"\0") for row in rows)
        return np.frombuffer(text, np.uint8).reshape(len(rows), -1)
    column = table[_column(part, features)].to_pylist()
    if part.kind == "state":
        return np.array(column, np.float32).reshape(len(column), -1)
    return np.stack([_picture(cell) for cell in column])


def _picture(cell: dict[str, Any]) -> Any:
    picture: Any = importlib.import_module("PIL.Image")
    return np.asarray(picture.open(io.BytesIO(cell["bytes"])))


def _tasks(folder: Path) -> dict[int, str]:
    if not (folder / TASKS).is_file():
        return {}
    lines = (folder / TASKS).read_text().splitlines()
    rows = [json.loads(line) for line in lines if line.strip()]
    return {int(row["task_index"]): str(row["task"]) for row in rows}
