"""``--resume --checkpoint NAME``: a run goes on from an older checkpoint than its newest."""

from __future__ import annotations

from tests.jobs.embodied.kit import Job

KEPT = ("--training.keep_checkpoints", 3)
ALL = ["version-000002", "version-000004", "version-000006"]


def test_a_run_goes_on_from_an_older_checkpoint_and_makes_what_follows_it_again(job: Job) -> None:
    job.succeed(*KEPT)
    first = job.iterations
    assert job.checkpoints == ALL
    for name in ("version-000003", "3", "../checkpoints/version-000002", ".", ""):
        ended = job.train(*KEPT, "--resume", "--checkpoint", name)
        assert ended.code == 2
        assert ", ".join(ALL) in ended.err
    ended = job.train(*KEPT, "--resume", "--checkpoint", 2, "--actor.ppo.epochs", 3)
    assert (ended.code, "epochs" in ended.err) == (2, True)
    assert job.note["version"] == 6  # refused: the newest is still the one to resume from

    assert job.succeed(*KEPT, "--resume", "--checkpoint", 2).iterations == 6
    again = job.iterations
    assert [int(row["iteration"]) for row in again] == [*range(6)]
    assert again[:2] == first[:2]
    assert all(new != old for new, old in zip(again[2:], first[2:], strict=True))
    assert (job.note["version"], job.checkpoints) == (6, ALL)


def test_a_checkpoint_is_chosen_only_to_resume(job: Job) -> None:
    ended = job.train("--checkpoint", 2)
    assert ended.code == 2
    assert "give --resume, too" in ended.err
