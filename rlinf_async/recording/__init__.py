"""Recordings of a run: everything that passed its channels, in order, in files that can be read
while they are written, and after the run was killed."""

from rlinf_async.recording.errors import (
    DamagedRecording,
    NoRecording,
    NothingYet,
    NotRecorded,
    OtherVersion,
    RecordingError,
    SegmentGone,
    TypeChanged,
    TypeGone,
)
from rlinf_async.recording.events import (
    Called,
    ChannelEnded,
    Declared,
    Delivered,
    Dropped,
    Event,
    Launched,
    Published,
    Put,
    Replaced,
    Returned,
    Seen,
    Settled,
    Withdrawn,
)
from rlinf_async.recording.reader import (
    RecordedChannel,
    RecordedItem,
    Recording,
    read_recording,
)
from rlinf_async.recording.recorder import Recorder, RecorderState
from rlinf_async.recording.segments import Damage

__all__ = [
    "Called",
    "ChannelEnded",
    "Damage",
    "DamagedRecording",
    "Declared",
    "Delivered",
    "Dropped",
    "Event",
    "Launched",
    "NoRecording",
    "NotRecorded",
    "NothingYet",
    "OtherVersion",
    "Published",
    "Put",
    "RecordedChannel",
    "RecordedItem",
    "Recorder",
    "RecorderState",
    "Recording",
    "RecordingError",
    "Replaced",
    "Returned",
    "Seen",
    "SegmentGone",
    "Settled",
    "TypeChanged",
    "TypeGone",
    "Withdrawn",
    "read_recording",
]
