"""The page for users of RLinf names what is there."""

from __future__ import annotations

import re
from typing import Any, Final

import pytest

from rlinf_async.backends.fsdp.manager import FSDPModelManager
from rlinf_async.backends.megatron.manager import MegatronModelManager
from rlinf_async.workers.actor import EmbodiedFSDPActor, FSDPActor, MegatronActor
from tests.docs.pages import ROOT

CLASSES: Final = (
    MegatronActor,
    MegatronModelManager,
    FSDPActor,
    EmbodiedFSDPActor,
    FSDPModelManager,
)
PAGE = (ROOT / "docs" / "coming-from-rlinf.md").read_text(encoding="utf-8")
SECTIONS: Final[dict[str, str]] = dict(
    re.findall(r"^## `(\w+)`\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
)


def test_each_class_has_a_section() -> None:
    assert [one.__name__ for one in CLASSES] == list(SECTIONS)


@pytest.mark.parametrize("cls", CLASSES)
def test_a_class_has_the_names_of_its_section(cls: Any) -> None:
    section = SECTIONS[cls.__name__]
    assert f"`{cls.__module__.rpartition('.')[0]}" in section or f"`{cls.__module__}`" in section
    names = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    assert len(names) >= 3
    assert [name for name in names if not hasattr(cls, name)] == []
