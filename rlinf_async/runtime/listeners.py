"""Where other processes reach the one that owns a cluster.

::

    workers of this host    a Unix socket in a folder of the run's own, owner only    always
    other hosts             TCP, at the one address that was given                    with `listen`

Both lead to the same channels, and both ask for proof of the cluster's secret.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Final

from rlinf_async.channels import WireError
from rlinf_async.channels.wire import Router, Server, serve
from rlinf_async.channels.wire.session.connection import Closed
from rlinf_async.channels.wire.session.endpoint import Opened
from rlinf_async.channels.wire.session.secret import HOW, load_secret
from rlinf_async.runtime.forced_exit import make_temporary_folder, remove_temporary_folder
from rlinf_async.workers.errors import BuildError

LISTEN_VARIABLE: Final = "RLINF_ASYNC_LISTEN"


class Listeners:
    """The listening sockets of one cluster.

    Args:
        listen: where other hosts reach it, ``tcp://host:port``; None for nowhere.
        secret: that both sides prove; by default a new one.
    """

    def __init__(
        self, listen: str | None, *, heartbeat_limit: float, secret: bytes | None = None
    ) -> None:
        self._listen = listen
        self._heartbeat_limit = heartbeat_limit
        self._folder: Path | None = None
        self._inner: Server | None = None
        self._outer: Server | None = None
        self.secret = secret or secrets.token_bytes(32)

    @property
    def socket(self) -> Path:
        """The Unix socket."""
        if self._folder is None:
            raise RuntimeError("the cluster was not entered")
        return self._folder / "driver.sock"

    @property
    def address(self) -> str | None:
        """Where other hosts reach the cluster; None where it does not listen for them."""
        return None if self._outer is None else self._outer.address

    async def open(self, router: Router, on_connect: Opened, on_disconnect: Closed) -> None:
        """Listen for connections.

        Raises:
            BuildError: a socket cannot be made; none is left.
        """
        self._folder = make_temporary_folder()

        async def listen_at(address: str | Path) -> Server:
            return await serve(
                address,
                self.secret,
                name="driver",
                router=router,
                on_connect=on_connect,
                on_disconnect=on_disconnect,
                heartbeat_limit=self._heartbeat_limit,
            )

        try:
            self._inner = await listen_at(self.socket)
            if self._listen is not None:
                self._outer = await listen_at(self._listen)
        except (OSError, WireError) as error:
            raise BuildError(self._explain(error)) from error
        finally:
            if self._inner is None or (self._listen is not None and self._outer is None):
                await self.close()

    async def close(self) -> None:
        """Close every connection, and leave no socket and no folder."""
        for server in (self._outer, self._inner):
            if server is not None:
                await server.close()
        if self._folder is not None:
            remove_temporary_folder(self._folder)

    def _explain(self, error: Exception) -> str:
        if self._inner is not None:
            return f"listen={self._listen!r}: {error}"
        return (
            f"the cluster's socket {self.socket} cannot be made ({error}): let TMPDIR name a "
            "folder with a short path that can be written to"
        )


def shared_secret() -> bytes:
    """The secret that processes of other hosts know too.

    Raises:
        BuildError: it is not set, or cannot be used.
    """
    try:
        secret = load_secret()
    except (OSError, ValueError) as error:
        raise BuildError(f"the cluster's secret cannot be used: {error}") from error
    if secret is None:
        raise BuildError(f"a cluster that listens for other hosts needs a secret: {HOW}")
    return secret
