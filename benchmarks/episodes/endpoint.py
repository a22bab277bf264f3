"""The same episodes twice: turns that a coroutine makes, and those of an agent over HTTP.

The engine is a process that answers at once: what is measured is what a turn costs beside it, where
each one waits for another process, as it does in a run.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import multiprocessing
import os
import socket
import statistics
import sys
import time
from collections.abc import Sequence
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import numpy as np
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rlinf_async.episodes import Episode, Limits, Task
from rlinf_async.episodes.endpoint import Endpoint, EndpointConfig
from rlinf_async.episodes.parsing import parsers
from rlinf_async.episodes.template import ChatTemplate
from rlinf_async.messages.language import Generated, Tokens
from tests.episodes.kit import FAMILIES, ends_of, tokenizer_of

EPISODES: Final = 20
"""of each kind in a round"""
ROUNDS: Final = 5
TURNS: Final = 8
WARM_UP: Final = 10
FAMILY: Final = "qwen2.5"
RESULT: Final = "row 1: 20 degrees, wind from the north, rain in the evening\n" * 8
QUESTION: Final = {"role": "user", "content": "What will the weather be in the next days? " * 10}
TOOLS: Final[list[dict[str, Any]]] = [
    {
        "type": "function",
        "function": {
            "name": f"tool{at}",
            "description": "Say what the weather is at a place. " * 3,
            "parameters": {
                "type": "object",
                "properties": {
                    "place": {"type": "string", "description": "name of the place"},
                    "days": {"type": "integer", "description": "days ahead"},
                },
                "required": ["place"],
            },
        },
    }
    for at in range(16)
]


class Drawn:
    """A model that draws the same call of a tool each time.

    Args:
        engine: the socket of a process that answers each byte by a byte.
    """

    def __init__(self, engine: socket.socket) -> None:
        self._engine = engine
        tokenizer: Any = tokenizer_of(FAMILY)
        end = FAMILIES[FAMILY].end
        thoughts = "<think>\nlet us look at the next place of the list\n</think>\n\n" * 3
        call = (
            '<tool_call>\n{"name": "tool3", "arguments": {"place": "Ulm", "days": 2}}\n</tool_call>'
        )
        ids = tokenizer(thoughts + call + end, add_special_tokens=False)["input_ids"]
        self._answer = Generated(
            token_ids=np.array(ids, np.int32),
            log_prob=np.zeros(len(ids), np.float32),
            version=np.zeros(len(ids), np.int32),
            finish="stop",
        )

    async def draw(self, context: Tokens, most: int, seed: int | None = None) -> Generated:
        """Return the answer, once the other process has been asked."""
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self._engine, b"?")
        await loop.sock_recv(self._engine, 1)
        return self._answer


def echo(theirs: socket.socket) -> None:
    """Answer each byte by a byte, in another process, until the socket is closed."""
    while asked := theirs.recv(1):
        theirs.send(asked)


@cache
def template_of() -> ChatTemplate:
    """Return the template, which all episodes of a worker share."""
    return ChatTemplate(tokenizer_of(FAMILY), ends=ends_of(FAMILY))


def episode_of(endpoint: Endpoint, engine: socket.socket) -> Episode:
    """Return an episode with this model."""
    template = template_of()
    return Episode(
        Task(index=0, messages=(QUESTION,), reference=""),
        Drawn(engine),
        template,
        parsers.load("hermes"),
        template.decode,
        Limits(turns=100, tokens=1_000_000),
        endpoint=endpoint,
    )


async def native(episode: Episode) -> None:
    """Make the turns of an episode as a coroutine does, with results that cost nothing."""
    chat = episode.chat(TOOLS)
    turn = await chat.turn()
    for _ in range(TURNS - 1):
        chat.say(RESULT, "tool", name="tool3", tool_call_id=turn.call_ids[0])
        turn = await chat.turn()


def agent(connection: Connection) -> None:
    """Make the turns of episodes over HTTP, in another process; tell the seconds of each."""
    while (given := connection.recv()) is not None:
        url, key = given
        server = http.client.HTTPConnection(urlsplit(url).netloc)
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        messages: list[dict[str, Any]] = [QUESTION]
        seconds = []
        for _ in range(TURNS):
            body = json.dumps({"model": "m", "messages": messages, "tools": TOOLS}).encode()
            began = time.perf_counter()
            server.request("POST", "/v1/chat/completions", body, headers)
            answer = server.getresponse().read()
            seconds.append(time.perf_counter() - began)
            message = json.loads(answer)["choices"][0]["message"]
            (call,) = message["tool_calls"]
            messages += [message, {"role": "tool", "content": RESULT, "tool_call_id": call["id"]}]
        server.close()
        connection.send(seconds)


async def over_http(episode: Episode, connection: Connection) -> list[float]:
    """Let the agent make the turns; return the seconds of each, as it has measured them."""
    connection.send((episode.base_url, episode.key))
    ready = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(connection.fileno(), ready.set)
    await ready.wait()
    loop.remove_reader(connection.fileno())
    seconds: list[float] = connection.recv()
    return seconds


async def measured(connection: Connection, engine: socket.socket) -> dict[str, float]:
    """Alternate rounds of both kinds."""
    endpoint = Endpoint(EndpointConfig())
    await one_round(endpoint, connection, engine, WARM_UP)
    rounds = [await one_round(endpoint, connection, engine, EPISODES) for _ in range(ROUNDS)]
    await endpoint.aclose()
    found = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    return found | {"load": os.getloadavg()[0]}


async def one_round(
    endpoint: Endpoint, connection: Connection, engine: socket.socket, episodes: int
) -> dict[str, float]:
    """Return milliseconds of a turn: CPU of this process, and the clock's."""
    began, clock = time.process_time(), time.perf_counter()
    for _ in range(episodes):
        await native(episode_of(endpoint, engine))
    turns = episodes * TURNS
    native_cpu = (time.process_time() - began) / turns * 1000
    native_ms = (time.perf_counter() - clock) / turns * 1000
    began = time.process_time()
    seconds: list[float] = []
    for _ in range(episodes):
        episode = episode_of(endpoint, engine)
        seconds += await over_http(episode, connection)
        await endpoint.end(episode)
    cpu = (time.process_time() - began) / turns * 1000
    took = statistics.mean(seconds) * 1000
    return {
        "native_cpu_ms": native_cpu,
        "http_cpu_ms": cpu,
        "cpu_ratio": cpu / native_cpu,
        "native_ms": native_ms,
        "http_ms": took,
        "added_ms": took - native_ms,
    }


def main(_: Sequence[str] = ()) -> None:
    """Print one line of JSON."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=agent, args=(theirs,))
    process.start()
    engine, far = socket.socketpair()
    engine.setblocking(False)
    answering = context.Process(target=echo, args=(far,))
    answering.start()
    far.close()
    print(json.dumps(uvloop.run(measured(ours, engine))))  # workers run uvloop, too
    ours.send(None)
    engine.close()
    process.join()
    answering.join()


if __name__ == "__main__":
    main()
