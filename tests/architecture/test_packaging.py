"""What is installed: every module under one name, with types that a user's checkers see.

The wheel and the editable install go into environments of their own, which find the project's
dependencies where the tests have them. Nothing is downloaded.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.architecture.sources import ROOT, imports, modules

PARTS = ("rlinf_async", "channels", "workers", "src", "pyproject.toml", "LICENSE", "README.md")
INSTALLS = ("wheel", "editable")
MISTAKE = "await primes.put(candidate)"
"""in the script of a user, in the place of a correct line"""


def run(*command: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command that sees nothing of this checkout by way of the environment."""
    hidden = ("PYTHONPATH", "MYPYPATH", "PYTHONHOME", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    words = [str(word) for word in command]
    return subprocess.run(
        words, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is packaged, so that the tree stays as it is."""
    pytest.importorskip("setuptools", minversion="77")
    copy = tmp_path_factory.mktemp("source")
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(
                ROOT / part,
                copy / part,
                symlinks=True,
                ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"),
            )
        else:
            shutil.copy(ROOT / part, copy / part)
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the tree."""
    out = tmp_path_factory.mktemp("wheel")
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(out)!r})"
    built = run(sys.executable, "-c", build, cwd=source)
    assert built.returncode == 0, built.stderr
    [found] = out.glob("*.whl")
    return found


@pytest.fixture(scope="module", params=INSTALLS)
def python(
    request: pytest.FixtureRequest,
    source: Path,
    wheel: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """The interpreter of an environment with nothing but the project, and a path to the rest."""
    pytest.importorskip("pip")
    environment = tmp_path_factory.mktemp("environment")
    made = run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=environment)
    assert made.returncode == 0, made.stderr
    interpreter = environment / "bin" / "python"
    where = run(
        interpreter, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=environment
    )
    # A folder that a .pth file names is searched last, and .pth files in it are not read: what
    # they would add, as an editable install of this checkout, is not seen.
    paths = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    (Path(where.stdout.strip()) / "dependencies.pth").write_text("\n".join(paths))
    what = [wheel] if request.param == "wheel" else ["-e", source]
    installed = run(
        *(sys.executable, "-m", "pip", "--python", interpreter, "--disable-pip-version-check"),
        *("install", "--no-deps", "--no-build-isolation", "--no-index", "--quiet", *what),
        cwd=environment,
    )
    assert installed.returncode == 0, installed.stderr
    return interpreter


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder: `examples/custom_worker.py` as it is, and with a mistake."""
    folder = tmp_path_factory.mktemp("user")
    text = (ROOT / "examples" / "custom_worker.py").read_text(encoding="utf-8")
    mistaken = re.sub(r"await primes\.put\(Prime\(.*\)\)$", MISTAKE, text, flags=re.MULTILINE)
    assert mistaken.count(MISTAKE) == 1
    (folder / "correct.py").write_text(text, encoding="utf-8")
    (folder / "mistaken.py").write_text(mistaken, encoding="utf-8")
    return folder


def line_of_mistake(scripts: Path) -> int:
    """The number of the wrong line, from 1."""
    lines = (scripts / "mistaken.py").read_text(encoding="utf-8").splitlines()
    return 1 + next(at for at, line in enumerate(lines) if MISTAKE in line)


def test_the_wheel_holds_every_module(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = {
        "/".join(name.split(".")) + ("/__init__.py" if path.stem == "__init__" else ".py")
        for name, path in modules().items()
    }
    assert wanted <= names, sorted(wanted - names)
    assert "rlinf_async/py.typed" in names


def test_the_wheel_holds_every_file_of_the_projects_that_init_writes(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    files = [one for one in (ROOT / "rlinf_async" / "templates").glob("[!.]*/*") if one.is_file()]
    wanted = {str(one.relative_to(ROOT)) for one in files}
    assert len(wanted) > 15
    assert wanted <= names, sorted(wanted - names)


def test_the_wheel_puts_one_name_into_site_packages(wheel: Path) -> None:
    tops = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"rlinf_async"}


def test_what_is_installed_imports_and_runs(python: Path, scripts: Path) -> None:
    where = run(python, "-c", "import rlinf_async.workers as w; print(w.__file__)", cwd=scripts)
    assert where.returncode == 0, where.stderr
    assert not Path(where.stdout.strip()).resolve().is_relative_to(ROOT)
    others = run(python, "-c", "import workers", cwd=scripts)
    assert "No module named 'workers'" in others.stderr
    done = run(python, "correct.py", cwd=scripts)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_settings_of_mypy_excuse_nothing_in_the_package() -> None:
    """They do not hold where a user runs ``mypy --strict``: what they excused would be errors."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mypy"]
    stricter = {"strict", "enable_error_code"}
    about_files = {"python_version", "files", "explicit_package_bases", "namespace_packages"}
    about_files |= {"mypy_path"}
    assert set(settings) == stricter | about_files | {"overrides"}
    excused = [module for one in settings["overrides"] for module in one["module"]]
    names = {each.what for each in imports()}
    assert not [
        name for name in names if any(fnmatch(f"{name}.", f"{module}*") for module in excused)
    ]


def test_mypy_sees_the_types_and_has_nothing_against_a_correct_script(
    python: Path, scripts: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    pytest.importorskip("mypy")
    found = run(
        *(sys.executable, "-m", "mypy", "--strict", "--python-executable", python, "--no-pretty"),
        *("--cache-dir", tmp_path_factory.getbasetemp() / "mypy", "correct.py", "mistaken.py"),
        cwd=scripts,
    )
    errors = [line for line in found.stdout.splitlines() if ": error:" in line]
    assert len(errors) == 1, found.stdout + found.stderr
    assert errors[0].startswith(f"mistaken.py:{line_of_mistake(scripts)}: ")
    assert errors[0].endswith("[arg-type]")


def test_pyright_sees_the_types_and_has_nothing_against_a_correct_script(
    python: Path, scripts: Path
) -> None:
    pytest.importorskip("pyright")
    found = run(
        *(sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", python),
        *("correct.py", "mistaken.py"),
        cwd=scripts,
    )
    findings = json.loads(found.stdout)["generalDiagnostics"]
    assert [
        (Path(one["file"]).name, one["range"]["start"]["line"] + 1, one["rule"]) for one in findings
    ] == [("mistaken.py", line_of_mistake(scripts), "reportArgumentType")], findings
