"""The policies of this package, as rollout workers load them. No torch."""

from __future__ import annotations

from rlinf_async.backends.parts import PolicyPart


class TorchPolicy(PolicyPart):
    """A policy of torch, built-in or of one's own: ``actor.fsdp.policy.name`` says which."""

    factory = "rlinf_async.backends.policies.serving:serve_policy"
    slow_imports = ("rlinf_async.backends.policies.serving",)
