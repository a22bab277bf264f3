"""Demonstrations in LeRobot's format, versions 2 and 3.

::

    version 2                                         version 3
    meta/info.json                                    meta/info.json
    meta/tasks.jsonl                                  meta/tasks.parquet
                                                      meta/episodes/chunk-000/file-000.parquet
    data/chunk-000/episode_000000.parquet             data/chunk-000/file-000.parquet
    videos/chunk-000/CAMERA/episode_000000.mp4        videos/CAMERA/chunk-000/file-000.mp4

``meta/info.json`` has the features and where the files are. In version 2 an episode has files of
its own; in version 3 a file holds many, and ``meta/episodes`` says which rows of which file, and
which seconds of which video, are an episode.

``observation.state`` becomes the state, ``observation.images.NAME`` (or ``observation.image``) the
image called ``NAME``, from the table or a video, and the task of a row the instruction. Videos are
read by ffmpeg, which the extra ``embodied`` brings to write them.

Source: the files that lerobot 0.4.4 writes (v3.0), and its converter from v2.1.
"""

from __future__ import annotations

import importlib
import io
import json
import math
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlinf_async.config import needed
from rlinf_async.data.config import DataError
from rlinf_async.messages.spaces import STATE, ObservationPart, ObservationSpec

INFO: Final = "meta/info.json"
TASKS: Final = ("meta/tasks.jsonl", "meta/tasks.parquet")
EPISODES: Final = "meta/episodes"
DATA: Final = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
VIDEO: Final = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
DAMAGE: Final = (ValueError, LookupError, TypeError, AttributeError)
"""what reading raises where something else is there than expected"""
REWARD: Final = "next.reward"
DONE: Final = "next.done"
"""columns that a data set may have: what followed each action, and whether the episode ended with
it"""
CHANNELS: Final = ("channel", "channels")
"""names of the axis of colours, in features"""


def is_lerobot(folder: Path) -> bool:
    """Whether the folder is of this format."""
    return (folder / INFO).is_file()


class Clip(NamedTuple):
    """The pictures of one episode, in a video."""

    path: Path
    start: float
    """seconds"""
    shape: tuple[int, ...]
    """``(height, width, channels)``"""


class Place(NamedTuple):
    """Where one episode is."""

    number: int
    table: Path
    row: Mapping[str, Any]
    """what ``meta/episodes`` says of it; empty in version 2, where its table is its own"""


class LeRobotFolder:
    """A data set."""

    def __init__(self, folder: Path) -> None:
        """Read ``meta/info.json``.

        Raises:
            DataError: it cannot be read, or is of another version.
        """
        self.folder = folder
        try:
            info: dict[str, Any] = json.loads((folder / INFO).read_text())
            if "action" not in info["features"]:
                raise DataError(
                    f"{str(folder)!r} has no actions: {INFO} lists no feature 'action', but "
                    f"{', '.join(info['features'])}: name a data set of somebody who acts"
                )
            self.action_size = int(np.prod(info["features"]["action"]["shape"]))
            self.episodes = int(info["total_episodes"])
            kind = str(info["features"]["action"].get("dtype", "float32"))
            self.discrete = kind.startswith("int") and self.action_size == 1
            """whether an action is one choice"""
            version = str(info.get("codebase_version", "v2"))
            number = version.lstrip("v").partition(".")[0]
        except (OSError, *DAMAGE) as error:
            raise DataError(
                f"{str(folder / INFO)!r} is no description of LeRobot: {error!r}"
            ) from error
        if number not in ("2", "3"):
            raise DataError(
                f"{str(folder)!r} is of version {version} of LeRobot's format; versions 2 and 3 "
                "are read: convert it with lerobot's own scripts"
            )
        self._info, self._packed = info, number == "3"
        self._features: dict[str, Any] = info["features"]

    @property
    def robot(self) -> str:
        """The robot's name, or the folder's."""
        return str(self._info.get("robot_type") or self.folder.name)

    @property
    def rewarded(self) -> bool:
        """Whether there is a reward for each step."""
        return REWARD in self._features

    @property
    def steps(self) -> int:
        """Steps of all episodes. Raises `DataError` where the folder does not say."""
        try:
            return int(self._info["total_frames"])
        except DAMAGE as error:
            raise DataError(f"{str(self.folder / INFO)!r} has no total_frames") from error

    def spec(self, wanted: ObservationSpec) -> ObservationSpec:
        """Return those of the ``wanted`` parts that the folder has, with its own shapes.

        Raises:
            DataError: several are texts, of which a step has one.
        """
        if len(texts := [part.name for part in wanted.parts if part.kind == "text"]) > 1:
            raise DataError(
                f"{str(self.folder)!r} has one text for a step, its task, but the environment "
                f"shows {', '.join(texts)}: which is it? Write the demonstrations in the format of "
                "rlinf-async demonstrations"
            )
        parts: list[ObservationPart] = []
        for part in wanted.parts:
            if part.kind == "text":
                if any((self.folder / name).is_file() for name in TASKS):
                    parts.append(part)
            elif (feature := self._features.get(self._column(part))) is not None:
                parts.append(
                    ObservationPart(name=part.name, kind=part.kind, shape=_shape(part, feature))
                )
        return ObservationSpec(tuple(parts))

    def arrays(
        self, spec: ObservationSpec, *, rewarded: bool = False
    ) -> Iterator[tuple[Path, dict[str, Any]]]:
        """Read the episodes: of each its file, an array for each part, ``[T, ...]``, and ``action
        [T, A]``, float32; with ``rewarded`` also `REWARD` and `DONE`, ``[T]`` (False where the data
        set does not say).

        Raises:
            DataError: a file that is damaged, or has other columns.
            MissingExtra: pyarrow is not installed, or ffmpeg for videos.
        """
        parquet = needed("pyarrow.parquet", extra="llm", needed_for=str(self.folder))
        tasks = self._tasks(parquet)
        filmed = {part.name: part.shape for part in spec.parts if self._is_video(part)}
        columns = {self._column(part) for part in spec.parts if part.name not in filmed}
        columns |= {name for name in (REWARD, DONE) if rewarded and name in self._features}
        for place in self._places(parquet):
            own = [("episode_index", "=", place.number)] if place.row else None
            try:
                table = parquet.read_table(
                    place.table, columns=sorted(columns | {"action"}), filters=own
                )
                kind = np.int64 if self.discrete else np.float32
                action = np.array(table["action"].to_pylist(), kind)
                rows = action.reshape(-1 if self.discrete else (len(action), -1))
                arrays: dict[str, Any] = {"action": rows}
                if rewarded:
                    arrays |= _outcome(table, len(action))
                for part in spec.parts:
                    if part.name in filmed:
                        clip = self._clip(place, self._column(part))
                        pictures = self._filmed(clip, len(action))
                        arrays[part.name] = pictures.reshape(len(action), *part.shape)
                    else:
                        arrays[part.name] = _cells(table[self._column(part)], part, tasks)
            except (OSError, *DAMAGE) as error:
                raise DataError(
                    f"{str(place.table)!r} is no episode of LeRobot: {error}"
                ) from error
            yield place.table, arrays

    def check_videos(self, spec: ObservationSpec) -> None:
        """Raise `DataError` for a video that is not there; reads none."""
        filmed = [self._column(part) for part in spec.parts if self._is_video(part)]
        if not filmed:
            return
        needed("imageio_ffmpeg", extra="embodied", needed_for=f"the videos in {str(self.folder)!r}")
        parquet = needed("pyarrow.parquet", extra="llm", needed_for=str(self.folder))
        for place in self._places(parquet):
            for key in filmed:
                path = self._clip(place, key).path
                if not path.is_file():
                    raise DataError(
                        f"{str(path)!r}, the video of episode {place.number}, is not there"
                    )

    def _places(self, parquet: Any) -> Iterator[Place]:
        if not self._packed:
            for number in range(self.episodes):
                yield Place(number, self.folder / self._named("data_path", DATA, number), {})
            return
        rows: dict[int, Mapping[str, Any]] = {}
        for path in sorted((self.folder / EPISODES).glob("*/*.parquet")):
            try:
                names = [one for one in parquet.read_schema(path).names if "stats/" not in one]
                table = parquet.read_table(path, columns=names)
                rows |= {int(row["episode_index"]): row for row in table.to_pylist()}
            except (OSError, *DAMAGE) as error:
                raise DataError(f"{str(path)!r} says nothing of episodes: {error}") from error
        for number in range(self.episodes):
            if number not in rows:
                raise DataError(
                    f"{str(self.folder / EPISODES)!r} has {len(rows)} episodes and not number "
                    f"{number}, of {self.episodes} that {INFO} counts: was its recording cut off?"
                )
            row = rows[number]
            name = self._info["data_path"].format(
                chunk_index=row["data/chunk_index"], file_index=row["data/file_index"]
            )
            yield Place(number, self.folder / name, row)

    def _named(self, setting: str, default: str, number: int, key: str = "") -> str:
        """The file of an episode in version 2."""
        chunk = number // int(self._info.get("chunks_size", 1000))
        pattern: str = self._info.get(setting) or default
        return pattern.format(episode_chunk=chunk, episode_index=number, video_key=key)

    def _clip(self, place: Place, key: str) -> Clip:
        shape = _height_width_channels(self._features[key])
        if not place.row:
            name = self._named("video_path", VIDEO, place.number, key)
            return Clip(self.folder / name, 0.0, shape)
        where = {name: place.row[f"videos/{key}/{name}"] for name in ("chunk_index", "file_index")}
        name = self._info["video_path"].format(video_key=key, **where)
        start = float(place.row[f"videos/{key}/from_timestamp"])
        return Clip(self.folder / name, start, shape)

    def _filmed(self, clip: Clip, count: int) -> NDArray[np.uint8]:
        """Return ``count`` pictures of a video; raises `ValueError` where there are fewer."""
        ffmpeg = needed(
            "imageio_ffmpeg", extra="embodied", needed_for=f"the videos in {str(self.folder)!r}"
        )
        half = 0.5 / float(self._info["fps"])  # of a picture's time, as times are rounded
        command = [
            *(ffmpeg.get_ffmpeg_exe(), "-v", "error", "-nostdin"),
            *("-ss", f"{max(0.0, clip.start - half):.6f}", "-i", str(clip.path)),
            *("-frames:v", str(count), "-fps_mode", "passthrough", "-f", "image2pipe"),
            *("-c:v", "pgm" if clip.shape[2] == 1 else "ppm", "-"),
        ]
        ended = subprocess.run(command, capture_output=True)
        said = ended.stderr.decode(errors="replace").strip().splitlines()
        if ended.returncode:
            raise ValueError(f"{str(clip.path)!r} cannot be read: {(said or ['no video'])[-1]}")
        made = list(_pictures(ended.stdout, clip))
        if len(made) != count:
            raise ValueError(
                f"{str(clip.path)!r} has {len(made)} pictures from second {clip.start:g} on, of "
                f"the {count} steps of the episode"
            )
        return np.stack(made)

    def _tasks(self, parquet: Any) -> dict[int, str]:
        """The instructions, by their number."""
        lines, table = (self.folder / name for name in TASKS)
        rows: list[dict[str, Any]] = []
        try:
            if lines.is_file():
                rows = [json.loads(one) for one in lines.read_text().splitlines() if one.strip()]
            elif table.is_file():
                rows = parquet.read_table(table).to_pylist()
            # In a table the text is an index of pandas, which has a name in some versions.
            return {int(row["task_index"]): _task(row) for row in rows}
        except (OSError, *DAMAGE) as error:
            raise DataError(f"the tasks in {str(self.folder / 'meta')!r}: {error!r}") from error

    def _is_video(self, part: ObservationPart) -> bool:
        feature = self._features.get(self._column(part), {})
        return part.kind == "image" and feature.get("dtype") == "video"

    def _column(self, part: ObservationPart) -> str:
        if part.kind == "text":
            return "task_index"
        if part.kind == "state":
            return f"observation.{STATE}"
        named = f"observation.images.{part.name}"
        return named if named in self._features else f"observation.{part.name}"


def _pictures(data: bytes, clip: Clip) -> Iterator[NDArray[np.uint8]]:
    """The pictures in netpbm's format: ``P6 width height 255``, and the pixels.

    Raises `ValueError` for those of another size than the clip's.
    """
    at, size = 0, math.prod(clip.shape)
    while at < len(data):
        _, width, height, _ = data[at : at + 40].split(maxsplit=4)[:4]
        if (int(height), int(width)) != clip.shape[:2]:
            raise ValueError(
                f"the pictures of {str(clip.path)!r} are {int(height)} x {int(width)}, but {INFO} "
                f"says {clip.shape[0]} x {clip.shape[1]}"
            )
        at = data.index(b"255\n", at) + 4
        yield np.frombuffer(data, np.uint8, size, at).reshape(clip.shape)
        at += size


def _shape(part: ObservationPart, feature: Mapping[str, Any]) -> tuple[int, ...]:
    if part.kind != "image":
        return tuple(feature["shape"])
    found = _height_width_channels(feature)
    return part.shape if found == (*part.shape, 1) else found  # grey, with or without a channel


def _height_width_channels(feature: Mapping[str, Any]) -> tuple[int, ...]:
    """The shape of a picture as it is read: some data sets say that of a tensor."""
    shape, names = tuple(feature["shape"]), list(feature.get("names") or ())
    if len(shape) == 3 and names[:1] and names[0] in CHANNELS:
        return (*shape[1:], shape[0])
    return shape


def _cells(column: Any, part: ObservationPart, tasks: Mapping[int, str]) -> Any:
    """The rows of a column, as an array of the part."""
    cells = column.to_pylist()
    if part.kind == "text":
        return texts([tasks[index].encode() for index in cells], part.shape[0], "task")
    if part.kind == "state":
        return np.array(cells, np.float32).reshape(len(cells), -1)
    channels = part.shape[2] if len(part.shape) == 3 else 1
    pictures = np.stack([decoded(one["bytes"], channels) for one in cells])
    if pictures.shape[1:] not in (part.shape, part.shape[:2]):
        raise ValueError(
            f"its pictures {part.name!r} are {list(pictures.shape[1:])}, but {INFO} says "
            f"{list(part.shape)}"
        )
    return pictures.reshape(len(cells), *part.shape)


def _outcome(table: Any, steps: int) -> dict[str, Any]:
    """Rewards ``[T]`` and ends ``[T]`` of an episode."""
    known = DONE in table.column_names
    return {
        REWARD: np.array(table[REWARD].to_pylist(), np.float32).reshape(steps),
        DONE: np.array(table[DONE].to_pylist() if known else steps * [False]).reshape(steps) > 0,
    }


def texts(rows: Sequence[bytes], size: int, what: str) -> NDArray[np.uint8]:
    """Return texts in ``size`` bytes each, ``[N, size]``; raises `ValueError`, which says ``what``
    they are, for longer ones."""
    if long := next((row for row in rows if len(row) > size), b""):
        raise ValueError(
            f"{what} {long.decode(errors='replace')!r} has {len(long)} bytes, but the environment "
            f"shows texts of at most {size}"
        )
    padded = b"".join(row.ljust(size, b"\0") for row in rows)
    return np.frombuffer(padded, np.uint8).reshape(len(rows), size)


def _task(row: Mapping[str, Any]) -> str:
    """The text of a task; raises `ValueError` where there is none."""
    [text] = (value for name, value in row.items() if name != "task_index")
    return str(text)


def decoded(data: bytes, channels: int) -> Any:
    """Pixels of a PNG or JPEG, uint8: grey, or of so many colours. Raises `ValueError` for more
    than 8 bits."""
    picture: Any = importlib.import_module("PIL.Image")
    found = picture.open(io.BytesIO(data))
    if found.mode.startswith(("I", "F")):
        raise ValueError(f"a picture has the mode {found.mode!r}: those of 8 bits are read")
    mode = {1: "L", 3: "RGB", 4: "RGBA"}.get(channels)
    return np.asarray(found if mode is None else found.convert(mode))
