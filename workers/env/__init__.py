"""The env role: environments of Gymnasium, stepped in stages. Imports gymnasium only when used."""

from rlinf_async.messages.described import EnvError
from rlinf_async.messages.spaces import EnvSpec
from rlinf_async.workers.env.config import EnvConfig, EnvFailed, RolloutGone
from rlinf_async.workers.env.evaluation import EvaluatedEpisode
from rlinf_async.workers.env.make import describe_env, describe_spaces, make_env
from rlinf_async.workers.env.worker import EnvReport, EnvWorker, EvaluationPlan

__all__ = [
    "EnvConfig",
    "EnvError",
    "EnvFailed",
    "EnvReport",
    "EnvSpec",
    "EnvWorker",
    "EvaluatedEpisode",
    "EvaluationPlan",
    "RolloutGone",
    "describe_env",
    "describe_spaces",
    "make_env",
]
