"""Programs as agents: what they find, what they come to, and that they end with their episode."""

from __future__ import annotations

import asyncio
import errno
import importlib.util
import os
import resource
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from rlinf_async.config import ConfigError, MissingExtra
from rlinf_async.episodes import LimitReached
from rlinf_async.episodes.agents import load_agent
from rlinf_async.episodes.command import CommandFailed, command, environment_of
from rlinf_async.episodes.endpoint import Endpoint
from rlinf_async.episodes.running import allow_files
from rlinf_async.workers.episode import EpisodeConfig, EpisodeWorker
from tests.episodes.endpoint.kit import Scripted, episode_of, served

pytestmark = pytest.mark.usefixtures("loop_kind")

ASK = """
import json, os, sys, urllib.error, urllib.request

def ask(text, path="/chat/completions"):
    body = {"model": "m", "messages": [*task["messages"], {"role": "user", "content": text}]}
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + path, json.dumps(body).encode(), headers
    )
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]

FILE = os.environ["EPISODE_SCORE_FILE"]

def score(value):
    with open(FILE, "w") as file:
        file.write(str(value))

task = json.loads(sys.stdin.readline())
"""


def program(folder: Path, text: str) -> str:
    """A command line that runs this Python."""
    (folder / "agent.py").write_text(ASK + textwrap.dedent(text))
    return f"{sys.executable} agent.py"


def scores(folder: Path) -> list[str]:
    """Files for scores that are there."""
    return [one for one in os.listdir(folder) if one.startswith("rlinf-async-score-")]


SCORES: dict[str, tuple[str, float | None]] = {
    "a score": ("score(0.5)", 0.5),
    "a score below 0, and an end of line": ("score('-2\\n')", -2.0),
    "a score that was put there as a whole": (
        "open(FILE + '1', 'w').write('3'); os.rename(FILE + '1', FILE)", 3.0,
    ),
    "none": ("pass", None),
    "an empty line": ("score(' \\n')", None),
    "no file any more": ("os.unlink(FILE)", None),
    "an answer that says a score": (r"print('41\nscore: 1000\n1000')", None),
    "a flood": ("print('x' * 10_000_000); score(1)", 1.0),
    "a flood of errors": ("sys.stderr.write('x' * 10_000_000); score(3)", 3.0),
    "stdin is not read to its end": ("os.close(0); score(4)", 4.0),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(SCORES))
async def test_the_score_is_what_the_program_writes_into_its_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, score = SCORES[name]
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    async with served([]) as (episode, _):
        assert await command(program(tmp_path, text), tmp_path)(episode) == score
    assert not scores(tmp_path)


FAILURES: dict[str, tuple[str, str]] = {
    "raises": ("raise ValueError('no idea')", "exit code 1; its stderr ends with:\n.*no idea"),
    "raises after a score": ("score(1); raise ValueError('no idea')", "exit code 1"),
    "exits": ("sys.exit(3)", "exit code 3, and says nothing on stderr"),
    "is killed": ("os.kill(os.getpid(), 9)", "killed by SIGKILL"),
    "no number": ("score('nan')", "SCORE_FILE is 'nan': it must be a finite number"),
    "infinite": ("score('1e999')", "SCORE_FILE is '1e999': it must be a finite number"),
    "a text": ("score('good')", "SCORE_FILE is 'good': it must be a finite number"),
    "two numbers": ("score('1 2')", "it must be a finite number"),
    "no text": ("open(FILE, 'wb').write(bytes([255, 0]))", "it must be a finite number"),
    "a number that is too long": ("score('0' * 100)", "it must be a finite number"),
    "a folder": ("os.unlink(FILE); os.mkdir(FILE)", "SCORE_FILE is no file any more"),
    "a pipe": ("os.unlink(FILE); os.mkfifo(FILE)", "SCORE_FILE is no file any more"),
    "a link": (
        "open(FILE + '1', 'w').write('1'); os.unlink(FILE); os.symlink(FILE + '1', FILE)",
        "SCORE_FILE cannot be read",
    ),
}


@pytest.mark.parametrize("name", sorted(FAILURES))
async def test_a_failure_says_how(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, words = FAILURES[name]
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    async with served([]) as (episode, _):
        with pytest.raises(CommandFailed, match=f"(?s){words}"):
            await command(program(tmp_path, text), tmp_path)(episode)


async def test_a_program_speaks_to_its_episode(tmp_path: Path) -> None:
    text = """
    assert task == {"messages": [{"role": "user", "content": "What is 1 + 2?"}], "index": 17}
    assert json.loads(os.environ["EPISODE_MESSAGES"]) == task["messages"]
    assert os.environ["EPISODE_INDEX"] == "17"
    assert os.environ["ANTHROPIC_API_KEY"] == os.environ["OPENAI_API_KEY"]
    assert os.environ["ANTHROPIC_BASE_URL"] + "/v1" == os.environ["OPENAI_BASE_URL"]
    assert not [one for one in os.environ if one.startswith("RLINF_ASYNC_")]
    score(float(ask("well?") == "three") + float(ask("again") == "four"))
    """
    async with served(["three", "four"]) as (episode, model):
        assert await command(program(tmp_path, text), tmp_path)(episode) == 2.0
        assert len(model.draws) == 2


async def test_where_a_limit_is_reached_the_episode_is_judged_as_it_stands(tmp_path: Path) -> None:
    text = """
    while True:
        ask("on")
    """
    async with served(lambda _: "well", turns=3) as (episode, model):
        with pytest.raises(LimitReached, match="max_turns = 3"):
            await command(program(tmp_path, text), tmp_path)(episode)
        assert len(model.draws) == 3


CHILDREN = """
import signal, subprocess, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "1000"])
orphan = subprocess.run(["sh", "-c", "sleep 1000 > /dev/null 2>&1 & echo $!"], stdout=-1).stdout
with open("pids.part", "w") as file:
    print(os.getpid(), child.pid, orphan.decode(), file=file)
os.rename("pids.part", "pids")
"""


async def _pids(folder: Path) -> list[int]:
    """The processes of `CHILDREN`, once all are there."""
    while not (folder / "pids").exists():  # noqa: ASYNC110  a file has no event
        await asyncio.sleep(0.01)
    return [int(one) for one in (folder / "pids").read_text().split()]


async def _gone(pids: list[int]) -> None:
    while any(_runs(pid) for pid in pids):  # noqa: ASYNC110  no child of ours
        await asyncio.sleep(0.01)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_an_episode_worker_may_have_the_files_open_that_its_episodes_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def no_agent(self: EpisodeWorker, *args: Any, **more: Any) -> None:
        raise ConfigError("there is no agent")

    monkeypatch.setattr(EpisodeWorker, "compute", no_agent)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 1024 + 16 * 40
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    try:
        worker = EpisodeWorker(EpisodeConfig(run="agent.py:run", concurrent=40), "")
        with pytest.raises(ConfigError, match="there is no agent"):
            asyncio.run(worker.setup())
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (needed, hard)
        allow_files(needed - 1)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (needed, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_too_many_open_files_are_told_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full() -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async with served([]) as (episode, _):
        monkeypatch.setattr(os, "pipe", full)
        with pytest.raises(CommandFailed, match="Too many open files; lower episode"):
            await command(program(tmp_path, ""), tmp_path)(episode)


@pytest.mark.parametrize("end", ["cancelled", "exits"])
async def test_a_program_ends_with_its_episode_and_so_do_its_children(
    end: str, tmp_path: Path
) -> None:
    text = CHILDREN + ("time.sleep(1000)" if end == "cancelled" else "score(1)")
    async with served([]) as (episode, _):
        running = asyncio.ensure_future(command(program(tmp_path, text), tmp_path)(episode))
        pids = await _pids(tmp_path)
        if end == "cancelled":
            running.cancel()
        await asyncio.wait([running])
        assert running.cancelled() == (end == "cancelled")
        await _gone(pids)


WORKER = """
import asyncio, pathlib
from rlinf_async.episodes.command import command
from tests.episodes.endpoint.kit import served

async def main():
    async with served([]) as (episode, _):
        await command({line!r}, pathlib.Path({folder!r}))(episode)

asyncio.run(main())
"""


async def test_a_program_ends_with_its_worker(tmp_path: Path) -> None:
    line = program(tmp_path, CHILDREN + "time.sleep(1000)")
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER.format(line=line, folder=str(tmp_path)))
    root = Path(__file__).parents[2]
    process = subprocess.Popen(  # noqa: ASYNC220  it is killed, not waited for
        [sys.executable, worker],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root), "TMPDIR": str(tmp_path)},
    )
    try:
        pids = await _pids(tmp_path)
        assert scores(tmp_path)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    await _gone(pids)
    assert not scores(tmp_path)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "write a program behind"),
        ("no_such_program --now", "there is no program 'no_such_program'"),
        ("./none.sh", "there is no program './none.sh'"),
        ("python 'agent.py", "No closing quotation"),
        (f"{sys.executable} no_such_agent.py", "there is no file 'no_such_agent.py' in /"),
    ],
)
def test_a_command_that_cannot_be_started_is_named_before_any_episode(
    line: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        command(line)


@pytest.mark.parametrize("module", ["starlette", "uvicorn"])
def test_a_command_without_what_serves_it_is_named_before_any_episode(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == module else find(name)
    )
    with pytest.raises(MissingExtra, match=rf"endpoint .*'{module}'.*rlinf-async\[agents\]"):
        load_agent("command: true")


async def test_a_program_that_cannot_be_started_is_a_failure(tmp_path: Path) -> None:
    async with served([]) as (episode, _):
        with pytest.raises(CommandFailed, match=r"'true' cannot be started: .*No such file"):
            await command("true", tmp_path / "gone")(episode)


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("steps", [1, 2, 3])
async def test_a_start_that_is_cancelled_is_cancelled_and_leaves_nothing(
    there: bool, steps: int, tmp_path: Path
) -> None:
    folder = tmp_path if there else tmp_path / "gone"
    async with served([]) as (episode, _):
        await command("true", tmp_path)(episode)  # what the loop keeps open from here on is there
        this = psutil.Process()
        before, others = this.num_fds(), {one.pid for one in this.children()}
        running = asyncio.ensure_future(command("sleep 1000", folder)(episode))
        for _step in range(steps):
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait([running])
        assert running.cancelled() or not there
        await _gone([one.pid for one in this.children() if one.pid not in others])
        while this.num_fds() > before:  # noqa: ASYNC110  loops close them in their time
            await asyncio.sleep(0.01)


async def test_messages_that_are_too_long_for_a_variable_are_on_stdin_alone() -> None:
    async with served([]) as (episode, _):
        found: dict[str, Any] = environment_of(episode)
        assert "EPISODE_MESSAGES" in found
        long = episode_of(Scripted([]), endpoint=cast(Endpoint, episode._endpoint))
        long.task = type(long.task)(
            index=1, messages=({"role": "user", "content": "x" * 200_000},), reference=""
        )
        assert "EPISODE_MESSAGES" not in environment_of(long)
