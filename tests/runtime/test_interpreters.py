"""Workers of another Python, on this host: a virtualenv of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import rlinf_async as ra
from rlinf_async.runtime.interpreters import is_of_this_python, what_is_wrong
from rlinf_async.workers.base import BuildError
from tests.interpreters import OURS, make_python, packages_of
from tests.runtime.telling import Teller

NEEDED = ("msgspec", "psutil", "uvloop", "numpy", "xxhash")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python that has what workers need, and little else."""
    folder = tmp_path_factory.mktemp("other")
    python = make_python(folder)
    packages = packages_of(folder)
    (packages / "only_there.py").write_text("WORD = 'here'\n")
    for name in NEEDED:
        for found in OURS.glob(f"{name}*"):
            (packages / found.name).symlink_to(found)
    return str(python)


async def test_a_worker_runs_with_the_packages_of_its_own_python(other: str) -> None:
    async with ra.Cluster.process(deadlock_after=None) as cluster:
        group = await cluster.launch(
            Teller, runtime_env={"py_executable": other}, env_vars={"ROLE": "env"}, count=2
        )
        here = await cluster.launch(Teller, name="Here")
        prefix = str(Path(other).parents[1])
        assert await group.call(Teller.prefix) == [prefix, prefix]
        assert await group.call(Teller.word) == ["here", "here"]
        assert await group.call(Teller.variable) == ["env", "env"]
        assert await here.call(Teller.prefix) == [sys.prefix]
        [path, _] = await group.call(Teller.path)
        packages = [one for one in path if "site-packages" in one]
        assert packages == [one for one in packages if one.startswith(prefix)] != []


async def test_a_worker_that_dies_is_started_again_with_it(other: str, tmp_path: Path) -> None:
    async with ra.Cluster.process(deadlock_after=None) as cluster:
        group = await cluster.launch(
            Teller, runtime_env={"py_executable": other}, restart=ra.Restart(max=1)
        )
        died = str(tmp_path / "died")
        assert await group.call(Teller.dies_once, died) == [str(Path(other).parents[1])]
        assert await group.call(Teller.dies_once, died) == [str(Path(other).parents[1])]


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_what_is_wrong_with_an_interpreter_is_said(tmp_path: Path, other: str) -> None:
    assert what_is_wrong(other, {}) == ""
    assert what_is_wrong(sys.executable, {}) == ""
    assert "it cannot be run: " in what_is_wrong("/no/such/python", {})
    bare = str(make_python(tmp_path / "bare"))
    assert what_is_wrong(bare, {}) == (
        "it cannot import rlinf_async and msgspec: ModuleNotFoundError: No module named 'msgspec'"
    )
    old = """echo '{"Python": "3.8", "rlinf_async": "0.0.1"}'"""
    wrong = what_is_wrong(script(tmp_path / "old", old), {})
    assert wrong.startswith("it has Python 3.8 and rlinf_async 0.0.1, and this process Python 3.")


@pytest.mark.parametrize(
    ("text", "prints"),
    [
        ("true", "nothing"),
        ("echo started", "'started' last"),
        ("echo '{\"Python\": 3}'", "'{\"Python\": 3}' last"),
        ("echo 3.11", "'3.11' last"),
    ],
)
def test_a_program_that_is_no_python_is_told_from_one(
    tmp_path: Path, text: str, prints: str
) -> None:
    assert what_is_wrong(script(tmp_path / "program", text), {}) == (
        f"it does not answer as a Python does: asked for its versions, it prints {prints}"
    )


async def test_a_python_is_looked_up_on_the_role_s_path(other: str) -> None:
    path = {"PATH": f"{Path(other).parent}{os.pathsep}{os.environ['PATH']}"}
    async with ra.Cluster.process(deadlock_after=None) as cluster:
        group = await cluster.launch(
            Teller, runtime_env={"py_executable": "python3"}, env_vars=path
        )
        assert await group.call(Teller.prefix) == [str(Path(other).parents[1])]


def test_what_is_of_a_python_is_its_library_and_its_programs() -> None:
    """Not what else stands below its prefix: a system's Python has ``/usr``."""
    library = Path(sysconfig.get_path("stdlib"))
    programs = Path(sysconfig.get_path("scripts"))
    for one in (
        library, library / "lib-dynload", library / "asyncio", f"{OURS}", f"{OURS / 'numpy'}",
        "/usr/lib/python3/dist-packages", programs, programs / "torchrun",
        Path(sys.executable).parent, *filter(None, _path_of(sys.executable)),
    ):  # fmt: skip
        assert is_of_this_python(str(one)), one
    for prefix in (sys.prefix, sys.base_prefix, sys.exec_prefix):
        for one in ("src/app", "local/src/checkout", "lib", "bin.py"):
            assert not is_of_this_python(str(Path(prefix, one))), one


def _path_of(python: str) -> list[str]:
    """Where an interpreter imports from, without what is set or installed in this environment."""
    print_path = "import sys; print(*sys.path, sep='\\n')"
    return subprocess.check_output([python, "-I", "-S", "-c", print_path], text=True).splitlines()


async def test_a_launch_with_a_python_that_cannot_be_is_refused(tmp_path: Path) -> None:
    env = {"py_executable": "/no/such/python"}
    async with ra.Cluster.process(deadlock_after=None) as cluster:
        with pytest.raises(BuildError, match=r"Teller: py_executable = '/no/such/python': it"):
            await cluster.launch(Teller, runtime_env=env)
        with pytest.raises(BuildError, match="only on a cluster of Ray"):
            await cluster.launch(Teller, runtime_env={"pip": ["a"], **env})
    async with ra.Cluster.local() as cluster:
        with pytest.raises(BuildError, match="only on a cluster of Ray"):
            await cluster.launch(Teller, runtime_env=env)


def test_a_script_s_own_modules_are_found_and_its_workers_too(tmp_path: Path, other: str) -> None:
    (tmp_path / "beside.py").write_text("NUMBER = 7\n")
    (tmp_path / "main.py").write_text(
        "import asyncio, sys\n"
        "import rlinf_async as ra\n"
        "from beside import NUMBER\n"
        "class Own(ra.Worker):\n"
        "    async def tell(self) -> str:\n"
        "        import only_there\n"
        "        return f'{only_there.WORD} {NUMBER} {sys.prefix}'\n"
        "async def main():\n"
        "    async with ra.Cluster.process() as cluster:\n"
        "        env = {'py_executable': sys.argv[1]}\n"
        "        print(await (await cluster.launch(Own, runtime_env=env)).call(Own.tell))\n"
        "if __name__ == '__main__':\n"
        "    asyncio.run(main())\n"
    )
    done = subprocess.run(
        [sys.executable, tmp_path / "main.py", other], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"['here 7 {Path(other).parents[1]}']\n"
