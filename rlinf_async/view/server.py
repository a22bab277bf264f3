"""The server of the page: what is asked, by path, and how it listens.

::

    /                    the page                   /static/NAME   its scripts and its style
    /api/state           all runs, as they are now  /api/metrics   cells of columns, the new ones
    /api/graph           workers and channels       /api/timeline  the spans of a trace
    /api/span            arguments of a span        /api/settings  the configuration
    /api/samples         a page of the list         /api/sample    one with its tokens
    /api/videos          names of videos            /video/RUN/NAME

Every answer is small, or made before it is asked for: a trace is read by a process of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib.resources
import secrets
import socket
import sys
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from rlinf_async.config import UsageError
from rlinf_async.config.registry import needed
from rlinf_async.observe.files import RunFolderError
from rlinf_async.view import graph, spans
from rlinf_async.view.guard import Guard
from rlinf_async.view.kept import Query
from rlinf_async.view.runs import Run, Runs

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

HOST: Final = "127.0.0.1"
PORT: Final = 8421
EXTRA: Final = "view"
TRACES_KEPT: Final = 6
"""digests of traces that are kept, those asked for last"""
CLOSING: Final = 1
"""seconds for which open connections are waited for at the end"""
KINDS: Final = {".html": "text/html", ".js": "text/javascript", ".css": "text/css",
                ".svg": "image/svg+xml"}  # fmt: skip


class Missing(RunFolderError):
    """Nothing is served under this name."""


class Traces:
    """Digests of the traces of runs, each made once, one after the other."""

    def __init__(self) -> None:
        self._made: OrderedDict[tuple[Path, str], asyncio.Task[bytes]] = OrderedDict()
        self._one = asyncio.Semaphore(1)

    def of(self, path: Path) -> bytes | None:
        """The digest of a file; None while it is being made.

        Raises:
            RunFolderError: there is no such file, or it is not a trace.
        """
        try:
            found = path.stat()
        except OSError as error:
            raise RunFolderError(
                f"{path}: there is no trace yet; a run writes it when it ends"
            ) from error
        key = path, f"{found.st_mtime_ns}-{found.st_size}"
        if key not in self._made:
            self._made[key] = asyncio.create_task(self._digest(path), name="digest of a trace")
            while len(self._made) > TRACES_KEPT:
                self._made.popitem(last=False)[1].cancel()
        self._made.move_to_end(key)
        made = self._made[key]
        if made.done() and made.cancelled():
            del self._made[key]
            return None
        return made.result() if made.done() else None

    async def _digest(self, path: Path) -> bytes:
        async with self._one:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", spans.__name__, str(path)),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            try:
                made, said = await process.communicate()
            except asyncio.CancelledError:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
                raise
        if process.returncode != 0:
            problem = said.decode(errors="replace").strip()
            raise RunFolderError(problem.splitlines()[-1] if problem else f"cannot read {path}")
        return made

    async def aclose(self) -> None:
        """Give up what is not made yet."""
        tasks = list(self._made.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Page:
    """What the page asks for.

    Args:
        runs: the runs that it shows.
    """

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._traces = Traces()
        self._files = static_files()
        self._reading: asyncio.Task[None] | None = None

    def app(self) -> Starlette:
        """The application, which answers everybody: a `Guard` stands before it."""
        from starlette.applications import Starlette
        from starlette.exceptions import HTTPException
        from starlette.routing import Route

        return Starlette(
            routes=[
                Route("/", self._index),
                Route("/static/{name}", self._static),
                Route("/favicon.ico", self._icon),  # browsers ask for it by themselves
                Route("/api/state", self._state),
                Route("/api/metrics", self._metrics),
                Route("/api/graph", self._graph),
                Route("/api/timeline", self._timeline),
                Route("/api/span", self._span),
                Route("/api/settings", self._settings),
                Route("/api/samples", self._samples),
                Route("/api/sample", self._sample),
                Route("/api/videos", self._videos),
                Route("/video/{run}/{name}", self._video),
            ],
            exception_handlers={
                Missing: _missing,
                RunFolderError: _problem,
                HTTPException: _refused,
            },
        )

    def read_ahead(self) -> None:
        """Begin to read the trace and the index of samples of the first run, which the page shows
        first."""
        for run in self._runs.all()[:1]:
            with contextlib.suppress(RunFolderError):
                self._traces.of(run.folder / "trace.json.gz")
            self._reading = asyncio.create_task(asyncio.to_thread(_read_samples, run))

    async def aclose(self) -> None:
        """Give up what is being read."""
        if self._reading is not None:
            await self._reading
        await self._traces.aclose()

    async def _index(self, request: Request) -> Response:
        return self._file("index.html")

    async def _static(self, request: Request) -> Response:
        return self._file(request.path_params["name"])

    async def _icon(self, request: Request) -> Response:
        return self._file("icon.svg")

    def _file(self, name: str) -> Response:
        from starlette.responses import Response

        if name not in self._files:
            raise Missing(f"the page has no file {name!r}")
        kind = KINDS.get(Path(name).suffix, "application/octet-stream")
        return Response(self._files[name], media_type=kind)

    def _state(self, request: Request) -> Response:
        runs = [run.state() for run in self._runs.all()]
        return as_json({"now": time.time(), "runs": runs})

    def _metrics(self, request: Request) -> Response:
        run = self._run(request)
        names = request.query_params.getlist("name")
        after, generation = _whole(request, "after", 0), _whole(request, "generation", 0)
        with run.lock:
            run.table.read()
            return as_json(run.table.since(names, max(0, after), generation))

    async def _graph(self, request: Request) -> Response:
        from starlette.concurrency import run_in_threadpool

        run = self._run(request)
        shown = await run_in_threadpool(run.shown)
        if shown is not None:
            return as_json(await run_in_threadpool(_with_waits, graph.of_status(shown), run))
        digest = self._traces.of(run.folder / "trace.json.gz")
        if digest is None:
            return as_json({"waiting": "the trace is being read"}, 202)
        told = graph.of_trace(spans.header_of(digest))
        return as_json(await run_in_threadpool(_with_waits, told, run))

    async def _timeline(self, request: Request) -> Response:
        from starlette.responses import Response

        digest = self._traces.of(self._run(request).folder / "trace.json.gz")
        if digest is None:
            return as_json({"waiting": "the trace is being read"}, 202)
        return Response(spans.drawn_part(digest), media_type="application/octet-stream")

    async def _span(self, request: Request) -> Response:
        digest = self._traces.of(self._run(request).folder / "trace.json.gz")
        if digest is None:
            return as_json({"waiting": "the trace is being read"}, 202)
        try:
            return as_json(spans.arguments_of(digest, _whole(request, "span", -1)))
        except IndexError as error:
            raise Missing(str(error)) from error

    def _settings(self, request: Request) -> Response:
        return as_json(self._run(request).settings())

    def _samples(self, request: Request) -> Response:
        given = {
            name: text
            for name in Query.__struct_fields__
            if (text := request.query_params.get(name)) is not None
        }
        try:
            query = msgspec.convert(given, Query, strict=False)
        except msgspec.ValidationError as error:
            raise Missing(f"no such samples: {error}") from error
        return as_json(self._run(request).samples.page(query))

    def _sample(self, request: Request) -> Response:
        key = request.query_params.get("key", "")
        try:
            return as_json(self._run(request).samples.record(key))
        except KeyError as error:
            raise RunFolderError(
                f"the sample {key} is not there any more: the oldest are removed, and a run that "
                "is resumed makes some anew"
            ) from error

    def _videos(self, request: Request) -> Response:
        return as_json({"videos": self._run(request).videos()})

    def _video(self, request: Request) -> Response:
        from starlette.responses import FileResponse

        run = self._of(_number("run", request.path_params["run"]))
        name = request.path_params["name"]
        if name not in run.videos():
            raise Missing(f"{run.folder} has no video {name!r}")
        return FileResponse(run.folder / name, media_type="video/mp4")

    def _run(self, request: Request) -> Run:
        return self._of(_whole(request, "run", -1))

    def _of(self, number: int) -> Run:
        try:
            return self._runs.of(number)
        except KeyError as error:
            raise Missing(f"there is no run of the number {number}") from error


def _with_waits(told: dict[str, Any], run: Run) -> dict[str, Any]:
    """The graph, with the waits of the run, or with what is wrong with their file."""
    try:
        graph.add_waits(told, run.waits)
    except RunFolderError as error:
        told["problem"] = str(error)
    return told


def _read_samples(run: Run) -> None:
    """Read the index of a run's samples; what is wrong with it is said where it is shown."""
    with contextlib.suppress(RunFolderError):
        run.samples.page(Query())


def static_files() -> dict[str, bytes]:
    """The files of the page by name: no other one is ever served by a name."""
    folder = importlib.resources.files("rlinf_async.view") / "static"
    return {one.name: one.read_bytes() for one in folder.iterdir() if one.is_file()}


def as_json(body: Any, status: int = 200) -> Response:
    from starlette.responses import Response

    return Response(msgspec.json.encode(body), status, media_type="application/json")


def _missing(request: Request, error: Exception) -> Response:
    return as_json({"error": str(error)}, 404)


def _problem(request: Request, error: Exception) -> Response:
    """An answer as good as any: the page shows what is wrong with a run's file."""
    return as_json({"error": str(error)})


def _refused(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    return as_json(
        {"error": f"{status}: {request.method} {request.url.path} is not served"}, status
    )


def _whole(request: Request, name: str, otherwise: int) -> int:
    text = request.query_params.get(name)
    return otherwise if text is None else _number(name, text)


def _number(name: str, text: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 15:
        raise Missing(f"{name} is {text[:40]!r}; it must be a whole number")
    return int(text)


async def serve(runs: Runs, port: int, announce: Callable[[str], None]) -> None:
    """Serve the page until it is cancelled.

    Args:
        runs: the runs to show.
        port: port on 127.0.0.1; 0: any that is free.
        announce: called with the address, once it is served.

    Raises:
        MissingExtra: starlette or uvicorn is not installed.
        UsageError: the port is taken, or may not be had.
    """
    page = Page(runs)
    async with served(page.app, port, secrets.token_urlsafe(32), "rlinf-async view") as serving:
        page.read_ahead()
        announce(serving.address)
        try:
            await asyncio.shield(serving.task)
        finally:
            await page.aclose()


class Serving(NamedTuple):
    """A server that answers."""

    address: str
    """the one that lets in"""
    task: asyncio.Task[None]
    """until it ends"""


@contextlib.asynccontextmanager
async def served(
    make: Callable[[], Starlette],
    port: int,
    token: str,
    needed_for: str,
    methods: Sequence[str] = ("GET", "HEAD"),
) -> AsyncIterator[Serving]:
    """Serve an application, behind a `Guard`, while the block runs.

    Raises: as `serve`.
    """
    needed("starlette", extra=EXTRA, needed_for=needed_for)
    uvicorn = needed("uvicorn", extra=EXTRA, needed_for=needed_for)
    with listener(port) as listening:
        bound = listening.getsockname()[1]
        app: Any = make()
        config = uvicorn.Config(
            Guard(app, bound, token, methods),
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_graceful_shutdown=CLOSING,
        )
        server = uvicorn.Server(config)
        server.capture_signals = contextlib.nullcontext  # they are the command's
        serving = asyncio.create_task(server.serve([listening]), name="server of the page")
        try:
            yield Serving(f"http://{HOST}:{bound}/?token={token}", serving)
        finally:
            server.should_exit = True  # and its connections are closed
            await serving


def listener(port: int) -> socket.socket:
    """Return a socket that listens on loopback.

    Raises:
        UsageError: the port is taken, or may not be had.
    """
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((HOST, port))
        made.listen(128)
        made.setblocking(False)
    except OSError as error:
        made.close()
        if error.errno == errno.EADDRINUSE:
            raise UsageError(
                f"port {port} of {HOST} is taken, perhaps by another rlinf-async view; choose "
                "another one (--port), or any that is free (--port 0)"
            ) from error
        raise UsageError(
            f"cannot listen on port {port} of {HOST}: {error.strerror}; choose another one "
            "(--port), or any that is free (--port 0)"
        ) from error
    return made
