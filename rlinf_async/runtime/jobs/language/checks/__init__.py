"""Whether a language run can be carried out: what would otherwise end it in its middle.

::

    check_backends   installed, registered                       nothing is read
    check_sizes      numbers that have to divide one another     nothing is read
    check_verifiers  those that settings name load
    open_prompts     context of the model - rollout.sampling.max_tokens >= every prompt
                     iterations x prompts of each <= records x epochs; verifiers that load
    open_sets        the same of the prompts of evaluation sets
    check_critic     a critic's own model: it reads the actor's tokens
    check_teacher    so does a teacher
    check_formats    formats of responses that some token of the model can begin
    check_scoring    verifiers load in a scoring process, too
"""

from rlinf_async.runtime.jobs.language.checks.episodes import (
    check_agent,
    check_endpoint,
    check_episodes,
)
from rlinf_async.runtime.jobs.language.checks.models import (
    check_comparison,
    check_critic,
    check_engine,
    check_formats,
    check_reward,
    check_teacher,
    check_teacher_folder,
)
from rlinf_async.runtime.jobs.language.checks.named import data_sections
from rlinf_async.runtime.jobs.language.checks.prompts import (
    check_scoring,
    check_verifiers,
    open_prompts,
    open_sets,
)
from rlinf_async.runtime.jobs.language.checks.settings import (
    check_backends,
    check_evaluation,
    check_families,
    check_honoured,
    check_sizes,
)

__all__ = [
    "check_agent",
    "check_backends",
    "check_comparison",
    "check_critic",
    "check_endpoint",
    "check_engine",
    "check_episodes",
    "check_evaluation",
    "check_families",
    "check_formats",
    "check_honoured",
    "check_reward",
    "check_scoring",
    "check_sizes",
    "check_teacher",
    "check_teacher_folder",
    "check_verifiers",
    "data_sections",
    "open_prompts",
    "open_sets",
]
