"""Workers of a run are swapped from another process, by the run's folder."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import pathlib
import signal
from typing import Any

import msgspec
import pytest

from rlinf_async.backends.transformers.config import TransformersEngineConfig
from rlinf_async.config import Document, UsageError
from rlinf_async.observe.samples import read_samples
from rlinf_async.runtime.jobs.language.config import LanguageConfig
from rlinf_async.runtime.jobs.language.job import LanguageRL
from tests.jobs.kit import rows_of
from tests.jobs.language.agents import WITH_TOOLS
from tests.jobs.language.kit import Job
from tests.jobs.language.test_killed_driver import ENDLESS, PROCESS
from tests.jobs.processes import Driver, Start

CONSTANT = "def score(answer):\n    return {}\n"


def rewards(out: pathlib.Path) -> list[float]:
    """Mean reward of each iteration of a run that goes on."""
    if not (out / "metrics.csv").exists():
        return []
    with (out / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [float(row["reward"]) for row in rows if row.get("iteration") and row.get("reward")]


def process_of(driver: Driver, worker: str) -> int:
    """Its process, which bears its name."""
    for pid in driver.running(b""):
        with contextlib.suppress(OSError):
            if pathlib.Path(f"/proc/{pid}/comm").read_text().strip() == worker:
                return pid
    raise AssertionError(f"no process of {worker}")


def workers(job: Job) -> dict[str, dict[str, Any]]:
    """The workers of the run, as ``status`` shows them."""
    seen = json.loads(job.command("status", job.out, "--json").out)
    shown = seen["status"]["shown"]["workers"] if seen["status"] else []
    return {one["name"]: one for one in shown}


@pytest.fixture
def verifier(job: Job, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A user's verifier, in a folder of the user's own."""
    folder = job.file.parent / "mine"
    folder.mkdir()
    monkeypatch.chdir(folder)
    file = folder / "new.py"
    file.write_text(CONSTANT.format(0.25))
    return file


def going(job: Job, start_driver: Start, *settings: object) -> Driver:
    """A run that does not end by itself, and has trained an iteration."""
    endless = ("--training.iterations", ENDLESS, "--training.checkpoint_every", 2)
    driver = start_driver("train", job.file, "--out", job.out, *PROCESS, *endless, *settings)
    driver.until(lambda: rewards(job.out), "an iteration")
    return driver


def test_a_verifier_is_swapped_again_and_again_and_holds_after_a_resume(
    job: Job, start_driver: Start, verifier: pathlib.Path
) -> None:
    driver = going(job, start_driver)
    config = (job.out / "config.toml").read_text()

    swapped = job.command("swap", job.out, "reward", "--data.verifier", "new.py:score")
    assert swapped.code == 0, swapped.err
    assert "reward: 1 worker replaced in " in swapped.out
    driver.until(lambda: rewards(job.out)[-1] == 0.25, "scores of the new verifier")

    verifier.write_text(CONSTANT.format(0.75))  # the same file, loaded anew
    swapped = job.command("swap", job.out, "reward", "--reward.processes", 1)
    assert swapped.code == 0, swapped.err
    driver.until(lambda: rewards(job.out)[-1] == 0.75, "scores of the changed file")
    driver.until(lambda: workers(job)["Reward[0]"]["replaced"] == 2, "the status to say so")
    assert workers(job)["Reward[0]"]["restarts"] == 0

    # A worker that dies is started again as what it was swapped for.
    os.kill(process_of(driver, "Reward[0]"), signal.SIGKILL)
    trained = len(rewards(job.out))
    driver.until(lambda: len(rewards(job.out)) > trained + 3, "it goes on")
    assert rewards(job.out)[-1] == 0.75

    assert (job.out / "config.toml").read_text() == config
    swaps = json.loads((job.out / "swaps.json").read_text())
    assert [sorted(one["settings"]) for one in swaps] == [["data.verifier"], ["reward.processes"]]
    assert swaps[0]["settings"]["data.verifier"]["before"] == "numeric"
    assert swaps[0]["code"][str(verifier)] != swaps[1]["code"][str(verifier)]
    inputs = json.loads((job.out / "inputs.json").read_text())
    assert inputs["code"][str(verifier)] == swaps[1]["code"][str(verifier)]
    assert not (job.out / "swap").exists()

    # What was sampled is trained once, whoever scored it.
    driver.until(lambda: (job.out / "checkpoints" / "latest.json").exists(), "a checkpoint")
    driver.kill()
    driver.wait()
    done = json.loads((job.out / "checkpoints" / "latest.json").read_text())["version"]
    resumed = job.train("--resume", "--training.iterations", done + 2, *PROCESS)
    assert resumed.code == 0, resumed.err
    assert f"data.verifier is '{verifier}:score', as swapped in the run" in resumed.err
    assert set(rewards(job.out)[-2:]) == {0.75}
    assert [int(row["iteration"]) for row in rows_of(job.out)] == list(range(done + 2))
    kept = read_samples(job.out, kind="training")  # each says who has scored it
    assert (kept[0]["verifier"], kept[-1]["verifier"]) == ("numeric", f"{verifier}:score")
    swapped_in = [one["verifier"] == f"{verifier}:score" for one in kept]
    assert swapped_in == [one["reward"] in (0.25, 0.75) for one in kept]


def test_engines_that_the_prompts_do_not_fit_are_refused(tiny: Job) -> None:
    config = Document.read(str(tiny.file)).to(LanguageConfig)

    def checked(**settings: int) -> None:
        engine = TransformersEngineConfig(**settings)  # type: ignore[arg-type]
        rollout = msgspec.structs.replace(config.rollout, transformers=engine)
        swapped = msgspec.structs.replace(config, rollout=rollout)
        LanguageRL().check_swap(swapped, "rollout")

    checked(max_concurrent=3)
    with pytest.raises(UsageError, match="max_tokens"):
        checked(context=12)


def test_what_cannot_be_swapped_is_refused_with_the_reason(
    job: Job, start_driver: Start, verifier: pathlib.Path
) -> None:
    driver = going(job, start_driver)

    def refused(*arguments: object) -> str:
        ended = job.command("swap", job.out, *arguments)
        assert ended.code == 2, ended
        return ended.err

    assert "cannot be swapped: its ranks hold the weights that are trained" in refused("actor")
    assert "there is no role 'rewards'" in refused("rewards")
    assert "--seed does not concern reward" in refused("reward", "--seed", 3)
    assert "rewrad" in refused("reward", "--rewrad.processes", 3)
    assert "must be at least 1" in refused("reward", "--reward.processes", 0)
    assert "its samples are no episodes" in refused("episode")
    assert "it has none (cluster.inference_workers = 0)" in refused("inference")
    assert "cannot be imported" in refused("reward", "--data.verifier", "not_there.py:score")
    verifier.write_text("raise ValueError('half written')\n")
    assert "half written" in refused("reward", "--data.verifier", "new.py:score")
    assert "Give the run's folder and a role" in refused()
    assert job.command("swap", job.out.parent / "nothing", "reward").code == 2
    assert not (job.out / "swaps.json").exists()
    driver.kill()
    driver.wait()
    ended = job.command("swap", job.out, "reward")
    assert ended.code == 2
    assert "there is no run to swap workers of" in ended.err


def test_new_workers_that_cannot_be_set_up_leave_the_old_ones(
    job: Job, start_driver: Start, verifier: pathlib.Path
) -> None:
    driver = going(job, start_driver)
    # It loads in the three processes that look at it first (the command's, the one in which that
    # tries it, the run's, which asks whether it judges groups), and no more in the new worker's.
    mark = verifier.parent / "loaded"
    loads = (
        f"from pathlib import Path\nn = len(list(Path({str(verifier.parent)!r}).glob('loaded*')))"
    )
    once = f"Path('{mark}' + str(n)).touch()\nif n > 2:\n    raise ValueError('not again')\n"
    verifier.write_text(f"{loads}\n{once}{CONSTANT.format(1.0)}")
    before = rewards(job.out)
    ended = job.command("swap", job.out, "reward", "--data.verifier", "new.py:score")
    assert ended.code == 1, ended
    assert "the old workers go on: Reward[0] failed in setup" in ended.err
    assert "not again" in ended.err
    driver.until(lambda: len(rewards(job.out)) > len(before) + 2, "it goes on")
    assert 1.0 not in rewards(job.out)[-1:]
    assert not (job.out / "swaps.json").exists()
    driver.kill()
    driver.wait()


def test_the_code_of_an_agent_is_swapped(job: Job, start_driver: Start) -> None:
    template = job.file.parent / "tools.jinja"
    template.write_text(WITH_TOOLS)
    agent = job.file.parent / "agent.py"
    code = "async def play(episode):\n    await episode.chat().turn()\n    return {}\n"
    agent.write_text(code.format(0.0))
    episodes = ("--episode.run", f"{agent}:play", "--data.chat_template", template)
    driver = going(job, start_driver, *episodes, "--cluster.episode_workers", 2)
    agent.write_text(code.format(1.0))
    swapped = job.command("swap", job.out, "episode")
    assert swapped.code == 0, swapped.err
    assert "episode: 2 workers replaced" in swapped.out
    driver.until(lambda: rewards(job.out)[-1] == 1.0, "rewards of the new agent")
    swapped = job.command("swap", job.out, "rollout", "--rollout.toy.mean_tokens", 3)
    assert swapped.code == 0, swapped.err
    trained = len(rewards(job.out))
    driver.until(lambda: len(rewards(job.out)) > trained + 3, "it goes on")
    driver.kill()
    driver.wait()
