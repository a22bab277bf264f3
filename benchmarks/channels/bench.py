"""Channels and calls against what else moves messages, in one process and between two."""

from __future__ import annotations

import pathlib

from benchmarks.harness import Bar, Bench, Case, PeerSoftware, best_of, bound, quotient, ratio

ROOT = pathlib.Path(__file__).resolve().parents[2]
"""Every side imports what all share from here, and ours the package."""

SHARED = ("msgspec==0.22.0", "numpy==2.4.6")
ZMQ = PeerSoftware("pyzmq", (("pyzmq==27.3.0", "uvloop==0.23.0", *SHARED),))
RAY = PeerSoftware("ray", (("ray==2.60.0", *SHARED),))
MONARCH = PeerSoftware("torchmonarch", (("torch==2.13.0",), ("torchmonarch==0.7.0", *SHARED)))
# Its metadata asks for far more than its channels import.
RLINF = PeerSoftware(
    "rlinf",
    (
        ("torch==2.13.0",),
        ("ray[default]==2.60.0", "hydra-core==1.3.8", "omegaconf==2.3.1", "packaging==26.3"),
        (*SHARED, "pyyaml==6.0.3"),
        ("--no-deps", "rlinf==0.3.0"),
    ),
)

PAIRS, STREAM, NARROW = "pairs", "stream_1024", "stream_64"
IN_PROCESS = {
    PAIRS: "put + get in one task",
    STREAM: "two tasks, capacity 1,024",
    NARROW: "two tasks, capacity 64",
}
HERE = "in one process: "
ARRAYS = "arrays: "
FOUR, SIXTY_FOUR = "gb_per_s_4mb", "gb_per_s_64mb"

OURS_ITEMS, OURS_ECHO, OURS_CALLS = "items: ours", "echo: ours", "calls: ours"
OURS_ARRAYS = ARRAYS + "ours"
ON_RAY_ITEMS, ON_RAY_ARRAYS = "items on Ray: ours", "arrays on Ray: ours"
ZMQ_ITEMS, ZMQ_ARRAYS = "items: zmq.asyncio", ARRAYS + "zmq.asyncio"
MP_ITEMS, MP_ARRAYS = "items: multiprocessing.Queue", ARRAYS + "multiprocessing.Queue"
RAW_ITEMS, RAW_ECHO = "items: raw uvloop socket (limit)", "echo: raw uvloop socket (limit)"
MEMCPY = ARRAYS + "memcpy (limit)"
RAY_ALL = "items, calls, arrays: Ray"
RLINF_ALL = "items, arrays: RLinf"
MONARCH_ALL = "calls, arrays: Monarch"
KEYED = "keyed, 8 to 8: ours"
MEMORY = "memory, slow consumer: ours"
CABLES = {"good": "two hosts: ", "bad": "two hosts, 20 ms and 1 % loss: "}
RAW_TCP, PAST, TLS = "raw TCP (limit)", "worker to worker", "ours, encrypted"
OF_RAW = {"good": ("4mb", 0.5, 0.7), "bad": ("256kb", 0.4, 0.4)}
"""size of the arrays, and what is wanted of raw TCP in items/s and in GB/s"""


def _alone(name: str, queue: str, *requires: str) -> Case:
    command = ("{python}", "{here}/in_process.py", queue)
    return Case(HERE + name, command, requires=requires, timeout=120)


def _two(
    name: str,
    *command: str,
    peer: PeerSoftware | None = None,
    requires: tuple[str, ...] = (),
    timeout: float = 120,
    **environment: str,
) -> Case:
    """A case with more than one process, all on the same two cores."""
    script, *rest = command
    return Case(
        name,
        ("{python}", f"{{here}}/{script}", *rest),
        peer=peer,
        requires=requires,
        cores=2,
        environment={"PYTHONPATH": str(ROOT), **environment},
        timeout=timeout,
    )


def _alone_bars(theirs: str, at_least: float) -> tuple[Bar, ...]:
    return tuple(
        ratio(
            f"{what} / {theirs}",
            metric=shape,
            ours=HERE + "ours",
            theirs=HERE + theirs,
            at_least=at_least,
        )
        for shape, what in IN_PROCESS.items()
    )


def _times(what: str, metric: str, ours: str, **targets: tuple[str, float]) -> tuple[Bar, ...]:
    """One bar "ours is at least so many times theirs" for each of several."""
    return tuple(
        ratio(f"{what} / {label}", metric=metric, ours=ours, theirs=theirs, at_least=at_least)
        for label, (theirs, at_least) in targets.items()
    )


def _of_raw(cable: str) -> tuple[Bar, ...]:
    """The bars on what goes between two hosts."""
    host, (size, items, bytes_) = CABLES[cable], OF_RAW[cable]
    ours, theirs = f"{host}ours", f"{host}{RAW_TCP}"
    return (
        *_times(f"{host}items/s", "items_per_s", ours, **{"raw TCP": (theirs, items)}),
        *_times(f"{host}GB/s", f"gb_per_s_{size}", ours, **{"raw TCP": (theirs, bytes_)}),
    )


def _quick(what: str, ours: str, of_raw: float) -> tuple[Bar, ...]:
    """The bars on something that goes there and back."""
    p50, p99 = (ours, "p50_us"), (ours, "p99_us")
    return (
        quotient(f"{what}, p50 / raw socket echo", p50, (RAW_ECHO, "p50_us"), at_most=of_raw),
        quotient(f"{what}, Monarch call's p50 / ours", (MONARCH_ALL, "p50_us"), p50, at_least=4),
        quotient(f"{what}, Ray call's p50 / ours", (RAY_ALL, "p50_us"), p50, at_least=8),
        quotient(f"{what}, p99 / p50", p99, p50, at_most=5),
    )


BENCH = Bench(
    name="channels",
    summary="channels and calls, in one process and between two, against eight others",
    cases=(
        _alone("ours", "ours"),
        _alone("asyncio.Queue", "asyncio"),
        _alone("anyio stream", "anyio", "anyio"),
        _two(OURS_ITEMS, "ours.py", "items"),
        _two(ON_RAY_ITEMS, "ours.py", "items", "ray", requires=("ray",)),
        _two(ZMQ_ITEMS, "of_zmq.py", "items", peer=ZMQ),
        _two(MP_ITEMS, "of_multiprocessing.py", "items"),
        _two(RAW_ITEMS, "raw.py", "items"),
        _two(RLINF_ALL, "of_rlinf.py", peer=RLINF, timeout=240),
        _two(RAW_ECHO, "raw.py", "echo"),
        _two(OURS_ECHO, "ours.py", "echo"),
        _two(OURS_CALLS, "ours.py", "calls"),
        _two(RAY_ALL, "of_ray.py", peer=RAY),
        _two(MONARCH_ALL, "of_monarch.py", peer=MONARCH),
        _two(OURS_ARRAYS, "ours.py", "arrays"),
        _two(ON_RAY_ARRAYS, "ours.py", "arrays", "ray", requires=("ray",)),
        _two(MEMCPY, "raw.py", "memcpy"),
        _two(ZMQ_ARRAYS, "of_zmq.py", "arrays", peer=ZMQ),
        _two(MP_ARRAYS, "of_multiprocessing.py", "arrays"),
        _two(KEYED, "keyed.py"),
        _two(MEMORY, "memory.py"),
        _two(CABLES["good"] + TLS, "hosts.py", "tls", "good", requires=("cryptography",)),
        *(
            _two(f"{name}{side}", "hosts.py", what, cable)
            for cable, name in CABLES.items()
            for what, side in (
                ("ours", "ours"),
                ("raw", RAW_TCP),
                ("past", PAST),
            )
        ),
    ),
    bars=(
        *_alone_bars("asyncio.Queue", 0.9),
        *_alone_bars("anyio stream", 2.0),
        *_times(
            "64-byte items/s",
            "items_per_s",
            OURS_ITEMS,
            **{
                "zmq.asyncio": (ZMQ_ITEMS, 3),
                "multiprocessing.Queue": (MP_ITEMS, 3),
                "RLinf": (RLINF_ALL, 300),
                "Ray's queue": (RAY_ALL, 1),
                "raw socket": (RAW_ITEMS, 0.2),
            },
        ),
        *_times(
            "64-byte items/s on Ray",
            "items_per_s",
            ON_RAY_ITEMS,
            **{
                "on processes": (OURS_ITEMS, 1 / 1.2),
                "RLinf": (RLINF_ALL, 100),
                "Ray's queue": (RAY_ALL, 100),
            },
        ),
        *_quick("round trip", OURS_ECHO, 3),
        *_quick("call", OURS_CALLS, 2),
        *_times(
            "calls in flight, per s",
            "in_flight_per_s",
            OURS_CALLS,
            Monarch=(MONARCH_ALL, 5),
            Ray=(RAY_ALL, 10),
        ),
        *_times(
            "4 MiB arrays, GB/s",
            FOUR,
            OURS_ARRAYS,
            memcpy=(MEMCPY, 0.4),
            RLinf=(RLINF_ALL, 20),
            Monarch=(MONARCH_ALL, 4),
        ),
        best_of(
            "4 MiB arrays, GB/s / best of the others",
            metric=FOUR,
            ours=OURS_ARRAYS,
            theirs=(ZMQ_ARRAYS, MP_ARRAYS, RAY_ALL, RLINF_ALL, MONARCH_ALL),
            at_least=1,
        ),
        *_times(
            "4 MiB arrays on Ray, GB/s",
            FOUR,
            ON_RAY_ARRAYS,
            **{"on processes": (OURS_ARRAYS, 1 / 1.2)},
        ),
        *_times("64 MiB arrays, GB/s", SIXTY_FOUR, OURS_ARRAYS, memcpy=(MEMCPY, 0.5)),
        quotient(
            "8 to 8 keyed, total items/s / 1 to 1",
            (KEYED, "total_per_s"),
            (KEYED, "one_to_one_per_s"),
            at_least=0.5,
        ),
        *(bar for cable in CABLES for bar in _of_raw(cable)),
        quotient(
            "two hosts: worker to worker past the owner, GB/s / raw TCP",
            (CABLES["good"] + PAST, "gb_per_s_past"),
            (CABLES["good"] + RAW_TCP, FOUR),
            at_least=0.8,
        ),
        bound(
            "two hosts: cores of the owner for each GB/s past it",
            (CABLES["good"] + PAST, "owner_cores_per_gb_per_s_past"),
            at_most=0.05,
        ),
        bound("8 to 8 keyed, most / fewest", (KEYED, "most_over_fewest"), at_most=1.2, unit="x"),
        bound("memory after 3 s, 4 KiB items", (MEMORY, "growth_4kb"), at_most=1.05, unit="x"),
        bound("memory after 3 s, 1 MiB arrays", (MEMORY, "growth_1mb"), at_most=1.05, unit="x"),
    ),
    repetitions=3,
    notes=(
        "in one process: items per second; one core, one event loop (uvloop if installed)",
        "others: all processes of a case on the same two cores; the consumer measures",
        "echo and calls, ours and raw socket: each side on a core of its own",
        "ours in items and arrays: the slower of worker -> driver and driver -> worker",
        "arrays: float32; received, first and last element read, not copied out",
        "memcpy: one thread, between arrays of 2 GiB in all",
        "two hosts: two network namespaces, each side on a core of its own; the slower direction",
        "worker to worker: 4 MiB arrays of a channel of the other host, through it and past it",
    ),
)
