"""Who may ask the page's server.

A request is answered where its ``Host`` is the server's own, its ``Origin`` (if it has one) as
well, and it carries the token: in the address that was printed, or in the cookie for which that
address is exchanged. Another page that the browser shows has none of the three: its requests bear
its own origin, those to a name that leads to 127.0.0.1 bear that name, and ``SameSite=Strict``
keeps the cookie from both.

The name of the cookie has the port in it: browsers share cookies between all ports of a host.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Awaitable, Callable, Iterable, MutableMapping, Sequence
from typing import Any, Final
from urllib.parse import parse_qs

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

HEADERS: Final = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; media-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
}
"""of every answer; trusted types: no text can become HTML, wherever a script would have it so"""

_ENTERED: Final = (
    '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url=/">'
    '<title>rlinf-async view</title><a href="/">to the runs</a>'
)
"""answer to the address that was printed. A page, and no redirect: whoever follows a link of
another site to it would be redirected without the cookie, which that site may not make us send."""


class Guard:
    """An ASGI application in front of another one, which sees only what may be asked.

    Args:
        app: whom it guards.
        port: port of the server, on 127.0.0.1.
        token: what the address that is printed carries.
        methods: those that are served.
    """

    def __init__(
        self, app: App, port: int, token: str, methods: Sequence[str] = ("GET", "HEAD")
    ) -> None:
        self._app, self._methods = app, methods
        self._hosts = (f"127.0.0.1:{port}", f"localhost:{port}")
        self._token = token
        self._cookie = f"rlinf_async_view_{port}"
        self._session = secrets.token_urlsafe(32)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        host, origins = _all(headers, b"host"), _all(headers, b"origin")
        if len(host) != 1 or host[0] not in self._hosts:
            await _answer(send, 403, self._wrong_host(host))
        elif any(origin != f"http://{host[0]}" for origin in origins):
            await _answer(
                send, 403, f"403: the origin {origins[0]!r} may not ask this server, only its page"
            )
        elif scope["method"] not in self._methods:
            await _answer(send, 405, f"405: {scope['method']} is not served; all is read only")
        elif self._carries_token(scope):
            await self._let_in(send)
        elif not self._carries_cookie(headers):
            await _answer(
                send,
                401,
                "401: the token is missing or wrong. Open the address that rlinf-async view "
                "printed, with its ?token=...; each start has a new one",
            )
        else:
            await self._app(scope, receive, _with_headers(send))

    def _wrong_host(self, found: list[str]) -> str:
        asked = ", ".join(map(repr, found)) or "none"
        return (
            f"403: the host {asked} is not this server's; ask {self._hosts[0]} (through a tunnel: "
            "forward the same port, ssh -L PORT:127.0.0.1:PORT)"
        )

    def _carries_token(self, scope: Message) -> bool:
        query = parse_qs(scope["query_string"].decode("latin-1"))
        return scope["path"] == "/" and any(
            _same(one, self._token) for one in query.get("token", [])
        )

    def _carries_cookie(self, headers: list[tuple[bytes, bytes]]) -> bool:
        for text in _all(headers, b"cookie"):
            for part in text.split(";"):
                name, _, value = part.strip().partition("=")
                if name == self._cookie and _same(value, self._session):
                    return True
        return False

    async def _let_in(self, send: Send) -> None:
        cookie = f"{self._cookie}={self._session}; HttpOnly; SameSite=Strict; Path=/"
        more = [(b"set-cookie", cookie.encode())]
        await _answer(send, 200, _ENTERED, kind="text/html; charset=utf-8", more=more)


def _all(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in headers if key.lower() == name]


def _same(given: str, wanted: str) -> bool:
    """Compare in a time that does not tell how much of it is right."""
    return hmac.compare_digest(given.encode(), wanted.encode())


async def _answer(
    send: Send,
    status: int,
    text: str,
    *,
    kind: str = "text/plain; charset=utf-8",
    more: Iterable[tuple[bytes, bytes]] = (),
) -> None:
    body = text.encode()
    headers = [(b"content-type", kind.encode()), (b"content-length", b"%d" % len(body)), *more]
    guarded = _with_headers(send)
    await guarded({"type": "http.response.start", "status": status, "headers": headers})
    await guarded({"type": "http.response.body", "body": body})


def _with_headers(send: Send) -> Send:
    """Add the headers that every answer has."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            ours = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
            message["headers"] = [*message.get("headers", ()), *ours]
        await send(message)

    return sending
