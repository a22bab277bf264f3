"""Another strategy while the run goes on: one transaction for every backend."""

from rlinf_async.backends.rescale.change import Change
from rlinf_async.backends.rescale.errors import RescaleError, RescaleUndecided
from rlinf_async.backends.rescale.rescale import Rescale, rescale_together
from rlinf_async.backends.rescale.transfer import TransferGroup

__all__ = [
    "Change",
    "Rescale",
    "RescaleError",
    "RescaleUndecided",
    "TransferGroup",
    "rescale_together",
]
