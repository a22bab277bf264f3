"""The ``language_rl`` job: reinforcement learning of a language model on verifiable tasks.

::

    job.py          checks a configuration, and runs it
    run.py          the flow, from the first prompt to the evaluation
    channels.py     the channels, and how much each may hold
    roles.py        rollout, inference and reward workers     learners.py  actors and critics
    backends.py     what trains: actor, critic, configuration of each backend
    samples.py      admission, the ledger, collection into groups
    checkpoints.py  what a checkpoint holds beside the weights; how it is written
    reports.py      metrics, the live view, evaluation, warnings, the summary
    model.py        the model's folder, before the run and after it
    config.py       the configuration                         checks.py    whether it can be run
"""

from rlinf_async.runtime.jobs.language.config import LanguageConfig
from rlinf_async.runtime.jobs.language.job import LanguageRL

__all__ = ["LanguageConfig", "LanguageRL"]
