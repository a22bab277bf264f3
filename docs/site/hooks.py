"""What the site adds to the pages of ``docs/``, and what it holds them to.

Added: the reference, one page for each public module; and what pages link to outside ``docs/``
(examples, the README): on GitHub such a link opens the file, here a page that shows it.

Held, beside what ``mkdocs build --strict`` checks: every public name stands in the reference;
every ``rlinf_async.`` name that a page has in its text or in an import exists; no page loads
anything from another place.
"""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).parents[2]
PACKAGE: Final = "rlinf_async"
FIRST: Final = (PACKAGE, f"{PACKAGE}.channels", f"{PACKAGE}.workers", f"{PACKAGE}.runtime")
"""modules that come before the others, which follow by name"""
WITHOUT_ALL: Final = (
    "algorithms.advantages",
    "algorithms.language.advantages",
    "algorithms.language.losses",
    "algorithms.losses",
    "backends.base",
    "backends.language",
    "backends.parts",
    "config.counts",
    "config.registry",
    "messages.embodied",
    "messages.language",
    "messages.spaces",
    "messages.weights",
    "observe.metrics",
    "observe.run_folder",
    "observe.status",
    "observe.summary",
    "runtime.jobs.checkpoints",
    "runtime.jobs.run",
    "runtime.jobs.view",
    "workers.reward",
    "workers.rollout.language",
)
"""public modules that have no ``__all__``: all that they define is public, and so are the settings,
modules called ``config``, ``settings`` or ``..._config``"""

_FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?\)")
_NAME = re.compile(rf"`({PACKAGE}(?:\.\w+)+)`")
_EXTERNAL = re.compile(
    r"<(?:script|link|img|iframe)\b[^>]*(?:src|href)=\"?((?:https?:)?//[^\">\s]+)"
)
_AWAIT: Final = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
_LANGUAGES: Final = {".py": "python", ".toml": "toml", ".sh": "sh", ".jinja": "jinja"}
_sources: Final[dict[str, str]] = {}
"""paths in the repository of what the pages show, by page"""


_ITSELF: Final = "    options:\n      members: false\n      show_root_heading: false\n"


# ---- the reference


@cache
def package() -> griffe.Module:
    """The whole package, read from its text."""
    found = griffe.load(PACKAGE, search_paths=[ROOT / "src"], allow_inspection=False)
    assert isinstance(found, griffe.Module)
    return found


def public_modules() -> dict[str, list[str]]:
    """The public names of every public module, in the order of the reference."""
    found: dict[str, list[str]] = {}
    for module in _modules(package()):
        names = _names(module)
        if names:
            found[module.path] = names
    first = [path for path in FIRST if path in found]
    return {path: found[path] for path in (*first, *sorted(set(found) - set(first)))}


def _modules(module: griffe.Module) -> Iterator[griffe.Module]:
    yield module
    for inner in module.modules.values():
        if not inner.is_alias and not inner.name.startswith("_"):
            yield from _modules(inner)


def _names(module: griffe.Module) -> list[str]:
    if module.exports is not None:
        return [str(name) for name in module.exports]
    short = module.path.removeprefix(f"{PACKAGE}.")
    settings = module.name in ("config", "settings") or module.name.endswith("_config")
    if short not in WITHOUT_ALL and not (settings and not module.is_init_module):
        return []
    return [
        name
        for name, member in module.members.items()
        if not (name.startswith("_") or member.is_alias)
        if member.is_class or member.is_function
    ]


def reference() -> dict[str, str]:
    """The pages of the reference: their Markdown by their module.

    A name that several modules offer is explained on the first one's page; the others link to it.
    """
    first: dict[str, str] = {}
    pages: dict[str, str] = {}
    for path, names in public_modules().items():
        here, elsewhere = list[str](), list[str]()
        for name in names:
            full = f"{path}.{name}"
            home = first.setdefault(_canonical(full), full)
            if home == full:
                here.append(f"::: {full}\n")
            else:
                elsewhere.append(f"- [`{name}`][{home}], of `{home.rpartition('.')[0]}`\n")
        head = f"# `{path}`\n\n::: {path}\n{_ITSELF}"
        also = ["## Also here\n", "".join(elsewhere)] if elsewhere else []
        pages[path] = "\n".join([head, *here, *also])
    return pages


def _canonical(full: str) -> str:
    """Where the object behind a name is defined; `PluginError` where there is none."""
    try:
        return str(package()[full.removeprefix(f"{PACKAGE}.")].canonical_path)
    except (KeyError, griffe.AliasResolutionError) as error:
        raise PluginError(f"the reference names {full}, which is not there") from error


# ---- names


def missing_names(markdown: str) -> set[str]:
    """Names of the project in a page's text, and in the imports of its examples, that do not
    exist. A string of the code counts, too: groups of entry points are called so."""
    found = set(_NAME.findall(_FENCE.sub("", markdown)))
    for _, language, text in _FENCE.findall(markdown):
        if language == "python":
            found |= set(_imported(text))
    return {name for name in found if not (_is_there(name) or name in _strings())}


def _imported(text: str) -> Iterator[str]:
    for node in ast.walk(compile(text, "", "exec", ast.PyCF_ONLY_AST | _AWAIT)):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(f"{PACKAGE}."):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _is_there(name: str) -> bool:
    try:
        package()[name.removeprefix(f"{PACKAGE}.")].canonical_path  # noqa: B018 it may raise
    except (KeyError, griffe.AliasResolutionError):
        return False
    return True


@cache
def _strings() -> frozenset[str]:
    folders = (ROOT / name for name in (PACKAGE, "channels", "workers"))
    texts = [one.read_text(encoding="utf-8") for each in folders for one in each.rglob("*.py")]
    return frozenset(name for text in texts for name in re.findall(rf'"({PACKAGE}\.\w+)"', text))


# ---- what lies outside docs/


def targets(markdown: str, source: str) -> Iterator[str]:
    """What the links of a page lead to, as paths from the root of the repository."""
    for found in _LINK.finditer(_FENCE.sub("", markdown)):
        if path := _path(found["target"], source):
            yield path


def _path(target: str, source: str) -> str:
    """What a link leads to, as a path from the root; empty where it is nothing of it."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    return path if ":" not in target and (ROOT / path).exists() else ""


def page_of(path: str) -> str:
    """The page on which the site has a file or folder of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    name = path.removesuffix(".md").replace("README", "about")  # a README would be an index
    return f"files/{name}.md"


def show(path: str) -> str:
    """A page with the text of a file, or with the names in a folder."""
    place = ROOT / path
    if place.is_dir():
        names = sorted(one.name for one in place.iterdir() if one.name != "__pycache__")
        return f"# `{path}`\n\n" + "".join(f"- `{name}`\n" for name in names)
    text = place.read_text(encoding="utf-8")
    if place.suffix == ".md":
        return f"---\nsearch:\n  exclude: true\n---\n{text}"
    return f"# `{path}`\n\n````{_LANGUAGES.get(place.suffix, 'text')}\n{text}````\n"


def relinked(markdown: str, source: str) -> str:
    """The page with links that lead to pages of the site; its code is left alone."""
    here = posixpath.dirname(page_of(source))

    def link(found: re.Match[str]) -> str:
        path = _path(found["target"], source)
        if not path:
            return found[0]
        return f"]({posixpath.relpath(page_of(path), here or '.')}{found['anchor'] or ''})"

    parts, at = list[str](), 0
    for fence in _FENCE.finditer(markdown):
        parts += [_LINK.sub(link, markdown[at : fence.start()]), fence[0]]
        at = fence.end()
    return "".join([*parts, _LINK.sub(link, markdown[at:])])


# ---- hooks of MkDocs


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Enter into the navigation what it does not name: pages that are new, and the reference."""
    nav: list[Any] = list(config.nav or ())
    named = set(re.findall(r"[\w/-]+\.md", str(nav)))
    folder = Path(config.docs_dir)
    found = sorted(page.relative_to(folder).as_posix() for page in folder.rglob("*.md"))
    if new := [page for page in found if page not in named]:
        nav.append({"More": new})
    nav.append({"Reference": [{path: f"reference/{path}.md"} for path in _wanted(config)]})
    config.nav = nav
    return config


def _wanted(config: MkDocsConfig) -> dict[str, str]:
    """The pages of the reference; of ``extra.reference`` alone, where the configuration has it."""
    every = reference()
    return {path: every[path] for path in config.extra.get("reference", every)}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made."""
    waiting = {f"docs/{one.src_uri}": one.content_string for one in files.documentation_pages()}
    for path, text in _wanted(config).items():
        files.append(File.generated(config, f"reference/{path}.md", content=text))
    _sources.clear()
    while waiting:
        source, markdown = waiting.popitem()
        _sources[page_of(source)] = source
        for path in targets(markdown, source):
            if not path.startswith("docs/") and page_of(path) not in _sources:
                waiting[path] = show(path)
                _sources[page_of(path)] = path
                made = File.generated(config, page_of(path), content=waiting[path])
                made.inclusion = InclusionLevel.NOT_IN_NAV
                files.append(made)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to where the site has what they name; check the page's names."""
    source = _sources.get(page.file.src_uri)
    if source is None:  # a page of the reference
        return markdown
    past = source == "CHANGELOG.md"  # tells of names that are gone
    if not past and (wrong := sorted(missing_names(markdown))):
        raise PluginError(f"{source} names what is not there: {', '.join(wrong)}")
    return relinked(markdown, source)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Refuse what a page would load from elsewhere."""
    if loaded := _EXTERNAL.findall(output):
        raise PluginError(f"{page.file.src_uri} loads {', '.join(loaded)}: keep it in docs/")
    return output


def on_post_build(config: MkDocsConfig) -> None:
    """Hold that every public name can be linked to."""
    for path, text in _wanted(config).items():
        html = Path(config.site_dir, "reference", f"{path}.html").read_text(encoding="utf-8")
        names = re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE)
        if missing := [name for name in names if f'id="{name}"' not in html]:
            raise PluginError(f"the reference lacks {', '.join(missing)}")
