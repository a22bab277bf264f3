"""Files and folders that prompts come from, and what is said of those that cannot be used."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf_async.data import DataConfig, DataError
from rlinf_async.data.prompts import open_records
from rlinf_async.data.records import Records, digest_of

ROWS = [{"prompt": f"{n}+{n}=", "answer": str(2 * n), "unused": b"x"} for n in range(6)]

LARGE = 12 * 2**20
"""bytes of a file that was once compared by its ends of 4 MiB"""


def open_path(path: Path, **fields: Any) -> Records:
    return open_records(DataConfig(path=str(path), verifier="exact", **fields))


def prompts_of(records: Records) -> list[str]:
    return [records[at]["prompt"] for at in range(len(records))]


def test_json_lines_are_found_again_whatever_stands_between_them(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(
        b'\xef\xbb\xbf{"prompt": "\xc3\xa9"}\r\n\n   \n{"prompt": "2"}\n{"prompt": "3"}'
    )
    records = open_path(file)
    assert prompts_of(records) == ["é", "2", "3"]
    assert records.where(1) == f"{file}:4"


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        (b'{"prompt": "1"}\n{"prompt": \n', 2, "each line must be one JSON object"),
        (b'[{"prompt": "1"}]', 1, "Expected `object`, got `array`"),
        (b'{"prompt": "\xff"}', 1, "each line must be one JSON object"),
        (b"prompt,answer\n1,2\n", 1, "each line must be one JSON object"),
    ],
)
def test_a_line_that_is_no_object_is_named(
    tmp_path: Path, text: bytes, line: int, said: str
) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_bytes(text)
    with pytest.raises(DataError, match=re.escape(f"{file}:{line}: ")) as raised:
        open_path(file)
    assert said in str(raised.value)


def test_a_path_that_is_not_there_says_from_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no file or folder .*\(seen from /"):
        open_path(tmp_path / "none.jsonl")


def test_an_empty_file_has_nothing_to_train_on(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    assert len(open_path(tmp_path / "empty.jsonl")) == 0


@pytest.fixture
def library() -> Any:
    return pytest.importorskip("datasets")


def test_a_saved_dataset_is_read(library: Any, tmp_path: Path) -> None:
    library.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"))
    records = open_path(tmp_path / "saved")
    assert prompts_of(records) == [row["prompt"] for row in ROWS]
    assert set(records[0]) == {"prompt", "answer"}
    assert records.where(2) == f"{tmp_path / 'saved'}, record 2"


def test_a_dataset_that_was_filtered_before_it_was_saved_has_its_rows_only(
    library: Any, tmp_path: Path
) -> None:
    chosen = library.Dataset.from_list(ROWS).select([4, 1])
    chosen.save_to_disk(str(tmp_path / "saved"))
    assert prompts_of(open_path(tmp_path / "saved")) == ["4+4=", "1+1="]


def test_a_split_of_a_saved_dataset_is_chosen(library: Any, tmp_path: Path) -> None:
    splits = {"train": ROWS[:4], "test": ROWS[4:]}
    library.DatasetDict(
        {name: library.Dataset.from_list(rows) for name, rows in splits.items()}
    ).save_to_disk(str(tmp_path))
    assert len(open_path(tmp_path)) == 4
    assert len(open_path(tmp_path, split="test")) == 2
    with pytest.raises(
        DataError, match=r"no split 'tests' \(did you mean 'test'\?\); it has test,"
    ):
        open_path(tmp_path, split="tests")


def test_parquet_files_of_a_split_are_read_together_and_in_order(
    library: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for part in range(2):
        rows = library.Dataset.from_list(ROWS[2 * part : 2 * part + 2])
        rows.to_parquet(str(folder / f"train-0000{part}-of-00002.parquet"))
    library.Dataset.from_list(ROWS[4:]).to_parquet(str(folder / "test-00000-of-00001.parquet"))
    assert prompts_of(open_path(tmp_path)) == [row["prompt"] for row in ROWS[:4]]
    assert prompts_of(open_path(tmp_path, split="test")) == ["4+4=", "5+5="]
    assert len(open_path(folder / "test-00000-of-00001.parquet")) == 2
    with pytest.raises(
        DataError, match="no parquet files of split 'dev'; it has those of test, tr"
    ):
        open_path(tmp_path, split="dev")


def test_parquet_files_without_a_split_in_their_names_are_all_read(
    library: Any, tmp_path: Path
) -> None:
    library.Dataset.from_list(ROWS).to_parquet(str(tmp_path / "part0.parquet"))
    assert len(open_path(tmp_path)) == 6


def test_arrow_files_are_read(library: Any, tmp_path: Path) -> None:
    library.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"))
    [arrow] = (tmp_path / "saved").glob("*.arrow")
    alone = tmp_path / "alone"
    alone.mkdir()
    arrow.rename(alone / arrow.name)
    assert len(open_path(alone)) == 6
    assert len(open_path(alone / arrow.name)) == 6


def test_a_column_that_is_not_there_is_named_with_those_that_are(
    library: Any, tmp_path: Path
) -> None:
    library.Dataset.from_list(ROWS).to_parquet(str(tmp_path / "a.parquet"))
    with pytest.raises(
        DataError, match=r"has no column 'prompts' \(did you mean 'prompt'\?\); it has prompt, answ"
    ):
        open_path(tmp_path, prompt_column="prompts")


def test_a_folder_without_data_says_what_was_looked_for(library: Any, tmp_path: Path) -> None:
    (tmp_path / "README.md").touch()
    with pytest.raises(DataError, match=r"holds no data: neither a dataset .* nor \.parquet or"):
        open_path(tmp_path)


def test_a_damaged_file_is_named(library: Any, tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(DataError, match=r"a\.parquet cannot be read: "):
        open_path(tmp_path)
    library.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "saved" / "state.json").write_text("{")
    with pytest.raises(DataError, match="saved cannot be read as a saved dataset: "):
        open_path(tmp_path / "saved")


def _parquet(library: Any, folder: Path) -> None:
    for name, rows in (("0", ROWS[:3]), ("1", ROWS[3:])):
        library.Dataset.from_list(rows).to_parquet(str(folder / f"train-{name}.parquet"))


def _answer(library: Any, folder: Path) -> None:
    other = [*ROWS[3:5], ROWS[5] | {"answer": "11"}]
    library.Dataset.from_list(other).to_parquet(str(folder / "train-1.parquet"))


def _swap(_: Any, folder: Path) -> None:
    first, second = folder / "train-0.parquet", folder / "train-1.parquet"
    first.rename(folder / "other")
    second.rename(first)
    (folder / "other").rename(second)


def _add(library: Any, folder: Path) -> None:
    library.Dataset.from_list(ROWS[:1]).to_parquet(str(folder / "train-2.parquet"))


@pytest.mark.parametrize(
    "change",
    [
        _answer,
        _swap,
        _add,
        lambda _, folder: (folder / "train-1.parquet").unlink(),
        lambda _, folder: (folder / "train-1.parquet").rename(folder / "train-3.parquet"),
    ],
    ids=["an answer", "the order", "a file more", "a file less", "a name"],
)
def test_the_fingerprint_of_a_folder_is_of_its_files_and_their_order(
    library: Any, tmp_path: Path, change: Any
) -> None:
    _parquet(library, tmp_path)
    before = open_path(tmp_path).fingerprint
    assert open_path(tmp_path).fingerprint == before
    change(library, tmp_path)
    assert open_path(tmp_path).fingerprint != before


@given(st.integers(0, LARGE - 1))
@settings(max_examples=20, deadline=None)
def test_every_byte_of_a_large_file_is_in_its_fingerprint(at: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "a.parquet"
        with file.open("wb") as opened:
            opened.truncate(LARGE)
        before = digest_of([file], file.parent)
        with file.open("r+b") as opened:
            opened.seek(at)
            opened.write(b"x")
        assert digest_of([file], file.parent) != before


def test_the_fingerprint_changes_with_the_content(library: Any, tmp_path: Path) -> None:
    prints = set()
    for rows in (ROWS, ROWS[::-1], ROWS):
        library.Dataset.from_list(rows).to_parquet(str(tmp_path / "a.parquet"))
        prints.add(open_path(tmp_path).fingerprint)
    assert len(prints) == 2
