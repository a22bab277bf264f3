"""Messages between the owner of a cluster and its workers' processes, beside the channels.

::

    to the worker      request                                   body of the reply
    worker.start       build the worker and run its setup
    worker.call        run a method; the body holds arguments    the result
    worker.ended       reply when a cancelled call has ended
    worker.doing       report its open spans
    worker.standstill  report whether it could go on by itself
    worker.clock       say its time
    worker.home        let queues live there; where is that
    worker.spans       send its spans since the last time        the spans
    worker.stop        cancel its calls, run teardown, and exit

Arguments and results travel as bytes by the annotations of the method, and by nothing else.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from rlinf_async.channels import MalformedFrame
from rlinf_async.channels.untyped import packed, packer
from rlinf_async.channels.wire import (
    ChannelServer,
    Decoder,
    Encoded,
    Encoder,
    EndRef,
    encode,
)
from rlinf_async.channels.wire.items.codec import DecodeEnd
from rlinf_async.channels.wire.links.remote_end import RemoteEnd
from rlinf_async.channels.wire.session.requests import head_of
from rlinf_async.observe.trace import Span
from rlinf_async.workers.errors import BuildError, Failure
from rlinf_async.workers.methods import Method

CALL: Final = "worker.call"
ENDED: Final = "worker.ended"


class Call(msgspec.Struct, array_like=True, frozen=True):
    """A method and the names of the arguments that the body holds."""

    method: str
    names: tuple[str, ...]
    homed: tuple[EndRef, ...] = ()
    """ends among the arguments whose queues live with workers"""


class CallNumber(msgspec.Struct, array_like=True, frozen=True):
    """Number of the request by which a call was made."""

    number: int


class ClockTime(msgspec.Struct, array_like=True, frozen=True):
    """Answer to ``worker.clock``: ``CLOCK_MONOTONIC`` of the worker's host, in nanoseconds."""

    now: int


class Outcome(msgspec.Struct, array_like=True, frozen=True):
    """Success or failure; the result is in the body."""

    failure: Failure | None = None


class ArgumentsCodec:
    """Encodes the arguments of one method, given under these names, and decodes its result.

    For one thread.
    """

    def __init__(self, method: Method, names: tuple[str, ...]) -> None:
        self.method = method
        self._head = head_of(CALL, Call(method.name, names))
        self._names = names
        types: Any = tuple[tuple(method.types[name] for name in names)]  # type: ignore[misc]
        self._encoder = Encoder(self._lend)
        self._packs = [packer(method.types[name]) for name in names]
        self._server: ChannelServer | None = None
        self._lent: list[int] = []
        self._homed: list[EndRef] = []
        self._ends: DecodeEnd = _refuse
        self._decoder = Decoder(types, lambda ref, item_type: self._ends(ref, item_type))
        self._result = Decoder(method.returns)

    def encode(self, arguments: dict[str, Any], server: ChannelServer) -> Encoded:
        """Encode the arguments. Channel ends among them are lent: see `take_lent`, also where this
        fails."""
        self._server = server
        self._homed.clear()  # of one that failed
        try:
            return self._encoder.encode(
                tuple(
                    value if pack is None else packed(value, pack)
                    for pack, value in zip(self._packs, arguments.values(), strict=True)
                )
            )
        except TypeError as error:
            raise BuildError(f"an argument of {self.method.label}: {error}") from error
        finally:
            self._server = None

    def take_lent(self) -> Sequence[int]:
        """The numbers of the ends that were lent since the last `take_lent`."""
        if not self._lent:
            return ()
        lent, self._lent = self._lent, []
        return lent

    def take_head(self) -> bytes:
        """Head of a request that calls this method with the arguments that were encoded last."""
        if not self._homed:
            return self._head
        homed, self._homed = tuple(self._homed), []
        return head_of(CALL, Call(self.method.name, self._names, homed))

    def decode(self, body: Encoded | None, ends: DecodeEnd) -> dict[str, Any]:
        """Decode the arguments; channel ends are made by ``ends``."""
        if body is None:
            raise MalformedFrame(f"a call of {self.method.label} came without its arguments")
        self._ends = ends
        try:
            values = self._decoder.decode(body)
        finally:
            self._ends = _refuse
        return dict(zip(self._names, values, strict=True))

    def decode_result(self, body: Encoded | None) -> Any:
        """Decode what the method returned, by its return annotation."""
        if body is None:
            raise MalformedFrame(f"the result of {self.method.label} is missing")
        try:
            return self._result.decode(body)
        except MalformedFrame as error:
            raise MalformedFrame(
                f"the result of {self.method.label} is not what its return annotation says: {error}"
            ) from error

    def _lend(self, end: Any) -> EndRef:
        if self._server is None:
            raise RuntimeError("ends are lent only while arguments are encoded")
        homed = end.on_loan() if isinstance(end, RemoteEnd) else None
        if homed is not None:
            self._homed.append(homed)
            return homed
        local: Any = end
        ref = self._server.lend(local)
        self._lent.append(ref.number)
        return ref


class _PerThread(threading.local):
    """Encoders and decoders of a thread: each is for one thread."""

    def __init__(self) -> None:
        self.arguments: dict[tuple[Method, tuple[str, ...]], ArgumentsCodec] = {}
        self.encode_result = Encoder().encode


_per_thread = _PerThread()
_spans = Decoder(list[Span])


def arguments_codec(method: Method, names: tuple[str, ...]) -> ArgumentsCodec:
    """The codec of a method; made once for each thread."""
    codecs = _per_thread.arguments
    found = codecs.get((method, names))
    if found is None:
        found = codecs[method, names] = ArgumentsCodec(method, names)
    return found


def encode_result(method: Method, value: Any) -> Encoded:
    """Encode what a method returned.

    Raises:
        TypeError: it cannot cross to another process.
    """
    pack = packer(method.returns)
    try:
        return _per_thread.encode_result(value if pack is None else packed(value, pack))
    except TypeError as error:
        raise TypeError(f"what {method.label} returned cannot travel: {error}") from error


def encode_spans(spans: list[Span]) -> Encoded:
    """The body that answers ``worker.spans``."""
    return encode(spans)


def decode_spans(body: Encoded | None) -> list[Span]:
    """The spans in the answer to ``worker.spans``."""
    found: list[Span] = [] if body is None else _spans.decode(body)
    return found


def _refuse(ref: Any, item_type: Any) -> Any:
    raise MalformedFrame("no end of a channel is expected here")
