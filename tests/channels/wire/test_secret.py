"""Where the cluster's secret may come from, and where not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlinf_async.channels.wire.session.tls import FILE_VARIABLE, VARIABLE, load_secret, read_secret

TEXT = "a secret of some length"


def written(folder: Path, text: str = TEXT, mode: int = 0o600) -> Path:
    path = folder / "secret"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_the_environment_gives_the_secret_or_names_its_file(tmp_path: Path) -> None:
    assert load_secret({}) is None
    assert load_secret({VARIABLE: f" {TEXT}\n"}) == TEXT.encode()
    assert load_secret({FILE_VARIABLE: str(written(tmp_path, TEXT + "\n"))}) == TEXT.encode()


def test_both_ways_at_once_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"both {VARIABLE} and {FILE_VARIABLE} are set"):
        load_secret({VARIABLE: TEXT, FILE_VARIABLE: str(written(tmp_path))})


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610])
def test_a_file_that_others_can_use_is_refused_with_its_mode(tmp_path: Path, mode: int) -> None:
    path = written(tmp_path, mode=mode)
    with pytest.raises(ValueError, match=rf"{path}' can be used by others \(mode {mode:o}.*chmod"):
        read_secret(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path)
    os.chown(path, 4242, -1)
    with pytest.raises(ValueError, match=r"belongs to user 4242, not to this one \(0\)"):
        read_secret(path)


def test_what_is_no_file_is_refused_and_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(ValueError, match="is not a file"):
            read_secret(path)
    with pytest.raises(FileNotFoundError):
        read_secret(tmp_path / "nothing")


def test_a_secret_of_the_wrong_length_is_refused_and_its_file_named(tmp_path: Path) -> None:
    path = written(tmp_path, "short")
    with pytest.raises(ValueError, match=rf"{path}': the cluster's secret has 5 bytes"):
        read_secret(path)
    with pytest.raises(ValueError, match="has more than 4096 bytes"):
        read_secret(written(tmp_path, "x" * 5000))
    with pytest.raises(ValueError, match="has 5 bytes"):
        load_secret({VARIABLE: "short"})
