"""Compressed images: what is drawn is what was stored, whatever is overwritten or killed."""

from __future__ import annotations

import pathlib
from typing import Any

import msgspec
import numpy as np
import pytest
from gymnasium import spaces

from rlinf_async.data.demonstrations import (
    DemonstratedEpisode,
    DemonstrationsInfo,
    Outcome,
    write_episode,
    write_info,
)
from rlinf_async.messages.embodied import BatchRequest, ReplayBatch
from rlinf_async.messages.spaces import ObservationPart, ObservationSpec, continuous
from rlinf_async.workers.env.config import EnvConfig
from rlinf_async.workers.env.goals import describe_goals
from rlinf_async.workers.env.make import describe_env
from rlinf_async.workers.replay.columns import ReplayError, columns_of
from rlinf_async.workers.replay.store import ReplayStore
from rlinf_async.workers.replay.worker import ReplayConfig, ReplayPlan, ReplayWorker
from tests.workers.replay.test_hindsight import Road, collect

SEEN = ObservationSpec(
    (
        ObservationPart(name="state", kind="state", shape=(2,)),
        ObservationPart(name="hand", kind="image", shape=(4, 5, 3)),
        ObservationPart(name="depth", kind="image", shape=(6, 4)),
    )
)
CAPACITY, SPARE = 40, 30
Rows = dict[str, Any]


def rows_of(random: np.random.Generator, count: int, *, noise: bool = False) -> Rows:
    """Steps that follow each other; half of their images are black, or none."""
    seen = SEEN.empty(count + 1)
    seen["state"] = random.normal(size=(count + 1, 2))
    for name in ("hand", "depth"):
        seen[name] = random.integers(0, 256, seen[name].shape)
        if not noise:
            seen[name][random.random(count + 1) < 0.5] = 0
    return {
        "observation": seen[:-1],
        "action": random.normal(size=(count, 1)),
        "reward": random.normal(size=count),
        "next_observation": seen[1:],
        "discount": np.ones(count),
        "version": np.arange(count),
    }


def store_of(folder: pathlib.Path | None, compressed: bool, fresh: bool = True) -> ReplayStore:
    columns = columns_of(SEEN, continuous(1), episodes=True, compressed=compressed)
    return ReplayStore(columns, CAPACITY, spare=SPARE, folder=folder, fresh=fresh)


def same(one: Rows, other: Rows) -> None:
    assert one.keys() == other.keys()
    for name, array in one.items():
        assert array.dtype == other[name].dtype
        assert array.tobytes() == other[name].tobytes(), name


class Both:
    """A store that keeps images as they are, and one that compresses them."""

    def __init__(self, folder: pathlib.Path, disk: bool) -> None:
        self.folder, self.disk = folder, disk
        self.raw, self.small = self._opened(fresh=True)

    def _opened(self, *, fresh: bool) -> tuple[ReplayStore, ReplayStore]:
        raw, small = (self.folder / name if self.disk else None for name in ("raw", "small"))
        return store_of(raw, False, fresh), store_of(small, True, fresh)

    def write(self, rows: Rows) -> None:
        for store in (self.raw, self.small):
            store.write(rows)

    def book(self, count: int) -> None:
        for store in (self.raw, self.small):
            store.count += count

    def reopen(self, count: int, written: int) -> None:
        """Open both again, at ``count``; ``written`` was the newest that was ever written."""
        oldest, before = self.raw.first, (self.raw, self.small)
        self.raw, self.small = self._opened(fresh=False)
        for store, left in zip((self.raw, self.small), before, strict=True):
            store.count = count
            store.oldest = max(oldest if count == left.count else 0, written - store.slots, 0)
            if not self.disk:
                folder = self.folder / ("raw" if store is self.raw else "small")
                folder.mkdir(exist_ok=True)
                store.oldest = left.first
                left.save(folder, left.arrays)
                store.load(folder, store.arrays)
            store.check_images()

    def compare(self, random: np.random.Generator) -> None:
        if len(self.raw):
            numbers = random.integers(self.raw.first, self.raw.count, 7)
            same(self.raw.take(numbers), self.small.take(numbers))


@pytest.mark.parametrize("disk", [True, False], ids=["disk", "memory"])
@pytest.mark.parametrize("seed", range(4))
def test_any_program_of_writes_and_reopenings_draws_what_a_raw_store_does(
    tmp_path: pathlib.Path, disk: bool, seed: int
) -> None:
    random = np.random.default_rng(seed)
    both, saved, written, turns = Both(tmp_path, disk), 0, 0, 0
    for _ in range(80):
        deed = random.choice(["write", "write", "write", "lose", "save", "reopen", "back"])
        count = int(random.integers(0, 9))
        if deed in ("write", "lose"):  # what is lost was written, and is not booked
            both.write(rows_of(random, count))
            written = max(written, both.raw.count + count)
            both.book(count if deed == "write" else 0)
        elif deed == "save" or both.raw.count - saved > SPARE - 10:
            saved = both.raw.count
        elif deed == "reopen" or not disk:
            both.reopen(both.raw.count, written if disk else 0)
        else:
            both.reopen(saved, written)
        both.compare(random)
        turns = max(turns, both.raw.count // both.raw.slots)
    same(both.raw.take(both.raw.numbers), both.small.take(both.small.numbers))
    assert turns >= 1
    assert disk == (tmp_path / "small/layout.json").exists()


def images_in(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(folder.glob("images-*.bin"))


def test_what_is_overwritten_gives_its_bytes_back(tmp_path: pathlib.Path) -> None:
    random, store = np.random.default_rng(0), store_of(tmp_path, True)
    sizes = []
    for _ in range(60):  # eight times round
        store.write(rows_of(random, 10, noise=True))
        store.count += 10
        sizes.append(sum(file.stat().st_size for file in images_in(tmp_path)))
    of_one = 4 * 5 * 3 + 6 * 4 + 2 * 11  # noise: zlib adds eleven bytes
    part = -(-store.slots // 16)
    assert max(sizes) <= (store.slots + part) * of_one * (1 + 1 / 4)  # one more in each part
    assert max(sizes[30:]) == pytest.approx(max(sizes[10:30]), rel=0.05)


def test_equal_images_are_kept_once(tmp_path: pathlib.Path) -> None:
    random, store = np.random.default_rng(0), store_of(tmp_path, True)
    rows = rows_of(random, 4, noise=True)
    store.write(rows)
    seen = store.arrays["observation"]["hand"], store.arrays["next_observation"]["hand"]
    np.testing.assert_array_equal(seen[0][1:4], seen[1][:3])
    assert len(np.unique(np.concatenate([one["offset"][:4] for one in seen]))) == 5


@pytest.mark.parametrize("way", ["gone", "cut", "damaged"])
@pytest.mark.parametrize("disk", [True, False], ids=["disk", "memory"])
def test_a_damaged_file_is_named(tmp_path: pathlib.Path, disk: bool, way: str) -> None:
    store = store_of(tmp_path if disk else None, True)
    store.write(rows_of(np.random.default_rng(0), 12, noise=True))
    store.count = 12
    if not disk:
        store.save(tmp_path, store.arrays)
    file = images_in(tmp_path)[1]
    whole = bytearray(file.read_bytes())
    if way == "gone":
        file.unlink()
    elif way == "cut":
        file.write_bytes(whole[:-1])
    else:
        whole[20:24] = b"\0\1\2\3"
        file.write_bytes(whole)
    again = store_of(tmp_path if disk else None, True, fresh=False)
    again.count = 12
    said = {"gone": "is missing", "cut": "it was cut", "damaged": "is damaged: an image in it"}

    def opened_and_drawn() -> None:
        if not disk:
            again.load(tmp_path, again.arrays)
        again.check_images()
        assert way == "damaged"
        again.take(again.numbers)

    with pytest.raises(ReplayError, match=f"images-1.bin .*{said[way]}"):
        opened_and_drawn()
    if disk and way != "damaged":  # found while it runs, too
        with pytest.raises(ReplayError, match=r"images-1\.bin"):
            again.take(again.numbers)


def test_a_disk_without_room_is_named(tmp_path: pathlib.Path) -> None:
    store = store_of(tmp_path, True)
    (tmp_path / "images-0.bin").symlink_to("/dev/full")
    with pytest.raises(ReplayError, match=r"images-0\.bin cannot be written: .*Make room, or keep"):
        store.write(rows_of(np.random.default_rng(0), 1))


def test_a_store_is_opened_as_it_was_made(tmp_path: pathlib.Path) -> None:
    for made in (True, False):
        store_of(tmp_path, made)
        with pytest.raises(ReplayError, match="it cannot go on with it"):
            store_of(tmp_path, not made, fresh=False)
        assert not images_in(tmp_path)


# ---- the worker


class Filmed(Road):
    """The road, seen by a camera."""

    def __init__(self) -> None:
        super().__init__(ends=True)
        assert isinstance(self.observation_space, spaces.Dict)
        self.observation_space["camera"] = spaces.Box(0, 255, (6, 8, 3), np.uint8)

    def _shown(self) -> Any:
        camera = np.zeros((6, 8, 3), np.uint8)
        camera[self.length % 6, int(self.at) % 8] = (255, int(self.at * 16) % 256, self.length)
        return super()._shown() | {"camera": camera}


ENV = EnvConfig(entry_point=f"{__name__}:Filmed", envs=2, stages=1)


@pytest.fixture(scope="module")
def given() -> list[Any]:
    """Trajectories of eight iterations; in half of their steps a person acts."""
    made = collect(ENV, 8)
    for one in made:
        one.intervened = np.arange(one.reward.size).reshape(one.reward.shape) % 2 == 1
    return made


def worker(folder: pathlib.Path, images: str, start: str = "first", **given: Any) -> ReplayWorker:
    resume = given.pop("resume", "")
    settings: dict[str, Any] = {"capacity": 30, "batch_size": 16, "images": images, **given}
    plan = ReplayPlan(
        observation=describe_env(ENV).observation,
        action=continuous(1),
        gamma=0.5,
        seed=3,
        iterations=8,
        iteration_steps=10,
        ranks=2,
        spare=50,
        folder=str(folder / images),
        start=start,
        resume=resume and f"{resume}/{images}",
        intervened=True,
        goals=describe_goals(ENV) if "hindsight" in given else None,
        env=ENV if "hindsight" in given else None,
    )
    made = ReplayWorker(ReplayConfig(**settings), plan)
    made._open()
    return made


def drawn(one: ReplayWorker, iteration: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    index = priority = None
    for number in range(3):
        shares: list[ReplayBatch] = one._draw(
            BatchRequest(iteration=iteration, number=number, index=index, priority=priority)
        )
        index, priority = shares[0].index, np.linspace(0.1, 9.0, 16, dtype=np.float32)
        found += [msgspec.structs.asdict(share) for share in shares]
    return found


def learnt(one: ReplayWorker, given: list[Any], iterations: range) -> list[dict[str, Any]]:
    found = []
    for iteration in iterations:
        one._store_all(iteration, [given[iteration]])
        found += drawn(one, iteration)
    return found


@pytest.fixture(scope="module")
def shown(given: list[Any], tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Two demonstrated episodes."""
    folder = tmp_path_factory.mktemp("shown")
    for number in range(2):
        one = given[number]
        outcome = Outcome(one.reward[:, 0], one.last_observation[:1], number == 0)
        episode = DemonstratedEpisode(one.observation[:, 0], one.action[:, 0], outcome)
        write_episode(folder, number, episode)
    seen = describe_env(ENV).observation
    write_info(
        folder,
        DemonstrationsInfo(
            env="road", observation=seen, action_size=1, episodes=2, transitions=True
        ),
    )
    return folder


FORMS: dict[str, dict[str, Any]] = {
    "n-step": {"n_step": 3},
    "prioritized": {"sampling": "prioritized", "n_step": 2},
    "hindsight": {"hindsight": "future", "n_step": 2},
}


def interrupted(
    images: str, given: list[Any], tmp_path: pathlib.Path, **settings: Any
) -> list[dict[str, Any]]:
    """All that is drawn in a run of eight iterations, whose worker is killed in the fifth, where it
    keeps its store on disk, and which is then resumed from the third."""
    one = worker(tmp_path, images, **settings)
    found = learnt(one, given, range(3))
    (tmp_path / "saved").mkdir(exist_ok=True)
    one._save(tmp_path / "saved" / images)
    found += learnt(one, given, range(3, 4))
    if settings["storage"] == "disk":
        count, rows = one._store.count, one._store.take(one._store.numbers[:10])
        one._store.write(rows)  # and is killed before that is booked
        one = worker(tmp_path, images, **settings)
        assert one._store.count == count
        found += learnt(one, given, range(4, 6))
    again = {"start": "second", "resume": str(tmp_path / "saved"), **settings}
    return found + learnt(worker(tmp_path, images, **again), given, range(3, 8))


@pytest.mark.parametrize("storage", ["disk", "memory"])
@pytest.mark.parametrize("form", FORMS)
def test_a_worker_draws_the_same_whoever_is_killed(
    given: list[Any], shown: pathlib.Path, tmp_path: pathlib.Path, form: str, storage: str
) -> None:
    """Own experience, a person's transitions and demonstrations in one batch of two ranks."""
    settings = {**FORMS[form], "storage": storage, "demonstrations": str(shown)}
    raw, small = (
        interrupted(images, given, tmp_path, **settings) for images in ("raw", "compressed")
    )
    for one, other in zip(raw, small, strict=True):
        for name, value in one.items():
            assert np.asarray(value).tobytes() == np.asarray(other[name]).tobytes(), name
    cameras = np.concatenate([batch["observation"]["camera"] for batch in small])
    assert len({one.tobytes() for one in cameras}) > 20
    assert bool(images_in(tmp_path / "compressed/intervened")) == (storage == "disk")
    assert bool(images_in(tmp_path / "compressed/demonstrations")) == (storage == "disk")
