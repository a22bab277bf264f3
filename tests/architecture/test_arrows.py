"""Who may import whom, as the design says."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.architecture.sources import ROOT, Import, folders, imports, loose, modules

LIGHT = {"config", "messages", "parallel", "scheduling", "deadlines", "processes", "threads"}

ARROWS: dict[str, set[str]] = {
    "__main__": {"cli"},
    "deadlines": set(),
    "processes": set(),
    "threads": set(),
    "elapse": set(),
    "parent": set(),
    "channels": {"deadlines"},
    "config": set(),
    "messages": set(),
    "parallel": set(),
    "scheduling": {"config", "parallel"},
    "observe": LIGHT,
    "algorithms": LIGHT,
    "weights": LIGHT,
    "rewards": LIGHT | {"algorithms"},
    "data": LIGHT | {"rewards"},
    "episodes": LIGHT | {"data"},
    "backends": LIGHT | {"algorithms", "data", "weights"},
    "workers": LIGHT
    | {"backends", "channels", "data", "episodes", "observe", "realtime", "rewards"},
    "recording": LIGHT | {"channels"},
    # Of the algorithms a job needs what they can be told: that part does not import torch.
    "runtime": LIGHT
    | {"algorithms", "backends", "channels", "data", "episodes", "observe", "recording", "rewards"}
    | {"workers"},
    "replaying": LIGHT | {"channels", "recording", "rewards", "runtime", "workers"},
    "simulate": LIGHT
    | {"backends", "channels", "episodes", "observe", "runtime", "testing", "workers"},
    "language": LIGHT
    | {"algorithms", "backends", "data", "episodes", "observe", "runtime", "workers"},
    "embodied": LIGHT | {"algorithms", "backends", "observe", "realtime", "runtime", "workers"},
    "policy": LIGHT | {"backends"},
    "realtime": {"config", "messages"},
    "testing": LIGHT | {"channels", "data", "episodes", "runtime", "workers"},
    "view": LIGHT | {"observe"},
    "cli": LIGHT
    | {"channels", "observe", "recording", "replaying", "runtime", "simulate", "view", "workers"},
}
"""What each part may import of the others when it is imported."""

TORCH_AT_IMPORT = {"algorithms", "backends", "weights"}
HEAVY = {"megatron", "ray", "torch", "transformers", "vllm"}
ONE_FOLDER_ONLY = ("megatron", "ray", "vllm")


def say(found: list[Import]) -> str:
    """One line for each import that breaks a rule."""
    return "\n".join(f"{each.where} imports {each.what}" for each in found)


def test_every_part_of_the_project_has_its_arrows() -> None:
    names = {path.stem for path in (*folders(), *loose())}
    assert names <= set(ARROWS), f"say in ARROWS what {names - set(ARROWS)} may import"


@pytest.mark.parametrize("package", sorted(ARROWS))
def test_a_part_imports_only_what_its_arrows_allow(package: str) -> None:
    wrong = [
        each
        for each in imports()
        if each.package == package
        and not each.lazy
        and each.what.startswith("rlinf_async")
        and each.target not in ARROWS[package] | {package}
    ]
    assert not wrong, say(wrong)


def test_channels_import_only_the_standard_library_and_msgspec() -> None:
    allowed = sys.stdlib_module_names | {"msgspec", "channels", "deadlines"}
    wrong = [
        each
        for each in imports()
        if each.package in {"channels", "deadlines"}
        and not each.lazy
        and each.target not in allowed
    ]
    assert not wrong, say(wrong)


def test_backends_never_import_channels_or_workers() -> None:
    wrong = [
        each
        for each in imports()
        if each.package == "backends" and each.target in {"channels", "runtime", "workers"}
    ]
    assert not wrong, say(wrong)


def test_workers_and_runtime_know_only_the_protocols_and_configs_of_backends() -> None:
    allowed = {
        "rlinf_async.backends",
        "rlinf_async.backends.base",
        "rlinf_async.backends.language",
        "rlinf_async.backends.parts",
    }
    wrong = [
        each
        for each in imports()
        if each.package in {"runtime", "workers"}
        and each.target == "backends"
        and not each.lazy
        and each.what not in allowed
        and not each.what.endswith((".config", "_config"))
    ]
    assert not wrong, say(wrong)


def test_torch_is_imported_at_import_time_only_where_the_design_says() -> None:
    wrong = [
        each
        for each in imports()
        if each.target in HEAVY and not each.lazy and each.package not in TORCH_AT_IMPORT
    ]
    assert not wrong, say(wrong)


@pytest.mark.parametrize("library", ONE_FOLDER_ONLY)
def test_a_big_library_is_imported_in_one_folder_only(library: str) -> None:
    paths = modules()
    found = {paths[each.where].parent for each in imports() if each.target == library}
    assert len(found) <= 1, f"{library} is imported in {sorted(map(str, found))}"


def loaded_after(*names: str) -> set[str]:
    """The top names in ``sys.modules`` of a fresh interpreter that imported these modules."""
    code = "\n".join(
        [
            "import importlib, sys",
            *(f"importlib.import_module({name!r})" for name in names),
            "print(' '.join({name.partition('.')[0] for name in sys.modules}))",
        ]
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return set(run.stdout.split())


def test_importing_the_channels_loads_nothing_but_the_standard_library_and_msgspec() -> None:
    loaded = loaded_after("rlinf_async.channels", "rlinf_async.channels.wire")
    assert not loaded & (HEAVY | {"click", "numpy", "rich", "uvloop"})


def test_importing_the_light_parts_loads_neither_torch_nor_ray() -> None:
    light = [
        name
        for name in modules()
        if name.split(".")[1]
        in {
            *("channels", "cli", "config", "data", "messages", "parallel", "rewards", "runtime"),
            "scheduling",
        }
        or name.startswith("rlinf_async.workers")
    ]
    assert not loaded_after("rlinf_async", *light) & HEAVY


@pytest.mark.parametrize("package", ["channels", "workers"])
def test_a_root_folder_refuses_its_bare_name(package: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", f"import {package}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode != 0
    assert f"import this package as 'rlinf_async.{package}', not as '{package}'" in run.stderr
