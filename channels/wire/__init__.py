"""Channels between processes: typed frames over a Unix socket or TCP, and no pickle.

::

    frames    messages <-> bytes: frames, and the pieces of large messages     (pure)
    items     items <-> MessagePack, with large arrays apart                   (pure)
    memory    large arrays by shared memory, between processes of one host
    session   a connection: handshake, requests and answers, sockets that are cut and replaced
    links     the ends of channels over a connection: credit, transfers, deliveries, settling
    direct    large arrays from producer to consumer, past the owner of their channel
    server    the owner of channels answers the ends of other processes
    client    those ends
    homes     queues that live with a worker, and not with the process that owns the cluster
"""

from rlinf_async.channels.encoded import Encoded
from rlinf_async.channels.wire.client import ChannelClient
from rlinf_async.channels.wire.direct.direct import Direct
from rlinf_async.channels.wire.homes.adopting import AdoptedEnd, Homes
from rlinf_async.channels.wire.homes.home_protocol import ChannelSeen
from rlinf_async.channels.wire.homes.homed_queues import HomedQueues
from rlinf_async.channels.wire.homes.remote_queue import HomeMaker, RemoteChannel
from rlinf_async.channels.wire.items.codec import Decoder, Encoder, encode
from rlinf_async.channels.wire.items.shared_arrays import shared_bytes
from rlinf_async.channels.wire.links.protocol import EndRef, Home
from rlinf_async.channels.wire.links.remote_latest import RemoteLatestReceiver, RemoteLatestSender
from rlinf_async.channels.wire.links.remote_receiver import RemoteReceiver
from rlinf_async.channels.wire.links.remote_sender import RemoteSender
from rlinf_async.channels.wire.server import ChannelServer
from rlinf_async.channels.wire.session.answers import Request, Router
from rlinf_async.channels.wire.session.connection import Connection
from rlinf_async.channels.wire.session.endpoint import Server, connect, serve
from rlinf_async.channels.wire.session.failures import RemoteError
from rlinf_async.channels.wire.session.secret import load_secret
from rlinf_async.channels.wire.session.traffic import Traffic, traffic_of

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
