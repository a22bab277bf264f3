"""Records of waits: written once an iteration, read after a kill, each iteration once."""

from __future__ import annotations

import pathlib

import msgspec
import pytest

from rlinf_async.observe.files import RunFolderError
from rlinf_async.observe.run_folder import RunFolder
from rlinf_async.observe.trace import SpanRecorder
from rlinf_async.observe.waits import (
    Facts,
    NoWaits,
    PartyWait,
    Shape,
    WaitsRecord,
    difference,
    read_waits,
    shapes_of,
    waited_since,
)
from rlinf_async.runtime.jobs.waits import WaitsFile


def record(iteration: int, *, start: int = 1, iterations: int = 1) -> WaitsRecord:
    return WaitsRecord(iteration=iteration, iterations=iterations, start=start, seconds=2.0)


def run_with(folder: pathlib.Path, content: bytes) -> pathlib.Path:
    RunFolder.create(folder, config_text="").close()
    (folder / "waits.jsonl").write_bytes(content)
    return folder


def lines(*records: WaitsRecord) -> bytes:
    return b"".join(msgspec.json.encode(one) + b"\n" for one in records)


def test_a_torn_last_line_is_left_out(tmp_path: pathlib.Path) -> None:
    whole = lines(record(1), record(2))
    for cut in range(len(lines(record(1))), len(whole) - 1):
        run = run_with(tmp_path / str(cut), whole[:cut])
        assert [one.iteration for one in read_waits(run)] == [1]


def test_iterations_that_are_trained_again_replace_those_of_before(tmp_path: pathlib.Path) -> None:
    content = lines(record(1), record(2), record(5, iterations=3), record(3, start=2))
    found = read_waits(run_with(tmp_path / "run", content))
    assert [(one.iteration, one.start) for one in found] == [(1, 1), (2, 1), (3, 2)]


def test_a_resumed_run_goes_on_after_what_it_has_trained(tmp_path: pathlib.Path) -> None:
    run = run_with(tmp_path / "run", lines(record(1), record(2), record(3)) + b'{"iter')
    file = WaitsFile(run / "waits.jsonl", 2)
    file.write(record(3, start=2))
    assert (run / "waits.jsonl").read_bytes() == lines(record(1), record(2), record(3, start=2))


def test_iterations_can_be_chosen(tmp_path: pathlib.Path) -> None:
    run = run_with(tmp_path / "run", lines(record(1), record(4, iterations=3), record(5)))
    assert [one.iteration for one in read_waits(run, first=1, last=2)] == [4]
    with pytest.raises(NoWaits, match="records of iterations 0 to 4, and none of 5 to the end"):
        read_waits(run, first=5)


def test_a_run_without_records_is_named(tmp_path: pathlib.Path) -> None:
    run = run_with(tmp_path / "run", b"")
    with pytest.raises(NoWaits, match="holds no record"):
        read_waits(run)
    (run / "waits.jsonl").unlink()
    with pytest.raises(NoWaits, match=r"has no waits\.jsonl"):
        read_waits(run)
    with pytest.raises(RunFolderError, match="there is no such folder"):
        read_waits(tmp_path / "nowhere")


def test_a_line_of_another_version_is_named(tmp_path: pathlib.Path) -> None:
    run = run_with(tmp_path / "run", b'{"iteration":"one","seconds":1}\n' + lines(record(2)))
    with pytest.raises(RunFolderError, match="line 1 is no record of waits"):
        read_waits(run)


def test_shapes_keep_the_longest_sample() -> None:
    shapes = shapes_of(Shape(tokens) for tokens in range(1000))
    assert len(shapes) == 64
    assert shapes[0].tokens == 0
    assert shapes[-1].tokens == 999
    assert msgspec.json.decode(msgspec.json.encode(Facts(shapes=shapes)), type=Facts).shapes


def test_waits_and_work_are_those_since_the_last_record() -> None:
    def waited(seconds: float, count: int, channel: str = "groups") -> PartyWait:
        return PartyWait("Actor[0].train", "get", channel, count, seconds)

    now = [waited(5.0, 3), waited(1.0, 1, "taken")]
    before = [waited(2.0, 1), waited(1.0, 1, "taken")]
    assert waited_since(now, before) == [waited(3.0, 2)]


def test_a_meter_counts_each_moment_once_and_pieces_up_to_what_can_be_worked_on() -> None:
    now = [0]
    recorder = SpanRecorder("reward 0", clock=lambda: now[0])
    meter = recorder.meter
    meter.serves("score", 2)
    spans = [recorder.span("score") for _ in range(3)]
    for span in spans:  # one more begins each second
        span.__enter__()
        now[0] += 10**9
    before = {one.name: one for one in meter.seen()}
    for span in spans:
        span.__exit__(None, None, None)
        now[0] += 10**9
    with recorder.span("wait samples"):
        now[0] += 10**9
    score = before["score"]
    assert (score.seconds, score.total, score.full, score.count) == (3.0, 5.0, 2.0, 0)
    assert before[""].total == 6.0
    [rest] = [one for one in difference(meter.seen(), before.values()) if one.name == "score"]
    assert (rest.seconds, rest.total, rest.full, rest.count) == (2.0, 3.0, 1.0, 3)
    assert {one.name: one.seconds for one in meter.seen()}["wait samples"] == 1.0


def test_a_fit_finds_what_a_step_takes_alone_and_beside_others() -> None:
    now = [0]
    meter = SpanRecorder("rollout 0", clock=lambda: now[0]).meter
    for rows in (4, 16, 8):
        with meter.batch("forward", rows):
            now[0] += 1_000_000 * (10 + 2 * rows)
    [work] = [one for one in meter.seen() if one.name == "forward"]
    assert work.fit is not None
    assert work.fit.line() == pytest.approx((0.010, 0.002))
    assert work.size == 28


def test_pieces_that_are_no_spans_are_not_among_what_a_worker_does() -> None:
    now = [0]
    recorder = SpanRecorder("rollout 0", clock=lambda: now[0])
    recorder.meter.serves("requests", 4)
    with recorder.meter.beside("requests") as piece, recorder.span("generate"):
        now[0] += 10**9
        piece.size = 10.0
        assert recorder.doing() == ("generate",)
    work = {one.name: one for one in recorder.meter.seen()}
    assert work["requests"].fit is not None
    assert work["requests"].fit.line() == pytest.approx((0.1, 0.0))
    assert work[""].seconds == 1.0
