"""``actor.recipe``: settings of published algorithms under one name."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from rlinf_async.config import ConfigError, to_toml
from rlinf_async.config.load import Document
from rlinf_async.runtime.jobs.language.config import ActorConfig, LanguageConfig, recipes
from tests.jobs.language.kit import Job

LEAST = """
[model]
path = "models/some"
[data]
tasks = ["chain_sum"]
[training]
iterations = 1
prompts = 8
[actor]
recipe = "dapo"
"""
PAGE = Path(__file__).parents[3] / "docs" / "language-training.md"


def read(text: str = LEAST, **flags: str) -> ActorConfig:
    overrides = {name.replace("__", "."): value for name, value in flags.items()}
    return Document("run.toml", text).to(LanguageConfig, overrides).actor


def test_a_recipe_takes_the_place_of_defaults_and_what_is_written_stands() -> None:
    assert read().loss.clip_high == 0.28
    assert read(LEAST + "[actor.loss]\nclip_low = 0.1\n").loss.clip_high == 0.28
    assert read(LEAST + "[actor.loss]\nclip_high = 0.5\n").loss.clip_high == 0.5
    assert read(actor__loss__clip_high="0.5", actor__recipe="cispo").loss.name == "cispo"
    assert read(actor__recipe="").loss == ActorConfig().loss


@pytest.mark.parametrize("name", recipes())
def test_the_run_folder_says_all_that_a_recipe_has_set(name: str) -> None:
    config = Document("run.toml", LEAST).to(LanguageConfig, {"actor.recipe": name})
    written = to_toml(config)
    assert Document("config.toml", written).to(LanguageConfig) == config
    without = re.sub(r'recipe = ".*"', 'recipe = ""', written)
    assert Document("config.toml", without).to(LanguageConfig).actor.loss == config.actor.loss


def test_an_unknown_recipe_is_named_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"run.toml:10: actor.recipe: .*did you mean 'dapo'"):
        read(LEAST.replace('"dapo"', '"dapoo"'))


def test_the_table_of_the_docs_has_every_recipe_with_what_it_sets() -> None:
    rows = re.findall(r'^\| `"(\w+)"` \| (.*?) \|', PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    described = {name: text.split(";")[0] for name, text in rows if name in recipes()}
    assert described.keys() == recipes().keys()
    plain = ActorConfig()
    for name, text in described.items():
        said: dict[str, Any] = {}
        for setting in re.findall(r"`([^`]* = [^`]*)`", text):
            said |= {setting.split(" = ")[0]: tomllib.loads(f"x = {setting.split(' = ')[1]}")["x"]}
        made, found = recipes()[name], {}
        for section in ("advantage", "loss"):
            ours, theirs = getattr(made, section), getattr(plain, section)
            for field in ours.__struct_fields__:
                value = getattr(ours, field)
                prefix = "loss." if field == "name" else f"{section}."
                key = field if section == "loss" and field != "name" else prefix + field
                if value != getattr(theirs, field) or key in said:
                    found[key] = value
        assert found == said, name


@pytest.mark.parametrize("name", recipes())
def test_a_recipe_trains(tiny: Job, name: str) -> None:
    from tests.jobs.language.test_runs import LETTERS

    tiny.succeed(
        *("--actor.recipe", name, "--training.max_staleness", 1, "--evaluation.samples", 0),
        *("--data.verifier", LETTERS, "--training.iterations", 2, "--actor.optimizer.lr", 1e-2),
        *("--cluster.inference_workers", 0),
    )
    assert max(abs(float(row["grad_norm"])) for row in tiny.iterations) > 0
