"""A language run that records its channels."""

from __future__ import annotations

from rlinf_async.messages.language import ScoredSample
from rlinf_async.recording import Delivered, Put, read_recording
from tests.jobs.language.kit import Job


def test_a_run_records_the_channels_that_are_named_and_a_resumed_one_others(job: Job) -> None:
    job.succeed("--record", "generated,scored", "--training.iterations", 2)
    recording = read_recording(job.out)
    assert sorted(recording.channels) == ["generated", "scored"]
    scored = list(recording.items("scored"))
    assert len(scored) >= 2 * 4 * 2  # those of two iterations, and of evaluations
    assert all(isinstance(one.value, ScoredSample) for one in scored)
    assert {one.sender.partition("[")[0] for one in scored} == {"Reward"}
    taken = [at for one in recording.events(Delivered, channel="scored") for at in one.sequences]
    assert taken == [one.sequence for one in scored]
    assert str(job.summary.extra["recording"]).endswith(" MB")

    job.succeed("--record", "all", "--training.iterations", 3, "--resume")
    again = read_recording(job.out)
    assert again.starts == (1, 2)
    assert {"generated", "groups", "requests", "scored", "weights"} <= set(again.channels)
    assert len(list(again.events(Put, channel="requests"))) > 0


def test_a_channel_that_is_not_there_is_named_and_leaves_the_folder_free(job: Job) -> None:
    ended = job.train("--record", "scored,nosuch")
    assert ended.code == 2
    assert "recording.channels: there is no channel 'nosuch' to record: this run has" in ended.err
    assert "scored" in ended.err
    assert not job.out.exists()
    ended = job.train("--record", "all,scored")
    assert (ended.code, "'all' is every channel: leave scored out" in ended.err) == (2, True)
    ended = job.train("--record", "all", "--recording.limit", "much")
    assert (ended.code, "'much' is no size of at least 1 MB" in ended.err) == (2, True)
