"""A run is looked at and stopped from another process, by its folder."""

from __future__ import annotations

import json
import os
import re
from typing import Any

from rlinf_async.runtime.jobs.language.samples import load_language_progress
from tests.jobs.language.agents import WITH_TOOLS
from tests.jobs.language.kit import Job
from tests.jobs.language.test_killed_driver import ENDLESS, PROCESS
from tests.jobs.processes import Start


def test_a_run_is_looked_at_and_stopped_with_a_checkpoint(job: Job, start_driver: Start) -> None:
    endless = ("--training.iterations", ENDLESS, "--cluster.grace_seconds", 600)
    driver = start_driver("train", job.file, "--out", job.out, *PROCESS, *endless)

    def looked_at() -> dict[str, Any]:
        seen = json.loads(job.command("status", job.out, "--json").out)
        shown: dict[str, Any] = seen["status"]["shown"] if seen["status"] else {"iteration": 0}
        return shown

    driver.until((job.out / "run.json").exists, "the folder")
    driver.until(lambda: looked_at()["iteration"], "an iteration")
    shown = looked_at()
    workers = {one["name"]: one for one in shown["workers"]}
    assert {"Actor[0]", "Rollout[0]", "Reward[0]"} <= set(workers)
    assert {one["host"] for one in workers.values()} == {os.uname().nodename}
    assert {"requests", "scored"} <= {one["name"] for one in shown["channels"]}
    assert any(one["name"] == "requests -> Rollout[0]" for one in shown["edges"])
    stopped = job.command("stop", job.out)
    assert stopped.code == 0, stopped.err
    assert f"{job.out}: terminated after " in stopped.out
    assert driver.wait() == 143
    progress = load_language_progress(job.out / "checkpoints")
    assert progress is not None
    assert progress.version == job.summary.iterations
    assert job.command("stop", job.out).code == 2


def test_status_names_the_episodes_that_have_waited_longest_and_for_what(
    job: Job, start_driver: Start
) -> None:
    agents = "tests.jobs.language.agents"
    template = job.file.parent / "tools.jinja"
    template.write_text(WITH_TOOLS)
    searches = (
        *("--episode.run", f"{agents}:searches", "--episode.tools", f"{agents}:always_searches"),
        *("--data.chat_template", template, "--episode.seconds", 600),
    )
    workers = ("--cluster.episode_workers", 2)
    driver = start_driver("train", job.file, "--out", job.out, *PROCESS, *searches, *workers)
    driver.until((job.out / "run.json").exists, "the folder")
    seen: dict[str, str] = {}

    def named() -> bool:
        said = job.command("status", job.out, "--json").out
        waits = r"episode (-?\d+/\d+) has waited \d+ s for (tool search|its agent)"
        seen.update(re.findall(waits, said))
        return {*seen.values()} == {"tool search", "its agent"}

    driver.until(named, "episodes that wait")
    driver.kill()
