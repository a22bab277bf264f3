"""``python -m tests.jobs.embodied_kills.driven KILLS.json DONE.jsonl REQUEST train ...``.

The driver of a run, which kills or stops its own workers, and itself, as the first file says. What
was carried out is in the second file: a run that is resumed goes on with the rest. By making the
third one it asks an environment to hang.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec

from rlinf_async.cli import main
from rlinf_async.messages.embodied import TrainReport
from rlinf_async.runtime.cluster import Cluster
from rlinf_async.runtime.jobs.config import HostConfig
from rlinf_async.runtime.jobs.embodied.run import EnvironmentRun
from tests.jobs.embodied_kills.plan import DRIVER, ENVIRONMENT, Kill


class Killing:
    """Kills, each a moment after its iteration is booked."""

    def __init__(self, kills: list[Kill], done: Path, request: Path) -> None:
        self._kills, self._done, self._request = kills, done, request
        self._clusters: list[Cluster] = []

    def install(self) -> None:
        """Be told of the cluster, and of the iterations that are booked."""
        make, write = HostConfig.make_cluster, EnvironmentRun._write_row

        def making(host: HostConfig, log: Path | None = None) -> Cluster:
            self._clusters.append(make(host, log))
            return self._clusters[-1]

        def writing(run: EnvironmentRun[Any, Any, Any], report: TrainReport, *rest: Any) -> None:
            write(run, report, *rest)
            due = [one for one in self._kills if one.iteration <= report.iteration]
            self._kills = [one for one in self._kills if one not in due]
            for kill in due:
                self._begin(kill, kill.moment)

        setattr(HostConfig, "make_cluster", making)  # noqa: B010 a type checker refuses it
        setattr(EnvironmentRun, "_write_row", writing)  # noqa: B010

    def _begin(self, kill: Kill, seconds: float) -> None:
        timer = threading.Timer(seconds, self._carry_out, (kill,))
        timer.daemon = True
        timer.start()

    def _carry_out(self, kill: Kill) -> None:
        itself = kill.name in (DRIVER, ENVIRONMENT)
        pid = os.getpid() if itself else self._clusters[-1].pid(kill.name)
        if pid is None:  # its restart is under way
            return self._begin(kill, 1.0)
        with self._done.open("ab") as file:
            file.write(msgspec.json.encode(kill) + b"\n")
        if kill.name == ENVIRONMENT:
            return self._request.touch()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL if kill.how == "kill" else signal.SIGSTOP)


if __name__ == "__main__":
    done = Path(sys.argv[2])
    kills = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=list[Kill])
    Killing(kills, done, Path(sys.argv[3])).install()
    sys.exit(main(sys.argv[4:]))
