"""The files of a recording: what is read of one that is torn, damaged, of another version, or cut
for its limit; and a disk that does not take it."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import shutil
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import zstandard

from rlinf_async.channels import Channel
from rlinf_async.channels.encoded import Encoded
from rlinf_async.recording import (
    Called,
    DamagedRecording,
    Dropped,
    Event,
    Launched,
    NoRecording,
    NothingYet,
    NotRecorded,
    OtherVersion,
    Put,
    Recorder,
    RecordingError,
    Returned,
    read_recording,
    reader,
    segments,
)
from tests.recording.killed import run_lives

FRAMES = 6


def put(number: int, nbytes: int = 0) -> tuple[Put, Encoded]:
    """An event with a body, as a tap makes it."""
    data = np.random.default_rng(number).bytes(nbytes)
    return Put(channel="items", sequence=number), Encoded(b"\xc0", [bytearray(data)])


def write(folder: Path, numbers: Sequence[int], nbytes: int = 2000, **options: int) -> Recorder:
    """A recording with a frame for each event."""
    recorder = Recorder(folder, **options)
    for number in numbers:
        event, body = put(number, nbytes)
        recorder.note(event, body)
        assert recorder.flush() or recorder.failure
    return recorder


def sequences(folder: Path) -> list[int]:
    return [one.sequence for one in read_recording(folder).events(Put)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The only segment of a recording of `FRAMES` frames."""
    folder = tmp_path_factory.mktemp("whole") / "1"
    write(folder, range(1, FRAMES + 1)).close()
    return folder / "000001.rec"


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    """A copy of it, in a folder of its own."""
    (tmp_path / "1").mkdir()
    return Path(shutil.copy(whole, tmp_path / "1" / whole.name))


def frames(path: Path) -> list[segments.Frame]:
    return segments.Segment(path, last=True).frames


def test_a_file_that_ends_anywhere_is_read_to_its_last_whole_frame(whole: Path, copy: Path) -> None:
    data, ends = whole.read_bytes(), [one.end for one in frames(whole)]
    assert len(ends) == FRAMES
    assert ends[-1] == len(data)
    places = sorted(
        {0, 1, 11, 12, 13, 40, *ends, *(end - 1 for end in ends), *range(0, len(data), 97)}
    )
    for length in places:
        copy.write_bytes(data[:length])
        recording = read_recording(copy.parent)
        kept = sum(end <= length for end in ends)
        assert [one.sequence for one in recording.events(Put)] == list(range(1, kept + 1))
        assert recording.damaged == []
        assert (
            recording.torn == length - max([0, *(end for end in ends if end <= length)]) or not kept
        )


def test_a_damaged_frame_is_left_out_named_and_counted_once(whole: Path, copy: Path) -> None:
    data, found = whole.read_bytes(), frames(whole)
    for index in range(FRAMES):
        for at in (found[index].offset, found[index].offset + 5, found[index].end - 1):
            broken = bytearray(data)
            broken[at] ^= 0xFF
            copy.write_bytes(broken)
            recording = read_recording(copy.parent)
            left = [number for number in range(1, FRAMES + 1) if number != index + 1]
            assert [one.sequence for one in recording.events(Put)] == left
            [damage] = recording.damaged
            assert (damage.path, damage.offset) == (copy, found[index].offset)
            assert damage.offset + damage.nbytes == found[index].end


def test_a_length_that_is_damaged_does_not_hide_the_frames_behind_it(
    whole: Path, copy: Path
) -> None:
    broken, found = bytearray(whole.read_bytes()), frames(whole)
    struct.pack_into("<Q", broken, found[2].offset + 8, 1 << 60)
    copy.write_bytes(broken)
    recording = read_recording(copy.parent)
    assert [one.sequence for one in recording.events(Put)] == [1, 2, 4, 5, 6]
    assert len(recording.damaged) == 1


def test_another_version_of_the_format_is_refused_by_name(copy: Path) -> None:
    broken = bytearray(copy.read_bytes())
    struct.pack_into("<I", broken, 8, segments.FORMAT + 1)
    copy.write_bytes(broken)
    with pytest.raises(OtherVersion, match=f"has version {segments.FORMAT + 1} of the format"):
        read_recording(copy.parent)


def test_what_is_no_recording_is_refused_by_name(copy: Path, tmp_path: Path) -> None:
    copy.write_bytes(b"not one, whatever its name says")
    with pytest.raises(DamagedRecording, match=r"000001\.rec is no file of a recording"):
        read_recording(copy.parent)
    empty = tmp_path / "run"
    empty.mkdir()
    with pytest.raises(NoRecording, match="has no recording: rlinf-async train FILE --record all"):
        read_recording(empty)
    with pytest.raises(NoRecording, match="is not there"):
        read_recording(tmp_path / "nowhere")
    with pytest.raises(NoRecording, match="start 3 of the run has no recording: 1 have one"):
        read_recording(tmp_path, start=3)


def test_one_damaged_file_does_not_hide_the_others(tmp_path: Path) -> None:
    recorder = write(tmp_path / "1", range(1, 9), nbytes=70_000, limit=1_000_000)
    recorder.close()
    paths = segments.segments_of(tmp_path / "1")
    assert len(paths) > 2
    paths[1].write_bytes(b"x" * 100)
    recording = read_recording(tmp_path)
    assert [one.path for one in recording.damaged] == [paths[1]]
    assert sequences(tmp_path)[0] == 1
    assert sequences(tmp_path)[-1] == 8


def test_the_oldest_segments_are_deleted_for_the_limit_and_the_reader_knows(
    tmp_path: Path,
) -> None:
    limit = 1_000_000
    folder = tmp_path / "recording"
    write(folder / "1", range(1, 6), nbytes=70_000, limit=limit).close()
    write(folder / "2", range(1, 41), nbytes=70_000, limit=limit).close()
    assert sum(one.stat().st_size for one in folder.rglob("*.rec")) <= limit
    assert not (folder / "1").exists()
    recording = read_recording(tmp_path)
    found = [one.sequence for one in recording.events(Put)]
    assert found == list(range(found[0], 41))
    assert recording.missing_before == found[0] - 1 > 0
    assert recording.starts == (2,)


def test_each_start_of_a_run_has_a_recording_of_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "recording"
    for start in (1, 2, 10):
        write(folder / str(start), range(1, start + 1)).close()
    assert read_recording(tmp_path).start == 10
    assert read_recording(tmp_path).starts == (1, 2, 10)
    assert len(list(read_recording(tmp_path, start=2).events(Put))) == 2
    assert read_recording(folder / "2").start == 2


# ---- a disk that does not take it


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A disk with room for so many bytes: a write that does not fit is cut short, and the next
    fails."""
    room = [1 << 30]
    written = os.writev

    def writev(file: int, parts: Sequence[bytes]) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = written(file, [b"".join(parts)[: room[0]]])
        room[0] -= count
        return count

    truncate = os.ftruncate

    def ftruncate(file: int, length: int) -> None:
        room[0] += os.fstat(file).st_size - length
        truncate(file, length)

    monkeypatch.setattr(os, "writev", writev)
    monkeypatch.setattr(os, "ftruncate", ftruncate)
    return room


async def test_a_full_disk_ends_the_recording_and_not_what_is_recorded(
    tmp_path: Path, full_disk: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    channel = Channel(bytes, name="items", capacity=64)
    recorder = Recorder(tmp_path / "1")
    recorder.record(channel)
    random = np.random.default_rng(1)
    with caplog.at_level(logging.ERROR):
        for number in range(20):
            if number == 10:
                full_disk[0] = 1000
            await channel.sender.put(random.bytes(2000))
            recorder.flush()
        got = [channel.receiver.get_nowait() for _ in range(20)]
        recorder.close()
    assert len(got) == 20
    state = recorder.state
    assert "No space left on device" in state.failure
    assert state.dropped >= 1
    assert len([one for one in caplog.records if "the run goes on" in one.message]) == 1
    assert channel.queue.tap is None
    recording = read_recording(tmp_path)
    assert [one.sequence for one in recording.items("items")] == list(range(1, 11))
    assert isinstance(recording.dropped, Dropped)
    assert "No space left" in recording.dropped.reason
    assert (recording.damaged, recording.torn) == ([], 0)


async def test_a_disk_that_cannot_follow_ends_the_recording_and_holds_up_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    held = threading.Event()
    written = os.writev

    def writev(file: int, parts: Sequence[bytes]) -> int:
        held.wait(60)
        return written(file, parts)

    monkeypatch.setattr(os, "writev", writev)
    channel = Channel(bytes, name="items", capacity=64)
    recorder = Recorder(tmp_path / "1", queue_bytes=100_000)
    recorder.record(channel)
    for _ in range(40):
        await channel.sender.put(bytes(10_000))
        await channel.receiver.get()
    assert "the disk cannot follow" in recorder.state.failure
    held.set()
    recorder.close()
    recording = read_recording(tmp_path)
    assert recording.dropped is not None
    assert recording.dropped.events + recording.dropped.first - 1 >= 10
    assert "cannot follow" in recording.dropped.reason


def test_an_item_larger_than_what_may_wait_is_taken_by_an_idle_disk(tmp_path: Path) -> None:
    recorder = write(tmp_path / "1", range(1, 4), nbytes=500_000, queue_bytes=100_000)
    recorder.close()
    assert recorder.state.failure == ""
    assert sequences(tmp_path) == [1, 2, 3]


def waiting_for_an_array(recorder: Recorder) -> asyncio.Future[None]:
    """Note an event whose arrays come when this is done."""
    coming = asyncio.get_running_loop().create_future()
    recorder.begin(Put(channel="arrays", sequence=1, bodies=[Encoded(b"\xc0")]))
    recorder.wait_for([coming])
    return coming


async def test_what_waits_for_an_array_is_counted_and_ends_the_recording_in_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(tmp_path / "1", queue_bytes=100_000)
    waiting_for_an_array(recorder)
    for number in range(1, 9):
        event, body = put(number, 10_000)
        recorder.note(event, body)
    assert 80_000 < recorder.state.waiting < 90_000
    assert recorder.state.failure == ""
    for number in range(9, 40):
        event, body = put(number, 10_000)
        recorder.note(event, body)
    state = recorder.state
    assert state.failure.startswith("the arrays of an item in channel 'arrays' (event 1) have not")
    assert state.events < 14
    assert (state.waiting, state.dropped) == (0, state.events)
    recorder.close()
    dropped = read_recording(tmp_path).dropped
    assert dropped is not None
    assert (dropped.reason, dropped.events) == (state.failure, state.events)


@pytest.mark.parametrize("comes", [True, False])
async def test_what_waits_for_an_array_is_written_when_it_comes_or_at_the_end(
    tmp_path: Path, comes: bool
) -> None:
    recorder = Recorder(tmp_path / "1", queue_bytes=100_000)
    coming = waiting_for_an_array(recorder)
    for number in range(2, 5):
        event, body = put(number, 300_000 if number == 4 else 10)
        recorder.note(event, body)
    if comes:
        coming.set_result(None)
        await asyncio.sleep(0)
        assert recorder.flush()
    recorder.close()
    assert sequences(tmp_path) == [1, 2, 3, 4]
    assert (recorder.state.failure, recorder.state.waiting) == ("", 0)


async def test_an_item_larger_than_the_limit_ends_the_recording(tmp_path: Path) -> None:
    recorder = write(tmp_path / "1", [1], nbytes=2_000_000, limit=1_000_000)
    assert "larger than the limit" in recorder.state.failure
    recorder.close()
    assert read_recording(tmp_path).dropped is not None


async def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordingError, match="file/1 cannot be made"):
        Recorder(tmp_path / "file" / "1")


def test_a_file_is_not_larger_than_what_zstd_makes_of_the_payload(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "1")
    random = np.random.default_rng(0)
    raw = b""
    for number in range(200):
        data = np.round(random.normal(size=4000), 1).astype(np.float32).tobytes()
        raw += data
        recorder.note(
            Put(channel="items", sequence=number + 1), Encoded(b"\xc0", [bytearray(data)])
        )
    recorder.close()
    size = sum(one.stat().st_size for one in (tmp_path / "1").iterdir())
    assert size <= 1.2 * len(zstandard.compress(raw, 3))


def test_kills_at_random_moments_leave_what_was_said_to_be_written() -> None:
    found = run_lives(8, seed=int.from_bytes(os.urandom(3), "little"))
    assert sum(one.items for one in found) > 0


def test_an_event_that_cannot_be_written_ends_the_recording(tmp_path: Path) -> None:
    recorder = write(tmp_path / "1", [1, 2])
    odd = Launched(worker="A[0]", cls="a:A", group="A", rank=0, world=1, details={"odd": object()})
    recorder.note(odd)
    assert not recorder.flush()
    assert "TypeError" in recorder.state.failure
    recorder.close()
    assert sequences(tmp_path) == [1, 2]


# ---- read while it is written


def delete_oldest(folder: Path, count: int) -> None:
    for path in segments.segments_of(folder)[:count]:
        path.unlink()


@pytest.fixture
def long(tmp_path: Path) -> Path:
    """A recording of 16 events in many segments."""
    write(tmp_path / "1", range(1, 17), nbytes=70_000, limit=10_000_000 // 8).close()
    assert len(segments.segments_of(tmp_path / "1")) > 4
    return tmp_path / "1"


def test_files_that_are_deleted_between_listing_and_opening_count_as_missing_before(
    long: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = segments.segments_of(long)
    answers = [listed]
    delete_oldest(long, 2)
    monkeypatch.setattr(
        reader, "segments_of", lambda of: answers.pop() if answers else segments.segments_of(of)
    )
    recording = reader.Recording(long, 1, (1,))
    found = [one.sequence for one in recording.events(Put)]
    assert found == list(range(found[0], 17))
    assert recording.missing_before == found[0] - 1 > 0
    assert recording.damaged == []


def test_where_all_files_are_deleted_between_listing_and_opening_the_new_ones_are_read(
    long: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = segments.segments_of(long)[:2]
    answers = [listed]
    delete_oldest(long, 2)
    monkeypatch.setattr(
        reader, "segments_of", lambda of: answers.pop() if answers else segments.segments_of(of)
    )
    assert [one.sequence for one in reader.Recording(long, 1, (1,)).events(Put)][-1] == 16


def test_files_that_are_deleted_while_items_are_read_are_left_out(long: Path) -> None:
    recording = read_recording(long)
    delete_oldest(long, 3)
    found = [one.sequence for one in recording.events(Put)]
    assert found == list(range(found[0], 17))
    assert recording.missing_before == found[0] - 1 > 0


def test_a_folder_in_which_nothing_is_written_yet_is_said_to_be_one(
    whole: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "recording" / "1"
    folder.mkdir(parents=True)
    for asked in (tmp_path, folder.parent, folder):
        with pytest.raises(NothingYet, match=r"nothing is written in .*/recording/1 yet: the run"):
            read_recording(asked)
    (folder / "000001.rec").write_bytes(whole.read_bytes()[:40])
    with pytest.raises(NotRecorded, match=r"channel 'items': nothing is written in .* yet"):
        read_recording(tmp_path).channel("items")


# ---- what files repeat of those that were deleted


def worker_events(calls: int, nbytes: int) -> list[tuple[Event, Encoded]]:
    """Two workers are launched, one twice; one call runs on, and the others end."""
    body = Encoded(b"\xc0", [bytearray(nbytes)])
    found: list[tuple[Event, Encoded]] = []
    for name, incarnation in (("A[0]", 0), ("B[0]", 0), ("A[0]", 1)):
        found.append((Launched(
            worker=name, cls="a:A", group=name[0], rank=0, world=1, incarnation=incarnation,
        ), body))  # fmt: skip
    for call in range(1, calls + 1):
        found.append((Called(worker="A[0]", method="run", call=call, incarnation=1), body))
        if call != 2:
            found.append((Returned(worker="A[0]", call=call, incarnation=1), Encoded(b"\xc0")))
    return found


def test_launches_and_calls_that_still_run_outlive_the_files_that_they_were_noted_in(
    tmp_path: Path,
) -> None:
    recorder = Recorder(tmp_path / "1", limit=1_000_000)
    for event, body in worker_events(calls=4, nbytes=100):
        recorder.note(event, body)
    for number in range(40):
        event, body = put(number, 70_000)
        recorder.note(event, body)
        assert recorder.flush()
    recorder.close()
    recording = read_recording(tmp_path)
    assert recording.missing_before > 10
    launched = list(recording.events(Launched))
    assert [(one.worker, one.incarnation, one.number) for one in launched] == [
        ("B[0]", 0, 2), ("A[0]", 1, 3),
    ]  # fmt: skip
    assert [len(one.body().buffers[0]) for one in launched] == [100, 100]
    [call] = recording.events(Called)
    assert call.call == 2
    numbers = [one.number for one in recording.events()]
    assert numbers == sorted(set(numbers))
    assert list(recording.events(Launched, after=numbers[3])) == []
    assert sum(one.stat().st_size for one in (tmp_path / "1").iterdir()) <= 1_000_000


def test_large_arguments_of_a_launch_are_not_repeated_and_it_says_so(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "1", limit=1_000_000)
    for event, body in worker_events(calls=2, nbytes=20_000):
        recorder.note(event, body)
    for number in range(40):
        event, body = put(number, 70_000)
        recorder.note(event, body)
        assert recorder.flush()
    recorder.close()
    without, whole = read_recording(tmp_path).events(Launched)
    assert len(whole.body().buffers[0]) == 20_000
    assert "of 20,001 bytes, were deleted for the limit" in without.details["unrecorded"]
    assert (without.body().data, list(without.body().buffers)) == (b"\xc0", [])
