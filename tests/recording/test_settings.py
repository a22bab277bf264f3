"""Settings of a recording: what is wrong is named by its path, once, and by where it was set."""

from __future__ import annotations

import msgspec
import pytest

from rlinf_async.cli import main
from rlinf_async.config import ConfigError
from rlinf_async.config.load import Document
from rlinf_async.runtime.recording import RecordingConfig


class Job(msgspec.Struct, kw_only=True):
    """A job that can be recorded."""

    recording: RecordingConfig = RecordingConfig()


def said_of(text: str, **flags: str) -> str:
    """The error of a file, and of flags over it."""
    overrides: dict[str, str | None] = {f"recording.{name}": one for name, one in flags.items()}
    with pytest.raises(ConfigError) as caught:
        Document("job.toml", text).to(Job, overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("channels", "said"),
    [
        ('["all", "generated"]', "'all' is every channel: leave generated out, or 'all'"),
        ('["", ""]', "a name in it is empty: name channels, or 'all'; [] records nothing"),
        ('["a", "b", "a"]', "'a' stands there more than once"),
    ],
)
def test_channels_that_cannot_be_meant_are_refused(channels: str, said: str) -> None:
    flag = "command line (--recording.channels): recording.channels: "
    assert said_of("", channels=channels) == flag + said
    file = f"[recording]\nchannels = {channels}\n"
    assert said_of(file) == f"job.toml:2: recording.channels: {said}"


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        ("lots", "'lots' is no size of at least 1 MB: write '500 MB', '2 GB'"),
        ("999 kB", "'999 kB' is no size of at least 1 MB: write '500 MB', '2 GB'"),
        ("1e9", "'1e9' has no unit: write '500 MB', '2 GB'"),
        ("1000000000", "'1000000000' has no unit: write '500 MB', '2 GB'"),
    ],
)
def test_a_limit_that_is_no_size_is_refused(limit: str, said: str) -> None:
    flag = "command line (--recording.limit): recording.limit: "
    assert said_of("", limit=limit) == flag + said


def test_record_and_the_setting_that_it_is_are_not_given_both(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", "job.toml", "--record", "all", "--recording.channels", "scored"]) == 2
    said = "--record and --recording.channels are the same: give one of them"
    assert said in capsys.readouterr().err
