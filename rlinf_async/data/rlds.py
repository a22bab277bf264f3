"""Data sets in RLDS, the format in which TensorFlow Datasets keeps episodes, read without
TensorFlow.

::

    dataset_info.json                          its name, and of each split the episodes of its files
    features.json                              what a step holds: kinds, types and shapes, by name
    bridge-train.tfrecord-00000-of-00512       episodes, each an ``Example`` of protocol buffers

A step has ``observation``, ``action``, ``reward``, ``is_first``, ``is_last`` and ``is_terminal``,
and what else the data set has. Of the last step of an episode only the observation counts, and
whether it is terminal: ``reward`` and ``action`` are those that follow an observation.

Features are named here as in ``features.json``, below ``steps``: ``observation/image``.

Sources: RLDS's README (the meaning of a step), TensorFlow's documentation of TFRecord and
``tf.train.Example``, and the files that tensorflow-datasets 4.9 writes.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import json
import struct
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlinf_async.config import needed
from rlinf_async.data.config import DataError
from rlinf_async.data.lerobot import DAMAGE, decoded

INFO: Final = "dataset_info.json"
FEATURES: Final = "features.json"
STEPS: Final = "steps"
TEMPLATE: Final = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
HEADER: Final = struct.Struct("<QI")
"""of a record: its length, and the checksum of that"""
CHECKSUM: Final = struct.Struct("<I")


class Feature(NamedTuple):
    """Something that each step has."""

    name: str
    kind: Literal["image", "numbers", "text"]
    dtype: str
    shape: tuple[int, ...]
    """-1 where it differs between steps"""

    def __str__(self) -> str:
        return f"{self.name} ({self.kind} {self.dtype} {list(self.shape)})"


class RldsFolder:
    """A data set: the folder of one version, such as ``bridge/1.0.0``."""

    def __init__(self, folder: Path, split: str) -> None:
        """Read what it holds.

        Raises:
            DataError: it is no RLDS, has no such split, or its files are of another format.
        """
        self.folder, self.split = folder, split
        info = _described(folder / INFO)
        try:
            form = str(info.get("fileFormat", "tfrecord"))
            splits = {str(one["name"]): one for one in info["splits"]}
            self.name = str(info["name"])
        except DAMAGE as error:
            raise DataError(f"{str(folder / INFO)!r} describes no data set: {error!r}") from error
        if form != "tfrecord":
            raise DataError(
                f"{str(folder)!r} has files of the format {form!r}; 'tfrecord' is read: write it "
                "anew with tfds.builder(..., file_format='tfrecord')"
            )
        if split not in splits:
            raise DataError(f"{str(folder)!r} has no split {split!r}, but {', '.join(splits)}")
        try:
            self._files = list(_files(self.name, splits[split]))
            steps = _described(folder / FEATURES)["featuresDict"]["features"][STEPS]
            found = dict(_features(steps["sequence"]["feature"], ""))
        except DAMAGE as error:
            raise DataError(
                f"{str(folder / FEATURES)!r} describes no episodes of steps: {error!r}"
            ) from error
        self.features: Mapping[str, Feature] = found
        """what a step has, by name"""
        self.episodes = sum(count for _, count in self._files)
        """episodes of the split"""

    def feature(self, name: str) -> Feature:
        """Return the feature of this name; raises `DataError` where there is none."""
        if name not in self.features:
            near = difflib.get_close_matches(name, self.features, n=1, cutoff=0.5)
            hint = f"; is it {near[0]}?" if near else "."
            raise DataError(
                f"the steps in {str(self.folder)!r} have no {name!r}{hint} They have: "
                f"{', '.join(map(str, self.features.values()))}"
            )
        return self.features[name]

    def arrays(self, names: Collection[str]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Read the episodes: of each where it is, and an array ``[T, ...]`` for each name, texts
        as a list of bytes.

        Raises:
            DataError: a file that is not there, or is damaged.
            MissingExtra: google-crc32c is not installed.
        """
        wanted = [self.feature(name) for name in names]
        for file, count in self._files:
            number = -1
            for number, record in enumerate(_records(self.folder / file)):
                where = f"{str(self.folder / file)!r}, episode {number}"
                try:
                    found = _lists(record)
                    made = {one.name: _array(found, one) for one in wanted}
                except (OSError, *DAMAGE) as error:
                    raise DataError(f"{where}, is none of this data set: {error}") from error
                yield where, made
            if number + 1 != count:
                raise DataError(
                    f"{str(self.folder / file)!r} has {number + 1} episodes of the {count} that "
                    f"{INFO} counts: was it cut off?"
                )


def _described(path: Path) -> dict[str, Any]:
    """What a JSON file of a data set says."""
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DataError(
            f"{str(path.parent)!r} is no data set in RLDS: its {path.name} cannot be read: "
            f"{error}; name the folder of a version, such as bridge/1.0.0"
        ) from error
    return found


def _files(name: str, split: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """The files of a split, and the episodes in each."""
    template = str(split.get("filepathTemplate") or TEMPLATE)
    lengths = [int(one) for one in split["shardLengths"]]
    for index, count in enumerate(lengths):
        fields = {"DATASET": name, "SPLIT": split["name"], "FILEFORMAT": "tfrecord"}
        fields |= {"SHARD_INDEX": f"{index:05d}", "NUM_SHARDS": f"{len(lengths):05d}"}
        both = "{SHARD_INDEX}-of-{NUM_SHARDS}".format(**fields)
        yield template.format(**fields, SHARD_X_OF_Y=both), count


def _features(described: Mapping[str, Any], name: str) -> Iterator[tuple[str, Feature]]:
    """Those features that can be read."""
    if "featuresDict" in described:
        for key, one in described["featuresDict"]["features"].items():
            yield from _features(one, f"{name}/{key}" if name else key)
    elif "text" in described:
        yield name, Feature(name, "text", "string", ())
    elif "image" in described:
        yield name, _feature(name, "image", described["image"])
    elif "tensor" in described and described["tensor"].get("encoding", "none") == "none":
        text = described["tensor"]["dtype"] == "string"
        yield name, _feature(name, "text" if text else "numbers", described["tensor"])


def _feature(
    name: str, kind: Literal["image", "numbers", "text"], described: Mapping[str, Any]
) -> Feature:
    dimensions = described.get("shape", {}).get("dimensions", ())
    return Feature(name, kind, str(described["dtype"]), tuple(map(int, dimensions)))


def _records(path: Path) -> Iterator[bytes]:
    """The records of a file, whose checksums are right."""
    crc = needed("google_crc32c", extra="rlds", needed_for=f"the episodes in {str(path)!r}")

    def checked(data: bytes, checksum: int) -> bytes:
        # A checksum is rotated and shifted, since records may hold checksums themselves.
        found = crc.value(data)
        if ((found >> 15 | found << 17) + 0xA282EAD8) & 0xFFFFFFFF != checksum:
            raise DataError(f"{str(path)!r} is damaged: a checksum of record {number} is wrong")
        return data

    number = 0
    try:
        with path.open("rb") as file:
            while head := file.read(HEADER.size):
                length, checksum = HEADER.unpack(head)
                checked(head[:8], checksum)
                body = file.read(length)
                (checksum,) = CHECKSUM.unpack(file.read(CHECKSUM.size))
                yield checked(body, checksum)
                number += 1
    except (OSError, struct.error) as error:
        raise DataError(f"{str(path)!r} ends in record {number}: {error}") from error


@functools.cache
def _example() -> Any:
    """The class of ``tf.train.Example``, as far as its bytes tell it: maps are entries there."""
    descriptor: Any = importlib.import_module("google.protobuf.descriptor_pb2")
    pool: Any = importlib.import_module("google.protobuf.descriptor_pool")
    factory: Any = importlib.import_module("google.protobuf.message_factory")
    field = descriptor.FieldDescriptorProto
    package = "rlinf_async.rlds"
    file = descriptor.FileDescriptorProto(name="rlds.proto", package=package, syntax="proto3")

    def message(name: str, **fields: tuple[int, bool, int | str]) -> None:
        made = file.message_type.add(name=name)
        for key, (number, repeated, kind) in fields.items():
            label = field.LABEL_REPEATED if repeated else field.LABEL_OPTIONAL
            one = made.field.add(name=key, number=number, label=label)
            if isinstance(kind, str):
                one.type, one.type_name = field.TYPE_MESSAGE, f".{package}.{kind}"
            else:
                one.type = kind

    message("Bytes", value=(1, True, field.TYPE_BYTES))
    message("Floats", value=(1, True, field.TYPE_FLOAT))
    message("Ints", value=(1, True, field.TYPE_INT64))
    lists = {"bytes_list": (1, False, "Bytes"), "float_list": (2, False, "Floats")}
    message("Feature", **lists, int64_list=(3, False, "Ints"))
    message("Entry", key=(1, False, field.TYPE_STRING), value=(2, False, "Feature"))
    message("Features", feature=(1, True, "Entry"))
    message("Example", features=(1, False, "Features"))
    own = pool.DescriptorPool()
    own.Add(file)
    return factory.GetMessageClass(own.FindMessageTypeByName(f"{package}.Example"))


def _lists(record: bytes) -> dict[str, Any]:
    """The values of an episode, by their names below ``steps``."""
    message: Any = importlib.import_module("google.protobuf.message")
    try:
        read = _example().FromString(record)
    except message.DecodeError as error:
        raise ValueError(str(error)) from error
    return {
        entry.key.removeprefix(f"{STEPS}/"): getattr(entry.value, kind).value
        for entry in read.features.feature
        for kind in ("bytes_list", "float_list", "int64_list")
        if entry.value.HasField(kind)
    }


def _array(found: Mapping[str, Any], feature: Feature) -> Any:
    """A feature of all steps; raises `ValueError` where the values do not fit it."""
    if feature.name not in found:
        raise ValueError(f"it has no {feature.name!r}")
    values = found[feature.name]
    if feature.kind == "text":
        return list(values)
    if feature.kind == "image":
        return np.stack([_image(one, feature) for one in values])
    if -1 in feature.shape:
        raise ValueError(f"{feature} has another size in each step")
    # Examples know float32 and int64 alone; truth values, say, are kept as the latter.
    kept: NDArray[Any] = np.array(values)
    return kept.astype(np.dtype(feature.dtype)).reshape(-1, *feature.shape)


def _image(data: bytes, feature: Feature) -> NDArray[np.uint8]:
    """The pixels of an encoded image."""
    channels = feature.shape[2]
    pixels: NDArray[np.uint8] = np.asarray(decoded(data, channels))
    pixels = pixels.reshape(*pixels.shape[:2], channels)
    if any(wide not in (-1, own) for own, wide in zip(pixels.shape, feature.shape, strict=True)):
        raise ValueError(f"an image {list(pixels.shape)} in place of {feature}")
    return pixels
