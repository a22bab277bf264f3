"""Where a response ends is one thing, whoever looks: an engine in its loop, or its worker."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rlinf_async.messages.language import Generated, Kept, Sampling, Tokens
from rlinf_async.messages.stopping import StopTexts, ended, written

PIECES = [
    *(b"a", b"b", b"<", b"/", b"</", b">", b"b>a", b"</a", b" ", b"\n", b"\n\n", b". "),
    *(b"\xc3", b"\xa9", b"\xe2\x82", b"\xac", b""),
]
"""texts of tokens: some are parts of a character, some several, one is nothing"""
STOPS = ["</a>", "a", "\n\n", ". ", "é", "€b", "<é>", ">a<", " ", "/ "]


def decode(tokens: Tokens) -> str:
    return b"".join(PIECES[one] for one in tokens.tolist()).decode("utf-8", errors="replace")


def drawn(tokens: list[int]) -> Generated:
    count = len(tokens)
    return Generated(
        token_ids=np.array(tokens, np.int32),
        log_prob=-np.arange(count, dtype=np.float32),
        version=np.arange(count, dtype=np.int32),
        finish="length",
        kept=Kept.of([[one, 20] for one in tokens]),
    )


tokens = st.lists(st.integers(0, len(PIECES) - 1), max_size=40)
stops = st.lists(st.sampled_from(STOPS), min_size=1, max_size=3, unique=True)


@given(tokens, stops, st.integers(0, 5))
def test_an_engine_stops_at_the_token_at_which_the_response_is_cut(
    response: list[int], stop: list[str], prompt: int
) -> None:
    texts = StopTexts(stop, decode)
    cut = ended(drawn(response), Sampling(stop=tuple(stop)), decode)
    so_far = [0] * prompt  # what stands before the response ends nothing
    stopped = None
    for one in response:
        so_far.append(one)
        if texts.ended(so_far, prompt):
            stopped = len(so_far) - prompt
            break
    whole = decode(np.array(response, np.int32))
    assert (stopped is None) == (not any(one in whole for one in stop))
    if stopped is not None:
        assert len(cut.token_ids) == stopped
        assert cut.finish == "stop"
    else:
        assert (cut.token_ids.tolist(), cut.finish) == (response, "length")


@given(tokens, stops, st.booleans())
def test_the_text_ends_before_what_stopped_it_or_with_it(
    response: list[int], stop: list[str], include: bool
) -> None:
    sampling = Sampling(stop=tuple(stop), include_stop=include)
    cut = ended(drawn(response), sampling, decode)
    text = written(cut, sampling, decode)
    there = [one for one in stop if one in decode(cut.token_ids)]
    if not there:
        assert text == decode(np.array(response, np.int32))
    elif include:
        assert any(text.endswith(one) for one in there)
    else:
        assert decode(cut.token_ids).startswith(text)
        assert any(decode(cut.token_ids).startswith(text + one) for one in there)
    counts = [len(one) for one in (cut.token_ids, cut.log_prob, cut.version)]
    assert cut.kept is not None
    assert counts == [len(cut.kept.counts)] * 3
    assert [one.tolist()[0] for one in cut.kept.sets()] == cut.token_ids.tolist()


def test_the_first_of_a_stop_token_and_a_stop_text_counts() -> None:
    both = Sampling(stop=("</a>",), stop_token_ids=(9,))
    begin = [0, 2, 3, 0]  # a</a
    assert ended(drawn([*begin, 5, 9]), both, decode).token_ids.tolist() == [*begin, 5]
    assert ended(drawn([*begin, 9, 5]), both, decode).token_ids.tolist() == [*begin, 9]
    stopped = ended(drawn([0, 9, 1]), both, decode)
    assert written(stopped, both, decode) == "a"
    kept = Sampling(stop_token_ids=(9,), include_stop=True)
    assert written(stopped, kept, decode) == "a\n"


def test_text_behind_a_stop_in_its_last_token_is_in_no_text() -> None:
    sampling = Sampling(stop=("b>",), include_stop=True)
    cut = ended(drawn([0, 6, 0]), sampling, decode)
    assert cut.token_ids.tolist() == [0, 6]
    assert written(cut, sampling, decode) == "ab>"
    assert written(cut, Sampling(stop=("b>",)), decode) == "a"
