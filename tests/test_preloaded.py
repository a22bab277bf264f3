"""Processes that are forked from a Python that has imported already."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs.processes import told_of, until
from tests.preloaded import ROOT, Preloaded, preloaded

TELL = """\
import json, os, sys
told = [sys.argv, os.environ["COLOUR"], os.getcwd(), os.getpid() == os.getsid(0), __name__]
print(json.dumps([*told, "json.tool" in sys.modules]), flush=True)
sys.exit(7)
"""
ENDLESS = "import time\nprint('begun', flush=True)\ntime.sleep(1000)\n"


@pytest.fixture(scope="module")
def python() -> Iterator[Preloaded]:
    with preloaded("json.tool", "no_such_module") as started:
        yield started


def test_a_process_has_its_arguments_environment_folder_session_and_exit_code(
    python: Preloaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tell.py").write_text(TELL)
    monkeypatch.chdir(tmp_path)
    for words in (("tell.py", "a b"), ("-m", "tell", "a b")):
        with (tmp_path / "out").open("w+") as out:
            one = python.start(*words, environment={"COLOUR": "red"}, output=out, session=True)
            assert one.wait(60) == 7
            assert one.poll() == 7
            out.seek(0)
            argv, *told = json.loads(out.read())
        assert (Path(argv[0]).name, argv[1:]) == ("tell.py", ["a b"])
        assert told == ["red", str(tmp_path), True, "__main__", True]


def test_a_signal_is_its_exit_code(python: Preloaded, tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text(ENDLESS)
    with (tmp_path / "out").open("w") as out:
        one = python.start(str(tmp_path / "endless.py"), environment=os.environ, output=out)
        assert one.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            one.wait(0.01)
        one.send_signal(signal.SIGTERM)
        assert one.wait(60) == -signal.SIGTERM


def test_it_goes_with_who_asked_for_it_and_the_server_stays(
    python: Preloaded, tmp_path: Path
) -> None:
    (tmp_path / "endless.py").write_text(ENDLESS)
    words = [*python.command.split(), str(tmp_path / "endless.py")]
    asking = subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True)
    assert asking.stdout is not None
    assert asking.stdout.readline() == b"begun\n"
    server = python.pid
    [pid] = [int(one) for one in told_of(server, f"task/{server}/children").split()]
    assert os.getpgid(pid) == pid  # as who asked leads a group
    asking.kill()
    asking.wait()
    asking.stdout.close()
    until(lambda: not told_of(pid, "cmdline"), "the process has ended")
    unread = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    unread.connect(words[-2])
    told = json.dumps([[sys.argv[0]], dict(os.environ), os.getcwd(), ""]).encode()
    with open(os.devnull) as nothing:
        socket.send_fds(unread, [told], [nothing.fileno()] * 3)
    unread.close()
    with (tmp_path / "out").open("w") as out:
        one = python.start(str(tmp_path / "endless.py"), environment=os.environ, output=out)
        one.kill()
        assert one.wait(60) == -signal.SIGKILL


ASK = """\
import os, sys
from pathlib import Path
from tests.preloaded import preloaded

with preloaded() as python, Path("out").open("w") as out:
    one = python.start("endless.py", environment=os.environ, output=out, session=True)
    holder = os.fork()  # it holds open what the one that asks holds
    if holder:
        print(holder, python.pid, one.pid, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("killed", ["who asked", "who asked and the server", "the server"])
def test_nothing_outlives_who_asked_or_the_server(killed: str, tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text(ENDLESS)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", ASK], cwd=tmp_path, env=environment, stdin=pipe, stdout=pipe
    ) as asking:
        assert asking.stdout is not None
        holder, server, one = map(int, asking.stdout.readline().split())
        try:
            if killed != "who asked":
                os.kill(server, signal.SIGKILL)
            if killed != "the server":
                asking.kill()
                until(lambda: not told_of(server, "cmdline"), "the server has ended")
            until(lambda: not told_of(one, "cmdline"), "what it has forked has ended")
        finally:
            for left in (holder, asking.pid, server, one):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(left, signal.SIGKILL)
