"""Values reach the verifier as they were written, or are refused: every type of every format."""

from __future__ import annotations

import datetime as dt
import importlib
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_async.data import DataConfig, DataError, Prompts
from rlinf_async.data.prompts import arithmetic_tokenizer
from rlinf_async.data.records import as_text

NOON = dt.datetime(2024, 1, 5, 12, tzinfo=dt.UTC)

TYPES: list[tuple[str, Any, str]] = [
    ("string", "42", "42"),
    ("large_string", "42", "42"),
    ("binary", b"42", "42"),
    ("large_binary", b"42", "42"),
    ("binary(2)", b"42", "42"),
    ("bool_", True, "true"),
    ("int8", -4, "-4"),
    ("int64", 2**53 + 1, "9007199254740993"),
    ("uint64", 2**64 - 1, "18446744073709551615"),
    ("float16", 0.1, "0.1"),
    ("float32", 0.1, "0.1"),
    ("float32", 16777216.0, "16777216.0"),
    ("float64", 0.1, "0.1"),
    ("float64", 3.0, "3.0"),
    ("decimal128(10, 2)", Decimal("3.50"), "3.50"),
    ("decimal256(50, 2)", Decimal("3.50"), "3.50"),
    ("date32", dt.date(2024, 1, 5), "2024-01-05"),
    ("date64", dt.date(2024, 1, 5), "2024-01-05"),
    ("time64('us')", dt.time(10, 1), "10:01:00"),
    ("time64('ns')", 1000, "00:00:00.000001"),
    ("timestamp('us')", dt.datetime(2024, 1, 5, 10), "2024-01-05T10:00:00"),
    ("timestamp('ns')", 1, "1970-01-01T00:00:00.000000001"),
    ("timestamp('us', 'Europe/Berlin')", NOON, "2024-01-05T13:00:00+01:00"),
    ("duration('us')", dt.timedelta(seconds=90), "PT90S"),
    ("duration('ns')", dt.timedelta(seconds=90), "PT90S"),
    ("list_(float32)", [0.1, None], "[0.1,null]"),
    ("list_(decimal)", [Decimal("3.50")], "[3.50]"),
    ("list_(int32, 2)", [1, 2], "[1,2]"),
    ("struct", {"a": b"x", "b": dt.date(2024, 1, 5)}, '{"a":"x","b":"2024-01-05"}'),
    ("dictionary", "42", "42"),
]
REFUSED: list[tuple[str, Any, str]] = [
    ("binary", b"\xff", "bytes that are not UTF-8"),
    ("float64", float("nan"), "nan is no number"),
    ("float32", float("inf"), "inf is no number"),
    ("list_(float32)", [float("nan")], "nan is no number"),
    ("int32", None, "is null"),
    ("duration('ns')", 1, "nanoseconds"),
    ("time64('ns')", 1, "nanoseconds"),
    ("timestamp('s')", 2**40, "out of range"),
    ("duration('s')", 2**62, "too large"),
    ("date32", 2**31 - 1, "days=2147483647"),
]


def arrow_type(arrow: Any, name: str) -> Any:
    special = {
        "list_(float32)": lambda: arrow.list_(arrow.float32()),
        "list_(decimal)": lambda: arrow.list_(arrow.decimal128(5, 2)),
        "list_(int32, 2)": lambda: arrow.list_(arrow.int32(), 2),
        "struct": lambda: arrow.struct([("a", arrow.binary()), ("b", arrow.date32())]),
        "dictionary": lambda: arrow.dictionary(arrow.int32(), arrow.string()),
    }
    if name in special:
        return special[name]()
    function, _, arguments = name.partition("(")
    values = [json.loads(one.replace("'", '"')) for one in arguments.rstrip(")").split(", ") if one]
    return getattr(arrow, function)(*values)


def references(path: Path) -> list[str]:
    config = DataConfig(path=str(path), verifier="exact", shuffle=False)
    prompts = Prompts(config, arithmetic_tokenizer())
    return [next(prompts).reference for _ in range(len(prompts))]


def write(folder: Path, format: str, kind: str, value: Any) -> Path:
    arrow = pytest.importorskip("pyarrow")
    pytest.importorskip("datasets")
    made = arrow_type(arrow, kind)
    column = arrow.array([value, value], made.value_type if kind == "dictionary" else made)
    if kind == "dictionary":
        column = column.dictionary_encode()
    table = arrow.table({"prompt": ["1", "2"], "answer": column})
    file = folder / f"a.{format}"
    if format == "parquet":
        parquet = importlib.import_module("pyarrow.parquet")

        parquet.write_table(table, file)
    else:
        with arrow.OSFile(str(file), "wb") as sink, arrow.ipc.new_stream(sink, table.schema) as out:
            out.write_table(table)
    return file


@pytest.mark.parametrize("format", ["parquet", "arrow"])
@pytest.mark.parametrize(("kind", "value", "text"), TYPES)
def test_a_column_of_every_type_arrives_as_it_was_written(
    tmp_path: Path, format: str, kind: str, value: Any, text: str
) -> None:
    assert references(write(tmp_path, format, kind, value)) == [text, text]


@pytest.mark.parametrize(("kind", "value", "text"), TYPES)
def test_a_saved_dataset_arrives_as_its_file_does(
    tmp_path: Path, kind: str, value: Any, text: str
) -> None:
    library = pytest.importorskip("datasets")
    file = write(tmp_path, "arrow", kind, value)
    library.Dataset.from_file(str(file)).save_to_disk(str(tmp_path / "saved"))
    assert references(tmp_path / "saved") == [text, text]


@pytest.mark.parametrize(("kind", "value", "said"), REFUSED)
def test_what_has_no_faithful_text_is_refused_with_its_place(
    tmp_path: Path, kind: str, value: Any, said: str
) -> None:
    file = write(tmp_path, "parquet", kind, value)
    with pytest.raises(DataError) as raised:
        references(file)
    assert str(raised.value).startswith(f"{file}, record 0: column 'answer'")
    assert said in str(raised.value)


def test_the_place_names_the_file_of_several(tmp_path: Path) -> None:
    for part in range(2):
        file = write(tmp_path, "parquet", "binary", b"\xff" if part else b"42")
        file.rename(tmp_path / f"part{part}.parquet")
    with pytest.raises(DataError, match=r"part1\.parquet, record 0: column 'answer'"):
        references(tmp_path)


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ('"42"', "42"), ("42", "42"), ("3.50", "3.50"), ("0.1", "0.1"), ("true", "true"),
        ("12345678901234567890123", "12345678901234567890123"), ("1e3", "1000"), ("-0.0", "-0.0"),
        ('[1, 2.50, "x", null]', '[1,2.50,"x",null]'), ('{"a": 0.10}', '{"a":0.10}'),
    ],
)  # fmt: skip
def test_numbers_of_json_lines_keep_their_digits(tmp_path: Path, written: str, text: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(f'{{"prompt": "1", "answer": {written}}}\n')
    assert references(file) == [text]


@given(st.floats(allow_nan=False, allow_infinity=False, width=32), st.integers(), st.decimals(
    allow_nan=False, allow_infinity=False))  # fmt: skip
def test_numbers_are_read_back_as_the_same(real: float, whole: int, decimal: Decimal) -> None:
    assert float(as_text(real)) == real
    assert int(as_text(whole)) == whole
    assert Decimal(as_text(decimal)) == decimal
