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

from rlinf_async.channels.untyped import Encoded
from rlinf_async.channels.wire.adopting import AdoptedEnd, ChannelClient, Homes
from rlinf_async.channels.wire.codec import Decoder, Encoder, encode
from rlinf_async.channels.wire.direct import Direct
from rlinf_async.channels.wire.homes import HomedQueues, HomeMaker, RemoteChannel
from rlinf_async.channels.wire.protocol import ChannelSeen, EndRef, Home
from rlinf_async.channels.wire.receiving import RemoteReceiver
from rlinf_async.channels.wire.remote_latest import RemoteLatestReceiver, RemoteLatestSender
from rlinf_async.channels.wire.sending import RemoteSender
from rlinf_async.channels.wire.server import ChannelServer
from rlinf_async.channels.wire.session.connection import (
    Connection,
    Request,
    Router,
    Traffic,
    traffic_of,
)
from rlinf_async.channels.wire.session.endpoint import Server, connect, serve
from rlinf_async.channels.wire.session.requests import RemoteError
from rlinf_async.channels.wire.session.tls import load_secret
from rlinf_async.channels.wire.shared_arrays import shared_bytes

__all__ = [
    "AdoptedEnd",
    "ChannelClient",
    "ChannelSeen",
    "ChannelServer",
    "Connection",
    "Decoder",
    "Direct",
    "Encoded",
    "Encoder",
    "EndRef",
    "Home",
    "HomeMaker",
    "HomedQueues",
    "Homes",
    "RemoteChannel",
    "RemoteError",
    "RemoteLatestReceiver",
    "RemoteLatestSender",
    "RemoteReceiver",
    "RemoteSender",
    "Request",
    "Router",
    "Server",
    "Traffic",
    "connect",
    "encode",
    "load_secret",
    "serve",
    "shared_bytes",
    "traffic_of",
]
