"""The Ray actor that is one rank's process.

::

    Ray                      this process                         driver
    starts the actor  --->   listen_for_ranks (rank 0 only)  <--  address of the rendezvous
                             prepare: main module, worker    <--  `Payload`, through Ray
                             serve: a worker, until its end  <->  one connection, not through Ray
    sees it end       <---                                   -->  by the end of `serve`

What the worker starts is in one process group, which a small process of its own kills once this
one is gone, however it ended: Ray kills the actor alone.
"""

from __future__ import annotations

import multiprocessing.spawn
import os
import pickle
import platform
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from rlinf_async.runtime.child import Boot, remove_unused_torch_cache, serve
from rlinf_async.runtime.ray.interfaces import address_of, interface_of
from rlinf_async.runtime.ray.reaper import KILL_GROUP, when_this_process_ends
from rlinf_async.runtime.signals import ignore_in_worker


class Payload(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank's process is given."""

    versions: dict[str, str]
    main: dict[str, Any]
    """how to import the driver's main module, see `main_module`"""
    boot: bytes
    """the pickled `Boot`: only readable once the main module is imported"""
    interface: str
    """network interface; empty: that of the host's address"""
    address: str
    """the host's address, as Ray knows it"""


class Standing(msgspec.Struct, frozen=True):
    """A rank's process that is ready to serve, or what is wrong with it."""

    pid: int
    error: str = ""


def versions() -> dict[str, str]:
    """Versions that have to be the same on all hosts."""
    python = ".".join(platform.python_version_tuple()[:2])
    package: Any = sys.modules[__name__.partition(".")[0]]
    return {"Python": python, "rlinf_async": package.__version__}


def main_module() -> dict[str, Any]:
    """How another process imports this one's main module: as multiprocessing does."""
    data = multiprocessing.spawn.get_preparation_data("ray")
    names = ("sys_path", "init_main_from_name", "init_main_from_path")
    return {name: data[name] for name in names if name in data}


class RankProcess:
    """One rank's process, as an actor of Ray."""

    def __init__(self) -> None:
        self._boot: Boot | None = None

    def listen_for_ranks(self, address: str, interface: str) -> str:
        """Where the other ranks of the group meet this one, see `collective.listen_for_ranks`."""
        from rlinf_async.workers.collective import listen_for_ranks

        return listen_for_ranks(address_of(interface) if interface else address)

    def prepare(self, payload: bytes) -> bytes:
        """Get ready to serve: a `Standing`. ``payload`` is a `Payload`."""
        error = self._prepare(msgspec.msgpack.decode(payload, type=Payload))
        return msgspec.msgpack.encode(Standing(os.getpid(), error))

    def serve(self) -> bool:
        """Serve the worker until asked to stop (True) or cut off (False)."""
        if self._boot is None:
            raise RuntimeError("the process was not prepared")
        asked_to_stop = serve(self._boot)
        remove_unused_torch_cache(Path(tempfile.gettempdir()))
        return asked_to_stop

    def _prepare(self, payload: Payload) -> str:
        """What is wrong; empty if nothing."""
        if payload.versions != versions():
            return (
                f"the driver has {in_words(payload.versions)}, but this host {in_words(versions())}"
            )
        _lead_group()
        ignore_in_worker()
        try:
            missing = _import_main(payload.main)
        except BaseException as error:
            return f"the driver's main module cannot be imported: {_name(error)}"
        try:
            boot: Boot = pickle.loads(payload.boot)
        except Exception as error:
            return (
                f"its class or arguments cannot be imported: {_name(error)}"
                f"{missing or ''}. Install the package that defines them on every host, or ship "
                "it: Cluster.ray(runtime_env={'working_dir': '.'})"
            )
        self._boot = boot
        if boot.spec.info.collective is not None:
            name = payload.interface or interface_of(payload.address)
            for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                if name:
                    os.environ.setdefault(variable, name)
        return ""


def _import_main(main: dict[str, Any]) -> str:
    """Import the driver's main module as ``__main__``; says so where it is not on this host."""
    here = set(sys.path)
    sys.path += [one for one in main["sys_path"] if one not in here and os.path.exists(one)]
    path = main.get("init_main_from_path")
    if path is not None:
        found = _on_this_host(path)
        if found is None:
            return f" (the script {path} is not on this host)"
        main = main | {"init_main_from_path": found}
    names = ("init_main_from_name", "init_main_from_path")
    multiprocessing.spawn.prepare({name: main[name] for name in names if name in main})
    return ""


def _on_this_host(path: str) -> str | None:
    """The script, at its own path or in the working directory that Ray has shipped."""
    for one in (Path(path), Path.cwd() / Path(path).name):
        if one.is_file():
            return str(one)
    return None


def _lead_group() -> None:
    """Lead a process group, which ends with this process."""
    with suppress(PermissionError):  # it leads one already
        os.setpgid(0, 0)
    when_this_process_ends(KILL_GROUP, str(os.getpgrp()))


def in_words(named: dict[str, str]) -> str:
    """Versions by name, in words."""
    return " and ".join(f"{name} {version}" for name, version in named.items())


def _name(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
