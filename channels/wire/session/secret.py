"""The cluster's secret, where it is given from outside: for processes of several hosts.

It comes from the environment, or better from a file of this user's own, and never from a command
line, which everybody on a host can read.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from typing import Final

from rlinf_async.channels.wire.session.auth import check_secret

VARIABLE: Final = "RLINF_ASYNC_SECRET"
FILE_VARIABLE: Final = "RLINF_ASYNC_SECRET_FILE"
MAX_SECRET_BYTES: Final = 4096
HOW: Final = (
    "make one with: (umask 077; head -c 32 /dev/urandom | base64 > secret), and give every process "
    f"its path in {FILE_VARIABLE}"
)


def load_secret(environ: Mapping[str, str] = os.environ) -> bytes | None:
    """The secret that the environment gives, or names a file of; None if it does neither.

    Raises:
        ValueError: it gives both, or the secret is too short; see `read_secret`.
        OSError: the file cannot be read.
    """
    text, path = environ.get(VARIABLE), environ.get(FILE_VARIABLE)
    if text is not None and path is not None:
        raise ValueError(f"both {VARIABLE} and {FILE_VARIABLE} are set: unset one of them")
    if path is not None:
        return read_secret(path)
    if text is None:
        return None
    secret = text.strip().encode()
    check_secret(secret)
    return secret


def read_secret(path: str | os.PathLike[str]) -> bytes:
    """The secret in a file that only this user can read; white space around it does not count.

    Raises:
        ValueError: others can read or change the file, it is no file, or what it holds is too short
            or too long.
        OSError: it cannot be read.
    """
    where = os.fspath(path)
    file = os.open(where, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise ValueError(f"the cluster's secret {where!r} is not a file: {HOW}")
        if found.st_uid != os.geteuid():
            raise ValueError(
                f"the cluster's secret {where!r} belongs to user {found.st_uid}, not to this one "
                f"({os.geteuid()}): {HOW}"
            )
        if mode := stat.S_IMODE(found.st_mode) & 0o077:
            raise ValueError(
                f"the cluster's secret {where!r} can be used by others (mode "
                f"{stat.S_IMODE(found.st_mode):o}, of which {mode:o} is too much): chmod 600 it, "
                "and make a new one if somebody may have read it"
            )
        secret = os.read(file, MAX_SECRET_BYTES + 1).strip()
    finally:
        os.close(file)
    if len(secret) > MAX_SECRET_BYTES:
        raise ValueError(f"the cluster's secret {where!r} has more than {MAX_SECRET_BYTES} bytes")
    try:
        check_secret(secret)
    except ValueError as error:
        raise ValueError(f"{where!r}: {error}") from error
    return secret
