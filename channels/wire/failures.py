"""Errors on their way back to whoever asked."""

from __future__ import annotations

import traceback

import msgspec

from rlinf_async.channels import errors
from rlinf_async.channels.errors import ChannelError

MAX_TEXT = 16 * 1024


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


def report(error: BaseException) -> Report:
    """The exception as it travels."""
    kind = type(error)
    if KNOWN.get(kind.__name__) is kind:
        return Report(kind.__name__, _cut(str(error)), "")
    if isinstance(error, RemoteError):  # it comes from further away
        return Report(error.type_name, _cut(error.message), error.traceback_text)
    name = (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )
    return Report(name, _cut(str(error)), _cut("".join(traceback.format_exception(error))))


def rebuild(found: Report) -> Exception:
    """The exception to raise here."""
    kind = KNOWN.get(found.type_name)
    if kind is not None:
        return kind(found.message)
    return RemoteError(found.type_name, found.message, found.traceback_text)


def _cut(text: str) -> str:
    """The end of a long text: that is where a traceback says what happened."""
    return text if len(text) <= MAX_TEXT else "... " + text[-MAX_TEXT:]
