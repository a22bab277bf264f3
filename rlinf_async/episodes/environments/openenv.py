"""An environment behind a server of OpenEnv, by its address::

    [episode]
    run = "openenv"

    [episode.environment]
    url = "http://127.0.0.1:8000"
    action = "code"                    # {"code": what the model says}
    observation = "stdout"             # what of the observation the model reads

A connection is a session of the server, with an environment of its own: each episode has one.
"""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Literal
from urllib.parse import urlsplit

import msgspec

from rlinf_async.config.counts import check_bounds
from rlinf_async.config.registry import ConfigError, Path, needed, raised
from rlinf_async.episodes.environments import (
    Asked,
    EnvironmentFailed,
    PlayedConfig,
    PlayedPart,
    Step,
    number,
    text_of,
)

CLOSE_SECONDS: Final = 2.0
"""longest time of the end of a session"""
SHOWN: Final = 500
"""most characters that an error shows of what a server sent"""


class OpenenvConfig(PlayedConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which server, and what of its messages is text."""

    url: str
    """the server's address, ``"http://host:8000"``"""
    action: str = ""
    """field of an action that is what the model says; left out: the model says an action, as a
    JSON object"""
    observation: str = ""
    """field of an observation that the model reads; left out: all of it, as JSON"""
    sessions: int = 1
    """number of sessions that the server has at a time, its ``max_concurrent_envs``"""
    connect_seconds: float = 10.0
    """longest time of a connection to the server"""
    largest_mib: int = 16
    """largest message of the server, in MiB"""

    def __post_init__(self) -> None:
        check_bounds(self, "sessions", "largest_mib", least=1)
        check_bounds(self, "connect_seconds", above=0, below=3600)
        split = urlsplit(self.url)
        if split.scheme not in ("http", "https", "ws", "wss") or not split.hostname:
            raise ValueError(f"url is {self.url!r}; it must be an address, http://host:8000")

    @property
    def name(self) -> str:
        """The environment's name in errors: what else an address has may be a key."""
        return f"environment at {urlsplit(self.url).netloc.rpartition('@')[2]}"

    @property
    def socket(self) -> str:
        """Address of its sessions."""
        secure = urlsplit(self.url).scheme in ("https", "wss")
        rest = self.url.partition("://")[2].rstrip("/")
        return f"{'wss' if secure else 'ws'}://{rest}/ws"


class OpenenvPart(PlayedPart):
    Config = OpenenvConfig
    library, extra = "websockets", "openenv"

    def check(self, settings: OpenenvConfig, path: Path, asked: Asked) -> None:
        """Compare sessions with episodes."""
        if asked.at_once > settings.sessions:
            raise ConfigError(
                f"{settings.name} has {settings.sessions} session(s), but {asked.at_once} episodes "
                "may be open at a time (episode.concurrent x cluster.episode_workers), of which "
                "all others would fail: lower episode.concurrent, or start the server with a "
                "higher max_concurrent_envs, and set this to it",
                path=(*path, "sessions"),
            )

    def worlds(self, settings: OpenenvConfig, /) -> Callable[[], _World]:
        """Return what makes the session of one episode."""
        needed("websockets.asyncio.client", extra="openenv", needed_for=settings.name)
        return partial(_World, settings)


class Said(msgspec.Struct, frozen=True):
    """What the server says to an action."""

    observation: dict[str, Any] = {}
    reward: bool | float | None = None
    done: bool = False


class Answer(msgspec.Struct, frozen=True):
    """A message of the server."""

    type: Literal["observation", "state", "error", "mcp"]
    data: msgspec.Raw = msgspec.Raw(b"{}")


class _World:
    def __init__(self, settings: OpenenvConfig) -> None:
        self._settings = settings
        self._session: Any = None

    async def reset(self, seed: int) -> Step:
        """Open a session, and reset its environment."""
        client = needed(
            "websockets.asyncio.client", extra="openenv", needed_for=self._settings.name
        )
        direct = {"proxy": None} if _is_here(self._settings.url) else {}
        try:
            self._session = await client.connect(
                self._settings.socket,
                close_timeout=CLOSE_SECONDS,
                ping_interval=None,  # a server may be busy for as long as the episode may take
                open_timeout=self._settings.connect_seconds,
                max_size=self._settings.largest_mib << 20,
                **direct,
            )
        except Exception as error:  # of the network, TLS, HTTP or the protocol
            raise EnvironmentFailed(
                f"{self._settings.name} cannot be reached: {raised(error)}"
            ) from error
        return await self._asked("reset", {"seed": seed})

    async def step(self, action: str) -> Step:
        """Send an action. One that is no JSON object, where it must be, is told to the model."""
        field = self._settings.action
        if field:
            return await self._asked("step", {field: action})
        try:
            found = msgspec.json.decode(action, type=dict[str, Any])
        except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
            return Step(f"error: an action is one JSON object: {error}")
        return await self._asked("step", found)

    async def aclose(self) -> None:
        """Close the session. One that is gone is closed."""
        if self._session is not None:
            with contextlib.suppress(Exception):
                await self._session.close()

    async def _asked(self, kind: str, data: dict[str, Any]) -> Step:
        name = self._settings.name
        try:
            await self._session.send(msgspec.json.encode({"type": kind, "data": data}).decode())
            answer = await self._session.recv()
        except Exception as error:
            raise EnvironmentFailed(f"{name} has gone during {kind}: {raised(error)}") from error
        shown = answer[:SHOWN] if isinstance(answer, str) else f"{len(answer)} bytes"
        try:
            found = msgspec.json.decode(answer, type=Answer)
            if found.type == "error":
                return self._refused(kind, found.data)
            said = msgspec.json.decode(found.data, type=Said)
        except msgspec.MsgspecError as error:
            raise EnvironmentFailed(f"{name} said {shown!r} to {kind}: {error}") from error
        reward = None if said.reward is None else number(name, "reward", float(said.reward))
        return Step("" if said.done else self._read(said.observation), reward, said.done)

    def _refused(self, kind: str, data: msgspec.Raw) -> Step:
        """An action that the server finds wrong is the model's; all else is an error."""
        about = msgspec.json.decode(data, type=dict[str, Any])
        if kind == "step" and about.get("code") == "VALIDATION_ERROR":
            return Step(f"error: this is no action of the environment: {about.get('errors')}")
        raise EnvironmentFailed(
            f"{self._settings.name} failed in {kind}: {about.get('message')} ({about.get('code')})"
        )

    def _read(self, observation: dict[str, Any]) -> str:
        field = self._settings.observation
        if not field:
            return msgspec.json.encode(observation).decode()
        if field not in observation:
            raise EnvironmentFailed(
                f"{self._settings.name} observed no {field!r}, but {', '.join(observation)}"
            )
        value = observation[field]
        said = value if isinstance(value, str) else msgspec.json.encode(value).decode()
        return text_of(self._settings.name, said or "(nothing)")


def _is_here(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
