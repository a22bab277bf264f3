"""A run that is started from Python is that of the command line, and ends with its caller."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import typing
from typing import Any

import msgspec
import pytest

import rlinf_async as ra
from rlinf_async import embodied, language
from rlinf_async.config import ConfigError, Document, UsageError
from rlinf_async.observe.summary import LanguageSummary
from rlinf_async.runtime.driving import RunFailed
from tests.jobs.language.kit import TOY
from tests.jobs.processes import Driver

ENDLESS = 10**6


@pytest.fixture
def file(tmp_path: pathlib.Path) -> pathlib.Path:
    """The configuration of a run of toys."""
    data = tmp_path / "sums.jsonl"
    lines = [f'{{"prompt": "{a}+{a + 1}=", "answer": "{2 * a + 1}"}}' for a in range(24)]
    data.write_text("\n".join(lines) + "\n")
    path = tmp_path / "run.toml"
    path.write_text(TOY.format(data=data), encoding="utf-8")
    return path


async def test_a_run_is_followed_stopped_and_gone_on_with(
    file: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    config = Document.read(file).to(language.LanguageConfig, {"training.iterations": str(ENDLESS)})
    seen = []
    async with await ra.train(config, out=tmp_path / "run") as run:
        assert run.running
        async for row in run:
            seen.append(row)
            if row.get("iteration") == 5:
                break
        stopped = await run.stop()
    assert isinstance(stopped, LanguageSummary)
    assert (stopped.outcome, run.running) == ("terminated", False)
    assert stopped.iterations >= 6
    assert seen == run.rows()[: len(seen)]  # also those before it was looked at
    assert [row["iteration"] for row in seen if "iteration" in row] == [0, 1, 2, 3, 4, 5]
    with pytest.raises(UsageError, match="holds a run already"):
        await ra.train(config, out=run.folder)

    more = {"training.iterations": stopped.iterations + 2}
    run = await ra.train(file, out=run.folder, resume=True, overrides=more)
    rows = [row async for row in run]
    summary = await run
    assert (summary.outcome, summary.iterations) == ("finished", stopped.iterations + 2)
    iterations = [row["iteration"] for row in rows if "iteration" in row]
    assert iterations == [*range(stopped.iterations + 2)]
    assert len(run.samples(kind="training")) == 8 * summary.iterations
    assert [one["name"] for one in run.samples(iteration=1, best=1)] == ["4/0"]
    assert "finished" in run.output


async def test_what_is_wrong_with_a_configuration_is_raised_where_it_is_called(
    file: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    config = Document.read(file).to(language.LanguageConfig)
    wrong = msgspec.structs.replace(
        config, data=msgspec.structs.replace(config.data, path="nothing.jsonl")
    )
    with pytest.raises(ConfigError, match=r"nothing\.jsonl") as caught:
        await ra.train(wrong, out=tmp_path / "run")
    assert (caught.value.path, caught.value.origin) == (("data", "path"), "")
    with pytest.raises(ConfigError, match="did you mean 'iterations'") as caught:
        await ra.train(file, out=tmp_path / "run", overrides={"training.iteration": 3})
    assert caught.value.path == ("training", "iteration")
    with pytest.raises(ConfigError, match="cannot be read"):
        await ra.train(tmp_path / "nothing.toml", out=tmp_path / "run")
    with pytest.raises(UsageError, match="needs out"):
        await ra.train(file, resume=True)
    with pytest.raises(UsageError, match="has no field 'job'"):
        await ra.train(config.model)
    with pytest.raises(UsageError, match="config is NoneType: give a file"):
        await ra.train(None)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="overrides: 3 is no setting"):
        await ra.train(file, out=tmp_path / "run", overrides={3: 3})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match=r"overrides: .*object") as caught:
        await ra.train(file, out=tmp_path / "run", overrides={"training.iterations": object()})
    assert caught.value.path == ("training", "iterations")
    assert not (tmp_path / "run").exists()


def test_a_script_that_starts_a_run_which_imports_it_is_told_what_to_do(
    file: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import asyncio\nimport rlinf_async as ra\n\ndef score(answer):\n    return 1.0\n\n"
        "async def main():\n"
        f"    await ra.train({str(file)!r}, out={str(tmp_path / 'run')!r},\n"
        f"        overrides={{'data.verifier': {f'{script}:score'!r}}})\n\nasyncio.run(main())\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "script.py' starts a run when it is imported, and a run imports it" in done.stderr
    assert "__main__" in done.stderr
    assert not (tmp_path / "run").exists()


async def test_a_run_that_fails_raises_its_cause(
    file: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    refuses = {"data.verifier": "tests.jobs.language.verifiers:refuses", "evaluation.samples": 0}
    with await ra.train(file, out=tmp_path / "run", overrides=refuses) as run:
        with pytest.raises(RunFailed, match=r"none of the 8 samples .* no reference"):
            async for _ in run:
                pass
        with pytest.raises(RunFailed, match="There is nothing to learn from"):
            await run
    assert [one["outcome"] for one in run.samples()] == ["rejected"] * 8


@pytest.mark.parametrize("how", ["killed", "interrupted"])
def test_a_run_ends_in_order_with_its_caller(
    how: str, file: pathlib.Path, tmp_path: pathlib.Path, temporary: pathlib.Path
) -> None:
    caller = Driver(temporary, file, tmp_path / "run", module=("tests.jobs.starts_a_run",))
    try:
        caller.until(lambda: "32.0" in caller.said.split(), "four iterations")
        if how == "killed":
            caller.kill()
        else:
            caller.interrupt()
        assert caller.wait() != 0  # once nothing of it is left
    finally:
        caller.end()
    assert [*temporary.glob("rlinf-async-*")] == []
    summary = msgspec.json.decode((tmp_path / "run" / "summary.json").read_bytes())
    assert summary["outcome"] == "terminated"
    assert [*(tmp_path / "run" / "checkpoints").glob("version-*")]


def structs_of(kind: Any, found: set[type[msgspec.Struct]]) -> set[type[msgspec.Struct]]:
    """The Structs of a configuration and of all its tables."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind not in found:
        found.add(kind)
        for field in msgspec.structs.fields(kind):
            structs_of(field.type, found)
    for inner in typing.get_args(kind):
        structs_of(inner, found)
    return found


@pytest.mark.parametrize(
    ("module", "configs"),
    [
        (language, [language.LanguageConfig]),
        (embodied, [embodied.EmbodiedConfig, embodied.SacConfig, embodied.OfflineConfig]),
    ],
    ids=["language", "embodied"],
)
def test_a_module_has_the_structs_of_every_table(module: Any, configs: list[Any]) -> None:
    found: set[type[msgspec.Struct]] = set()
    for config in configs:
        structs_of(config, found)
    assert {getattr(module, name) for name in module.__all__} == found


def test_what_is_imported_for_a_run_is_light() -> None:
    script = (
        "import sys, rlinf_async as ra; assert 'numpy' not in sys.modules; ra.train; "
        "import rlinf_async.language, rlinf_async.embodied; "
        "print({'torch', 'ray', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ}, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("set()\n", "")
