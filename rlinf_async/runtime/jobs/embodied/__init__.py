"""The ``embodied_ppo`` job: PPO on Gymnasium environments.

::

    job.py         checks a configuration, and runs it
    settings.py    the configuration, and what all jobs in environments share of it
    choosing.py    which simulator, and how many rollout workers
    run.py         the flow, from the first ticket to the evaluation; metrics, pictures
    collectors.py  channels; env and rollout workers, or env workers that run the policy themselves
    playing.py     a trained policy's episodes, and recorded ones of a script
"""

from rlinf_async.runtime.jobs.embodied.job import EmbodiedPPO
from rlinf_async.runtime.jobs.embodied.settings import (
    EmbodiedClusterConfig,
    EmbodiedConfig,
    EmbodiedEvaluationConfig,
    EmbodiedTrainingConfig,
)

__all__ = [
    "EmbodiedClusterConfig",
    "EmbodiedConfig",
    "EmbodiedEvaluationConfig",
    "EmbodiedPPO",
    "EmbodiedTrainingConfig",
]
