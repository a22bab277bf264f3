"""Making one rank's rescale fail, or be late, at a stage."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import torch
from torch.distributed.distributed_c10d import _set_pg_timeout

from rlinf_async.backends.rescale.rescale import Rescale
from rlinf_async.backends.reshard import buckets

LIMIT = 60.0
"""seconds; a busy machine is slow"""
STAGES = ("propose", "connect", "drain", "build", "move", "verify", "decide")
SHORT = 0.3
"""seconds that a rank waits for the late one, once it has come to that stage itself"""


class Injected(Exception):
    """What the broken rank raises."""


def break_it(how: str, stage: str) -> Callable[[], None]:
    """Make this rank's next rescale fail at a stage; returns what mends it."""
    whole, seal = getattr(Rescale, stage), cast(Any, buckets.seal)

    def raises(_: Rescale) -> None:
        raise Injected("as the test wants it")

    def raises_after(attempt: Rescale) -> None:
        whole(attempt)
        raise Injected("as the test wants it")

    def late(attempt: Rescale) -> Any:
        # Goes on as soon as another rank has given up: the worst moment.
        decision = "decision/0" if stage == "propose" else "decision/1"
        attempt._transaction._store.wait([decision], timedelta(seconds=LIMIT))
        return impatient(attempt)

    def impatient(attempt: Rescale) -> Any:
        attempt._timeout, attempt._transaction._deadline = SHORT, time.monotonic() + SHORT
        if stage == "move":  # torch's own threads wait for what was begun there
            _set_pg_timeout(timedelta(seconds=SHORT), attempt.change.transfer.group)
        return whole(attempt)

    def damages(bucket: torch.Tensor, *checksum_and_round: int) -> None:
        seal(bucket, *checksum_and_round)
        bucket[len(bucket) // 3] ^= 4

    if how == "damages":
        cast(Any, buckets).seal = damages
    else:
        wrong = {
            "raises": raises,
            "raises after": raises_after,
            "late": late,
            "waits for it": impatient,
        }
        setattr(Rescale, stage, wrong[how])

    def mend() -> None:
        cast(Any, buckets).seal = seal
        setattr(Rescale, stage, whole)

    return mend


def nothing_to_mend() -> None:
    pass
