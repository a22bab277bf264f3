"""The bottleneck of a run is named from its records, and its advice gains what is predicted."""

from __future__ import annotations

import pathlib

import msgspec
import pytest

from rlinf_async.cli import main
from rlinf_async.observe.bottleneck import analyse
from rlinf_async.observe.run_folder import RunFolder
from rlinf_async.observe.trace import Work
from rlinf_async.observe.waits import Cores, Facts, PartyWork, WaitsRecord
from rlinf_async.observe.what_if import Crew, Pipeline, iteration_seconds
from tests.observe.bottlenecks import CLOSE, Outcome, one_run

SEEDS = (0, 1, 5, 11)


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    return [one_run(seed) for seed in SEEDS]


def test_what_was_slowed_is_named_and_the_advice_gains_what_it_says(
    outcomes: list[Outcome],
) -> None:
    right = [one for one in outcomes if one.right]
    errors = [one.error for one in outcomes if one.error is not None]
    assert len(right) >= len(SEEDS) - 1, "\n".join(map(str, outcomes))
    assert sum(error <= CLOSE for error in errors) >= len(errors) - 1, "\n".join(map(str, outcomes))


def embodied(*, env: float, train: float, seconds: float, busy: float = 0.5) -> WaitsRecord:
    """One iteration of two env workers of ten steps, and an actor."""
    steps = [Work("step", 10 * env, 10 * env, count=10), Work("", 10 * env, 10 * env, count=10)]
    trained = [Work("train", train, train, count=1), Work("", train, train, count=1)]
    parties = [
        PartyWork(worker=f"Env[{rank}]", role="env", seconds=seconds, work=steps)
        for rank in range(2)
    ]
    actor = PartyWork(worker="Actor[0]", role="actor", seconds=seconds, work=trained)
    return WaitsRecord(
        iteration=5,
        seconds=seconds,
        facts=Facts(kind="embodied", samples=2, steps=10),
        parties=[*parties, actor],
        cores=Cores(count=2, busy=busy),
    )


def test_who_waits_for_whom_stands_in_the_sentence() -> None:
    found = analyse([embodied(env=0.8, train=2.0, seconds=10.0)])
    assert found.role == "env"
    assert found.text.startswith("actor waits for env 80% of the time: ")
    assert found.advice is not None
    assert found.advice.role == "env"
    # Twice the env workers need half the steps each; the actor as long as before.
    assert found.roles[0].gain == pytest.approx(0.4)


def test_time_that_is_not_explained_gets_no_gain() -> None:
    found = analyse([embodied(env=0.2, train=0.5, seconds=10.0)])
    assert not found.explained
    assert found.advice is None
    assert "no gain is predicted, as the measured work explains 2.5 s" in found.text


def test_more_processes_are_not_advised_where_all_cores_are_busy() -> None:
    found = analyse([embodied(env=0.8, train=2.0, seconds=10.0, busy=0.97)])
    assert found.role == "env"
    assert found.advice is None
    assert "the 2 cores of this host are busy 97% of the time" in found.text


def test_another_kind_of_job_gets_the_busiest_role_and_no_gain() -> None:
    record = embodied(env=0.8, train=2.0, seconds=10.0)
    record.facts.kind = "other"
    found = analyse([record])
    assert found.text.startswith("env is busiest, 80% of the time, and actor waits 80%; nothing is")


def test_staleness_lets_collecting_and_training_overlap() -> None:
    crews = {"env": Crew(workers=1, alone=1.0), "actor": Crew(workers=1, alone=6.0)}
    on_policy = Pipeline(embodied=True, samples=1, max_staleness=0, steps=10, crews=crews)
    assert iteration_seconds(on_policy) == pytest.approx(16.0)
    assert iteration_seconds(msgspec.structs.replace(on_policy, max_staleness=1)) == pytest.approx(
        10.0
    )


def test_the_command_prints_the_table_and_the_sentence(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    RunFolder.create(run, config_text="").close()
    assert main(["waits", str(run)]) == 2
    assert "has no waits.jsonl" in capsys.readouterr().err
    record = embodied(env=0.8, train=2.0, seconds=10.0)
    (run / "waits.jsonl").write_bytes(msgspec.json.encode(record) + b"\n")
    assert main(["waits", str(run)]) == 0
    printed = capsys.readouterr().out
    assert "iterations 4 to 4, 10 s each" in printed
    assert "actor waits for env 80% of the time" in printed
    assert main(["waits", str(run), "--json", "--iteration", "4"]) == 0
    assert msgspec.json.decode(capsys.readouterr().out)["role"] == "env"
    for wrong in ("x", "5", "5-2"):
        assert main(["waits", str(run), "--iteration", wrong]) == 2
        said = capsys.readouterr().err
        assert f"--iteration {wrong}" in said or f"none of {wrong} to {wrong}" in said
