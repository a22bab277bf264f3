"""In-process channels against asyncio.Queue and anyio's memory object stream."""

from __future__ import annotations

from rlinf_async.bench import Bar, Bench, Case, ratio

SHAPES = {
    "pairs": "put + get in one task",
    "stream_1024": "two tasks, capacity 1,024",
    "stream_64": "two tasks, capacity 64",
}


def _case(name: str, queue: str, *requires: str) -> Case:
    return Case(name, ("{python}", "{here}/put_get.py", queue), requires=requires, timeout=120)


def _bars(theirs: str, at_least: float) -> tuple[Bar, ...]:
    return tuple(
        ratio(f"{what} / {theirs}", metric=shape, ours="ours", theirs=theirs, at_least=at_least)
        for shape, what in SHAPES.items()
    )


BENCH = Bench(
    name="channels",
    summary="in-process put + get against asyncio.Queue and anyio's memory object stream",
    cases=(
        _case("ours", "ours"),
        _case("asyncio.Queue", "asyncio"),
        _case("anyio stream", "anyio", "anyio"),
    ),
    bars=(*_bars("asyncio.Queue", 0.8), *_bars("anyio stream", 2.0)),
    repetitions=5,
    notes=(
        "items per second; one core, one process, one event loop for all (uvloop if installed)",
    ),
)
