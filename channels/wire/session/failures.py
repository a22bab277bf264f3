"""Errors on their way back to the process that asked."""

from __future__ import annotations

import traceback

import msgspec

from rlinf_async.channels import errors
from rlinf_async.channels.errors import ChannelError, fit_bytes, text_of

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are not what was expected."""
MAX_TEXT = 16 * 1024
"""Bytes, of a message and of a traceback: an answer that fails must fit where it goes."""


class RemoteError(Exception):
    """The other side's handler raised something that is not a channel's error.

    Args:
        type_name: the exception's class, as ``module.Name``.
        message: what it said.
        traceback_text: where it was raised, over there.
    """

    def __init__(self, type_name: str, message: str, traceback_text: str) -> None:
        super().__init__(f"{type_name}: {message}")
        self.type_name = type_name
        self.message = message
        self.traceback_text = traceback_text


class Report(msgspec.Struct, array_like=True, frozen=True):
    """An exception as plain data."""

    type_name: str
    message: str
    traceback_text: str


def _known() -> dict[str, type[Exception]]:
    """The classes that come back as themselves: all of them take one text."""
    ours = {
        name: value
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, ChannelError)
    }
    return {**ours, "ValueError": ValueError}


KNOWN = _known()


def report(error: BaseException, most: int = MAX_TEXT) -> Report:
    """The exception as it travels: it always fits, and can always be encoded. Each of its texts has
    at most so many bytes."""
    kind = type(error)
    said = fit_bytes(text_of(error), most)
    if KNOWN.get(kind.__name__) is kind:
        return Report(kind.__name__, said, "")
    if isinstance(error, RemoteError):  # it comes from further away
        return Report(
            fit_bytes(error.type_name, most),
            fit_bytes(error.message, most),
            fit_bytes(error.traceback_text, most),
        )
    name = (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )
    trace = "".join(traceback.format_exception(error))
    return Report(fit_bytes(name, most), said, fit_bytes(trace, most))


def rebuild(found: Report) -> Exception:
    """The exception to raise here."""
    kind = KNOWN.get(found.type_name)
    if kind is not None:
        return kind(found.message)
    return RemoteError(found.type_name, found.message, found.traceback_text)
