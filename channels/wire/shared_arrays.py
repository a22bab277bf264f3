"""Arrays that lie in shared memory from the start: another process of this host gets them without
a copy.

Anything else that is large is copied into shared memory when it is sent. What is computed anew each
time and then only read, as published weights are, can be written there at once:

::

    shared_bytes(n) --write--> put, publish --> only its place goes through the socket
         ^                                                       |
         +------- free again when nobody has a view of it -------+

Invariant: whoever receives it sees what is written later too, so nothing may be written once it was
sent.
"""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING, Final

from rlinf_async.channels.wire.pool import Pool
from rlinf_async.channels.wire.slab import AVAILABLE

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


SLAB_BYTES: Final = 4 * 1024**3
"""bytes of addresses: memory is taken as parts of it are used, and then kept for the next"""
LIMIT_BYTES: Final = 1024**4


def shared_bytes(size: int) -> NDArray[np.uint8] | None:
    """Return ``size`` bytes of shared memory, with any content; None where there is none.

    They are free again when nobody here or elsewhere has a view of them any more.
    """
    import numpy as np

    if not AVAILABLE or size < 1:
        return None
    parts = _pool_of(os.getpid()).take([size])
    return None if parts is None else np.frombuffer(parts[0], np.uint8)


@cache
def _pool_of(pid: int) -> Pool:
    # Apart from that of what is copied when it is sent: these are larger, and stay longer.
    return Pool(LIMIT_BYTES, SLAB_BYTES)
