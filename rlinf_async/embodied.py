"""The configurations of ``embodied_ppo``, ``embodied_sac`` and ``embodied_offline``, jobs in
environments: a Struct for each of their tables, from one module.

::

    from rlinf_async.embodied import EmbodiedConfig, EmbodiedTrainingConfig, EnvConfig

What each setting means is in the docs, under its table. Importing this brings in no torch.
"""

from rlinf_async.algorithms.config import AdvantageConfig, LossConfig
from rlinf_async.backends.base import LoraConfig, OptimizerConfig, SchedulerConfig
from rlinf_async.backends.fsdp.config import (
    CloningConfig,
    EmbodiedTrainerConfig,
    FSDPConfig,
    PPOConfig,
)
from rlinf_async.backends.policies.config import Corrected, PolicyConfig
from rlinf_async.backends.policies.flow_action.config import FlowConfig
from rlinf_async.backends.policies.vision_language.config import VisionLanguageConfig
from rlinf_async.backends.sac_config import (
    OfflineLossConfig,
    OfflineTrainerConfig,
    SacLossConfig,
    SacOptimizerConfig,
    SacPolicyConfig,
    SacShardingConfig,
    SacTrainerConfig,
)
from rlinf_async.messages.spaces import ActionSpec, Factor, ObservationPart, ObservationSpec
from rlinf_async.observe.samples import SamplesConfig
from rlinf_async.observe.sinks.config import ObserveConfig
from rlinf_async.observe.sinks.mlflow import MlflowConfig
from rlinf_async.observe.sinks.prometheus import PrometheusConfig
from rlinf_async.observe.sinks.trackio import TrackioConfig
from rlinf_async.observe.sinks.wandb import WandbConfig
from rlinf_async.realtime import ControlConfig, SafetyConfig
from rlinf_async.runtime.jobs.config import RayConfig
from rlinf_async.runtime.jobs.embodied.curriculum import CurriculumConfig
from rlinf_async.runtime.jobs.embodied.settings import (
    DemonstrationsConfig,
    EmbodiedClusterConfig,
    EmbodiedConfig,
    EmbodiedEvaluationConfig,
    EmbodiedPlacement,
    EmbodiedTrainingConfig,
    ModelConfig,
)
from rlinf_async.runtime.jobs.embodied_offline.config import (
    OfflineConfig,
    OfflineTrainingConfig,
)
from rlinf_async.runtime.jobs.embodied_sac.config import (
    ResidualConfig,
    SacConfig,
    SacTrainingConfig,
)
from rlinf_async.runtime.jobs.hooks import HooksConfig
from rlinf_async.runtime.jobs.placement import RolePlacement
from rlinf_async.runtime.jobs.targets import KeepBestConfig, StopAtConfig
from rlinf_async.runtime.recording import RecordingConfig
from rlinf_async.workers.env.config import EnvConfig, EnvRewardConfig
from rlinf_async.workers.intervention import InterventionConfig
from rlinf_async.workers.replay.worker import BatchesConfig, ReplayConfig
from rlinf_async.workers.rollout.policy import RolloutConfig

__all__ = [
    "ActionSpec",
    "AdvantageConfig",
    "BatchesConfig",
    "CloningConfig",
    "ControlConfig",
    "Corrected",
    "CurriculumConfig",
    "DemonstrationsConfig",
    "EmbodiedClusterConfig",
    "EmbodiedConfig",
    "EmbodiedEvaluationConfig",
    "EmbodiedPlacement",
    "EmbodiedTrainerConfig",
    "EmbodiedTrainingConfig",
    "EnvConfig",
    "EnvRewardConfig",
    "FSDPConfig",
    "Factor",
    "FlowConfig",
    "HooksConfig",
    "InterventionConfig",
    "KeepBestConfig",
    "LoraConfig",
    "LossConfig",
    "MlflowConfig",
    "ModelConfig",
    "ObservationPart",
    "ObservationSpec",
    "ObserveConfig",
    "OfflineConfig",
    "OfflineLossConfig",
    "OfflineTrainerConfig",
    "OfflineTrainingConfig",
    "OptimizerConfig",
    "PPOConfig",
    "PolicyConfig",
    "PrometheusConfig",
    "RayConfig",
    "RecordingConfig",
    "ReplayConfig",
    "ResidualConfig",
    "RolePlacement",
    "RolloutConfig",
    "SacConfig",
    "SacLossConfig",
    "SacOptimizerConfig",
    "SacPolicyConfig",
    "SacShardingConfig",
    "SacTrainerConfig",
    "SacTrainingConfig",
    "SafetyConfig",
    "SamplesConfig",
    "SchedulerConfig",
    "StopAtConfig",
    "TrackioConfig",
    "VisionLanguageConfig",
    "WandbConfig",
]
