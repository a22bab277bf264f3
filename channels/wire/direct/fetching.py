"""The consumer's side of payloads that stayed with their producer. See `direct`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from rlinf_async.channels.encoded import Buffer, Encoded
from rlinf_async.channels.errors import ConnectionLost, MalformedFrame
from rlinf_async.channels.remote_payload import PayloadLost, RemotePayload, remote_payload_of
from rlinf_async.channels.wire.direct.direct import Direct
from rlinf_async.channels.wire.direct.direct_protocol import Fetch, Payload, check_payload, fits
from rlinf_async.channels.wire.links.protocol import PayloadRef

if TYPE_CHECKING:
    from rlinf_async.channels.wire.session.connection import Connection

AT_ONCE: Final = 4
"""Items of a batch that are fetched at a time."""


def attach(parts: Sequence[Encoded], left: Sequence[PayloadRef]) -> None:
    """Mark the items whose payload is elsewhere.

    Raises:
        MalformedFrame: there is no such item, or it has arrays already.
    """
    for one in left:
        check_payload(one.sizes)
        if not 0 <= one.item < len(parts) or parts[one.item].buffers:
            raise MalformedFrame(f"arrays are to be fetched for item {one.item}, which is none")
        parts[one.item].buffers = RemotePayload(one.sizes, one)


def fetch_ahead(connection: Connection, part: Encoded) -> None:
    """Start to fetch the payload of an item that no caller has asked for yet."""
    payload = remote_payload_of(part)
    if payload is not None and not payload.lost:
        payload.start_loading(partial(_fetch_quietly, connection, payload.where))


async def _fetch_quietly(connection: Connection, left: PayloadRef) -> Sequence[Buffer]:
    try:
        return await _fetch(connection, connection.attached(Direct), left)
    except ConnectionLost as error:  # the item goes to others, with its payload
        raise PayloadLost(str(error)) from error


async def fetch_all(
    connection: Connection, direct: Direct | None, parts: Sequence[Encoded]
) -> list[int]:
    """Fetch the payloads of these items, from their producers or through the owner at the other
    side of the connection. The indices of the items whose payload is lost.

    Raises:
        ConnectionLost: to the owner; the items go to others.
    """
    slots = asyncio.Semaphore(AT_ONCE)

    async def bring(index: int, part: Encoded, payload: RemotePayload) -> None:
        async with slots:
            try:
                part.buffers = (
                    await payload.wait_loaded()
                    if payload.loading or payload.lost
                    else await _fetch(connection, direct, payload.where)
                )
            except PayloadLost:
                lost.append(index)

    lost: list[int] = []
    for part in parts:
        if isinstance(part.buffers, RemotePayload) and part.buffers.loaded is not None:
            part.buffers = part.buffers.loaded
    wanted = [
        (index, part, payload)
        for index, part in enumerate(parts)
        if (payload := remote_payload_of(part)) is not None
    ]
    if len(wanted) == 1:
        await bring(*wanted[0])
    else:
        bringing = [asyncio.ensure_future(bring(*one)) for one in wanted]
        try:
            await asyncio.gather(*bringing)
        finally:
            for task in bringing:
                task.cancel()
    if connection.closed:  # they have gone back, and others may have them
        raise connection.lost_as(f"connection to {connection.peer!r} was lost")
    return lost


async def _fetch(
    connection: Connection, direct: Direct | None, left: PayloadRef
) -> Sequence[Buffer]:
    if direct is not None:
        found = await direct.fetch(left)
        if found is not None:
            return found
    reply, body = await connection.request(
        "payload.pass", Fetch(left.token, left.number), reply=Payload
    )
    if body is None or not reply.here or not fits(body, left.sizes):
        raise PayloadLost("the payload of this item is gone with its producer")
    if direct is not None:
        direct.passed_by_owner(left)
    return body.buffers
