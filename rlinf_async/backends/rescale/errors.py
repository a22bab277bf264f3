"""What can go wrong when the strategy changes. A rank that was lost is a `reshard.PeerLost`.

::

    RescaleError        another strategy was refused or failed; nothing has changed
    RescaleUndecided    what the other ranks decided cannot be known: end this one
"""

from __future__ import annotations

from rlinf_async.backends.base import StrategyUnknown


class RescaleError(Exception):
    """The message names the stage, the rank, and the cause; every rank trains on as before."""


class RescaleUndecided(StrategyUnknown):
    """This rank was ready, so the others may have changed, and the store with the decision is gone.

    Its model may be the old or the new one: end the process, and go on from a checkpoint.
    """
