"""The configuration of the endpoint."""

from __future__ import annotations

import importlib.util
from typing import Final, Literal

import msgspec

from rlinf_async.config import MissingExtra
from rlinf_async.config.counts import check_bounds

EXTRA: Final = "agents"
NEEDED_FOR: Final = "the endpoint of episodes"
SERVER: Final = ("starlette", "uvicorn")


class EndpointConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where agents that speak HTTP find their episode, and what they may ask for."""

    interface: str = "127.0.0.1"
    """address that is listened on, or name of a network interface, whose IPv4 address it is"""
    port: int = 0
    """port that is listened on; 0: any that is free. One that is given is one worker's of a host"""
    models: tuple[str, ...] = ()
    """names of models that an agent may ask for; empty: any, as most agents have one built in. The
    name changes nothing, there is one model; but an agent may ask another one, a judge say, whose
    answers would be trained"""
    unknown: Literal["refuse", "warn"] = "refuse"
    """what becomes of a request with a field that cannot be honoured: ``refuse``: it is answered
    with an error that names the field; ``warn``: the field is left out, with one warning"""

    def __post_init__(self) -> None:
        check_bounds(self, "port", least=0, most=65535)
        if not self.interface:
            raise ValueError("interface is empty; name one, or an address such as 127.0.0.1")
        if self.interface in ("0.0.0.0", "::"):  # agents are told it as an address
            raise ValueError(
                f"interface is {self.interface!r}, which no agent can call: name the interface by "
                "which agents reach this host, or its address"
            )


def check_installed() -> None:
    """Check that what serves episodes is installed; nothing is imported.

    Raises:
        MissingExtra: it is not.
    """
    for module in SERVER:
        if importlib.util.find_spec(module) is None:
            raise MissingExtra(module, extra=EXTRA, needed_for=NEEDED_FOR)
