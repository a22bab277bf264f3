"""What can be wrong with a recording.

::

    RecordingError
      NoRecording          the folder holds none, or not this start of the run
        NothingYet         it has begun, and nothing of it is written so far
      SegmentGone          a file of it was deleted for the limit while it was read
      OtherVersion         it is of a version of the format that cannot be read here
      DamagedRecording     a file does not begin as one of a recording does
      TypeGone             the type of a channel cannot be imported any more
      TypeChanged          it is there, with another schema than the items were recorded with
      NotRecorded          there is no such channel in it
"""

from __future__ import annotations


class RecordingError(Exception):
    """A recording cannot be read, or not what was asked of it."""


class NoRecording(RecordingError):
    """The folder holds no recording."""


class NothingYet(NoRecording):
    """A recording has begun here, and nothing of it is written yet."""


class SegmentGone(RecordingError):
    """A file of the recording was deleted for its limit, just now."""


class OtherVersion(RecordingError):
    """The recording is of another version of the format."""


class DamagedRecording(RecordingError):
    """The file is no recording, or its beginning is damaged."""


class TypeGone(RecordingError):
    """The type of a channel's items cannot be imported."""


class TypeChanged(RecordingError):
    """The type of a channel's items is not what it was."""


class NotRecorded(RecordingError):
    """The channel is not in the recording."""
