"""`Hands`: a page by which a person acts in place of the policy.

::

    GET   /            the page              GET   /static/NAME   its script and its style
    GET   /api/seen    what the policy sees, and is about to do
    GET   /api/image   the numbers of an image of it, by name
    POST  /api/hands   what the person's hands do: an action, or null, "off"
    POST  /api/verdict whether the episode, which ends with the next step, is a success

Hands that have said nothing for `HELD` seconds are off: a page that was closed, or hangs, lets go.
While the page is open the policy takes at most `HZ` steps a second, so that somebody can follow.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from rlinf_async.messages.embodied import Verdict
from rlinf_async.messages.spaces import ActionSpec
from rlinf_async.observe.files import RunFolderError
from rlinf_async.view.server import as_json, served, static_files

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

HELD: Final = 0.5
"""seconds for which hands are where they were last said to be"""
WATCHED: Final = 2.0
"""seconds since it last asked, for which the page counts as open"""
HZ: Final = 10.0
SHOWN: Final = 32
"""numbers of a part that are shown"""
NEEDED_FOR: Final = "intervention.person = 'page'"


class Hands:
    """A person with a browser; see `rlinf_async.workers.intervention.Person`.

    Args:
        action: what an action is: one vector of numbers in [-1, 1], or one choice.
        port: port on 127.0.0.1; 0: any that is free.
        token: what the address has to carry.
        clock: seconds, as `time.monotonic`.
        hz: most steps in a second while the page is open.
        judges: whether the person may end episodes.
    """

    def __init__(
        self,
        action: ActionSpec,
        port: int,
        token: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        hz: float = HZ,
        judges: bool = False,
    ) -> None:
        self._spec, self._port, self._token = action, port, token
        self._clock, self._hz = clock, hz
        self._files = static_files()
        self._open = AsyncExitStack()
        self._held: Any = None
        self._held_at = self._watched_at = self._answered_at = self._judged_at = -math.inf
        self._judges = judges
        self._verdict: bool | None = None
        self._seen: Any = None
        self._proposed: Any = None
        self._asked = 0
        self.address = ""
        """of the page, once it is open"""

    async def open(self) -> None:
        """Begin to serve the page. Raises: as `rlinf_async.view.server.served`."""
        serving = await self._open.enter_async_context(
            served(self._app, self._port, self._token, NEEDED_FOR, ("GET", "HEAD", "POST"))
        )
        self.address = serving.address

    async def close(self) -> None:
        """Serve no longer."""
        await self._open.aclose()

    async def __call__(self, observation: Any, proposed: Any) -> Any:
        """Return what the hands do, or None while they are off; or a verdict, since a button was
        pressed: once, with the first step that is asked about from then on. One that is older than
        `WATCHED` is of an episode that nobody sees any more, and is dropped."""
        if self._clock() - self._watched_at < WATCHED:
            await asyncio.sleep(max(0.0, self._answered_at + 1.0 / self._hz - self._clock()))
        self._answered_at = self._clock()
        self._seen, self._proposed = observation, np.asarray(proposed).tolist()
        self._asked += 1
        held = self._held if self._acts else None
        verdict, self._verdict = self._verdict, None
        if verdict is None or self._clock() - self._judged_at > WATCHED:
            return held
        return Verdict(verdict, held)

    @property
    def _acts(self) -> bool:
        return self._held is not None and self._clock() - self._held_at < HELD

    def _app(self) -> Starlette:
        from starlette.applications import Starlette
        from starlette.routing import Route

        return Starlette(
            routes=[
                Route("/", self._index),
                Route("/static/{name}", self._static),
                Route("/favicon.ico", self._icon),
                Route("/api/seen", self._tell),
                Route("/api/image", self._image),
                Route("/api/hands", self._take, methods=["POST"]),
                Route("/api/verdict", self._judge, methods=["POST"]),
            ],
            exception_handlers={RunFolderError: _problem},
        )

    async def _index(self, request: Request) -> Response:
        return self._file("hands.html", "text/html")

    async def _icon(self, request: Request) -> Response:
        return self._file("icon.svg", "image/svg+xml")

    async def _static(self, request: Request) -> Response:
        kinds = {
            "hands.js": "text/javascript",
            "style.css": "text/css",
            "icon.svg": "image/svg+xml",
        }
        name = request.path_params["name"]
        if name not in kinds:
            raise RunFolderError(f"the page has no file {name!r}")
        return self._file(name, kinds[name])

    def _file(self, name: str, kind: str) -> Response:
        from starlette.responses import Response

        return Response(self._files[name], media_type=kind)

    async def _tell(self, request: Request) -> Response:
        self._watched_at = self._clock()
        parts = _parts(self._seen)
        return as_json(
            {
                "asked": self._asked,
                "acts": self._acts,
                "judges": self._judges,
                "proposed": self._proposed,
                "numbers": 0 if self._spec.discrete else self._spec.columns,
                "choices": self._spec.outputs if self._spec.discrete else 0,
                "shown": {
                    name: np.ravel(part)[:SHOWN].tolist()
                    for name, part in parts.items()
                    if not _is_image(part)
                },
                "images": {name: part.shape for name, part in parts.items() if _is_image(part)},
            }
        )

    async def _image(self, request: Request) -> Response:
        from starlette.responses import Response

        part = _parts(self._seen).get(request.query_params.get("name", ""))
        if part is None or not _is_image(part):
            raise RunFolderError("there is no such image")
        return Response(np.ascontiguousarray(part).tobytes(), media_type="application/octet-stream")

    async def _take(self, request: Request) -> Response:
        try:
            said = msgspec.json.decode(await request.body())["action"]
            self._held = None if said is None else self._checked(said)
        except (msgspec.DecodeError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise RunFolderError(f"this is no action: {error}") from error
        self._held_at = self._watched_at = self._clock()
        return as_json({})

    async def _judge(self, request: Request) -> Response:
        try:
            success = msgspec.json.decode(await request.body())["success"]
        except (msgspec.DecodeError, KeyError, TypeError) as error:
            raise RunFolderError(f"this is no verdict: {error}") from error
        if type(success) is not bool:
            raise RunFolderError(f"this is no verdict: {success!r} is not true or false")
        if not self._judges or not self._asked:
            raise RunFolderError(
                "no episode can be ended here" if self._asked else "no episode has begun"
            )
        self._verdict = success
        self._judged_at = self._watched_at = self._clock()
        return as_json({})

    def _checked(self, said: Any) -> Any:
        """The action. Raises `ValueError` where it is none."""
        spec = self._spec
        if spec.discrete:
            if type(said) is not int or not 0 <= said < spec.outputs:
                raise ValueError(f"{said!r} is not one of {spec.outputs} choices")
            return said
        action = np.asarray(said, np.float32)
        if action.shape != spec.shape or not (np.abs(action) <= 1.0).all():
            raise ValueError(f"{said!r} is not {spec.columns} numbers from -1 to 1")
        return action


def _parts(seen: Any) -> dict[str, Any]:
    """The parts of an observation, by name."""
    if seen is None:
        return {}
    names = seen.dtype.names
    return {"state": seen} if names is None else {name: seen[name] for name in names}


def _is_image(part: Any) -> bool:
    return bool(part.dtype == np.uint8 and part.ndim in (2, 3))


def _problem(request: Request, error: Exception) -> Response:
    return as_json({"error": str(error)}, 400)
