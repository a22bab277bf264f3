"""The configuration of the ``language_rl`` job: a Struct for each of its tables, from one module.

::

    from rlinf_async.language import LanguageConfig, ModelConfig, TrainingConfig

What each setting means is in the docs, under its table. Importing this brings in no torch.
"""

from rlinf_async.algorithms.config import LanguageAdvantageConfig, LanguageLossConfig
from rlinf_async.backends.base import SchedulerConfig
from rlinf_async.backends.language_training.config import PublishedAdapterConfig
from rlinf_async.backends.megatron.config import MegatronOptions
from rlinf_async.backends.toy.config import ToyEngineConfig, ToyTrainerConfig
from rlinf_async.backends.transformers.config import TransformersEngineConfig
from rlinf_async.backends.vllm.config import VllmEngineConfig
from rlinf_async.data.config import DataConfig
from rlinf_async.episodes.endpoint.config import EndpointConfig
from rlinf_async.messages.language import Grammar, Sampling
from rlinf_async.observe.samples import SamplesConfig
from rlinf_async.observe.sinks.config import ObserveConfig
from rlinf_async.observe.sinks.mlflow import MlflowConfig
from rlinf_async.observe.sinks.prometheus import PrometheusConfig
from rlinf_async.observe.sinks.trackio import TrackioConfig
from rlinf_async.observe.sinks.wandb import WandbConfig
from rlinf_async.runtime.jobs.config import RayConfig
from rlinf_async.runtime.jobs.hooks import HooksConfig
from rlinf_async.runtime.jobs.language.config import (
    ActorConfig,
    ClusterConfig,
    CriticConfig,
    CriticOptimizerConfig,
    EvaluationConfig,
    EvaluationSetConfig,
    GenerationSettings,
    LanguageConfig,
    LanguageOptimizerConfig,
    LanguagePlacement,
    ModelConfig,
    TeacherConfig,
    TrainingConfig,
    WarmStartConfig,
)
from rlinf_async.runtime.jobs.placement import RolePlacement
from rlinf_async.runtime.recording import RecordingConfig
from rlinf_async.scheduling.config import SchedulingConfig
from rlinf_async.scheduling.state import Rates
from rlinf_async.workers.episode.config import EpisodeConfig
from rlinf_async.workers.reward import RewardConfig
from rlinf_async.workers.rollout.language import LanguageRolloutConfig

__all__ = [
    "ActorConfig",
    "ClusterConfig",
    "CriticConfig",
    "CriticOptimizerConfig",
    "DataConfig",
    "EndpointConfig",
    "EpisodeConfig",
    "EvaluationConfig",
    "EvaluationSetConfig",
    "GenerationSettings",
    "Grammar",
    "HooksConfig",
    "LanguageAdvantageConfig",
    "LanguageConfig",
    "LanguageLossConfig",
    "LanguageOptimizerConfig",
    "LanguagePlacement",
    "LanguageRolloutConfig",
    "MegatronOptions",
    "MlflowConfig",
    "ModelConfig",
    "ObserveConfig",
    "PrometheusConfig",
    "PublishedAdapterConfig",
    "Rates",
    "RayConfig",
    "RecordingConfig",
    "RewardConfig",
    "RolePlacement",
    "SamplesConfig",
    "Sampling",
    "SchedulerConfig",
    "SchedulingConfig",
    "TeacherConfig",
    "ToyEngineConfig",
    "ToyTrainerConfig",
    "TrackioConfig",
    "TrainingConfig",
    "TransformersEngineConfig",
    "VllmEngineConfig",
    "WandbConfig",
    "WarmStartConfig",
]
