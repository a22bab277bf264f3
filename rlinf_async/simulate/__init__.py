"""Runs in virtual time: the workers, channels and policies of a real run over cost models.

::

    SimulationConfig --> simulate() --> Record(result, spans, decisions)

``docs/scheduling.md`` says what of it is real.
"""

from rlinf_async.simulate.config import SimulationConfig, on_devices, placements
from rlinf_async.simulate.run import Simulated, SimulationRecord, simulate

__all__ = [
    "Simulated",
    "SimulationConfig",
    "SimulationRecord",
    "on_devices",
    "placements",
    "simulate",
]
