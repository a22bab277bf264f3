"""Arguments and results of calls as bytes and back: by annotations, and by nothing else."""

from __future__ import annotations

from typing import Any

from rlinf_async.channels import MalformedFrame
from rlinf_async.channels.wire import (
    ChannelClient,
    ChannelServer,
    Decoder,
    Encoded,
    Encoder,
    EndRef,
    encode,
)
from rlinf_async.observe.trace import Span
from rlinf_async.workers.errors import BuildError
from rlinf_async.workers.methods import Method


class ArgumentsCodec:
    """The arguments of one method, given under these names."""

    def __init__(self, method: Method, names: tuple[str, ...]) -> None:
        self._method = method
        self._names = names
        self._types: Any = tuple[tuple(method.types[name] for name in names)]  # type: ignore[misc]
        try:
            Decoder(self._types, _refuse)
        except TypeError as error:
            raise BuildError(
                f"{method.label} cannot be called in another process: {error}"
            ) from error

    def encode(self, arguments: dict[str, Any], server: ChannelServer, lent: list[int]) -> Encoded:
        """The arguments. Channel ends among them are lent; their numbers are added to ``lent``."""

        def lend(end: Any) -> EndRef:
            ref = server.lend(end)
            lent.append(ref.number)
            return ref

        try:
            return Encoder(lend).encode(tuple(arguments[name] for name in self._names))
        except TypeError as error:
            raise BuildError(f"an argument of {self._method.label}: {error}") from error

    def decode(self, body: Encoded | None, client: ChannelClient) -> dict[str, Any]:
        """The arguments; channel ends come out as ends over this connection."""
        if body is None:
            raise MalformedFrame(f"a call of {self._method.label} came without its arguments")
        values = Decoder(self._types, client.end).decode(body)
        return dict(zip(self._names, values, strict=True))


_codecs: dict[tuple[Method, tuple[str, ...]], ArgumentsCodec] = {}
_results: dict[Method, Decoder] = {}
_spans = Decoder(list[Span])


def arguments_codec(method: Method, names: tuple[str, ...]) -> ArgumentsCodec:
    """The codec of a method's arguments; made once.

    Raises:
        BuildError: an annotation names a type that cannot travel.
    """
    found = _codecs.get((method, names))
    if found is None:
        found = _codecs[method, names] = ArgumentsCodec(method, names)
    return found


def encode_result(method: Method, value: Any) -> Encoded:
    """What a method returned.

    Raises:
        TypeError: it cannot travel.
    """
    try:
        return encode(value)
    except TypeError as error:
        raise TypeError(f"what {method.label} returned cannot travel: {error}") from error


def decode_result(method: Method, body: Encoded | None) -> Any:
    """What a method returned, by its return annotation."""
    decoder = _results.get(method)
    if decoder is None:
        decoder = _results[method] = Decoder(method.returns)
    if body is None:
        raise MalformedFrame(f"the result of {method.label} is missing")
    return decoder.decode(body)


def check_result_type(method: Method) -> None:
    """Refuse a return annotation that cannot travel, before the call.

    Raises:
        BuildError: naming the annotation.
    """
    if method in _results:
        return
    try:
        _results[method] = Decoder(method.returns)
    except TypeError as error:
        raise BuildError(
            f"{method.label} cannot be called in another process: what it returns: {error}"
        ) from error


def encode_spans(spans: list[Span]) -> Encoded:
    return encode(spans)


def decode_spans(body: Encoded | None) -> list[Span]:
    found: list[Span] = [] if body is None else _spans.decode(body)
    return found


def _refuse(ref: Any, item_type: Any) -> Any:
    raise MalformedFrame("no end of a channel is expected here")
