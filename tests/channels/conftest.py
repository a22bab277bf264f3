"""The fixtures that run one test body on every loop and over every transport."""

from __future__ import annotations

import pytest

from tests.channels.transport import SETTINGS, TRANSPORTS, Setting, Transport


@pytest.fixture(params=SETTINGS, ids="-".join)
def setting(request: pytest.FixtureRequest) -> Setting:
    """A transport and a kind of loop, by name."""
    chosen: Setting = request.param
    return chosen


@pytest.fixture
def loop_kind(setting: Setting) -> str:
    """The kind of loop that the test runs on."""
    return setting[1]


@pytest.fixture
def transport(setting: Setting, loop_kind: str) -> Transport:
    """Where the test's channel ends live."""
    return TRANSPORTS[setting[0]]()
