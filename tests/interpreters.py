"""Other Pythons for workers: virtualenvs of their own."""

from __future__ import annotations

import venv
from pathlib import Path
from typing import Final

import msgspec

OURS: Final = Path(msgspec.__file__).parents[1]
"""folder of the packages that are installed here"""


def packages_of(environment: Path) -> Path:
    """The folder of packages of a virtualenv."""
    [found] = environment.glob("lib/python*/site-packages")
    return found


def make_python(folder: Path, *packages: Path) -> Path:
    """Make a virtualenv that has the packages of these folders; its interpreter."""
    venv.create(folder, symlinks=True)
    (packages_of(folder) / "these.pth").write_text("".join(f"{one}\n" for one in packages))
    return folder / "bin" / "python"
