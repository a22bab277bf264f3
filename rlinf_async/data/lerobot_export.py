"""Demonstrations written in LeRobot's format, version 3: see `rlinf_async.data.lerobot`.

Pictures are PNGs in the tables: nothing is lost, as it would be in a video. What a transition has
besides (`Outcome`) becomes ``next.reward`` and ``next.done``; the observation after the last step
has no place in that format.

``meta/info.json`` is written last: a folder that was cut off is none of this format.

Source: the files that lerobot 0.4.4 writes and reads.
"""

from __future__ import annotations

import importlib
import io
import json
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rlinf_async.config import needed
from rlinf_async.data.config import DataError
from rlinf_async.data.demonstrations import DemonstratedEpisode, read_episodes, read_info
from rlinf_async.data.lerobot import EPISODES, INFO
from rlinf_async.messages.spaces import STATE, ObservationSpec

TABLE: Final = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
FILE_BYTES: Final = 100 * 2**20
"""of a table, before the next one begins"""
FILES: Final = 1000
"""in a folder (a chunk)"""
QUANTILES: Final = (0.01, 0.1, 0.5, 0.9, 0.99)
OWN: Final = ("timestamp", "frame_index", "episode_index", "index", "task_index")
"""columns that every table has"""


def write_lerobot(source: Path, out: Path, fps: int, file_bytes: int = FILE_BYTES) -> int:
    """Write the demonstrations of a folder as a data set in the new folder ``out``.

    Args:
        source: folder of this framework's format.
        out: a folder that is not there, or empty.
        fps: steps of the environment in a second, of which the format makes time stamps.
        file_bytes: of a table, before the next one begins.

    Returns the number of steps.

    Raises:
        DataError: the source holds no demonstrations, or a damaged file.
        MissingExtra: pyarrow, pandas or Pillow is not installed.
    """
    info = read_info(source)
    _check(source, info.observation)
    written = _Writing(out, info.observation, info.env, fps, file_bytes)
    for episode in read_episodes(source):
        written.add(episode)
    written.finish(robot=info.env)
    return written.steps


def _check(source: Path, spec: ObservationSpec) -> None:
    """Raise `DataError` for what the format has no place for."""
    texts = [part.name for part in spec.parts if part.kind == "text"]
    if len(texts) > 1:
        raise DataError(
            f"{str(source)!r} shows {', '.join(texts)}, but LeRobot's format has one text for a "
            "step, its task"
        )
    for part in spec.of_kind("image"):
        if len(part.shape) == 3 and part.shape[2] not in (1, 3, 4):
            raise DataError(
                f"{str(source)!r} shows {part.name!r} with {part.shape[2]} channels, such as "
                "stacked frames: LeRobot's format has pictures of 1, 3 or 4"
            )


class _Writing:
    """A data set that is being written."""

    def __init__(
        self, out: Path, spec: ObservationSpec, task: str, fps: int, file_bytes: int
    ) -> None:
        self._parquet = needed("pyarrow.parquet", extra="llm", needed_for="LeRobot's format")
        self._arrow = needed("pyarrow", extra="llm", needed_for="LeRobot's format")
        self._out, self._spec, self._fps, self._file_bytes = out, spec, fps, file_bytes
        self._task = task
        """of demonstrations without instructions"""
        self._tasks: dict[str, int] = {}
        self._features: dict[str, Any] = {}
        self._statistics: dict[str, _Numbers | _Pictures] = {}
        self._episodes: list[dict[str, Any]] = []
        self._writer: Any = None
        self._file = 0
        self._bytes = 0
        self.steps = 0

    def add(self, episode: DemonstratedEpisode) -> None:
        """Write one episode."""
        columns, tasks = self._columns(episode)
        count = len(episode.action)
        if self._writer is not None and self._bytes >= self._file_bytes:
            self._writer.close()
            self._writer, self._bytes, self._file = None, 0, self._file + 1
        number = len(self._episodes)
        frame = np.arange(count)
        own: tuple[NDArray[Any], ...] = (
            (frame / self._fps).astype(np.float32),
            *(frame, np.full(count, number), self.steps + frame, np.array(tasks)),
        )
        for name, values in zip(OWN, own, strict=True):
            self._number(columns, name, values, names=None)
        table = self._arrow.table(columns)
        where = {"chunk_index": self._file // FILES, "file_index": self._file % FILES}
        if self._writer is None:
            path = self._out / TABLE.format(**where)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._writer = self._parquet.ParquetWriter(path, table.schema)
        self._writer.write_table(table)  # a group of rows: reading one episode reads only its own
        self._bytes += table.nbytes
        texts = list(self._tasks)
        self._episodes.append(
            {
                "episode_index": number,
                "tasks": [texts[one] for one in dict.fromkeys(tasks)],
                "length": count,
                **{f"data/{name}": value for name, value in where.items()},
                "dataset_from_index": self.steps,
                "dataset_to_index": self.steps + count,
                "meta/episodes/chunk_index": 0,
                "meta/episodes/file_index": 0,
            }
        )
        self.steps += count

    def finish(self, robot: str) -> None:
        """Write what the tables hold."""
        if self._writer is not None:
            self._writer.close()
        pandas = needed("pandas", extra="llm", needed_for="LeRobot's format")
        meta = self._out / EPISODES / "chunk-000"
        meta.mkdir(parents=True, exist_ok=True)
        episodes = self._arrow.Table.from_pylist(self._episodes)
        self._parquet.write_table(episodes, meta / "file-000.parquet")
        tasks = pandas.DataFrame({"task_index": range(len(self._tasks))}, index=list(self._tasks))
        tasks.to_parquet(self._out / "meta/tasks.parquet")
        statistics = {name: one.figures() for name, one in self._statistics.items()}
        (self._out / "meta/stats.json").write_text(json.dumps(statistics, indent=4))
        info = {
            "codebase_version": "v3.0",
            "robot_type": robot,
            "total_episodes": len(self._episodes),
            "total_frames": self.steps,
            "total_tasks": len(self._tasks),
            "chunks_size": FILES,
            "data_files_size_in_mb": self._file_bytes // 2**20,
            "video_files_size_in_mb": 200,
            "fps": self._fps,
            "splits": {"train": f"0:{len(self._episodes)}"},
            "data_path": TABLE,
            "video_path": None,
            "features": self._features,
        }
        (self._out / INFO).write_text(json.dumps(info, indent=4))

    def _columns(self, episode: DemonstratedEpisode) -> tuple[dict[str, Any], list[int]]:
        """The columns of an episode but its `OWN`, and the number of the task of each step."""
        columns: dict[str, Any] = {}
        self._number(columns, "action", episode.action)
        texts = [self._task] * len(episode.action)
        for part in self._spec.parts:
            seen = episode.observation
            values = seen if self._spec.flat else seen[part.name]
            if part.kind == "text":
                texts = [bytes(row).rstrip(b"\0").decode(errors="replace") for row in values]
            elif part.kind == "image":
                self._pictures(columns, f"observation.images.{part.name}", values)
            else:
                self._number(columns, f"observation.{STATE}", values)
        if (outcome := episode.outcome) is not None:
            done = np.zeros(len(episode.action), np.bool_)
            done[-1] = outcome.terminated
            self._number(columns, "next.reward", outcome.reward, names=None)
            self._number(columns, "next.done", done, names=None)
        return columns, [self._tasks.setdefault(one, len(self._tasks)) for one in texts]

    def _number(
        self, columns: dict[str, Any], name: str, values: NDArray[Any], names: Any = ()
    ) -> None:
        """Add a column of numbers ``[T]`` or ``[T, D]``, which has no lists where D is 1."""
        rows = values.reshape(len(values), -1)
        size = rows.shape[1]
        flat = self._arrow.array(rows.reshape(-1))
        columns[name] = (
            flat if size == 1 else self._arrow.FixedSizeListArray.from_arrays(flat, size)
        )
        self._features[name] = {
            "dtype": str(rows.dtype),
            "shape": [size],
            "names": None if names is None else [f"{name}_{at}" for at in range(size)],
        }
        self._statistics.setdefault(name, _Numbers()).add(rows)

    def _pictures(self, columns: dict[str, Any], name: str, values: NDArray[np.uint8]) -> None:
        pictures = values if values.ndim == 4 else values[..., None]
        columns[name] = self._arrow.array([{"bytes": _png(one), "path": None} for one in pictures])
        self._features[name] = {
            "dtype": "image",
            "shape": list(pictures.shape[1:]),
            "names": ["height", "width", "channels"],
        }
        self._statistics.setdefault(name, _Pictures(pictures.shape[-1])).add(pictures)


class _Numbers:
    """Statistics of a column of numbers, which are few: all are kept until the end."""

    def __init__(self) -> None:
        self._rows: list[NDArray[Any]] = []

    def add(self, values: NDArray[Any]) -> None:
        """Take the rows of an episode, ``[T, D]``."""
        self._rows.append(values)

    def figures(self) -> dict[str, Any]:
        """Return what ``meta/stats.json`` has, ``[D]`` each."""
        rows = np.concatenate(self._rows).astype(np.float64)
        found = {
            "min": rows.min(0),
            "max": rows.max(0),
            "mean": rows.mean(0),
            "std": rows.std(0),
            "count": np.array([len(rows)]),
        }
        found |= {_named(one): np.quantile(rows, one, axis=0) for one in QUANTILES}
        return {name: one.tolist() for name, one in found.items()}


class _Pictures:
    """Statistics of pictures, between 0 and 1: how often each channel has each of its 256
    values."""

    def __init__(self, channels: int) -> None:
        self._counts = np.zeros((channels, 256), np.int64)
        self._pictures = 0

    def add(self, values: NDArray[Any]) -> None:
        """Take the pictures of an episode, ``[T, height, width, channels]``."""
        self._pictures += len(values)
        for channel, counts in enumerate(self._counts):
            counts += np.bincount(values[..., channel].reshape(-1), minlength=256)

    def figures(self) -> dict[str, Any]:
        """Return what ``meta/stats.json`` has, ``[channels, 1, 1]`` each."""
        levels = np.arange(256) / 255
        share = self._counts / self._counts.sum(1, keepdims=True)
        below = share.cumsum(1)
        mean = share @ levels
        found = {
            "min": levels[(share > 0).argmax(1)],
            "max": levels[255 - (share > 0)[:, ::-1].argmax(1)],
            "mean": mean,
            "std": np.sqrt(share @ levels**2 - mean**2),
        }
        found |= {_named(one): levels[(below >= one).argmax(1)] for one in QUANTILES}
        shaped = {name: one[:, None, None].tolist() for name, one in found.items()}
        return {**shaped, "count": [self._pictures]}


def _named(quantile: float) -> str:
    return f"q{round(100 * quantile):02d}"


def _png(pixels: NDArray[np.uint8]) -> bytes:
    picture: Any = importlib.import_module("PIL.Image")
    file = io.BytesIO()
    picture.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels).save(file, "png")
    return file.getvalue()
