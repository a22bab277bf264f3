"""What the documentation says is so: its links, its examples, its settings, its options."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest

from rlinf_async.cli import COMMANDS, commands
from rlinf_async.config import Document
from rlinf_async.observe.sinks.config import ObserveConfig
from rlinf_async.runtime.jobs.embodied.settings import EmbodiedConfig
from rlinf_async.runtime.jobs.embodied_offline.config import OfflineConfig
from rlinf_async.runtime.jobs.embodied_sac.config import SacConfig
from rlinf_async.runtime.jobs.language.config import ClusterConfig, LanguageConfig
from rlinf_async.runtime.jobs.supervised.config import DistillConfig, DpoConfig, SftConfig
from rlinf_async.runtime.jobs.world_model.config import WorldModelConfig
from rlinf_async.runtime.recording import RecordingConfig
from rlinf_async.simulate import SimulationConfig
from tests.docs.pages import PAGES, ROOT, Block, Script, anchors, blocks, links, scripts, settings

EVERY_BLOCK = [block for page in PAGES for block in blocks(page)]
REQUIRED = "required"
SINKS = settings(ROOT / "docs" / "metrics-sinks.md")
"""settings that all jobs share"""
README_WORKER = next(one.block for one in scripts() if one.block.page == ROOT / "README.md")


def run_script(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(text, encoding="utf-8")
    return subprocess.run(
        [sys.executable, str(script)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def timeless(printed: str) -> str:
    """Without how long somebody has waited: a busy machine adds to it."""
    return re.sub(r"has waited \d+\.\d s ", "has waited _ s ", printed)


def defaults(struct: Any, prefix: str = "") -> dict[str, object]:
    """``{"section.field": default}`` of a configuration and all its sections."""
    found: dict[str, object] = {}
    for field in msgspec.structs.fields(struct):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            found |= defaults(field.type, f"{prefix}{field.name}.")
        elif field.required:
            found[prefix + field.name] = REQUIRED
        else:
            made = field.default_factory is not msgspec.NODEFAULT
            value = field.default_factory() if made else field.default
            found[prefix + field.name] = list(value) if isinstance(value, tuple) else value
    return found


def written(cell: str) -> object:
    """The value that a table's cell stands for."""
    return None if cell == "none" else cell if cell == REQUIRED else msgspec.json.decode(cell)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    for target in links(page):
        path, _, anchor = target.partition("#")
        if "://" in path:
            continue
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(file), f"{page.name}: {target}"


def linked(page: Path) -> set[Path]:
    """The files that a page links to."""
    return {(page.parent / target.partition("#")[0]).resolve() for target in links(page)}


def test_every_page_stands_in_the_list_of_pages() -> None:
    pages = {page for page in ROOT.glob("docs/**/*.md") if page.name != "README.md"}
    missing = pages - linked(ROOT / "docs" / "README.md")
    assert not missing, f"missing: {sorted(page.name for page in missing)}"


def test_the_readme_is_two_screens_and_leads_to_every_tutorial() -> None:
    readme = ROOT / "README.md"
    assert len(readme.read_text(encoding="utf-8").splitlines()) <= 105
    assert linked(readme) >= {*ROOT.glob("docs/tutorials/*.md"), ROOT / "docs" / "README.md"}


def test_every_package_stands_in_the_folders_of_the_architecture() -> None:
    """Those under a role or a backend are that one's own affair."""
    tree = next(one.text for one in blocks(ROOT / "docs" / "architecture.md"))
    depths = ("channels/*", "workers/*", "rlinf_async/*", "rlinf_async/backends/*")
    found = [one.parent.name for depth in depths for one in ROOT.glob(f"{depth}/__init__.py")]
    assert len(found) > 20
    assert [name for name in found if f"{name}/" not in tree] == []


@pytest.mark.parametrize("script", list(scripts()), ids=lambda one: one.block.where)
def test_every_example_runs_and_prints_what_the_page_shows(script: Script, tmp_path: Path) -> None:
    done = run_script(script.block.text, tmp_path)
    assert done.returncode == 0, done.stderr
    if script.prints is not None:
        assert timeless(done.stdout) == timeless(script.prints)


def test_the_worker_in_the_readme_runs_the_same_on_both_backends(tmp_path: Path) -> None:
    text = README_WORKER.text
    assert text.count("Cluster.process()") == 1
    processes = run_script(text, tmp_path)
    one_loop = run_script(text.replace("Cluster.process()", "Cluster.local()"), tmp_path)
    assert processes.returncode == one_loop.returncode == 0, processes.stderr + one_loop.stderr
    assert processes.stdout == one_loop.stdout != ""


@pytest.mark.parametrize(
    "block", [one for one in EVERY_BLOCK if one.language == "python"], ids=lambda one: one.where
)
def test_every_python_block_is_python(block: Block) -> None:
    compile(block.text, block.where, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@pytest.mark.parametrize(
    "block", [one for one in EVERY_BLOCK if one.language == "toml"], ids=lambda one: one.where
)
def test_every_configuration_shown_can_be_read(block: Block) -> None:
    jobs = {
        "language_rl": LanguageConfig,
        "embodied_sac": SacConfig,
        "embodied_offline": OfflineConfig,
        "sft": SftConfig,
        "dpo": DpoConfig,
        "distill": DistillConfig,
        "world_model": WorldModelConfig,
    }
    shown = [kind for name, kind in jobs.items() if f'job = "{name}"' in block.text]
    job: Any = shown[0] if shown else EmbodiedConfig
    if "[generation]" in block.text:
        job = SimulationConfig
    sections: dict[str, tuple[str, Any]] = {  # pages that show one section
        "metrics-sinks.md": ("observe", ObserveConfig),
        "placement.md": ("cluster", ClusterConfig),
        "recording.md": ("recording", RecordingConfig),
    }
    if (section := sections.get(block.page.name)) is not None:
        job = msgspec.defstruct("Section", [section], forbid_unknown_fields=True)
    if block.page.name == "jobs.md":  # tests/jobs/test_own_job.py runs that one
        return
    Document(block.where, block.text).to(job)


def test_the_table_of_settings_has_every_setting_and_its_default() -> None:
    page = settings(ROOT / "docs" / "embodied.md") | SINKS
    assert {name: written(cell) for name, cell in page.items()} == defaults(EmbodiedConfig)


OF_PPO = tuple(
    f"{one}."
    for one in (
        *("model", "env", "curriculum", "rollout", "evaluation", "hooks", "recording"),
        *("samples", "cluster", "actor.fsdp.scheduler", "training.stop_at", "training.keep_best"),
    )
)
"""sections of jobs in environments that stand on the page of the PPO job"""


def test_the_tables_of_soft_actor_critic_have_every_setting_and_its_default() -> None:
    """Sections that are those of the PPO job stand on its page."""
    shared, others = OF_PPO, settings(ROOT / "docs" / "embodied.md")
    page = {name: cell for name, cell in others.items() if name.startswith(shared)}
    page |= settings(ROOT / "docs" / "sac.md") | SINKS
    assert {name: written(cell) for name, cell in page.items()} == defaults(SacConfig)


def test_the_tables_of_learning_from_data_alone_have_every_setting_and_its_default() -> None:
    """Sections that are those of other jobs stand on their pages."""
    page = SINKS.copy()
    for name, shared in (
        ("embodied", OF_PPO),
        ("sac", ("demonstrations.", "actor.bucket_bytes", "actor.seed", "actor.fsdp.")),
        ("offline", ("",)),
    ):
        found = settings(ROOT / "docs" / f"{name}.md")
        page |= {one: cell for one, cell in found.items() if one.startswith(shared)}
    assert {name: written(cell) for name, cell in page.items()} == defaults(OfflineConfig)


def test_the_tables_of_the_language_job_have_every_setting_and_its_default() -> None:
    page = SINKS.copy()
    pages = ("language", "language-data", "language-rollout", "language-training", "episodes")
    for name in pages:
        page |= settings(ROOT / "docs" / f"{name}.md")
    assert {name: written(cell) for name, cell in page.items()} == defaults(LanguageConfig)


def test_the_tables_of_world_models_have_every_setting_and_its_default() -> None:
    """Sections that are those of the PPO job stand on its page."""
    shared = ("actor.fsdp.scheduler.", "cluster.")
    others = settings(ROOT / "docs" / "embodied.md")
    page = {name: cell for name, cell in others.items() if name.startswith(shared)}
    page = {name.replace("actor.fsdp.", "actor."): cell for name, cell in page.items()}
    own = settings(ROOT / "docs" / "world-models.md")
    expected = defaults(WorldModelConfig)
    page = {name: cell for name, cell in (page | own | SINKS).items() if name in expected}
    assert own.keys() <= expected.keys()
    assert {name: written(cell) for name, cell in page.items()} == expected


OTHERS: dict[str, dict[str, object]] = {
    "sft": {},
    "dpo": {"job": "dpo", "name": "dpo", "actor.optimizer.lr": 1e-6},
    "distill": {"job": "distill", "name": "distill"},
}
"""defaults that are not those in the tables, by job"""


SUPERVISED = {"sft": SftConfig, "dpo": DpoConfig, "distill": DistillConfig}


@pytest.mark.parametrize("config", SUPERVISED.values(), ids=SUPERVISED)
def test_the_tables_of_supervised_jobs_have_every_setting_and_its_default(config: Any) -> None:
    """Sections that are those of the language job stand on its page, and each job has its own."""
    sections = ("model", "actor.scheduler", "actor.megatron", "recording", "cluster")
    others = settings(ROOT / "docs" / "language.md")
    page = {name: cell for name, cell in others.items() if name.rpartition(".")[0] in sections}
    page |= {name: cell for name, cell in others.items() if name.startswith("cluster.ray.")}
    own = settings(ROOT / "docs" / "supervised.md")
    expected = defaults(config)
    assert own.keys() <= {name for one in SUPERVISED.values() for name in defaults(one)}
    page = {name: cell for name, cell in (page | own | SINKS).items() if name in expected}
    found = {name: written(cell) for name, cell in page.items()} | OTHERS[str(expected["job"])]
    assert found == expected


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_of_the_command_line_is_explained(name: str) -> None:
    text = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
    assert f"rlinf-async {name}" in text
    command = commands.get_command(click.Context(commands), name)
    assert command is not None
    options = [one for one in command.params if isinstance(one, click.Option)]
    missing = [one.opts[0] for one in options if f"`{one.opts[0]}" not in text]
    assert not missing
