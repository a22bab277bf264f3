"""No module imports itself by way of others.

Imports count wherever they stand, those inside functions and those for type checkers too: a circle
that is hidden there is one to the reader. How imports are resolved, and how packages that offer the
names of their submodules count, is said at `sources.import_graph`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tests.architecture.sources import import_graph


def circles(graph: Mapping[str, Iterable[str]]) -> list[frozenset[str]]:
    """The groups of modules that all reach one another (Tarjan's strongly connected components)."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[frozenset[str]] = []

    def visit(name: str) -> None:
        number[name] = lowest[name] = len(number)
        stack.append(name)
        for other in graph[name]:
            if other not in number:
                visit(other)
            if other in stack:
                lowest[name] = min(lowest[name], lowest[other])
        if lowest[name] == number[name]:
            at = stack.index(name)
            group = frozenset(stack[at:])
            del stack[at:]
            if len(group) > 1:
                found.append(group)

    for name in graph:
        if name not in number:
            visit(name)
    return found


def test_no_modules_import_one_another_in_a_circle() -> None:
    found = circles(import_graph())
    assert not found, "\n".join(f"a circle: {', '.join(sorted(one))}" for one in found)


def test_every_circle_of_a_graph_is_found() -> None:
    graph = {"a": "bd", "b": "c", "c": "a", "d": "e", "e": "f", "f": "e", "g": "a"}
    assert set(circles(graph)) == {frozenset("abc"), frozenset("ef")}
    assert not circles({"a": "bc", "b": "c", "c": ""})


def test_the_graph_knows_submodules_packages_and_hidden_imports() -> None:
    graph = import_graph()
    assert "rlinf_async.data.records" in graph["rlinf_async.data.prompts"]
    assert "rlinf_async.data" not in graph["rlinf_async.data.prompts"]
    assert "rlinf_async.channels.local" in graph["rlinf_async.channels"]
    assert "rlinf_async.channels" in graph["rlinf_async.workers.reward"]
    lazy = graph["rlinf_async.workers.rollout.policy"]
    assert "rlinf_async.backends.base" in lazy
    for_type_checkers = graph["rlinf_async.workers.inference"]
    assert "rlinf_async.backends.language" in for_type_checkers
