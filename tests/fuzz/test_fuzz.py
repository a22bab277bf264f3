"""The fuzzers' targets over their corpus, and over inputs that hypothesis makes of good ones."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlinf_async.channels.wire.session.connection import PeerRequests
from tests.fuzz import seeds
from tests.fuzz.pieces import Pieces, piece
from tests.fuzz.pure import Broken
from tests.fuzz.targets import CORPUS, PURE, TARGETS, ready

MEMORY = 4 * 1024**2
"""What reading one input may take beside a few copies of it: of the modules that it imports."""


@pytest.fixture(scope="module")
def live() -> Iterator[Callable[[bytes], None]]:
    with ready("live") as target:
        yield target


def mutated(good: list[bytes]) -> st.SearchStrategy[bytes]:
    """A good input that was changed in places, cut, or joined to another; or any bytes."""
    edits = st.lists(st.tuples(st.integers(0, 1 << 16), st.binary(max_size=4)), max_size=4)
    changed = st.builds(_edit, st.sampled_from(good), edits)
    return changed | st.builds(lambda a, b: a + b, changed, changed) | st.binary(max_size=300)


def _edit(good: bytes, edits: list[tuple[int, bytes]]) -> bytes:
    for at, new in edits:
        start = at % (len(good) + 1)
        good = good[:start] + new + good[start + (at >> 8) % 4 :]
    return good


def inputs(name: str) -> list[bytes]:
    found = [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]
    assert found, f"no corpus for {name}"
    return found


@pytest.mark.parametrize("name", TARGETS)
def test_every_input_of_the_corpus_is_read_or_refused(name: str) -> None:
    with ready(name) as target:
        for data in inputs(name):
            target(data)


@pytest.mark.parametrize("name", PURE)
def test_no_input_of_the_corpus_takes_more_memory_than_it_is_worth(name: str) -> None:
    with ready(name) as target:
        every = inputs(name)
        for data in every:  # whatever is imported and cached on first use
            target(data)
        tracemalloc.start()
        try:
            for data in every:
                tracemalloc.reset_peak()
                before = tracemalloc.get_traced_memory()[0]
                target(data)
                assert tracemalloc.get_traced_memory()[1] - before < 16 * len(data) + MEMORY
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("name", PURE)
def test_what_is_almost_right_is_read_or_refused(name: str) -> None:
    @settings(max_examples=300, derandomize=True, deadline=None, database=None)
    @given(mutated([*seeds.EVERY[name]()]))
    def check(data: bytes) -> None:
        PURE[name](data)

    check()


def test_a_server_goes_on_whatever_one_of_its_peers_says(live: Callable[[bytes], None]) -> None:
    @settings(
        max_examples=200,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(mutated([*seeds.live()]))
    def check(data: bytes) -> None:
        live(data)

    check()


def test_the_fuzzer_sees_a_request_that_is_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = 2 * [kind for kind, _ in seeds.METAS].index("channel.get")
    with ready("live") as live, monkeypatch.context() as patched:
        patched.setattr(PeerRequests, "lose", lambda self, reason: None)
        with pytest.raises(Broken, match="still holds something"):
            live([*seeds.live()][waiting])


def test_pieces_come_out_as_they_went_in() -> None:
    pieces = Pieces(b"\x07" + piece(b"some") + b"\x01\x02rest")
    found = pieces.byte(), pieces.some(), pieces.number(2), pieces.rest()
    assert found == (7, b"some", 0x201, b"rest")
    assert not pieces
    assert (pieces.byte(), pieces.some()) == (0, b"")
