"""`FSDPActor`: a `LanguageActor` whose model FSDP shards."""

from __future__ import annotations

from rlinf_async.workers.actor.language import LanguageActor


class FSDPActor(LanguageActor):
    """One rank of the actor group; its ``trainer`` is a `LanguageTrainerConfig`."""

    backend = "fsdp"
