"""Agents of others that tests run, each in a virtualenv of its own: they need other versions of
what is installed here."""

from __future__ import annotations

from benchmarks.harness import PeerSoftware

PACKAGES = {
    name: PeerSoftware(name, ((pin,),))
    for name, pin in (
        ("openai-agents", "openai-agents==0.24.0"),
        ("pydantic-ai", "pydantic-ai-slim[openai,anthropic]==2.66.0"),
        ("mini-swe-agent", "mini-swe-agent==2.4.6"),
        ("verifiers", "verifiers==0.4.0"),
        ("textarena", "textarena==0.7.4"),
        ("openenv", "openenv-core==0.3.0"),
        ("lm-eval", "lm_eval[api]==0.4.13"),
    )
}
