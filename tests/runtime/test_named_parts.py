"""Parts that settings name: every kind of part, every way of naming it, every backend."""

from __future__ import annotations

import importlib
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import rlinf_async as ra
from rlinf_async.algorithms.advantages import advantage_functions
from rlinf_async.algorithms.language.advantages import group_advantages
from rlinf_async.algorithms.language.losses import language_losses
from rlinf_async.algorithms.losses import loss_functions
from rlinf_async.backends import parts as backends
from rlinf_async.backends.policies.base import policies
from rlinf_async.config import ConfigError
from rlinf_async.config.registry import NAMES, Registry
from rlinf_async.observe.sinks.config import sinks
from rlinf_async.rewards.judging import verifiers
from rlinf_async.runtime.jobs import jobs
from rlinf_async.scheduling.policy import scaling_policies

KINDS: dict[str, tuple[Registry[Any], int]] = {
    "advantage": (advantage_functions, 2),
    "loss": (loss_functions, 2),
    "language_advantage": (group_advantages, 2),
    "language_loss": (language_losses, 2),
    "verifier": (verifiers, 1),
    "policy": (policies, 1),
    "scaling_policy": (scaling_policies, 0),
    "job": (jobs, 0),
    "sink": (sinks, 2),
    "trainer": (backends.trainers, 3),
    "language_trainer": (backends.language_trainers, 3),
    "off_policy_trainer": (backends.off_policy_trainers, 4),
    "policy_backend": (backends.policy_backends, 3),
    "engine": (backends.engines, 3),
}
"""name -> the registry, and the number of arguments of its parts"""
SOURCE = "".join(
    f"def {kind}({', '.join('abcd'[:count])}):\n    return {kind!r}\n"
    for kind, (_, count) in KINDS.items()
)
WAYS = ("registered", "file", "module", "entry point")


class Finder(ra.Worker):
    """Loads parts, and calls them."""

    async def found(self, named: list[tuple[str, str]]) -> list[str]:
        return [call(kind, name) for kind, name in named]


def call(kind: str, name: str) -> str:
    """Load a part and call it, as whoever needs it does."""
    registry, count = KINDS[kind]
    part = registry.load(name)
    answer: str = getattr(part, "make", part)(*range(count))
    return answer


def name_of(kind: str, way: str) -> str:
    return {
        "registered": f"registered_{kind}",
        "file": f"parts.py:{kind}",
        "module": f"parts_module:{kind}",
        "entry point": f"installed_{kind}",
    }[way]


@pytest.fixture
def parts(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A file, a module, a package with entry points, and parts that this process registers."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for file in ("parts.py", "parts_module.py", "parts_installed.py", "parts_registered.py"):
        (tmp_path / file).write_text(SOURCE)
    info = tmp_path / "parts-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: parts\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "".join(
            f"[{registry._group}]\ninstalled_{kind} = parts_installed:{kind}\n"
            for kind, (registry, _) in KINDS.items()
        )
    )
    importlib.invalidate_caches()
    registered = importlib.import_module("parts_registered")
    for kind, (registry, _) in KINDS.items():
        registry.register(f"registered_{kind}")(getattr(registered, kind))
    yield
    for kind, (registry, _) in KINDS.items():
        registry._entries.pop(f"registered_{kind}")
    for module in [one for one in sys.modules if one.startswith("parts")]:
        del sys.modules[module]


def cluster(backend: str) -> Any:
    return ra.Cluster.local() if backend == "local" else ra.Cluster.process()


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("backend", ["local", "process"])
async def test_every_kind_is_found_by_every_way_of_naming_it(backend: str) -> None:
    named = [(kind, name_of(kind, way)) for kind in KINDS for way in WAYS]
    assert [call(*one) for one in named] == [kind for kind, _ in named]
    async with cluster(backend) as running:
        finders = await running.launch(Finder)
        [found] = await finders.call(Finder.found, named)
    assert found == [kind for kind, _ in named]


@pytest.mark.usefixtures("parts")
def test_a_file_is_looked_for_from_the_folder_of_the_command_too(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Ray, whose workers may run in another folder."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setenv("RLINF_ASYNC_FOLDER", str(tmp_path))
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert call("loss", "parts.py:loss") == "loss"


BROKEN: dict[str, tuple[str, str]] = {
    "a file that is not there": ("nowhere.py:part", "'nowhere.py' cannot be imported"),
    "a module that is not there": ("no_such_module:part", "'no_such_module' cannot be imported"),
    "no such name": ("broken.py:nothing", "'broken.py' has no function 'nothing'"),
    "not callable": ("broken.py:NUMBER", "'broken.py' has no function 'NUMBER'"),
    "other arguments": ("broken.py:other", "'broken.py:other' takes other arguments"),
    "it raises": ("raising.py:part", "raised when it was imported: RuntimeError: on purpose"),
    "it exits": ("exiting.py:part", "raised when it was imported: SystemExit: 0"),
    "no Python": ("grammar.py:part", "raised when it was imported: SyntaxError"),
    "no name": ("broken.py", "must be 'module:function' or 'file.py:function'"),
    "unknown": ("nobody", "is called 'nobody'"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrong", BROKEN)
def test_what_is_wrong_with_a_part_is_said_with_its_setting(
    kind: str, wrong: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text("NUMBER = 1\ndef other(a, b, c, d, e): pass\n")
    (tmp_path / "raising.py").write_text("raise RuntimeError('on purpose')\n")
    (tmp_path / "exiting.py").write_text("import sys\nsys.exit(0)\n")
    (tmp_path / "grammar.py").write_text("def part(:\n")
    name, message = BROKEN[wrong]
    with pytest.raises(ConfigError) as caught:
        KINDS[kind][0].check(name, ("a", "setting"))
    assert message in str(caught.value)
    assert str(caught.value).startswith("a.setting: ")


def test_what_workers_cannot_import_is_refused_before_they_are_started() -> None:
    def local(inputs: object, config: object) -> None: ...

    language_losses.register("of_a_function")(local)  # type: ignore[arg-type]
    try:
        language_losses.check("of_a_function", ("a",))
        with pytest.raises(ConfigError, match="define it at the top of a module or file"):
            language_losses.check("of_a_function", ("a",), apart=True)
    finally:
        language_losses._entries.pop("of_a_function")


SCRIPT = """
from rlinf_async.config import ConfigError
from rlinf_async.config.registry import Registry, names_for_workers
parts = Registry("part")
def at_the_top(): ...
if __name__ == "__main__":
    def under_main(): ...
    for one in (at_the_top, under_main):
        parts.register(one.__name__)(one)
        try:
            parts.check(one.__name__, ("a",), apart=True)
        except ConfigError as error:
            print(error)
    print(names_for_workers())
"""


def test_what_a_script_defines_under_its_main_part_alone_is_no_part_for_workers(
    tmp_path: pathlib.Path,
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ran = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    error, names = ran.stdout.splitlines()
    assert error.startswith("a: part 'under_main' was registered in this process, and other")
    assert "not under `if __name__ == '__main__'`" in error
    assert f"{script}:at_the_top" in names
    assert "under_main" not in names


def test_a_file_that_registers_what_it_defines_is_found_by_both_names(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "registering.py"
    file.write_text(
        "from rlinf_async.algorithms.losses import register_loss\n\n\n"
        "@register_loss('of_a_file')\ndef mine(inputs, config):\n    return 'mine'\n"
    )
    found: Callable[..., Any] = loss_functions.load(f"{file}:mine")
    try:
        assert loss_functions.load("of_a_file") is found
        monkeypatch.setenv(NAMES, f'{{"loss": {{"of_a_file": "{file}:mine"}}}}')
        loss_functions._entries.pop("of_a_file")  # as in a worker
        again: Callable[..., Any] = loss_functions.load("of_a_file")
        assert again(None, None) == "mine"
    finally:
        loss_functions._entries.pop("of_a_file", None)
