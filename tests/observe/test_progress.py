"""The live view shows the newest state and never stops a run."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import msgspec
import pytest
from rich.console import Console

from rlinf_async.observe.progress import (
    ChannelView,
    EdgeView,
    ProgressState,
    ProgressView,
    RunConsole,
    WaitView,
    WorkerView,
    figure,
    line_of,
    picture_of,
)

STATE = ProgressState(
    run="reach",
    iteration=12,
    iterations=40,
    figures=[
        ("steps", "33,600"),
        ("steps/s", "1,953"),
        ("return", figure(-2.128, ".2f")),
        ("success", figure(0.91, ".0%")),
        ("staleness", "0.8"),
    ],
    channels=[
        ChannelView(name="observations", depth=8, capacity=8),
        ChannelView(name="trajectories", depth=1),
    ],
    workers=[
        WorkerView(name="env 0", doing="step", restarts=1),
        WorkerView(name="rollout 0", waiting_for="observations", waiting_seconds=0.4),
    ],
    note="env 0 was restarted",
)


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_an_unchanged_line_is_not_printed_again() -> None:
    clock, out = Clock(), io.StringIO()
    with ProgressView(console=RunConsole(file=out), interval=5.0, clock=clock) as view:
        for _ in range(3):
            view.update(msgspec.structs.replace(STATE))
            clock.now += 6.0
    assert out.getvalue().count("iteration 12/40") == 1


class GonePipe(io.StringIO):
    """The pipe of a reader that has left."""

    def write(self, text: str, /) -> int:
        raise BrokenPipeError(32, "Broken pipe")


def drawn(state: ProgressState, width: int, *, whole: bool = False) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(picture_of(state, width, whole=whole))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_edges_are_shown_with_their_rates_those_with_the_most_bytes_first() -> None:
    edges = [
        EdgeView(name=f"Env[{n}] -> steps", items_per_second=n, bytes_per_second=n * 1e6, copied=n)
        for n in range(12)
    ]
    seen = drawn(msgspec.structs.replace(STATE, edges=edges), 100)
    assert "Env[11] -> steps" in seen
    assert "11.00" in seen
    assert "Env[1] -> steps" not in seen
    assert "and 2 more" in seen
    assert "Env[11]" not in drawn(msgspec.structs.replace(STATE, edges=edges), 60)


def test_the_picture_has_everything_that_is_known() -> None:
    picture = drawn(STATE, 100)
    for part in (
        *("reach", "12/40", "33,600", "1,953", "-2.13", "91%", "0.8", "8/8", "no limit"),
        *("env 0", "step", "waits 0.4 s for observations", "env 0 was restarted"),
    ):
        assert part in picture


def test_the_whole_picture_has_every_worker_with_its_place_and_who_waits_for_whom() -> None:
    workers = [
        WorkerView(name=f"env {rank}", host="alpha", devices=["cuda:1"]) for rank in range(20)
    ]
    workers.append(WorkerView(name="actor 0", host="beta", live=False, restarts=3))
    waits = [
        WaitView(party="actor 0.run", operation="get", channel="steps", seconds=seconds, key="7")
        for seconds in (0.5, 2.5)
    ]
    waits.append(
        WaitView(
            party="main", operation="put", channel="full", seconds=9.0, unblockers=["a.b", "c.d"]
        )
    )
    state = msgspec.structs.replace(STATE, workers=workers, waits=waits)
    lines = [" ".join(line.split()) for line in drawn(state, 100, whole=True).splitlines()]
    for line in (
        "env 19 alpha cuda:1",
        "actor 0 beta cpu no process 3",
        "main 9.0 put full a.b, c.d",
        "actor 0.run (2 tasks) 2.5 get steps (key 7) nobody",
    ):
        assert any(line in one for one in lines), line
    assert "who waits" not in drawn(state, 100), "the live view has to fit into the terminal"


@pytest.mark.parametrize("width", [1, 2, 5, 12, 40, 71, 72, 80, 200])
def test_the_picture_keeps_within_the_terminal(width: int) -> None:
    for whole in (False, True):
        lines = drawn(STATE, width, whole=whole).splitlines()
        assert max(len(line) for line in lines) <= width


def test_what_is_not_known_is_a_dash_and_no_zero() -> None:
    state = ProgressState(run="reach", iteration=0, figures=[("success", figure(None, ".0%"))])
    assert line_of(state).plain == "reach: iteration 0 | success -"
    assert "success" in drawn(state, 80)


def test_the_line_is_plain_ascii_and_one_line() -> None:
    line = line_of(STATE).plain
    assert line.isascii()
    assert line == (
        "reach: iteration 12/40 | steps 33,600 | steps/s 1,953 | return -2.13 | success 91% "
        "| staleness 0.8 | channels observations 8/8, trajectories 1 | waiting: rollout 0 "
        "| env 0 was restarted"
    )


def test_names_with_markup_are_shown_as_they_are() -> None:
    state = msgspec.structs.replace(STATE, run="[bold]a[/]", note="[/nothing]")
    assert "[bold]a[/]" in drawn(state, 100)
    assert "[/nothing]" in drawn(state, 100)


def test_of_many_workers_those_that_wait_longest_are_shown_and_the_rest_counted() -> None:
    workers = [
        WorkerView(name=f"env {rank}", waiting_for="actions", waiting_seconds=rank)
        for rank in range(100)
    ]
    picture = drawn(msgspec.structs.replace(STATE, workers=workers, note=""), 100)
    assert "env 99" in picture
    assert "env 0 " not in picture
    assert "and 90 more" in picture


def test_without_a_terminal_a_line_is_printed_now_and_then_and_at_the_end() -> None:
    clock, out = Clock(), io.StringIO()
    console = RunConsole(file=out, force_terminal=False, width=40)
    with ProgressView(console=console, interval=5.0, clock=clock) as view:
        for iteration in range(8):
            view.update(ProgressState(run="reach", iteration=iteration))
            clock.now += 2.0
    lines = out.getvalue().splitlines()
    assert [line.split(" | ")[0] for line in lines] == [
        "reach: iteration 0",
        "reach: iteration 3",
        "reach: iteration 6",
        "reach: iteration 7",
    ]


def test_the_last_state_is_not_printed_twice() -> None:
    out = io.StringIO()
    with ProgressView(console=RunConsole(file=out, force_terminal=False)) as view:
        view.update(STATE)
    assert len(out.getvalue().splitlines()) == 1


def test_a_terminal_gets_the_picture_and_is_left_in_order() -> None:
    clock, out = Clock(), io.StringIO()
    console = RunConsole(file=out, force_terminal=True, width=100, height=40)
    with ProgressView(console=console, clock=clock) as view:
        view.update(msgspec.structs.replace(STATE, iteration=1))
        view.update(msgspec.structs.replace(STATE, iteration=2))
        clock.now += 1.0
        view.update(msgspec.structs.replace(STATE, iteration=3))
    text = out.getvalue()
    assert "1/40" in text
    assert "2/40" not in text, "it came too soon after the one before"
    assert "3/40" in text
    hide, show = "\x1b[?25l", "\x1b[?25h"
    assert text.rindex(show) > text.rindex(hide), "the cursor is visible again"


@pytest.mark.parametrize("terminal", [True, False])
def test_a_run_goes_on_when_the_reader_of_its_output_has_left(terminal: bool) -> None:
    console = RunConsole(file=GonePipe(), force_terminal=terminal, width=80)
    with ProgressView(console=console, interval=0.0) as view:
        view.update(STATE)
        assert console.quiet
        view.update(STATE)


def test_what_is_printed_after_the_reader_has_left_does_not_fail() -> None:
    program = (
        "from rlinf_async.observe.progress import ProgressState, ProgressView\n"
        "with ProgressView(interval=0.0) as view:\n"
        "    for iteration in range(9):\n"
        "        view.update(ProgressState(run='reach', iteration=iteration))\n"
        "print('the last line')\n"
    )
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_an_ascii_terminal_can_show_it() -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Console(file=file, width=80, force_terminal=True).print(picture_of(STATE, 80))
    file.seek(0)
    assert "12/40" in file.read()
