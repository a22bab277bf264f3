"""The server of an episode worker: one for all its episodes, in its event loop.

::

    agent --POST, key of its episode--> `Endpoint` --> `Record` of the episode --> Chat.turn
                                           |
          no such key, or an ended one: 401

    chat completions   /v1/chat/completions
    responses          /v1/responses
    messages           /v1/messages, /v1/messages/count_tokens
    models             /v1/models            each also without /v1

It listens from the first time that an episode is asked for its key or its address. A client that
goes away gives its answer up: the conversation is as before. So does the end of the episode.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import secrets
import socket
import weakref
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any, Final

import msgspec
import psutil

from rlinf_async.config.registry import needed, raised
from rlinf_async.episodes.endpoint.anthropic_messages import AnthropicMessages
from rlinf_async.episodes.endpoint.ask import STATUS, Answers, Api, Ask, Policy, Refused
from rlinf_async.episodes.endpoint.chat_completions import ChatCompletions
from rlinf_async.episodes.endpoint.config import EXTRA, NEEDED_FOR, EndpointConfig
from rlinf_async.episodes.endpoint.record import Record
from rlinf_async.episodes.endpoint.responses import Responses
from rlinf_async.episodes.episode import Episode, EpisodeError, EpisodeOver

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

LEAST_BODY: Final = 1024 * 1024
"""bytes of a request that are always read"""
BODY_PER_TOKEN: Final = 32
"""further bytes of a request for each token that an episode may have; JSON and tools included"""
DRAINED: Final = 256 * 1024 * 1024
"""bytes of a request that is too large that are read, and dropped, before it is answered: a client
that still sends does not read the answer"""
KEEP_ALIVE: Final = 75
"""seconds for which a connection stays open between two requests"""
CLOSING: Final = 2
"""seconds for which open connections are waited for at the end"""
BACKLOG: Final = 2048

logger = logging.getLogger(__name__)


class Endpoint:
    """Serves the episodes of a worker over HTTP. Made in the worker's event loop.

    Args:
        config: where it listens, and what is refused.
    """

    def __init__(self, config: EndpointConfig) -> None:
        self._config = config
        self._warned: set[str] = set()
        self._records: dict[str, Record] = {}
        self._keys: dict[Episode, str] = {}
        self._ended = weakref.WeakSet[Episode]()
        self._address = ""
        self._server: Any = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def base_url(self) -> str:
        """Address, such as ``http://127.0.0.1:40123``. It is served from now on.

        Raises:
            MissingExtra: starlette or uvicorn is not installed.
            EpisodeError: the interface does not exist, or the port is taken.
        """
        if self._serving is None:
            self._start()
        return self._address

    def key(self, episode: Episode) -> str:
        """Return the key that opens an episode, until `end`.

        Raises:
            EpisodeOver: it has ended.
        """
        if episode in self._ended:
            raise EpisodeOver("the episode is over: no key opens it any more")
        if episode not in self._keys:
            self._keys[episode] = key = f"sk-{secrets.token_urlsafe(24)}"
            policy = Policy(
                episode.sampling,
                self._config.models,
                refuses=self._config.unknown == "refuse",
                warned=self._warned,
            )
            self._records[key] = Record(episode, policy)
        return self._keys[episode]

    async def end(self, episode: Episode) -> None:
        """End the key of an episode; what is still asked is given up."""
        self._ended.add(episode)
        key = self._keys.pop(episode, None)
        if key is None:
            return
        record = self._records.pop(key)
        for asked in record.asking:
            asked.cancel()
        if record.asking:
            await asyncio.wait(record.asking)

    async def aclose(self) -> None:
        """End all keys, and serve no more."""
        for episode in list(self._keys):
            await self.end(episode)
        if self._serving is not None:
            self._server.should_exit = True
            await self._serving

    def _start(self) -> None:
        uvicorn = needed("uvicorn", extra=EXTRA, needed_for=NEEDED_FOR)
        app = self._app()
        listening = listener(self._config)
        host, port = listening.getsockname()[:2]
        self._address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        config = uvicorn.Config(
            app,
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=CLOSING,
            backlog=BACKLOG,
            server_header=False,
        )
        self._server = uvicorn.Server(config)
        self._server.capture_signals = contextlib.nullcontext  # signals are the worker's
        # Not in the context of the episode that was the first to ask for it.
        self._serving = asyncio.get_running_loop().create_task(
            self._server.serve([listening]), name="endpoint", context=contextvars.Context()
        )

    def _app(self) -> Any:
        needed("starlette", extra=EXTRA, needed_for=NEEDED_FOR)
        from starlette.applications import Starlette
        from starlette.routing import Route

        chat, responses, messages = ChatCompletions(), Responses(), AnthropicMessages()
        routes: list[Route] = []

        def route(path: str, api: Api, method: str, serve: Any) -> None:
            async def handler(request: Request) -> Response:
                return await self._handled(request, api, serve)

            routes.extend(Route(prefix + path, handler, methods=[method]) for prefix in ("/v1", ""))

        route("/chat/completions", chat, "POST", self._asked)
        route("/responses", responses, "POST", self._asked)
        route("/messages", messages, "POST", self._asked)
        route("/messages/count_tokens", messages, "POST", self._counted)
        route("/models", chat, "GET", self._models)

        async def unknown(request: Request, error: Any) -> Response:
            kind: Any = "method" if error.status_code == STATUS["method"] else "missing"
            served = ", ".join(f"{one.path}" for one in routes[::2])
            refused = Refused(f"there is no {request.method} {request.url.path}: {served}", kind)
            return _refusal(refused, messages if "/messages" in request.url.path else chat)

        return Starlette(routes=routes, exception_handlers={404: unknown, 405: unknown})

    async def _handled(self, request: Request, api: Api, serve: Any) -> Response:
        try:
            response: Response = await serve(request, api, self._record(request))
        except Refused as refused:
            return _refusal(refused, api)
        except Exception as error:  # the agent gets an answer, whatever the engine or template did
            logger.exception("an agent's request has failed")
            return _refusal(Refused(raised(error), "failed"), api)
        return response

    def _record(self, request: Request) -> Record:
        header = request.headers.get("authorization", "")
        scheme, _, given = header.partition(" ")
        key = given.strip() if scheme.lower() == "bearer" else ""
        record = self._records.get(key) or self._records.get(request.headers.get("x-api-key", ""))
        if record is None:
            raise Refused("the key opens no episode, or its episode has ended", "key")
        return record

    async def _asked(self, request: Request, api: Api, record: Record) -> Response:
        ask = api.read(await self._body(request, record), record.policy)
        answers = await self._answers(request, record, ask)
        if not ask.stream:
            return _json(api.reply(ask, answers))
        # The answer is there as a whole, so its events are, too.
        return _response(b"".join(_events(api, ask, answers)), "text/event-stream")

    async def _counted(self, request: Request, api: Api, record: Record) -> Response:
        ask = api.read(await self._body(request, record), record.policy)
        return _json({"input_tokens": record.count(ask)})

    async def _models(self, request: Request, api: Api, record: Record) -> Response:
        names = self._config.models or ("model",)
        models = [
            {"id": name, "object": "model", "created": 0, "owned_by": "rlinf-async"}
            for name in names
        ]
        return _json({"object": "list", "data": models})

    async def _answers(self, request: Request, record: Record, ask: Ask) -> Answers:
        """Have the model answer, unless the client goes away or the episode ends before."""
        loop = asyncio.get_running_loop()
        # Counted by the clients of OpenAI and Anthropic; it begins with 0.
        again = request.headers.get("x-stainless-retry-count", "0") != "0"
        asking = record.answers(ask, again=again)
        asked = loop.create_task(asking, context=record.context.copy())
        left = asyncio.ensure_future(_left(request))
        record.asking.add(asked)
        try:
            await asyncio.wait((asked, left), return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                raise Refused("the client has gone away, and the answer was given up")
            if asked.cancelled():
                raise Refused("the episode has ended", "key")
            answers = asked.result()
            if left.done():
                record.lost(answers)
            return answers
        finally:
            for one in (asked, left):
                one.cancel()
            await asyncio.wait((asked, left))
            record.asking.discard(asked)

    async def _body(self, request: Request, record: Record) -> Any:
        """Return the JSON object that a request has."""
        limit = LEAST_BODY + BODY_PER_TOKEN * record.episode.limits.tokens
        parts: list[bytes] = []
        size = 0
        async for part in _stream(request):
            size += len(part)
            if size <= limit:
                parts.append(part)
            elif size > DRAINED:
                break
        if size > limit:
            raise Refused(
                f"the request has more than {limit} bytes: an episode of at most "
                f"{record.episode.limits.tokens} tokens cannot hold it",
                "too large",
            )
        try:
            body = msgspec.json.decode(b"".join(parts))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise Refused(f"the body is no JSON: {error}") from None
        if not isinstance(body, dict):
            raise Refused("the body must be a JSON object")
        return body


async def _stream(request: Request) -> AsyncIterator[bytes]:
    from starlette.requests import ClientDisconnect

    try:
        async for part in request.stream():
            yield part
    except ClientDisconnect:
        raise Refused("the client has gone away before its request was whole") from None


async def _left(request: Request) -> None:
    """Wait until the client closes its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _events(api: Api, ask: Ask, answers: Answers) -> Iterator[bytes]:
    for name, data in api.events(ask, answers):
        if name:
            yield b"event: %b\n" % name.encode()
        yield b"data: %b\n\n" % (
            data.encode() if isinstance(data, str) else msgspec.json.encode(data)
        )


def _json(body: Any, status: int = 200) -> Response:
    return _response(msgspec.json.encode(body), "application/json", status)


def _refusal(refused: Refused, api: Api) -> Response:
    response = _json(api.refusal(refused), STATUS[refused.kind])
    if refused.kind != "failed":  # clients of both makers obey it
        response.headers["x-should-retry"] = "false"
    return response


def _response(body: bytes, media_type: str, status: int = 200) -> Response:
    from starlette.responses import Response

    return Response(body, status, media_type=media_type)


def listener(config: EndpointConfig) -> socket.socket:
    """Return a socket that listens.

    Raises:
        EpisodeError: it cannot: the interface does not exist, or the port is taken.
    """
    address = _address(config.interface)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    # By its protocol asyncio knows that small writes are not to wait for one another (Nagle).
    made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((address, config.port))
        made.listen(BACKLOG)
        made.setblocking(False)
    except (OSError, OverflowError) as error:
        made.close()
        free = "; with port = 0 any that is free is taken" if config.port else ""
        raise EpisodeError(
            f"the endpoint cannot listen on {config.interface} port {config.port}: {error}{free}"
        ) from error
    return made


def _address(interface: str) -> str:
    """Return the IPv4 address of an interface, or the address that is given itself."""
    found = psutil.net_if_addrs().get(interface, ())
    return next((one.address for one in found if one.family == socket.AF_INET), interface)
