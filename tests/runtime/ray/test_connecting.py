"""What is said where no Ray cluster can be used, and how long that takes. No Ray runs here."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import rlinf_async as ra
from rlinf_async.cli import main
from rlinf_async.runtime.jobs import config as job_config
from rlinf_async.runtime.ray import session
from rlinf_async.runtime.ray.session import CallThread, of_ray
from rlinf_async.workers.base import BuildError
from tests.net.hosts import ROOT

EXAMPLE = ROOT / "examples" / "fetch_reach_ppo.toml"
HANGS = """
import asyncio, threading
from rlinf_async.runtime.ray.session import CallThread
from rlinf_async.runtime.ray.session import of_ray

async def main():
    calls = CallThread("hangs")
    asyncio.get_running_loop().run_in_executor(calls, threading.Event().wait)
    print("called", flush=True)

asyncio.run(main())
"""


@contextmanager
def listening(answer: bytes) -> Iterator[str]:
    """Something that is no head of Ray: takes one connection, and says this."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        done = threading.Event()

        def serve() -> None:
            taken, _ = server.accept()
            with taken:
                taken.recv(1)
                taken.sendall(answer)
                done.wait()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            done.set()
            thread.join()


async def enter(address: str) -> None:
    async with ra.Cluster.ray(address=address):
        raise AssertionError("it was entered")


async def test_what_listens_but_is_no_head_is_told_from_one() -> None:
    with (
        listening(b"HTTP/1.0 400 Bad request") as address,
        pytest.raises(BuildError, match=r"is no head of a Ray cluster: it answers b'HTTP"),
    ):
        await enter(address)


async def test_a_head_that_stands_still_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "ANSWER_SECONDS", 0.1)
    with (
        listening(b"") as address,
        pytest.raises(BuildError, match=r"no Ray cluster answers at .* \(timed out\)"),
    ):
        await enter(address)


async def test_without_ray_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(module: str = "") -> object:
        raise ImportError("No module named 'ray'")

    monkeypatch.setattr(session, "of_ray", missing)
    with pytest.raises(
        BuildError, match=r"Ray is not installed .*: pip install 'rlinf_async\[ray\]'"
    ):
        await enter("127.0.0.1:6379")


async def test_a_head_that_asks_for_a_token_is_thought_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray says only that it has failed, as of any other cause."""

    class Refusing:
        AuthenticationError = PermissionError
        __version__ = "2.99.0"

        def is_initialized(self) -> bool:
            return False

        def init(self, **options: object) -> None:
            raise ConnectionError("Failed to connect to Ray cluster")

    def refusing(module: str = "") -> Any:
        return of_ray(module) if module == "runtime_env" else Refusing()

    monkeypatch.setattr(session, "of_ray", refusing)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with (
        listening(session.HTTP2_SETTINGS) as address,
        pytest.raises(BuildError, match=r"Failed to connect .*set RAY_AUTH_MODE=token") as refused,
    ):
        await enter(address)
    assert "This process has Ray 2.99.0 and Python 3." in str(refused.value)


async def test_a_driver_beside_the_cluster_is_told_to_join_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session, "ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(of_ray("_private.services"), "find_node_ids", list)
    with (
        listening(session.HTTP2_SETTINGS) as address,
        pytest.raises(BuildError, match=rf"{address}' answers, but this host has no part in it"),
    ):
        await enter(address)


@pytest.mark.parametrize("command", ["check", "train"])
def test_the_command_line_says_so_before_anything_starts(
    command: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(job_config, "is_installed", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    out = () if command == "check" else ("--out", str(tmp_path / "run"))
    assert main([command, str(EXAMPLE), "--cluster.backend", "ray", *out]) == 2
    assert "error: Ray is not installed: pip install" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_call_that_never_returns_keeps_no_process() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stdout) == (0, "called\n"), ended.stderr


def test_calls_are_made_in_order_and_their_errors_come_back() -> None:
    calls, made = CallThread("calls"), list[int]()
    results = [calls.submit(made.append, number) for number in range(10)]
    failed = calls.submit(divmod, 1, 0)
    calls.shutdown()
    assert [one.result() for one in results] == [None] * 10
    assert made == [*range(10)]
    assert isinstance(failed.exception(), ZeroDivisionError)
    with pytest.raises(RuntimeError, match="takes no more calls"):
        calls.submit(made.append, 11)
