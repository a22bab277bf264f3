"""Channels between processes: typed frames over a Unix socket or TCP, and no pickle.

::

    frames                          messages <-> bytes, also the pieces of large ones      (pure)
    codec, arrays                   items <-> MessagePack, with large arrays apart         (pure)
    sharing, pool, slab             large arrays by shared memory, between processes of one host
    session                         a connection: handshake, requests, sockets that are replaced
    sending, receiving              the ends of channels in other processes
    server, owner_*                 the owner of channels answers the ends of other processes
    direct, retained_payloads       large arrays from producer to consumer, past the owner
    homes, adopting                 queues that live with a worker, not with who owns the cluster
"""

from rlinf_async.channels.wire.adopting import ChannelClient
from rlinf_async.channels.wire.direct import Direct
from rlinf_async.channels.wire.protocol import EndRef
from rlinf_async.channels.wire.server import ChannelServer
from rlinf_async.channels.wire.session.connection import Connection, Router
from rlinf_async.channels.wire.session.endpoint import Server, connect, serve
from rlinf_async.channels.wire.session.tls import load_secret
from rlinf_async.channels.wire.shared_arrays import shared_bytes

__all__ = [
    "ChannelClient",
    "ChannelServer",
    "Connection",
    "Direct",
    "EndRef",
    "Router",
    "Server",
    "connect",
    "load_secret",
    "serve",
    "shared_bytes",
]
