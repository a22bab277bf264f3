"""Run folders as a run leaves them, and the server of the page over them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx
import msgspec
import numpy as np

from rlinf_async.observe.metrics import CsvLog
from rlinf_async.observe.progress import ChannelView, EdgeView, ProgressState, WaitView, WorkerView
from rlinf_async.observe.run_folder import RunFolder
from rlinf_async.observe.samples import SamplesConfig, SampleWriter, Vocabulary
from rlinf_async.observe.status import Status, write_status
from rlinf_async.observe.summary import LanguageSummary, write_summary
from rlinf_async.observe.trace import Counter, Span, Work, write_perfetto
from rlinf_async.observe.waits import WAITS, PartyWait, PartyWork, WaitsRecord
from rlinf_async.runtime.jobs.language.kept import KeptLanguageSample
from rlinf_async.view.runs import Runs
from rlinf_async.view.server import serve

CONFIG = 'job = "language_rl"\n\n[training]\niterations = 40\nprompts = 8\n'
MS = 1_000_000


def make_run(
    path: Path,
    rows: Sequence[Mapping[str, float]] = (),
    *,
    config: str = CONFIG,
    outcome: str | None = "succeeded",
) -> Path:
    """A run that has ended, with a trace and these rows; ``outcome`` None: without a summary."""
    with RunFolder.create(path, config_text=config) as folder:
        log = CsvLog(folder.metrics, keep_to=None)
        for step, row in enumerate(rows):
            log.write(step, row)
        log.close()
        if outcome is not None:
            summary = LanguageSummary(
                run=path.name, outcome=outcome, seed=0,  # type: ignore[arg-type]
                iterations=len(rows), train_seconds=12.5, samples=64,
            )  # fmt: skip
            write_summary(folder.summary, summary)
            write_trace(folder.trace)
    return path


def keep_samples(run: Path, prompt: str = "1 + 1 =", groups: int = 15) -> None:
    """Samples of three tokens, eight of each prompt, the later the better."""
    writer = SampleWriter(run, SamplesConfig(), keep_to=None)
    made = [
        KeptLanguageSample(
            name=f"{number // 8}/{number % 8}", kind="training", step=number // 8,
            iteration=number // 8, trained=True, outcome="scored", reward=number / 16, size=3,
            prompt=prompt, completion="a<b>", finish="stop", detail="", reward_parts={"exact": 1.0},
            verifier="exact", reference="2", prompt_tokens=[0], tokens=[0, 1, 2],
            log_probs=[-0.1, -0.5, -3.0], versions=[3, 3, 4], mask=[1, 1, 0],
            prev_log_probs=[-0.1, -0.25, -3.5], rollout_rank=0, scoring_seconds=0.001,
        )
        for number in range(8 * groups)
    ]  # fmt: skip
    Vocabulary(run, lambda tokens: "".join(("a", "<b>", " ")[one] for one in tokens)).note(
        np.arange(3)
    )
    writer.put(lambda: made, len(made))
    assert writer.close() == {}


def keep_waits(run: Path, iterations: int = 4) -> None:
    """Records of a run whose rollout workers wait for the reward worker three quarters of it."""
    records = [
        WaitsRecord(
            iteration=at, seconds=2.0,
            parties=[
                PartyWork(worker=name, role=name[:-3].lower(), seconds=2.0,
                          work=[Work("", seconds=2.0 * busy, count=1)])
                for name, busy in (("Rollout[0]", 0.2), ("Rollout[1]", 0.3), ("Reward[0]", 0.95))
            ],
            waits=[
                PartyWait(f"Rollout[{rank}].generate", "put", "generated", 1, 1.5,
                          ("Reward[0].score",))
                for rank in range(2)
            ] + [PartyWait("main.collect", "get", "scored", 1, 0.5, ("Reward[0].score",))],
        )
        for at in range(1, iterations + 1)
    ]  # fmt: skip
    content = b"".join(msgspec.json.encode(one) + b"\n" for one in records)
    (run / WAITS).write_bytes(content)


def write_trace(path: Path) -> None:
    """The trace of two rollout workers, a reward worker and an actor; it reaches into a ring."""
    spans = [
        Span(f"Rollout[{rank}]", name, (i * 10 + at) * MS, length * MS, {"iteration": i})
        for rank in range(2)
        for i in range(30)
        for name, at, length in (("generate", rank, 6), ("wait requests", 6 + rank, 2))
    ]
    spans += [Span("Actor[0]", "train", (i * 10 + 6) * MS, 4 * MS) for i in range(30)]
    spans += [Span("Actor[0]", "micro-batch", (i * 10 + 7) * MS, 2 * MS) for i in range(30)]
    spans += [Span("Reward[0]", "score", (i * 10 + 5) * MS, MS) for i in range(30)]
    tracks = ("channel requests depth", "channel generated depth", "channel scored depth")
    edges = ("requests -> Rollout[0] items/s", "Rollout[0] -> generated items/s",
             "generated -> Reward[0] items/s", "Reward[0] -> scored items/s")  # fmt: skip
    counters = [
        Counter(name.rpartition(" ")[0], i * 10 * MS, {name.rpartition(" ")[2]: float(i % 5)})
        for name in (*tracks, *edges)
        for i in range(30)
    ]
    write_perfetto(spans, path, counters=counters)


def live_state(iteration: int) -> ProgressState:
    """What the view of a run shows that goes on, one of whose channels is full."""
    return ProgressState(
        run="sums (seed 0)",
        iteration=iteration,
        iterations=40,
        figures=[("reward", "0.41")],
        channels=[
            ChannelView(name="requests", depth=8, capacity=8, items_per_second=12.0),
            ChannelView(name="generated", depth=1, capacity=8, items_per_second=11.5),
        ],
        edges=[
            EdgeView(name="requests -> Rollout[0]", items_per_second=12.0, bytes_per_second=2e6),
            EdgeView(name="Rollout[0] -> generated", items_per_second=11.5, bytes_per_second=3e6),
        ],
        workers=[
            WorkerView(name="Rollout[0]", doing="generate", host="here", devices=["cuda:0"]),
            WorkerView(name="Actor[0]", waiting_for="groups", waiting_seconds=3.5, restarts=1),
        ],
        waits=[
            WaitView(party="run.source", operation="put", channel="requests", seconds=2.5,
                     unblockers=["Rollout[0].generate"]),
        ],
    )  # fmt: skip


@contextlib.contextmanager
def going_on(path: Path, iteration: int = 7) -> Iterator[RunFolder]:
    """A run that goes on in this process."""
    with RunFolder.create(path, config_text=CONFIG) as folder:
        tell(folder, iteration)
        yield folder


def tell(folder: RunFolder, iteration: int) -> None:
    """Write the status of a run that goes on."""
    status = Status(time=time.time(), ending=False, grace_seconds=5.0, shown=live_state(iteration))
    write_status(folder.status, status)


@contextlib.contextmanager
def served(*folders: Path) -> Iterator[str]:
    """The address that is printed, while the page of these runs is served."""
    told: list[str] = []
    ready = threading.Event()
    runs = Runs(folders)

    def announce(address: str) -> None:
        told.append(address)
        ready.set()

    loop = asyncio.new_event_loop()
    serving: list[asyncio.Task[None]] = []

    def work() -> None:
        asyncio.set_event_loop(loop)
        serving.append(loop.create_task(serve(runs, 0, announce)))
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(serving[0])
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()

    thread = threading.Thread(target=work, name="the page's server")
    thread.start()
    try:
        assert ready.wait(60)
        yield told[0]
    finally:
        loop.call_soon_threadsafe(lambda: serving[0].cancel())
        thread.join()


@contextlib.contextmanager
def entered(*folders: Path) -> Iterator[httpx.Client]:
    """A client that has exchanged the token for its cookie."""
    with served(*folders) as address:
        url = httpx.URL(address)
        with httpx.Client(base_url=url.copy_with(path="/", query=None), verify=False) as client:
            assert client.get(url).status_code == 200
            yield client
