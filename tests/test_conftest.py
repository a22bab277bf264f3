"""The guards of ``conftest.py`` do fail the tests that they are there for."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import threading
import traceback
from pathlib import Path

import pytest

from rlinf_async.deadlines import LoopWatch
from rlinf_async.testing import InvariantBroken, LoopBlocked, Unhandled, no_tasks_left
from tests import loops, together
from tests.loops import FACTORIES, VIRTUAL, run_on_kind

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("kind", [*FACTORIES, VIRTUAL])
def test_a_test_that_leaves_a_task_fails(kind: str) -> None:
    async def main() -> None:
        left = asyncio.create_task(asyncio.Event().wait())
        await asyncio.sleep(0)
        try:
            no_tasks_left()
        finally:
            left.cancel()

    with pytest.raises(InvariantBroken, match="1 tasks have not finished"):
        run_on_kind(kind, main)


@pytest.mark.parametrize("kind", FACTORIES)
def test_a_test_that_blocks_its_loop_fails(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, stack = threading.Event(), LoopWatch._stack

    def noted(watch: LoopWatch) -> str:
        said = stack(watch)
        found.set()
        return said

    monkeypatch.setattr(LoopWatch, "_stack", noted)
    monkeypatch.setattr(loops, "BLOCKED", 0.3)

    async def main() -> None:
        await asyncio.sleep(0)
        assert found.wait(60)  # the very mistake; in seconds, for a busy machine

    with pytest.raises(LoopBlocked, match="did not answer"):
        run_on_kind(kind, main)


@pytest.mark.parametrize("kind", [*FACTORIES, VIRTUAL])
def test_an_error_that_reaches_nobody_fails_the_test(kind: str) -> None:
    async def main() -> None:
        def broken() -> None:
            raise ValueError("in a callback")

        asyncio.get_running_loop().call_soon(broken)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    with pytest.raises(Unhandled):
        run_on_kind(kind, main)


@pytest.mark.parametrize("kind", FACTORIES)
def test_a_test_that_hangs_fails_and_says_where(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "LIMIT", 0.01)

    async def waits_for_nothing() -> None:
        await asyncio.Event().wait()

    with pytest.raises(TimeoutError) as caught:
        run_on_kind(kind, waits_for_nothing)
    cause = caught.value.__cause__
    assert isinstance(cause, asyncio.CancelledError)
    assert "waits_for_nothing" in "".join(traceback.format_exception(cause))


def test_eager_tasks_run_up_to_their_first_wait_at_once() -> None:
    async def main() -> None:
        seen: list[object] = []

        async def work() -> None:
            seen.append(asyncio.current_task())
            async with asyncio.timeout(1):
                await asyncio.sleep(0)
            seen.append("end")

        creator = asyncio.current_task()
        task = asyncio.create_task(work())
        assert seen == [task]
        assert asyncio.current_task() is creator
        await task
        assert seen == [task, "end"]

    run_on_kind("eager", main)


def test_the_tests_of_a_file_run_in_one_process() -> None:
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-n", "2"]
    grouped = ["--dist", "loadgroup", "--no-loadscope-reorder", "tests/config"]
    done = subprocess.run(
        [*command, *grouped], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    places = set(re.findall(r"^\[(gw\d)\] .* (tests/\S+\.py)::", done.stdout, re.MULTILINE))
    assert {process for process, _ in places} == {"gw0", "gw1"}
    assert len(places) == len({file for _, file in places}) > 3


def test_a_test_that_ends_its_process_is_named_and_the_others_run(tmp_path: Path) -> None:
    (tmp_path / "test_ends.py").write_text(
        "import os\ndef test_before(): pass\ndef test_ends(): os._exit(1)\ndef test_after(): pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "tests.conftest"]
    grouped = ["--dist", "loadgroup", "-n", "2", "-c", f"{ROOT}/pyproject.toml", f"{tmp_path}"]
    done = subprocess.run(
        [*command, *grouped], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert set(re.findall("crashed while running '.*::(.*)'", done.stdout)) == {"test_ends"}
    assert "1 failed, 2 passed" in done.stdout


def test_what_is_said_to_stay_together_or_to_take_long_is_there() -> None:
    for group in (*together.TOGETHER, *together.LONGEST):
        assert (ROOT / "tests" / group).is_dir() or (ROOT / "tests" / f"{group}.py").is_file()


HANGS = """
import asyncio, logging
from pathlib import Path
import pytest

async def test_it() -> None:
    async def waits_for_ever() -> None:
        print("before the wait")
        logging.getLogger("somebody").warning("nothing has moved")
        await asyncio.Event().wait()

    await waits_for_ever()

def test_it_with_its_own_capture(capsys: pytest.CaptureFixture[str]) -> None:
    asyncio.run(test_it())
"""


@pytest.mark.parametrize("test", ["test_it", "test_it_with_its_own_capture"])
def test_a_test_that_hangs_says_what_it_printed_and_logged_and_where_its_tasks_are(
    test: str, tmp_path: Path
) -> None:
    (tmp_path / "test_hangs.py").write_text(HANGS)
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-o"),
            *("faulthandler_timeout=3", "-o", "faulthandler_exit_on_timeout=true"),
            *("-p", "no:cacheprovider", f"--rootdir={tmp_path}", f"test_hangs.py::{test}"),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    said = ended.stdout + ended.stderr
    assert ended.returncode == 1
    assert f"test_hangs.py::{test} hangs" in said
    for part in ("before the wait", "nothing has moved", "in waits_for_ever", "Timeout (0:00:03)!"):
        assert part in said
