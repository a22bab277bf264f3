"""The ``embodied_ppo`` job: PPO on Gymnasium environments.

::

    job.py         checks a configuration, and runs it          config.py, checks.py
    run.py         the graph, from the first ticket to the evaluation
    collecting.py  env and rollout workers: apart, or together in one process
    reached.py     how far a run has come, beside its checkpoints
    pictures.py    learning curve, timeline, video
"""

from rlinf_async.runtime.jobs.embodied.config import (
    ClusterConfig,
    EmbodiedConfig,
    EvaluationConfig,
    TrainingConfig,
)
from rlinf_async.runtime.jobs.embodied.job import EmbodiedPPO

__all__ = ["ClusterConfig", "EmbodiedConfig", "EmbodiedPPO", "EvaluationConfig", "TrainingConfig"]
