"""Programs of a model: what they can do, and when they end."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlinf_async.episodes import ToolResult, program
from rlinf_async.episodes.parsing import ToolCall
from rlinf_async.episodes.sandbox import NoSandbox, check_sandbox
from rlinf_async.episodes.tools import Tool
from tests.jobs.processes import until


def can_be_made() -> bool:
    try:
        check_sandbox()
    except NoSandbox:
        return False
    return Path("/usr/bin/python3").exists()


needs_sandbox = pytest.mark.skipif(
    not can_be_made(), reason="bubblewrap is not installed, or not allowed"
)


pytestmark = pytest.mark.usefixtures("each_loop")


def ran(tool: Tool, code: str) -> ToolResult:
    return asyncio.run(tool.run(ToolCall(name=tool.name, arguments={"code": code})))


def zombies() -> int:
    """Processes that this one has started, that have ended, and that it has not waited for."""
    every = psutil.Process().children()
    return sum(one.status() == psutil.STATUS_ZOMBIE for one in every)


HARMLESS = [
    ("python", "print(6 * 7)", "42\n"),
    ("python", "import sys; print('no', file=sys.stderr); sys.exit(3)", "no\n[exit code 3]"),
    ("python", "1 / 0", "ZeroDivisionError: division by zero\n[exit code 1]"),
    ("python", "import os; os.kill(os.getpid(), 11)", "[killed by SIGSEGV]"),
    ("python", "print(input())", "EOFError: EOF when reading a line\n[exit code 1]"),
    ("python", "open('a', 'w').write('x'); print(open('a').read())", "x\n"),
    ("python", "x = '" + "é" * 100_000 + "'; print(len(x))", "100000\n"),
    ("bash", "echo $((6 * 7)) | tr 4 5", "52\n"),
    ("bash", "seq 3 | awk '{ s += $1 } END { print s }'", "6\n"),
    ("bash", "", ""),
]


@pytest.mark.parametrize("sandbox", [pytest.param("bubblewrap", marks=needs_sandbox), "none"])
@pytest.mark.parametrize(("language", "code", "printed"), HARMLESS)
def test_a_program_says_what_it_prints(
    language: str, code: str, printed: str, sandbox: Any
) -> None:
    found = ran(program(language, sandbox=sandbox), code)
    assert found.failure == ""
    assert found.text.endswith(printed) if printed else not found.text


FORBIDDEN = [
    ("a file of the host", "print(open('/etc/hostname').read())", "No such file"),
    ("a file of the user", "import os; print(os.listdir('/root'))", "No such file"),
    ("writing to /usr", "open('/usr/x', 'w')", "Read-only file system"),
    ("writing to /", "open('/x', 'w')", "Read-only file system"),
    ("variables", "import os; print(sorted(os.environ))", "['HOME', 'LANG', 'PATH', 'PWD']"),
    ("too much memory", "x = bytearray(2 ** 31)", "MemoryError"),
    ("a file that is too large", "open('a', 'wb').write(bytes(2 ** 28))", "rror"),
    ("many files", (
        "for i in range(20): open(str(i), 'wb').write(bytes(2 ** 23))"), "No space left"),
    ("many files in memory", (
        "for i in range(20): open(f'/dev/shm/{i}', 'wb').write(bytes(2 ** 23))"), "No space left"),
    ("files beside devices", "open('/dev/x', 'w')", "Read-only file system"),
    ("its own program", "open('/program', 'w')", ""),
    ("files in a namespace of its own", (
        "import subprocess as s\n"
        "s.run(['/usr/bin/unshare', '-Urm', '/usr/bin/mount', '-t', 'tmpfs', 'a', '/tmp'],"
        " check=True)"), "CalledProcessError"),
    ("a file in memory", "import os; os.memfd_create('a')", "PermissionError"),
    ("shared memory of the system", (
        "import ctypes; c = ctypes.CDLL(None, use_errno=True)\n"
        "if c.shmget(0, 2 ** 28, 0o1600) < 0: raise OSError(ctypes.get_errno(), 'refused')"),
        "PermissionError"),
    ("many open files", "x = [open('/program') for _ in range(300)]", "Too many open files"),
    ("becoming root", "import os; os.setuid(0)", "rror"),
    ("another namespace", (
        "import subprocess as s; s.run(['/usr/bin/mount', '-t', 'tmpfs', 'a', '/usr'], check=True)"
    ), "CalledProcessError"),
]  # fmt: skip


@needs_sandbox
@pytest.mark.parametrize(
    ("code", "printed"), [one[1:] for one in FORBIDDEN], ids=[one[0] for one in FORBIDDEN]
)
def test_what_a_program_cannot_do(code: str, printed: str) -> None:
    found = ran(program("python"), code)
    assert printed in found.text
    if "environ" not in code:
        assert "rror" in found.text  # it has failed
        assert "[exit code" in found.text or "[signal" in found.text


@needs_sandbox
def test_no_process_of_the_host_and_no_environment_of_the_worker_can_be_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "hunter2-secret")
    found = ran(
        program("bash"),
        "cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline | tr '\\0' '\\n'; "
        "ls -d /proc/[0-9]* | wc -l",
    )
    assert found.failure == ""
    assert "hunter2" not in found.text
    assert int(found.text.split()[-1]) < 6


def test_a_program_without_a_sandbox_has_the_variables_of_the_worker_but_our_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RLINF_ASYNC_SECRET", "hunter2-secret")
    monkeypatch.setenv("OTHER", "there")
    found = ran(program("bash", sandbox="none"), "env | grep -e RLINF_ASYNC -e OTHER")
    assert found.text == "OTHER=there\n"


@needs_sandbox
def test_there_is_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket; socket.create_connection(('127.0.0.1', {port}), 1); print('open')"
        assert "refused" in ran(program("python"), code).text
        assert "open" in ran(program("python", sandbox="none"), code).text
    found = ran(program("bash"), "cat /proc/net/dev")
    assert [line.split(":")[0].strip() for line in found.text.splitlines()[2:]] == ["lo"]


@pytest.mark.parametrize("sandbox", [pytest.param("bubblewrap", marks=needs_sandbox), "none"])
def test_an_endless_program_ends_with_all_that_it_started(sandbox: Any) -> None:
    before = zombies()
    tool = program("bash", seconds=1, sandbox=sandbox)
    began = time.monotonic()
    found = ran(tool, "sleep 61 & (sleep 62 & sleep 63) & while :; do :; done")
    assert found.failure == "timeout"
    assert found.text == "error: bash took longer than 1 s"
    assert time.monotonic() - began < 10
    for number in (61, 62, 63):
        wait_for_the_end(f"{number}")
    assert zombies() <= before


def wait_for_the_end(seconds: str) -> None:
    """Wait until no process sleeps for this time: the kernel ends them one after the other."""
    until(lambda: not sleeps(seconds), f"no process sleeps for {seconds} s", 10)


def sleeps(seconds: str) -> bool:
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    return f"sleep {seconds}" in listed.stdout.splitlines()


@needs_sandbox
def test_a_daemon_ends_with_its_program() -> None:
    found = ran(program("bash"), "setsid sleep 64 >/dev/null 2>&1 & echo started")
    assert (found.failure, found.text) == ("", "started\n")
    wait_for_the_end("64")


@needs_sandbox
def test_a_fork_bomb_is_bounded() -> None:
    code = """
import os, time
made = 0
try:
    while made < 200:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        made += 1
except OSError as error:
    print(made, error)
"""
    before = zombies()
    found = ran(program("python", processes=16), code)
    made, _, error = found.text.partition(" ")
    assert 5 <= int(made) <= 16, found.text
    assert "Resource temporarily unavailable" in error
    assert zombies() <= before


@needs_sandbox
def test_programs_do_not_share_their_number_of_processes() -> None:
    code = "for i in 1 2 3 4 5 6 7 8; do sleep 0.2 & done; wait; echo $?"
    tool = program("bash", processes=12, concurrent=4)

    async def main() -> list[str]:
        calls = [tool.run(ToolCall(name="bash", arguments={"code": code})) for _ in range(4)]
        return [one.text for one in await asyncio.gather(*calls)]

    assert asyncio.run(main()) == ["0\n"] * 4


@pytest.mark.parametrize("sandbox", [pytest.param("bubblewrap", marks=needs_sandbox), "none"])
def test_a_program_that_prints_too_much_is_ended(sandbox: Any) -> None:
    began = time.monotonic()
    found = ran(program("bash", output=1000, seconds=30, sandbox=sandbox), "yes")
    assert time.monotonic() - began < 10
    assert found.failure == "output"
    assert found.text == "y\n" * 500 + "\n[cut: a result has at most 1000 characters]"


@pytest.mark.parametrize("sandbox", [pytest.param("bubblewrap", marks=needs_sandbox), "none"])
def test_a_program_ends_with_its_worker_and_leaves_nothing(sandbox: str, tmp_path: Path) -> None:
    code = (
        "import asyncio, os\n"
        "from rlinf_async.episodes import program\n"
        "from rlinf_async.episodes.parsing import ToolCall\n"
        "async def main():\n"
        f"    tool = program('bash', seconds=60, sandbox={sandbox!r})\n"
        "    call = ToolCall(name='bash', arguments={'code': 'sleep 65'})\n"
        "    await tool.run(call)\n"
        "asyncio.run(main())\n"
    )
    worker = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    until(lambda: worker.poll() is not None or sleeps("65"), "the program runs")
    assert sleeps("65")
    worker.kill()
    worker.wait()
    wait_for_the_end("65")
    assert not list(tmp_path.iterdir())


def test_programs_have_one_limit_however_often_their_tool_is_made(tmp_path: Path) -> None:
    code = f"mkdir {tmp_path}/one || echo two at once; sleep 0.1; rmdir {tmp_path}/one"

    async def main() -> list[ToolResult]:
        made = [program("bash", sandbox="none", concurrent=1) for _ in range(3)]
        call = ToolCall(name="bash", arguments={"code": code})
        return await asyncio.gather(*(one.run(call) for one in made))

    assert [(one.failure, one.text) for one in asyncio.run(main())] == [("", "")] * 3


def test_without_bubblewrap_programs_are_refused_unless_it_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "bwrap" else found(name))
    check_sandbox.cache_clear()
    try:
        with pytest.raises(NoSandbox, match=r"install the package bubblewrap, or .*sandbox='none'"):
            program("python")
        assert ran(program("python", sandbox="none"), "print(1)").text == "1\n"
    finally:
        check_sandbox.cache_clear()


def test_a_language_that_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no language is called 'perl' .*python, bash"):
        program("perl")
    with pytest.raises(ValueError, match="concurrent is 0; at least 1"):
        program("python", sandbox="none", concurrent=0)
    own = program(["/usr/bin/sort", "-r"], name="sort", sandbox="none")
    assert ran(own, "1\n2\n").text == "2\n1\n"
    assert [
        own.description.split(",")[0]
        for own in (
            program(["/usr/bin/perl"], sandbox="none"),
            program(["/usr/bin/sort", "-r"], name="sorting", sandbox="none"),
            program("python", sandbox="none"),
        )
    ] == ["Run a perl program", "Run a sorting program", "Run a python program"]
    bad: Any = "docker"
    with pytest.raises(ValueError, match="sandbox is 'docker'"):
        program("python", sandbox=bad)


@needs_sandbox
def test_a_program_that_is_no_text_is_told() -> None:
    found = ran(program("python"), "print('\ud800')")
    assert found.failure == "error"
    assert "the program is no text" in found.text
