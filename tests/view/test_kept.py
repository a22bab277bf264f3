"""Pages of samples: each record once, in the order that is asked for, whatever comes meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlinf_async.observe.files import RunFolderError
from rlinf_async.view.kept import KeptSamples, Query
from tests.view.kit import entered, keep_samples, make_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = make_run(tmp_path_factory.mktemp("kept") / "run")
    keep_samples(run)
    return run


def every_page(kept: KeptSamples, **wanted: Any) -> list[str]:
    """The names of all pages, one after the other."""
    names: list[str] = []
    after = None
    while rows := kept.page(Query(after=after, count=50, **wanted))["rows"]:
        names += [one["name"] for one in rows]
        after = rows[-1]["key"]
    return names


@pytest.mark.parametrize("order", ["written", "reward", "tokens", "iteration"])
@pytest.mark.parametrize("descending", [True, False])
def test_the_pages_of_an_order_have_each_record_once(
    run: Path, order: str, descending: bool
) -> None:
    names = every_page(KeptSamples(run), order=order, descending=descending)
    assert len(names) == len(set(names)) == 120
    if order in ("written", "reward"):
        assert names[0] == ("14/7" if descending else "0/0")


def test_a_page_is_not_moved_by_what_comes_meanwhile(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    keep_samples(run, groups=10)
    kept = KeptSamples(run)
    first = kept.page(Query(count=50))
    segment = run / "samples" / "000001.jsonl"
    lines = segment.read_bytes().splitlines(keepends=True)
    newer = lines[-1].replace(b'"name":"9/7"', b'"name":"10/0"')
    with segment.open("ab") as file:
        file.write(newer)
    second = kept.page(Query(after=first["rows"][-1]["key"], count=50))
    assert (second["all"], second["first"]) == (81, 51)
    names = [one["name"] for one in (*first["rows"], *second["rows"])]
    assert len(names) == len(set(names)) == 80


def test_records_are_chosen_by_prompt_iteration_and_kind(run: Path) -> None:
    kept = KeptSamples(run)
    assert every_page(kept, name="3/1") == ["3/1"]
    assert len(every_page(kept, name="3")) == len(every_page(kept, iteration=3)) == 8
    assert every_page(kept, kind="evaluation") == every_page(kept, failed=True) == []
    with pytest.raises(RunFolderError, match="the order 'age' is not known"):
        kept.page(Query(order="age"))


def test_what_is_asked_wrongly_or_is_gone_is_named(run: Path) -> None:
    with entered(run) as client:
        for query in ("count=x", "kind=other", "iteration=1.5"):
            assert client.get(f"/api/samples?run=0&{query}").status_code == 404
        told = client.get("/api/sample", params={"run": 0, "key": "5.0.777.0"}).json()
        assert "is not there any more" in told["error"]
        assert "names no sample" in client.get("/api/sample?run=0&key=../x").json()["error"]
        one = client.get("/api/sample", params={"run": 0, "key": "3.0.3.1"}).json()["record"]
        assert (one["name"], one["tokens_texts"]) == ("3/1", ["a", "<b>", " "])


def test_a_run_without_samples_has_an_empty_list(tmp_path: Path) -> None:
    page = KeptSamples(make_run(tmp_path / "none")).page(Query())
    assert (page["all"], page["rows"]) == (0, [])
