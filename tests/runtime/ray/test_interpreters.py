"""What is said of another Python, on its host."""

from __future__ import annotations

import sys
from pathlib import Path

from rlinf_async.runtime.interpreters import versions
from rlinf_async.runtime.ray.backend import environment_of, versions_of
from rlinf_async.runtime.ray.session import of_ray
from rlinf_async.runtime.supervise import WorkerSpec
from rlinf_async.workers.base import Worker, WorkerInfo


def program(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_the_versions_of_an_interpreter_are_asked_for() -> None:
    assert versions_of(sys.executable, {}) == {**versions(), "Ray": of_ray().__version__}


def test_a_command_may_have_arguments_and_sees_the_variables_of_the_role(tmp_path: Path) -> None:
    asked = program(tmp_path / "asked", 'printf \'{"%s": "%s"}\' "$1" "$ROLE"')
    assert versions_of(f"{asked} run", {"ROLE": "env"}) == {"run": "env"}


def test_what_is_wrong_with_it_is_said(tmp_path: Path) -> None:
    no_ray = program(tmp_path / "no_ray", "echo of nothing >&2; echo No module >&2; exit 1")
    assert versions_of(no_ray, {}) == "it cannot import Ray and rlinf_async: No module"
    silent = program(tmp_path / "silent", "exit 3")
    assert versions_of(silent, {}) == "it cannot import Ray and rlinf_async: exit code 3"
    assert "it cannot be run: " in str(versions_of("/no/such/python", {}))
    assert versions_of("'unbalanced", {}) == "it cannot be run: No closing quotation"


def test_it_is_asked_with_the_variables_that_a_rank_is_started_with() -> None:
    spec = WorkerSpec(
        cls=Worker,
        args=(),
        kwargs={},
        info=WorkerInfo(group="G", rank=0, world_size=1),
        env_vars={"A": "own"},
        runtime_env={"env_vars": {"A": "shared", "B": "shared"}, "py_executable": "python"},
    )
    assert environment_of(spec) == {"A": "own", "B": "shared"}
