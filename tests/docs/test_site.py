"""The site refuses what leads nowhere, and has every public name in its reference.

``make docs`` builds all of it; here a small one is built by the same rules.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from rlinf_async.config.registry import load_entry_point
from tests.docs.pages import ROOT

pytest.importorskip("mkdocs")
pytest.importorskip("mkdocstrings_handlers.python")

PAGE = """# A page

[a page that is not there](nothing.md), [a heading that is not there](other.md#nope),
[a name that is not there][rlinf_async.rewards.Nothing], [another page](other.md#there-is),
[a name][rlinf_async.rewards.Answer], [a file](../examples/custom_env.py).
"""
SITE = """INHERIT: base.yml
nav: [README.md]
extra: {reference: [rlinf_async.messages.language, rlinf_async.rewards]}
"""


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    where = f"{ROOT / 'docs' / 'site' / 'hooks.py'}:missing_names"
    return sys.modules[load_entry_point(where).__module__]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A site of two pages, as it is, and what was said of it."""
    root = tmp_path_factory.mktemp("site")
    for name in ("src", "rlinf_async", "channels", "workers", "examples"):
        (root / name).symlink_to(ROOT / name)
    for name in ("site", "assets"):
        shutil.copytree(ROOT / "docs" / name, root / "docs" / name)
    shutil.copy(ROOT / "mkdocs.yml", root / "base.yml")
    (root / "mkdocs.yml").write_text(SITE)
    (root / "docs" / "README.md").write_text(PAGE)
    (root / "docs" / "other.md").write_text("# Other\n\n## There is\n")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict"],
        cwd=root,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return root / "build" / "site", done.stderr


def test_links_that_lead_nowhere_end_the_build(built: tuple[Path, str]) -> None:
    _, said = built
    warnings = re.findall(r"^WARNING -  (.*README\.md.*)$", said, re.MULTILINE)
    assert len(warnings) == 3, said
    for one in ("'nothing.md'", "'other.md#nope'", "'rlinf_async.rewards.Nothing'"):
        assert any(one in warning for warning in warnings), said


def test_links_out_of_the_folder_lead_to_pages_that_show_the_file(built: tuple[Path, str]) -> None:
    site, _ = built
    html = (site / "index.html").read_text(encoding="utf-8")
    assert 'href="files/examples/custom_env.py.html"' in html
    assert 'href="reference/rlinf_async.rewards.html#rlinf_async.rewards.Answer"' in html
    shown = (site / "files" / "examples" / "custom_env.py.html").read_text(encoding="utf-8")
    assert "PushDisc" in shown


def test_a_page_that_the_navigation_does_not_name_is_entered_all_the_same(
    built: tuple[Path, str],
) -> None:
    site, _ = built
    html = (site / "index.html").read_text(encoding="utf-8")
    assert re.search(r'href="other\.html" class="md-nav__link"', html)


def test_the_search_works_from_the_disk(built: tuple[Path, str]) -> None:
    site, _ = built
    index = (site / "search" / "search_index.js").read_text(encoding="utf-8")
    assert index.startswith("var __index = ")
    assert "#rlinf_async.rewards.Answer" in index
    html = (site / "index.html").read_text(encoding="utf-8")
    assert '<script src="assets/iframe-worker.js">' in html


def test_every_name_that_a_package_offers_stands_in_the_reference(hooks: ModuleType) -> None:
    """As importing the packages says, not as the site has read them."""
    pages = hooks.reference()
    shown = set(re.findall(r"^::: (rlinf_async[\w.]+)$", "\n".join(pages.values()), re.MULTILINE))
    packages = [name for name in hooks.public_modules() if name not in hooks.WITHOUT_ALL]
    assert len(packages) > 30
    light = ("rlinf_async", "rlinf_async.channels", "rlinf_async.workers", "rlinf_async.testing")
    for name in (*light, "rlinf_async.episodes", "rlinf_async.config", "rlinf_async.runtime"):
        for each in importlib.import_module(name).__all__:
            assert f"{name}.{each}" in shown or f"[`{each}`][" in pages[name], f"{name}.{each}"


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("`rlinf_async.Cluster`, `rlinf_async.channels.Sender`, `rlinf_async.jobs`", set()),
        ("`rlinf_async.Nothing`", {"rlinf_async.Nothing"}),
        (
            "```python\nfrom rlinf_async.channels import Sender, Nothing\nawait Sender.put(1)\n```",
            {"rlinf_async.channels.Nothing"},
        ),
        ("```text\n`rlinf_async.Nothing`\n```", set()),
    ],
)
def test_names_in_pages_have_to_exist(hooks: ModuleType, text: str, missing: set[str]) -> None:
    assert hooks.missing_names(text) == missing


def test_a_page_that_loads_something_from_elsewhere_is_found(hooks: ModuleType) -> None:
    found = hooks._EXTERNAL.findall
    assert found('<script src="https://cdn.example/a.js">') == ["https://cdn.example/a.js"]
    assert found('<link href="//fonts.example/x" rel=stylesheet>') == ["//fonts.example/x"]
    assert found('<a href="https://example.org">, <img src="images/arm.png">') == []
