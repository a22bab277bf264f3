"""The person of a run who may act in place of the policy: a worker that asks them, its channels.

::

    env worker --Proposal--> InterventionWorker --Intervention, by key of the stage--> env worker

A stage has at most `PATIENCE` questions out, and one more for each earlier life of its env worker,
since one whose person is away asks none: so a put never waits for room while everybody lives.
"""

from __future__ import annotations

import secrets
import socket
from typing import Final

from rlinf_async.channels import Channel, Receiver, Sender
from rlinf_async.config import ConfigError
from rlinf_async.config.registry import needed
from rlinf_async.messages.embodied import Intervention, Proposal
from rlinf_async.runtime.apart import apart
from rlinf_async.runtime.calls import GroupCall
from rlinf_async.runtime.cluster import Cluster
from rlinf_async.runtime.jobs.checkpoints import max_deliveries
from rlinf_async.runtime.jobs.embodied.settings import EnvironmentSettings
from rlinf_async.runtime.supervise import Restart
from rlinf_async.workers.base import WorkerDied
from rlinf_async.workers.intervention import (
    PAGE,
    PATIENCE,
    InterventionReport,
    InterventionWorker,
    PageAddress,
    load_person,
)

GRACE: Final = 2.0
"""seconds for the answer to a question that nobody waits for any more"""
PATH = ("intervention", "person")
SLOWEST = 0.15
"""seconds of a step while a page is open, with some room: `rlinf_async.view.hands.HZ`"""


class Intervening:
    """The channels to the person of a run and back; none where nobody is asked."""

    def __init__(self, cluster: Cluster, config: EnvironmentSettings) -> None:
        self._cluster, self._config = cluster, config
        if not config.asked.person:
            return
        counts = config.cluster
        self._proposals: Channel[Proposal] = cluster.channel(
            Proposal,
            name="proposals",
            capacity=PATIENCE * config.env.stages * counts.env_workers,
            max_deliveries=max_deliveries(1, counts.max_restarts),
        )
        self._interventions: Channel[Intervention] = cluster.channel(
            Intervention, name="interventions", capacity=2 * PATIENCE
        )

    @property
    def seconds(self) -> float | None:
        """How long a step waits for the person; None: nobody is asked."""
        asked = self._config.asked
        return asked.deadline if asked.person else None

    @property
    def ends(self) -> tuple[Sender[Proposal] | None, Receiver[Intervention] | None]:
        """The ends of the env workers; None: nobody is asked."""
        if self.seconds is None:
            return None, None
        return self._proposals.sender, self._interventions.receiver

    async def launch(self) -> GroupCall[list[InterventionReport]] | None:
        """Start asking the person, until the env workers have collected all; None: nobody."""
        if self.seconds is None:
            return None
        counts, person = self._config.cluster, self._config.asked.person
        action = self._config.acting_policy.acts
        page = None
        if person == PAGE:
            page = PageAddress(action, _free_port(), secrets.token_urlsafe(32))
        people = await self._cluster.launch(
            InterventionWorker,
            person,
            page,
            acts=self._config.asked.acts,
            choices=action.outputs if action.discrete else 0,
            unjudged=self._config.unjudged,
            name="Person",
            restart=Restart(max=counts.max_restarts),
            env_vars=counts.environment,
        )
        if page is not None:
            address = f"http://127.0.0.1:{page.port}/?token={page.token}"
            print(f"{self._config.name}: to step in, open {address}", flush=True)
        return people.call(
            InterventionWorker.serve, self._proposals.receiver, self._interventions.sender
        )

    async def end(self, watching: GroupCall[list[InterventionReport]] | None) -> None:
        """Wait for the person to end, now that nothing is asked any more; one who does not answer
        holds up nobody.

        Raises: as `InterventionWorker.serve`.
        """
        if watching is None:
            return
        await watching.finished(GRACE)
        if watching.done():
            await watching
        else:
            watching.cancel()


def check_person(config: EnvironmentSettings) -> None:
    """Load the person of a run, in a process as theirs.

    Raises:
        ConfigError: there is no such function, it takes other arguments, or its import ends the
            process; or answers would come too late at each step.
    """
    asked, env = config.asked, config.env
    if not asked.person:
        return
    if env.control.hz and asked.deadline >= (between := env.steps_per_answer * env.control.period):
        raise ConfigError(
            f"{asked.deadline:g} seconds, but in real time (env.control) the policy is asked every "
            f"{between:g}: actions that wait for the person so long come too late; take less",
            path=("intervention", "deadline"),
        )
    if asked.person == PAGE:
        _check_page(config)
        return
    if not config.cluster.processes:
        load_person(asked.person)
        return
    try:
        apart(_load, asked.person, returns=bool, name="Person", quiet=True)
    except WorkerDied as death:
        raise ConfigError(f"{asked.person!r}: {death.failure.message}", path=PATH) from death


def _check_page(config: EnvironmentSettings) -> None:
    """Refuse a page that cannot be served, or whose person would have too many environments."""
    for module in ("starlette", "uvicorn"):
        needed(module, extra="view", needed_for=f"intervention.person = {PAGE!r}")
    if config.cluster.backend == "ray":
        raise ConfigError(
            f"{PAGE!r} is served on loopback, and Ray may start the person on any of its hosts: "
            "take cluster.backend 'processes', or name a function",
            path=PATH,
        )
    envs = config.cluster.env_workers * config.env.envs
    if envs > 1:
        raise ConfigError(
            f"{PAGE!r} is one person, who cannot act in {envs} environments at once: set env.envs, "
            "env.stages and cluster.env_workers to 1, or name a function",
            path=PATH,
        )
    if config.asked.deadline < SLOWEST:
        raise ConfigError(
            f"{config.asked.deadline:g} seconds, but while its page is open a person takes up to "
            f"{SLOWEST:g} for a step: allow at least that",
            path=("intervention", "deadline"),
        )


def _free_port() -> int:
    """A port of this host that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


def _load(person: str) -> bool:
    return callable(load_person(person))
