"""The ``embodied_ppo`` job: PPO on Gymnasium environments.

::

    job.py         checks a configuration, and runs it
    run.py         the flow, from the first ticket to the evaluation
    channels.py    the channels, and how much each may hold
    collectors.py  env and rollout workers; or env workers that run the policy themselves
    reports.py     progress, metrics, the live view, pictures
    config.py      the configuration

    base.py        what the runs of all jobs in environments have in common
    settings.py    and their configurations
"""

from rlinf_async.runtime.jobs.embodied.config import EmbodiedConfig, TrainingConfig
from rlinf_async.runtime.jobs.embodied.job import EmbodiedPPO
from rlinf_async.runtime.jobs.embodied.settings import ClusterConfig, EvaluationConfig

__all__ = ["ClusterConfig", "EmbodiedConfig", "EmbodiedPPO", "EvaluationConfig", "TrainingConfig"]
