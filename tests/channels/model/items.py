"""What the programs' items are, and how one is told from another and checked."""

from __future__ import annotations

import importlib
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from tests.channels.model.program import Payload

VERSIONS = 16
"""Versions that items carry, in turn."""


class Sample(msgspec.Struct):
    """A struct with plain bytes."""

    number: int
    version: int
    data: bytes


class ArraySample(msgspec.Struct):
    """A struct with an array, each element of which says the number."""

    number: int
    version: int
    data: NDArray[np.uint8]


def item_type(payload: Payload) -> Any:
    """What the channel of such a program carries."""
    if payload == "int":
        return int
    if payload == "struct":
        return Sample
    if payload == "array":
        return ArraySample
    return importlib.import_module("tests.channels.model.tensor_items").TensorSample


def make_item(payload: Payload, number: int, size: int) -> Any:
    """An item of this number, and about so many bytes."""
    if payload == "int":
        return number
    version = number % VERSIONS
    if payload == "struct":
        return Sample(number, version, bytes([number % 251]) * size)
    if payload == "array":
        return ArraySample(number, version, np.full(size, number % 251, np.uint8))
    tensors = importlib.import_module("tests.channels.model.tensor_items")
    return tensors.make(number, version, size)


REPLACED = 1 << 40
"""How much larger the number of an item is for each time that it was replaced."""


def replacement(item: Any) -> Any:
    """What takes the place of an item: the same, one replacement older."""
    if isinstance(item, int):
        return item + REPLACED
    return msgspec.structs.replace(item, number=item.number + REPLACED)


def times_replaced(item: Any) -> int:
    """How often an item was replaced."""
    return int(getattr(item, "number", item)) // REPLACED


def number_in(item: Any) -> int:
    """The number of an item, which its replacements share."""
    number: int = getattr(item, "number", item)
    return number % REPLACED


def number_of(item: Any) -> int:
    """The number of an item that was taken.

    Raises:
        AssertionError: its payload is not what was put.
    """
    number = number_in(item)
    if isinstance(item, int):
        return number
    data = item.data
    wanted = number % 251
    if isinstance(data, bytes):
        sound = data.count(wanted) == len(data)
    else:
        sound = bool((data == wanted).all())
    if not sound or item.version != number % VERSIONS:
        raise AssertionError(f"item {number} arrived with another payload")
    return number
