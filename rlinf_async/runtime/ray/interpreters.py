"""Another Python for a role (``py_executable``), asked for its versions before Ray starts it.

Ray starts a program that is not there again and again without a word, and a Python of another
version dies by SIGSEGV of the classes that Ray sends it.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import subprocess
from typing import Any, Final

from rlinf_async.runtime.backend import WorkerSpec
from rlinf_async.runtime.ray.hosts import Host
from rlinf_async.runtime.ray.library import of_ray
from rlinf_async.runtime.ray.rank_process import in_words, versions
from rlinf_async.runtime.ray.session import RaySession
from rlinf_async.workers.errors import BuildError

SECONDS: Final = 300.0
"""time in which it answers; a command such as ``uv run`` may install packages first"""
QUESTION: Final = (
    "import json, ray; from rlinf_async.runtime.ray.rank_process import versions; "
    "print(json.dumps({**versions(), 'Ray': ray.__version__}))"
)


class Interpreters:
    """Checks each interpreter once on each host."""

    def __init__(self, session: RaySession) -> None:
        self._session = session
        self._right: set[tuple[str, str]] = set()
        """host's identifier and command"""

    async def check(self, spec: WorkerSpec, command: str, host: Host) -> None:
        """Ask the interpreter with which a rank would be started.

        Raises:
            BuildError: it is not there, cannot import what it needs, or has other versions.
        """
        if (host.id, command) in self._right:
            return
        asked = await self._session.do(_ask, command, environment_of(spec), host)
        where = f"{spec.info.name} on {host.name}: py_executable = {command!r}"
        try:
            async with asyncio.timeout(2 * SECONDS):
                answer: dict[str, str] | str = await asked
        except TimeoutError:
            raise BuildError(f"{where}: Ray ran no task there that could look at it") from None
        except of_ray("exceptions").RayError as error:
            raise BuildError(f"{where}: Ray cannot run a task there: {error}") from error
        if isinstance(answer, str):
            raise BuildError(f"{where}: {answer}")
        wanted = {**versions(), "Ray": of_ray().__version__}
        if answer != wanted:
            raise BuildError(f"{where}: it has {in_words(answer)}, the driver {in_words(wanted)}")
        self._right.add((host.id, command))


def environment_of(spec: WorkerSpec) -> dict[str, str]:
    """Return the variables that a rank's process is started with: those of its own come last."""
    return {**spec.runtime_env.get("env_vars", {}), **spec.env_vars}


def _ask(command: str, env_vars: dict[str, str], host: Host) -> Any:
    """Have a task on the host ask; returns the reference to its answer."""
    here = of_ray("util.scheduling_strategies").NodeAffinitySchedulingStrategy(host.id, soft=False)
    task = of_ray().remote(versions_of).options(num_cpus=0, scheduling_strategy=here)
    return task.remote(command, env_vars)


def versions_of(command: str, env_vars: dict[str, str]) -> dict[str, str] | str:
    """Versions that the interpreter has on this host, or what is wrong with it."""
    try:
        ended = subprocess.run(
            [*shlex.split(command), "-c", QUESTION],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            env=os.environ | env_vars,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"it does not answer within {SECONDS:g} s"
    except (OSError, ValueError) as error:
        return f"it cannot be run: {error}"
    if ended.returncode:
        said = [*ended.stderr.strip().splitlines(), f"exit code {ended.returncode}"]
        return f"it cannot import Ray and rlinf_async: {said[-2] if said[:-1] else said[-1]}"
    answer: dict[str, str] = json.loads(ended.stdout.splitlines()[-1])
    return answer
