"""The order of prompts, what is held out and left out, and going on from a saved position."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf_async.data import DataChanged, DataConfig, DataError, DataState, Prompts, Tokenizer
from rlinf_async.data.prompts import order_of, split
from rlinf_async.data.records import digest_of_ends
from rlinf_async.messages.language import Prompt
from tests.data.conftest import Write


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


def config(path: str, **fields: Any) -> DataConfig:
    given: dict[str, Any] = {"path": path, "verifier": "exact"} | fields
    return DataConfig(**given)


def take(prompts: Prompts, count: int) -> list[Prompt]:
    return list(itertools.islice(prompts, count))


def texts(prompts: list[Prompt]) -> list[str]:
    return [prompt.text for prompt in prompts]


def same(left: list[Prompt], right: list[Prompt]) -> None:
    assert [msgspec.json.encode(msgspec.structs.replace(one, token_ids=None)) for one in left] == [
        msgspec.json.encode(msgspec.structs.replace(one, token_ids=None)) for one in right
    ]
    for one, other in zip(left, right, strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)


def test_a_prompt_has_text_tokens_verifier_reference_and_its_place(
    sums: str, tokenizer: Tokenizer
) -> None:
    first, second = take(Prompts(config(sums, shuffle=False), tokenizer), 2)
    assert (first.index, first.text) == (0, "<user>0+0=<assistant>")
    assert (second.index, second.text) == (1, "<user>1+1=<assistant>")
    assert (second.verifier, second.reference) == ("exact", "2")
    assert second.token_ids.dtype == np.int32
    assert tokenizer.decode(second.token_ids) == second.text


def test_every_epoch_has_each_record_once_in_an_order_of_its_own(
    sums: str, tokenizer: Tokenizer
) -> None:
    prompts = Prompts(config(sums), tokenizer)
    epochs = [texts(take(prompts, 20)) for _ in range(3)]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert len({tuple(sorted(epoch)) for epoch in epochs}) == 1
    assert prompts.epoch == 3
    again = Prompts(config(sums), tokenizer)
    assert texts(take(again, 60)) == list(itertools.chain(*epochs))
    other = Prompts(config(sums, seed=1), tokenizer)
    assert texts(take(other, 20)) != epochs[0]


def test_after_the_last_epoch_it_ends(sums: str, tokenizer: Tokenizer) -> None:
    prompts = Prompts(config(sums, epochs=2), tokenizer)
    assert [prompt.index for prompt in prompts] == list(range(40))
    assert list(prompts) == []


@pytest.mark.parametrize("taken", [0, 1, 19, 20, 33])
@pytest.mark.parametrize("shuffle", [True, False])
def test_from_a_restored_position_the_prompts_are_those_that_would_have_come(
    sums: str, tokenizer: Tokenizer, taken: int, shuffle: bool
) -> None:
    chosen = config(sums, shuffle=shuffle, held_out=3)
    prompts = Prompts(chosen, tokenizer)
    take(prompts, taken)
    saved = msgspec.json.decode(msgspec.json.encode(prompts.state()), type=DataState)
    resumed = Prompts(chosen, tokenizer)
    resumed.restore(saved)
    assert resumed.state() == prompts.state()
    same(take(resumed, 50), take(prompts, 50))


def test_what_was_left_out_is_counted_on_from_a_restored_position(
    write: Write, tokenizer: Tokenizer
) -> None:
    path = write(*({"prompt": "1" * n, "answer": "1"} for n in range(1, 21)))
    chosen = config(path, max_prompt_tokens=12, too_long="skip")
    prompts = Prompts(chosen, tokenizer)
    take(prompts, 15)
    resumed = Prompts(chosen, tokenizer)
    resumed.restore(prompts.state())
    same(take(resumed, 30), take(prompts, 30))
    assert resumed.too_long == prompts.too_long > 0
    assert all(len(prompt.token_ids) <= 12 for prompt in take(prompts, 40))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"seed": 1}, "seed was 0 when the position was saved, and is 1"),
        ({"held_out": 2}, "held_out was 0 .* is 2"),
        ({"shuffle": False}, "shuffle was True"),
    ],
)
def test_a_position_of_another_order_is_refused(
    sums: str, tokenizer: Tokenizer, changed: dict[str, Any], said: str
) -> None:
    saved = Prompts(config(sums), tokenizer).state()
    with pytest.raises(DataChanged, match=said):
        Prompts(config(sums, **changed), tokenizer).restore(saved)


def test_a_position_in_other_data_is_refused(write: Write, tokenizer: Tokenizer) -> None:
    path = write({"prompt": "1+1=", "answer": "2"})
    saved = Prompts(config(path), tokenizer).state()
    write({"prompt": "1+2=", "answer": "3"})
    with pytest.raises(DataChanged, match="the content of the data was"):
        Prompts(config(path), tokenizer).restore(saved)
    write({"prompt": "1+1=", "answer": "2"}, {"prompt": "1+2=", "answer": "3"})
    with pytest.raises(DataChanged, match="records was 1 when the position was saved, and is 2"):
        Prompts(config(path), tokenizer).restore(saved)


def test_a_position_that_an_earlier_version_saved_is_compared_as_it_did_and_says_so(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    library = pytest.importorskip("datasets")
    file = tmp_path / "sums.parquet"
    library.Dataset.from_list([{"prompt": "1+1=", "answer": "2"}] * 3).to_parquet(str(file))
    saved = Prompts(config(str(file)), tokenizer).state()
    assert Prompts(config(str(file)), tokenizer).restore(saved) == ""
    earlier = msgspec.structs.replace(saved, fingerprint=digest_of_ends([file]))
    found = Prompts(config(str(file)), tokenizer).restore(earlier)
    assert "saved by an earlier version" in found
    library.Dataset.from_list([{"prompt": "1+1=", "answer": "3"}] * 3).to_parquet(str(file))
    with pytest.raises(DataChanged, match="the content of the data was"):
        Prompts(config(str(file)), tokenizer).restore(earlier)


def test_held_out_records_are_never_trained_on(sums: str, tokenizer: Tokenizer) -> None:
    prompts = Prompts(config(sums, held_out=5), tokenizer)
    kept = texts(prompts.held_out)
    trained = texts(take(prompts, 15))
    assert (len(set(kept)), len(prompts)) == (5, 15)
    assert not set(kept) & set(trained)
    assert len(set(kept) | set(trained)) == 20
    assert texts(Prompts(config(sums, held_out=5), tokenizer).held_out) == kept
    assert texts(Prompts(config(sums, held_out=5, seed=1), tokenizer).held_out) != kept


def test_a_record_with_the_prompt_of_a_held_out_one_is_left_out_and_counted(
    write: Write, tokenizer: Tokenizer
) -> None:
    path = write(*({"prompt": f"{n % 10}+1=", "answer": "?"} for n in range(20)))
    prompts = Prompts(config(path, held_out=2, epochs=1), tokenizer)
    kept = set(texts(prompts.held_out))
    trained = texts(list(prompts))
    assert not kept & set(trained)
    assert len(trained) + prompts.like_held_out == 18
    assert prompts.like_held_out == 20 - 2 * len(set(trained)) - 2


def test_where_nothing_is_left_to_train_on_it_is_an_error(
    sums: str, write: Write, tokenizer: Tokenizer
) -> None:
    with pytest.raises(DataError, match=r"empty\.jsonl has no records"):
        Prompts(config(write(name="empty.jsonl")), tokenizer)
    with pytest.raises(DataError, match="has 20 records, of which held_out = 20 are kept back"):
        Prompts(config(sums, held_out=20), tokenizer)
    alike = write(*({"prompt": "1+1=", "answer": "2"} for _ in range(5)), name="alike.jsonl")
    prompts = Prompts(config(alike, held_out=1), tokenizer)
    with pytest.raises(
        DataError, match=r"none of 4 records can be used: .* and 8 had the prompt of"
    ):
        next(prompts)
    short = Prompts(config(sums, max_prompt_tokens=2, too_long="skip"), tokenizer)
    with pytest.raises(DataError, match="40 were longer than max_prompt_tokens = 2"):
        next(short)


def test_prompts_that_are_too_long_are_named_before_the_first(
    write: Write, tokenizer: Tokenizer
) -> None:
    path = write(*({"prompt": "1" * n, "answer": "1"} for n in (3, 30, 31, 4, 32, 33)))
    said = (
        rf"4 prompts are longer than max_prompt_tokens = 20: {path}:2 \(32 tokens\), "
        rf"{path}:3 \(33 tokens\), {path}:5 \(34 tokens\) and 1 more; raise the limit, or set "
        "too_long to 'skip'"
    )
    with pytest.raises(DataError, match=said):
        Prompts(config(path, max_prompt_tokens=20), tokenizer)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=2, max_size=25),
    held_out=st.integers(0, 3),
    limit=st.integers(5, 12),
    shuffle=st.booleans(),
    seed=st.integers(0, 3),
    epochs=st.integers(1, 3),
    taken=st.integers(0, 40),
)
def test_interrupted_anywhere_a_run_sees_the_prompts_of_one_that_was_not(
    folder: Path,
    tokenizer: Tokenizer,
    lengths: list[int],
    held_out: int,
    limit: int,
    shuffle: bool,
    seed: int,
    epochs: int,
    taken: int,
) -> None:
    file = folder / "data.jsonl"
    file.write_text("".join(f'{{"prompt": "{"1" * n}", "answer": 1}}\n' for n in lengths))
    chosen = config(
        str(file),
        held_out=min(held_out, len(lengths) - 1),
        max_prompt_tokens=limit,
        too_long="skip",
        shuffle=shuffle,
        seed=seed,
        epochs=epochs,
    )

    training, kept = split(len(lengths), chosen.held_out, seed)
    fits = [n + 2 <= limit for n in lengths]  # two tokens of the template
    held = {lengths[record] for record in kept if fits[record]}
    expected = [
        (epoch * len(training) + at, lengths[record])
        for epoch in range(epochs)
        for at, record in enumerate(order_of(training, seed, epoch, shuffle=shuffle))
        if fits[record] and lengths[record] not in held
    ]
    whole = Prompts(chosen, tokenizer)
    if not expected:
        with pytest.raises(DataError, match=f"none of {len(training)} records can be used"):
            next(whole)
        return
    every = list(whole)
    assert [(prompt.index, prompt.text.count("1")) for prompt in every] == expected
    interrupted = Prompts(chosen, tokenizer)
    before = take(interrupted, taken)
    resumed = Prompts(chosen, tokenizer)
    resumed.restore(interrupted.state())
    same(before + list(resumed), every)
    assert resumed.state() == whole.state()
    assert len(every) + whole.too_long + whole.like_held_out == epochs * len(whole)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 60), st.integers(0, 59), st.integers(0, 5), st.integers(0, 3))
def test_a_split_and_an_order_have_every_record_once(
    count: int, held_out: int, seed: int, epoch: int
) -> None:
    training, kept = split(count, min(held_out, count), seed)
    assert sorted([*training, *kept]) == list(range(count))
    assert len(kept) == min(held_out, count)
    order = order_of(training, seed, epoch, shuffle=True)
    assert sorted(order) == sorted(training)
    np.testing.assert_array_equal(order, order_of(training, seed, epoch, shuffle=True))
    np.testing.assert_array_equal(order_of(training, seed, epoch, shuffle=False), training)
