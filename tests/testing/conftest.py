"""The test kit's own fixtures."""

from rlinf_async.testing.pytest_plugin import run_on_loop as run_on_loop
