"""A part says everything about itself: nobody outside its folder compares its name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlinf_async.backends.parts import engines, language_trainers
from tests.architecture.sources import ROOT

NAMES = {*engines.paths, *language_trainers.paths}
TABLE = "rlinf_async/backends/parts.py"
ELSEWHERE = {
    "rlinf_async/runtime/ray/training": "arguments that slime has, and the actors it has for them",
    "rlinf_async/workers/actor/language.py": "FSDPActor, which is named after its trainer",
    "rlinf_async/workers/actor/megatron.py": "MegatronActor",
    "rlinf_async/workers/critic.py": "FSDPCritic, MegatronCritic",
    "rlinf_async/backends/language.py": "the table of families that were tried with each engine",
    "rlinf_async/runtime/jobs/config.py": "distributions whose versions a run notes",
    "rlinf_async/parallel": "names of decoders, as each library has them",
}
"""where a name is not that of a part, or the public class that is called so, and why"""
LIBRARY = ("import_module", "needed", "find_spec", "MissingExtra", "getattr")
"""calls whose arguments are modules"""


def sources() -> Iterator[Path]:
    for folder in ("rlinf_async", "workers", "channels"):
        yield from sorted((ROOT / folder).rglob("*.py"))


def own_folder(name: str, place: str) -> bool:
    return f"/{name.removesuffix('_critic')}/" in place


def named(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Names of parts in code, but those of libraries and those in the path of a setting."""
    spared: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if called in LIBRARY:
                spared |= {id(one) for one in node.args}
        if isinstance(node, ast.Tuple) and node.elts:
            first = node.elts[0]
            if isinstance(first, ast.Constant) and first.value in ("actor", "rollout", "critic"):
                spared |= {id(one) for one in node.elts}
        if isinstance(node, ast.BoolOp):  # the module that an ImportError names, or this one
            spared |= {id(one) for one in node.values}
        if isinstance(node, ast.Assign) and any(
            isinstance(one, ast.Name) and one.id in ("library", "extra", "__all__")
            for one in node.targets
        ):
            spared |= {id(one) for one in ast.walk(node.value)}
        if isinstance(node, ast.Constant) and node.value in NAMES and id(node) not in spared:
            yield str(node.value), node.lineno


def test_no_name_of_an_engine_or_a_trainer_stands_outside_its_folder() -> None:
    found = []
    for path in sources():
        place = str(path.relative_to(ROOT))
        place = place if place.startswith("rlinf_async") else f"rlinf_async/{place}"
        if place == TABLE or any(place.startswith(one) for one in ELSEWHERE):
            continue
        for name, line in named(ast.parse(path.read_text())):
            if not own_folder(name, place):
                found.append(f"{place}:{line} {name}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("kind", [engines, language_trainers], ids=lambda one: one.kind)
def test_every_built_in_part_stands_in_a_folder_of_its_name(kind: object) -> None:
    assert kind in (engines, language_trainers)
    paths = engines.paths if kind is engines else language_trainers.paths
    for name, where in paths.items():
        module, _, _ = where.partition(":")
        assert module.endswith(".part")
        assert own_folder(name, module.replace(".", "/"))


def unlocked(tree: ast.AST) -> Iterator[int]:
    """Lines where transformers makes a model, without the lock of `building` around them."""
    spared: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.With) and any(
            isinstance(one, ast.Name) and one.id in ("one_at_a_time", "building")
            for item in node.items
            for one in ast.walk(item.context_expr)
        ):
            spared |= {id(one) for one in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = getattr(node.func.value, "attr", getattr(node.func.value, "id", ""))
            makes = node.func.attr in ("from_pretrained", "from_config")
            if makes and not owner.endswith(NO_MODEL) and id(node) not in spared:
                yield node.lineno


NO_MODEL = ("Config", "Tokenizer", "Processor", "DecoderSizes")
"""ends of the names of classes that are no models"""


def test_models_of_transformers_are_made_one_at_a_time() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sources()
        for line in unlocked(ast.parse(path.read_text()))
    ]
    assert found == [], "two threads that load at once change what is global to a process"
    assert list(unlocked(ast.parse("AutoModelForCausalLM.from_pretrained(folder)"))) == [1]
