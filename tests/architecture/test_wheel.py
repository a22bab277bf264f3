"""The wheel holds every module under the one name that it is imported by."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.architecture.sources import ROOT, modules

PARTS = ("rlinf_async", "channels", "workers", "pyproject.toml", "LICENSE", "README.md")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the tree, so that the tree stays as it is."""
    pytest.importorskip("setuptools", minversion="77")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(
                ROOT / part,
                source / part,
                symlinks=True,
                ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"),
            )
        else:
            shutil.copy(ROOT / part, source / part)
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(out)!r})"
    run = subprocess.run(
        [sys.executable, "-c", build], cwd=source, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    [found] = out.glob("*.whl")
    return found


def test_the_wheel_holds_every_module(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = {
        "/".join(name.split(".")) + ("/__init__.py" if path.stem == "__init__" else ".py")
        for name, path in modules().items()
    }
    assert wanted <= names, sorted(wanted - names)
    assert "rlinf_async/py.typed" in names


def test_the_wheel_puts_one_name_into_site_packages(wheel: Path) -> None:
    tops = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"rlinf_async"}


def test_the_unpacked_wheel_imports(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import rlinf_async.channels.wire, rlinf_async.workers\n"
        "print(rlinf_async.channels.wire.__file__)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith(str(tmp_path))
