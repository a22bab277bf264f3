"""Programs by hypothesis: the same as those by seed, found more slowly and made small by itself."""

from __future__ import annotations

from typing import Final

from hypothesis import strategies as st

from rlinf_async.channels import Key
from tests.channels.model.program import KEYS, Do, Ending, Kill, Op, Program, Side, Task

QUICK: Final = st.one_of(st.integers(1, 3), st.integers(1, 120))
"""Times: who gets often enough in a row is served in another way."""
_keys = st.sampled_from(KEYS[:2])
_cancel = st.one_of(st.none(), st.none(), st.none(), st.integers(0, 12))
_after = st.one_of(st.none(), st.none(), st.none(), st.none(), st.integers(1, 4))
_endings: st.SearchStrategy[Ending] = st.sampled_from(("ack", "fail", "cancel", "replace"))


def _batches(do: Do, endings: st.SearchStrategy[Ending]) -> st.SearchStrategy[Op]:
    def make(
        weight: int, least: int | None, times: int, key: Key | None, ending: Ending,
        turns: int, cancel: int | None, after: int | None,
    ) -> Op:  # fmt: skip
        at_least = None if least is None else min(least, weight)
        return Op(
            do, times, key, weight, at_least,
            ending=ending, turns=turns, cancel=cancel, cancel_after=after,
        )  # fmt: skip

    return st.builds(
        make,
        st.sampled_from((1, 2, 3, 12, 100)), st.one_of(st.none(), st.integers(1, 3)),
        st.integers(1, 4), _keys, endings, st.integers(0, 6), _cancel, _after,
    )  # fmt: skip


_turns = st.builds(Op, st.just("turn"), turns=st.integers(1, 8))
_ends = st.builds(Op, st.sampled_from(("clone", "close", "statistics")))
_puts = st.builds(
    Op, st.sampled_from(("put", "put_nowait")), QUICK, _keys, st.integers(1, 3),
    cancel=_cancel, cancel_after=_after,
)  # fmt: skip
_sends = st.one_of(_puts, _puts, _turns, st.just(Op("flush")), _ends, st.just(Op("fail")))
_gets = st.builds(
    Op, st.sampled_from(("get", "iterate", "get_nowait")), QUICK, _keys,
    cancel=_cancel, cancel_after=_after,
)  # fmt: skip
_plain: st.SearchStrategy[Ending] = st.just("ack")
_takes = st.one_of(
    _gets, _gets, _turns, _ends, _batches("batch", _plain), _batches("lease", _endings),
)  # fmt: skip


def _tasks(side: Side, *, wire: bool) -> st.SearchStrategy[Task]:
    ops = st.lists(_sends if side == "send" else _takes, min_size=1, max_size=6).map(tuple)
    at = st.integers(0, 3) if wire else st.just(0)
    return st.builds(Task, st.just(side), ops, at, st.integers(0, 2))


def programs(*, wire: bool = False, kills: bool = False) -> st.SearchStrategy[Program]:
    """Programs of 2 to 8 tasks; over a wire with cuts, over processes with kills."""
    tasks = st.tuples(
        st.lists(_tasks("send", wire=wire), min_size=1, max_size=3),
        st.lists(_tasks("take", wire=wire), min_size=1, max_size=5),
    ).map(lambda both: (*both[0], *both[1]))
    cuts = st.lists(st.integers(1, 60), max_size=2).map(lambda at: tuple(sorted(at)))
    kill = st.lists(st.builds(Kill, st.integers(1, 3), st.integers(1, 60)), max_size=1).map(tuple)
    return st.builds(
        Program,
        tasks,
        capacity=st.sampled_from((64, 1, 2, 5, 512)),
        max_weight=st.sampled_from((None, None, 3, 8)),
        max_deliveries=st.sampled_from((5, 1, 2)),
        payload=st.sampled_from(("int", "int", "struct", "array")),
        witness=st.booleans(),
        cuts=cuts if wire else st.just(()),
        kills=kill if kills else st.just(()),
        seed=st.just(None) if wire else st.one_of(st.none(), st.integers(0, 1000)),
    )
