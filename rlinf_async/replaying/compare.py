"""Whether two values are the same, as deep as they go; where they differ first, and how many values
were compared.

Numbers may differ by a tolerance; whole numbers, text, shapes, dtypes and lengths may not. NaN is
equal to NaN. Weights are compared tensor by tensor, with the numbers that their bytes are. Times
that were measured differ in every run, and so does how often somebody had to wait: fields that hold
those are left out, and counted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

import msgspec
import numpy as np

from rlinf_async.channels.encoded import parts_of
from rlinf_async.messages.weights import TensorSlot, WeightBucket

TIMES: Final = ("seconds", "longest")
"""names of fields that hold measured times, by themselves or behind an underscore"""
RATES: Final = "_per_second"
WAITS: Final = ("waited", "set_aside")
"""names of fields that count how often somebody had to wait: so much depends on the moment"""
CHECKSUM: Final = "checksum"
"""field that follows from others: with a tolerance, those are compared"""


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """Where the replay is not what was recorded."""

    where: str
    """channel, call or launch: ``"channel 'scored'"``, ``"the result of train, call 3"``"""
    index: int
    """number of the item among those that this worker put there, from 1; 0: of no item"""
    path: str
    """path of the field in it; empty: the whole"""
    recorded: str
    replayed: str
    iteration: int | None = None
    """iteration that it belongs to, where that is known"""

    def __str__(self) -> str:
        number = f", item {self.index}" if self.index else ""
        inside = "" if self.iteration is None else f" (iteration {self.iteration})"
        at = f" at {self.path}" if self.path else ""
        return (
            f"{self.where}{number}{inside}{at}: recorded {self.recorded}, replayed {self.replayed}"
        )


class Found(Exception):
    """The first difference between two values: its path and both values."""

    def __init__(self, path: str, recorded: object, replayed: object) -> None:
        super().__init__(path)
        self.path = path
        self.recorded = recorded if isinstance(recorded, _Text) else _Text(repr(recorded))
        self.replayed = replayed if isinstance(replayed, _Text) else _Text(repr(replayed))


class _Text(str):
    """Words that stand for a value."""


MOST_TEXT: Final = 200
"""characters of a value that a report shows"""


def shown(text: str) -> str:
    """The beginning of a long text."""
    return text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]}... ({len(text)} characters)"


class Comparison:
    """Compares values, and counts.

    Args:
        tolerance: largest difference of two numbers that are not whole, as a part of the number
            where that is above 1; 0: none.
        ignored: names of further fields that are not compared.
    """

    def __init__(self, tolerance: float = 0.0, ignored: frozenset[str] = frozenset()) -> None:
        self.tolerance = tolerance
        self.ignored = ignored
        self.values = 0
        """numbers, texts and other single values that were compared"""
        self.left_out: Counter[str] = Counter()
        """fields that were not compared, by name"""
        self.largest = 0.0
        """largest difference of two numbers that was within the tolerance"""

    def add(self, other: Comparison) -> None:
        """Count what another has compared as well."""
        self.values += other.values
        self.left_out += other.left_out
        self.largest = max(self.largest, other.largest)

    def compare(self, recorded: Any, replayed: Any, path: str = "") -> None:
        """Return if they are the same.

        Raises:
            Found: they are not.
        """
        if isinstance(recorded, WeightBucket) and isinstance(replayed, WeightBucket):
            return self._bucket(recorded, replayed, path)
        if _is_array(recorded) or _is_array(replayed):
            return self._array(recorded, replayed, path)
        recorded, replayed = _number(recorded), _number(replayed)
        if isinstance(recorded, (int, float)) and isinstance(replayed, (int, float)):
            return self._numbers(recorded, replayed, path)
        if isinstance(recorded, (list, tuple)) and isinstance(replayed, (list, tuple)):
            return self._sequence(recorded, replayed, path)
        if isinstance(recorded, Mapping) and isinstance(replayed, Mapping):
            return self._mapping(recorded, replayed, path)
        if type(recorded) is not type(replayed):
            raise Found(path, recorded, replayed)
        return self._parts(recorded, replayed, path)

    def _parts(self, recorded: Any, replayed: Any, path: str) -> None:
        before, after = parts_of(recorded), dict(parts_of(replayed))
        if not before:
            self.values += 1
            if recorded != replayed:
                raise Found(path, recorded, replayed)
            return
        for step, part in before:
            if self._is_left_out(step.removeprefix("."), path):
                continue
            if step not in after:
                raise Found(path + step, part, _Text("nothing"))
            self.compare(part, after[step], path + step)

    def _is_left_out(self, name: str, path: str) -> bool:
        last = name.rpartition("_")[2]
        time = last in TIMES or name.endswith(RATES) or name in WAITS
        derived = name == CHECKSUM and self.tolerance > 0
        if time or derived or name in self.ignored:
            self.left_out[name] += 1
            return True
        return False

    def _numbers(self, recorded: float, replayed: float, path: str) -> None:
        self.values += 1
        if isinstance(recorded, bool) is not isinstance(replayed, bool):
            raise Found(path, recorded, replayed)
        if recorded == replayed:
            return
        if isinstance(recorded, int) and isinstance(replayed, int):
            raise Found(path, recorded, replayed)
        if math.isnan(recorded) and math.isnan(replayed):
            return
        distance = abs(recorded - replayed)
        limit = self.tolerance * max(1.0, abs(recorded))
        if not (math.isfinite(distance) and distance <= limit):
            raise Found(path, recorded, replayed)
        self.largest = max(self.largest, distance)

    def _sequence(self, recorded: Any, replayed: Any, path: str) -> None:
        for index, (before, after) in enumerate(zip(recorded, replayed, strict=False)):
            self.compare(before, after, f"{path}[{index}]")
        if len(recorded) != len(replayed):
            sizes = [_Text(f"{len(one)} elements") for one in (recorded, replayed)]
            raise Found(path, *sizes)

    def _mapping(self, recorded: Any, replayed: Any, path: str) -> None:
        for key in recorded:
            if isinstance(key, str) and self._is_left_out(key, path):
                continue
            if key not in replayed:
                raise Found(f"{path}[{key!r}]", recorded[key], _Text("nothing"))
            self.compare(recorded[key], replayed[key], f"{path}[{key!r}]")
        for key in replayed:
            if key not in recorded:
                raise Found(f"{path}[{key!r}]", _Text("nothing"), replayed[key])

    def _array(self, recorded: Any, replayed: Any, path: str) -> None:
        if not (_is_array(recorded) and _is_array(replayed)):
            raise Found(path, recorded, replayed)
        before, after = _as_numpy(recorded), _as_numpy(replayed)
        if before.dtype != after.dtype or before.shape != after.shape:
            texts = [_Text(f"{one.dtype} of shape {list(one.shape)}") for one in (before, after)]
            raise Found(path, *texts)
        self.values += before.size
        same = before == after
        if before.dtype.kind in "fc":
            with np.errstate(invalid="ignore"):
                far = np.abs(before - after)
                limit = self.tolerance * np.maximum(1.0, np.abs(before))
                within = np.isfinite(far) & (far <= limit) & (self.tolerance > 0)
            same = same | within | (np.isnan(before) & np.isnan(after))
            if before.size and bool(np.all(same)):
                self.largest = max(self.largest, float(np.max(far, initial=0.0, where=within)))
        if not bool(np.all(same)):
            at = np.unravel_index(int(np.argmax(~np.atleast_1d(same))), np.atleast_1d(same).shape)
            place = "".join(f"[{int(one)}]" for one in at) if before.ndim else ""
            first = [np.atleast_1d(one)[at].item() for one in (before, after)]
            raise Found(path + place, *first)

    def _bucket(self, recorded: WeightBucket, replayed: WeightBucket, path: str) -> None:
        """Tensor by tensor: bytes say nothing of how far two numbers are apart."""
        self.compare(list(recorded.slots), list(replayed.slots), f"{path}.slots")
        for slot in recorded.slots:
            at = f"{path} tensor {slot.name!r}"
            self._array(_tensor(recorded, slot), _tensor(replayed, slot), at)
        if not self._is_left_out(CHECKSUM, path):
            self.compare(recorded.checksum, replayed.checksum, f"{path}.{CHECKSUM}")


def _tensor(bucket: WeightBucket, slot: TensorSlot) -> np.ndarray[Any, Any]:
    """The numbers of a tensor; those of bfloat16 as float32."""
    brain = slot.dtype == "bfloat16"
    dtype = np.dtype(np.uint16) if brain else _dtype(slot.dtype)
    count = math.prod(slot.shape)
    data = np.ascontiguousarray(bucket.data)[slot.offset : slot.offset + count * dtype.itemsize]
    found = np.frombuffer(data.tobytes(), dtype)
    if brain:
        found = (found.astype(np.uint32) << 16).view(np.float32)
    return found.reshape(slot.shape)


def _dtype(name: str) -> np.dtype[Any]:
    try:
        return np.dtype(name)
    except TypeError:  # of 8 bits: compared as they are
        return np.dtype(np.uint8)


def _number(value: Any) -> Any:
    """A scalar of numpy as a plain number: so it arrives where it was put by another process."""
    return value.item() if isinstance(value, np.generic) else value


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) or _is_tensor(value)


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "detach") and hasattr(value, "numpy")


def _as_numpy(value: Any) -> np.ndarray[Any, Any]:
    if not _is_tensor(value):
        found: np.ndarray[Any, Any] = value
        return found
    value = value.detach().cpu()
    if str(value.dtype) == "torch.bfloat16":
        value = value.float()
    arrived: np.ndarray[Any, Any] = value.numpy()
    return arrived
