"""``python -m tests.jobs.embodied_kills.driven KILLS.json DONE.jsonl train ...``: kills in a run.

The driver of a run, which kills its own workers, and itself, as the file says. What was carried out
is in the second file: a run that is resumed goes on with the rest.
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
from tests.jobs.embodied_kills.plan import DRIVER, Kill


class Killing:
    """Kills, each a moment after its iteration is booked."""

    def __init__(self, kills: list[Kill], done: Path) -> None:
        self._kills, self._done = kills, done
        self._clusters: list[Cluster] = []

    def install(self) -> None:
        """Be told of the cluster, and of the iterations that are booked."""
        make, write = HostConfig.make_cluster, EnvironmentRun._write_row

        def making(host: HostConfig, log: Path | None = None) -> Cluster:
            self._clusters.append(make(host, log))
            return self._clusters[-1]

        def writing(run: EnvironmentRun[Any, Any, Any], report: TrainReport, *rest: Any) -> None:
            write(run, report, *rest)
            for kill in self._kills:
                if kill.iteration == report.iteration:
                    timer = threading.Timer(kill.moment, self._carry_out, (kill,))
                    timer.daemon = True
                    timer.start()

        setattr(HostConfig, "make_cluster", making)  # noqa: B010 a type checker refuses it
        setattr(EnvironmentRun, "_write_row", writing)  # noqa: B010

    def _carry_out(self, kill: Kill) -> None:
        pid = os.getpid() if kill.name == DRIVER else self._clusters[-1].pid(kill.name)
        if pid is None:  # its restart is under way
            return
        with self._done.open("ab") as file:
            file.write(msgspec.json.encode(kill) + b"\n")
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    done = Path(sys.argv[2])
    killing = Killing(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=list[Kill]), done)
    killing.install()
    sys.exit(main(sys.argv[3:]))
