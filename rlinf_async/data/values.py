"""Values of data files as they were written: one rule for every type of JSON, Parquet and Arrow.

::

    text, and bytes that are UTF-8     the text
    integer, of any size               its digits
    floating, of 16, 32 or 64 bits     the shortest digits that are read back as the same number
    decimal; a number in JSON lines    the digits as they were written: 3.50
    boolean                            true, false
    date, time, timestamp, duration    ISO 8601
    list, struct, map                  JSON, with each value by this rule; a map as a list of pairs
    null, NaN, infinity, other bytes   refused, with file, record and column
"""

from __future__ import annotations

import importlib
import math
import uuid
from collections.abc import Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, Final

import msgspec
import numpy as np

PLAIN_DIGITS: Final = 100
"""zeros that a decimal may need to be written without an exponent"""

_json = msgspec.json.Encoder(decimal_format="number")


def from_arrow(scalar: Any) -> Any:
    """A scalar of Arrow as a plain value that loses nothing.

    Raises:
        ValueError: there is no plain value of it, such as of a time with nanoseconds.
    """
    arrow = importlib.import_module("pyarrow")
    kind, types = scalar.type, arrow.types
    if isinstance(kind, arrow.BaseExtensionType):
        return from_arrow(scalar.value) if scalar.is_valid else None
    if not scalar.is_valid:
        return None
    if types.is_struct(kind):
        return {field.name: from_arrow(scalar[at]) for at, field in enumerate(kind)}
    if types.is_map(kind):
        return [[from_arrow(pair[0]), from_arrow(pair[1])] for pair in scalar.values]
    if types.is_nested(kind) and hasattr(scalar, "values"):
        return [from_arrow(one) for one in scalar.values]
    if types.is_dictionary(kind):
        return from_arrow(scalar.value)
    try:
        value = scalar.as_py()
        same = not types.is_temporal(kind) or arrow.scalar(value, kind).equals(scalar)
    except OverflowError as error:
        raise ValueError(f"{kind}: {error}") from error
    if not same:  # Python's times have microseconds
        raise ValueError(f"{kind}: {scalar} has nanoseconds, which are not read")
    if types.is_floating(kind) and kind.bit_width < 64:
        return float(str(np.dtype(f"f{kind.bit_width // 8}").type(value)))
    return _decoded(value) if isinstance(value, bytes) else value


def as_text(value: Any) -> str:
    """The value as text.

    Raises:
        ValueError: it cannot be written faithfully; says why.
    """
    plain = _plain(value)
    if isinstance(plain, str):
        return plain
    if isinstance(plain, Decimal):
        return f"{plain:f}" if abs(plain.adjusted()) < PLAIN_DIGITS else str(plain)
    if isinstance(plain, int) and not isinstance(plain, bool):
        return str(plain)
    return _json.encode(plain).decode()


def _plain(value: Any) -> Any:
    """What JSON has a form for: text, numbers, booleans, None, lists and dicts of these."""
    if isinstance(value, bytes):
        value = _decoded(value)
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, int):  # msgspec writes larger ones as decimals only
        return value if -(2**63) <= value < 2**64 else Decimal(value)
    if isinstance(value, float | Decimal):
        finite = value.is_finite() if isinstance(value, Decimal) else math.isfinite(value)
        if not finite:
            raise ValueError(f"{value} is no number that an answer could be")
        return value
    if isinstance(value, date | time | datetime):
        return value.isoformat()
    if isinstance(value, timedelta):  # of pandas, too, where nanoseconds are counted
        if getattr(value, "nanoseconds", 0):
            raise ValueError(f"{value} has nanoseconds, which are not read")
        return msgspec.to_builtins(timedelta(value.days, value.seconds, value.microseconds))
    if isinstance(value, uuid.UUID):
        return msgspec.to_builtins(value)
    if isinstance(value, Mapping):
        return {as_text(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    what = "bytes that are not UTF-8" if isinstance(value, bytes) else type(value).__name__
    raise ValueError(f"{what} cannot be compared with an answer: {value!r:.80}")


def _decoded(value: bytes) -> str | bytes:
    """The text that bytes are; these bytes where they are none."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value
