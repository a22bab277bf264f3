"""A file is the old one or the new one, and an error says which path, why and what to do."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rlinf_async.observe.files import (
    RunFolderError,
    append_all,
    atomic_write,
    explaining,
    is_partial,
    replacing,
)


def full_disk_after(free: int) -> Callable[[int, memoryview], int]:
    """An ``os.write`` of a disk with so many bytes left: it takes what fits, and then fails."""
    write = os.write

    def limited(descriptor: int, data: memoryview) -> int:
        nonlocal free
        if free == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = write(descriptor, data[:free])
        free -= written
        return written

    return limited


def test_a_file_is_written_whole_and_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    atomic_write(path, "first")
    atomic_write(path, b"second")
    assert path.read_text() == "second"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_leaves_the_old_file_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt"
    atomic_write(path, "old")
    monkeypatch.setattr(os, "write", full_disk_after(2))
    with pytest.raises(RunFolderError) as caught:
        atomic_write(path, "new and longer")
    message = str(caught.value)
    assert str(path) in message
    assert "No space left on device" in message
    assert "free some space" in message
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_short_write_is_followed_by_one_of_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:3]))
    descriptor = os.open(tmp_path / "a", os.O_WRONLY | os.O_CREAT)
    append_all(descriptor, b"0123456789")
    os.close(descriptor)
    assert (tmp_path / "a").read_bytes() == b"0123456789"


def test_a_file_in_the_place_of_the_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match=r"cannot write .*file/a\.txt: Not a directory"):
        atomic_write(tmp_path / "file" / "a.txt", "text")


def test_an_error_inside_the_block_keeps_the_old_file_and_leaves_no_partial_one(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.png"
    path.write_text("old")

    def draw() -> None:
        with replacing(path) as partial:
            partial.write_text("half")
            assert is_partial(partial)
            assert partial.suffix == ".png"
            raise KeyError("drawing failed")

    with pytest.raises(KeyError, match="drawing failed"):
        draw()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "free some space"),
        (errno.EDQUOT, "quota"),
        (errno.EROFS, "read-only"),
        (errno.EACCES, "you may not write there"),
        (errno.EIO, "choose another folder"),
    ],
)
def test_each_cause_comes_with_its_advice(number: int, advice: str) -> None:
    with pytest.raises(RunFolderError) as caught, explaining("write", Path("/somewhere/run")):
        raise OSError(number, os.strerror(number))
    assert str(caught.value).startswith("cannot write /somewhere/run: " + os.strerror(number))
    assert advice in str(caught.value)
    assert isinstance(caught.value.__cause__, OSError)
