"""Another strategy while the run goes on: one transaction for every backend."""

from rlinf_async.backends.rescale.rescale import Change, Rescale, TransferGroup, rescale_together
from rlinf_async.backends.rescale.transaction import RescaleError, RescaleUndecided

__all__ = [
    "Change",
    "Rescale",
    "RescaleError",
    "RescaleUndecided",
    "TransferGroup",
    "rescale_together",
]
