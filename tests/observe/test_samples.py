"""However often a run is killed and resumed, each sample stands in its folder once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from threading import Event

import numpy as np
import pytest

from rlinf_async.config import ConfigError
from rlinf_async.observe.files import RunFolderError
from rlinf_async.observe.run_folder import RunFolder
from rlinf_async.observe.samples import (
    KeptSample,
    SampleIndex,
    SamplesConfig,
    SampleWriter,
    Vocabulary,
    read_samples,
    segments,
    size_in_bytes,
)
from tests.observe.test_files import full_disk_after

EACH = 4
"""samples of an iteration"""

WRITE_FOR_EVER = """
import itertools, sys
from pathlib import Path
from rlinf_async.observe.samples import SamplesConfig, SampleWriter
from tests.observe.test_samples import iteration
writer = SampleWriter(Path(sys.argv[1]), SamplesConfig(limit="200 kB"), keep_to=int(sys.argv[2]))
for number in itertools.count(int(sys.argv[2]) + 1):
    writer.put(lambda: iteration(number), 4)
    assert writer.flushed()
    print(number, flush=True)
"""


class Answer(KeptSample, kw_only=True):
    """A record with a text of its own."""

    text: str = "x" * 100


def sample(number: int, index: int, reward: float | None = None) -> Answer:
    """The sample of this index of iteration ``number``, which is also its step."""
    return Answer(
        name=f"{number}/{index}",
        kind="training",
        step=number,
        iteration=number,
        trained=reward is not None,
        outcome="failed" if reward is None else "scored",
        reward=reward,
        size=10 * index,
    )


def iteration(number: int) -> Iterator[Answer]:
    return (sample(number, index, reward=float(index)) for index in range(EACH))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run."""
    with RunFolder.create(tmp_path / "run", config_text="") as folder:
        return folder.path


def write(
    run: Path,
    numbers: Iterable[int],
    *,
    keep_to: int | None = None,
    config: SamplesConfig = SamplesConfig(),  # noqa: B008  (it is frozen)
) -> SampleWriter:
    """Write these iterations, and close the writer."""
    writer = SampleWriter(run, config, keep_to=keep_to)
    for number in numbers:
        writer.put(lambda number=number: iteration(number), EACH)  # type: ignore[misc]
        assert writer.flushed()
    writer.close()
    return writer


def names(run: Path) -> list[str]:
    return [one["name"] for one in read_samples(run)]


def expected(numbers: Iterable[int]) -> list[str]:
    return [f"{number}/{index}" for number in numbers for index in range(EACH)]


def test_samples_are_read_in_the_order_in_which_they_were_written(run: Path) -> None:
    write(run, range(5))
    assert names(run) == expected(range(5))
    assert read_samples(run)[0]["text"] == "x" * 100


def test_a_resumed_run_drops_what_comes_again(run: Path) -> None:
    write(run, range(6))
    write(run, range(3, 8), keep_to=2)
    assert names(run) == expected(range(8))
    write(run, range(2), keep_to=None)  # from the beginning
    assert names(run) == expected(range(2))


def test_samples_are_chosen_by_what_they_are_and_ordered_by_reward(run: Path) -> None:
    write(run, range(3))
    writer = SampleWriter(run, SamplesConfig(), keep_to=3)
    writer.put(lambda: [sample(3, 0, reward=7.0), sample(3, 1)], 2)
    writer.close()
    assert [one["name"] for one in read_samples(run, iteration=1)] == expected([1])
    assert [one["name"] for one in read_samples(run, name="2")] == expected([2])
    assert [one["name"] for one in read_samples(run, name="2/3")] == ["2/3"]
    assert read_samples(run, name="x/y") == []
    assert [one["name"] for one in read_samples(run, failed=True)] == ["3/1"]
    assert [one["name"] for one in read_samples(run, best=2)] == ["3/0", "0/3"]
    assert [one["name"] for one in read_samples(run, worst=2)] == ["0/0", "1/0"]
    few = read_samples(run, iteration=3, best=1, worst=1)
    assert [one["name"] for one in few] == ["3/0"]  # each once
    assert read_samples(run, kind="evaluation") == []


def test_the_oldest_are_removed_to_stay_below_the_limit(run: Path) -> None:
    config = SamplesConfig(limit="200 kB")
    write(run, range(400), config=config)
    kept = names(run)
    assert kept == expected(range(400))[-len(kept) :]
    assert EACH * 100 < len(kept) < EACH * 400
    size = sum(path.stat().st_size for path in (run / "samples").iterdir())
    assert size <= size_in_bytes(config.limit)


def test_a_number_of_each_iteration_is_kept(run: Path) -> None:
    write(run, range(3), config=SamplesConfig(keep=2))
    assert names(run) == ["0/0", "0/1", "1/0", "1/1", "2/0", "2/1"]


def test_a_run_that_keeps_none_drops_those_that_come_again(run: Path) -> None:
    write(run, range(3))
    write(run, range(1, 3), keep_to=0, config=SamplesConfig(keep=0))
    assert names(run) == expected([0])


def test_a_run_that_keeps_none_makes_no_folder_and_no_thread(run: Path) -> None:
    write(run, range(3), config=SamplesConfig(keep=0))
    assert not (run / "samples").exists()
    with pytest.raises(ConfigError, match="keep"):
        SamplesConfig(keep=-1)


@pytest.mark.parametrize("limit", ["1", "GB", "1 GiB", "-1 GB", "10 kB"])
def test_a_limit_that_is_none_is_named(limit: str) -> None:
    with pytest.raises(ConfigError, match="limit"):
        SamplesConfig(limit=limit)


@pytest.mark.parametrize(("text", "size"), [("1 GB", 10**9), ("2.5MB", 2_500_000), ("7 B", 7)])
def test_sizes_are_read(text: str, size: int) -> None:
    assert size_in_bytes(text) == size


def test_a_torn_line_is_not_read_and_a_lost_index_is_made_anew(run: Path) -> None:
    write(run, range(4))
    [segment] = segments(run / "samples")
    whole = segment.stat().st_size
    with segment.open("ab") as file:
        file.write(b'{"name":"4/0","kind":"trai')
    assert names(run) == expected(range(4))
    index = segment.with_suffix(".index")
    index.write_bytes(index.read_bytes()[:-30])  # torn, too
    assert names(run) == expected(range(4))
    index.unlink()
    assert names(run) == expected(range(4))
    write(run, range(4, 6), keep_to=3)
    assert names(run) == expected(range(6))
    assert segment.stat().st_size == whole


@pytest.mark.parametrize("free", [0, 10, 3000])
def test_a_full_disk_costs_samples_and_is_said_once(
    run: Path, free: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write(run, range(2))
    with monkeypatch.context() as full:
        full.setattr(os, "write", full_disk_after(free))
        writer = write(run, range(2, 12), keep_to=1)
    kept = names(run)
    assert kept == expected(range(12))[: len(kept)]
    assert len(kept) < EACH * 12
    lost = EACH * 12 - len(kept)
    # The lines of a batch may be there, and the index not: that counts as lost, too.
    assert lost <= writer.left_out <= lost + EACH
    assert writer.close() == {"samples that are not kept": writer.left_out}
    assert sum("not kept" in one.message for one in caplog.records) == 1
    assert "No space left on device" in caplog.text


def test_a_disk_that_is_behind_costs_samples_and_nobody_waits(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer, hung, begun = SampleWriter(run, SamplesConfig(), keep_to=None), Event(), Event()

    def slow() -> Iterator[Answer]:
        begun.set()
        hung.wait()
        yield from iteration(0)

    writer.put(slow, EACH)
    begun.wait()
    for number in range(1, 21):
        writer.put(lambda number=number: iteration(number), EACH)  # type: ignore[misc]
    assert not writer.flushed(0.01)
    hung.set()
    writer.close()
    kept = names(run)
    assert kept == expected(range(len(kept) // EACH))
    assert writer.left_out == EACH * 21 - len(kept) > 0
    assert "too slow" in caplog.text


def test_a_record_that_cannot_be_made_costs_itself(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = SampleWriter(run, SamplesConfig(), keep_to=None)

    def broken() -> Iterator[Answer]:
        raise LookupError("no tokenizer")
        yield

    writer.put(broken, EACH)
    writer.put(lambda: iteration(1), EACH)
    writer.close()
    assert names(run) == expected([1])
    assert writer.left_out == EACH
    assert "LookupError: no tokenizer" in caplog.text


def test_a_killed_writer_leaves_whole_samples_each_once(run: Path) -> None:
    said = -1
    for _ in range(4):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITE_FOR_EVER, str(run), str(said)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        for _ in range(150):
            said = int(process.stdout.readline())
        process.kill()
        process.communicate()
        kept = names(run)
        assert kept == expected(range(said + 2))[: len(kept)] or int(kept[0].split("/")[0]) > 0
        assert len(kept) == len(set(kept))
        numbers = [int(one.partition("/")[0]) for one in kept]
        assert numbers == sorted(numbers)
        assert set(range(numbers[0], said + 1)) <= set(numbers)


def test_an_index_that_is_open_sees_what_is_written_and_what_is_removed(run: Path) -> None:
    config = SamplesConfig(limit="200 kB")
    writer = SampleWriter(run, config, keep_to=None)
    index = SampleIndex(run)
    assert len(index) == 0
    assert not index.refresh()
    for number in range(300):
        writer.put(lambda number=number: iteration(number), EACH)  # type: ignore[misc]
        assert writer.flushed()
        if number == 2:
            assert index.refresh()
            assert [one["name"] for one in index.read(range(len(index)))] == expected(range(3))
            assert not index.refresh()
    gone = index.read(range(len(index)))
    assert gone == []  # its segment was removed
    assert index.refresh()
    assert index.iterations[-1] == 299
    assert index.iterations[0] > 2
    writer.close()


def test_a_hundred_thousand_are_put_in_order_without_reading_them(run: Path) -> None:
    numbers = np.random.default_rng(0).permutation(100_000)

    def many() -> Iterator[KeptSample]:
        for at, number in enumerate(numbers.tolist()):
            yield KeptSample(
                name=f"{at}/0",
                kind="training",
                step=0,
                iteration=at // 1000,
                trained=True,
                outcome="scored",
                reward=float(number),
                size=1,
            )

    writer = SampleWriter(run, SamplesConfig(), keep_to=None)
    writer.put(many, len(numbers))
    assert writer.flushed(300.0)
    writer.close()
    index = SampleIndex(run)
    everything = index.choose()
    assert len(everything) == 100_000
    page = index.ordered(everything, "reward", descending=True)[500:550]
    assert [one["reward"] for one in index.read(page)] == [float(99_499 - n) for n in range(50)]
    assert len(index.choose(iteration=7)) == 1000


def test_the_texts_of_tokens_are_written_once(run: Path) -> None:
    asked: list[int] = []

    def decode(tokens: object) -> str:
        assert isinstance(tokens, list)
        asked.extend(tokens)
        return f"<{tokens[0]}>"

    for _ in range(2):  # also by a resumed run
        vocabulary = Vocabulary(run, decode)
        vocabulary.note(np.array([3, 5, 3], np.int32), np.array([70], np.int32))
        vocabulary.note(np.array([5], np.int32))
    assert asked == [3, 5, 70]
    assert SampleIndex(run).texts([70, 4, 3]) == ["<70>", "", "<3>"]
    with (run / "samples" / "vocabulary.jsonl").open("ab") as file:
        file.write(b'\n[9,"<')  # torn
    Vocabulary(run, decode).note(np.array([9], np.int32))
    assert SampleIndex(run).texts([9, 5]) == ["<9>", "<5>"]


def test_what_is_not_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="no such folder"):
        read_samples(tmp_path / "nothing")
    with pytest.raises(RunFolderError, match="not the folder of a run"):
        read_samples(tmp_path)
