"""What the owner of a channel is told and has to confirm: an end is closed, a channel has failed.

Nobody waits for the confirmation but the closing of the connection: a sender's end that is lost
where the connection is cut in that moment would leave the receivers waiting for ever.
"""

from __future__ import annotations

import logging
from typing import Any

from rlinf_async.channels.errors import ChannelError, WireError
from rlinf_async.channels.wire.frames.messages import Message
from rlinf_async.channels.wire.session.connection import Connection
from rlinf_async.channels.wire.session.linger import Linger
from rlinf_async.channels.wire.session.requests import head_of

log = logging.getLogger(__name__)


class ConfirmedNotices:
    """Those over one connection. See `of`. (The `ReplyTarget` of all of them.)"""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._open = 0
        self._linger = Linger(
            connection, lambda: self._open, connection.outbox.flush, "notices were not confirmed"
        )
        connection.add_linger(self._linger)

    @classmethod
    def of(cls, connection: Connection) -> ConfirmedNotices:
        """Those of this connection."""
        return connection.attached(cls) or connection.attach(cls(connection))

    def send(self, kind: str, meta: Any) -> None:
        """Say this, in the order of what was said before; to a lost owner there is nothing to
        say."""
        if not self._connection.closed:
            self._connection.post(self, kind, head_of(kind, meta))
            self._open += 1

    # ---- the answers

    def done(self) -> bool:
        return False

    def set_result(self, message: Message) -> None:
        self._confirmed()

    def set_exception(self, error: BaseException) -> None:
        if not isinstance(error, ChannelError | WireError):  # a channel that ended is not worth it
            log.error("%s: %s", self._connection.peer, error)
        self._confirmed()

    def _confirmed(self) -> None:
        self._open -= 1
        if not self._open:
            self._linger.settled()
