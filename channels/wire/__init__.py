"""Channels between processes: typed frames over a Unix socket or TCP, and no pickle.

::

    codec       items   <-> MessagePack, with large arrays apart
    framing     bytes   <-> frames                    (pure: no socket, no clock)
    transfer    frames  <-> messages, large ones in chunks
    auth        who may speak: proof of the cluster's secret, before anything else
    link        one socket: first the handshake, then bytes
    kept        what may have to be sent again over the next one; reach: whether there will be one
    connection  requests, replies, notices, cancellation, heartbeats between two processes
    endpoint    serve and connect: a Unix socket, or TCP
    server      the owner of channels answers the ends of other processes
    client      those ends
    direct      large arrays from producer to consumer, past the owner of their channel

"""

from rlinf_async.channels.encoded import Encoded
from rlinf_async.channels.wire.client import ChannelClient
from rlinf_async.channels.wire.codec import Decoder, Encoder, encode
from rlinf_async.channels.wire.connection import Connection
from rlinf_async.channels.wire.devices import SharedTensor, share_tensor
from rlinf_async.channels.wire.direct import Direct
from rlinf_async.channels.wire.endpoint import Server, connect, serve
from rlinf_async.channels.wire.failures import RemoteError
from rlinf_async.channels.wire.protocol import EndRef
from rlinf_async.channels.wire.remote_latest import RemoteLatestReceiver, RemoteLatestSender
from rlinf_async.channels.wire.remote_receiver import RemoteReceiver
from rlinf_async.channels.wire.remote_sender import RemoteSender
from rlinf_async.channels.wire.router import Request, Router
from rlinf_async.channels.wire.secret import load_secret
from rlinf_async.channels.wire.server import ChannelServer
from rlinf_async.channels.wire.shared_arrays import shared_bytes
from rlinf_async.channels.wire.traffic import Traffic, traffic_of

__all__ = [
    "ChannelClient",
    "ChannelServer",
    "Connection",
    "Decoder",
    "Direct",
    "Encoded",
    "Encoder",
    "EndRef",
    "RemoteError",
    "RemoteLatestReceiver",
    "RemoteLatestSender",
    "RemoteReceiver",
    "RemoteSender",
    "Request",
    "Router",
    "Server",
    "SharedTensor",
    "Traffic",
    "connect",
    "encode",
    "load_secret",
    "serve",
    "share_tensor",
    "shared_bytes",
    "traffic_of",
]
