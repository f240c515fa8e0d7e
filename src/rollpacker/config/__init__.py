"""One pydantic tree: the configuration of a run.

Nothing here acts on a key, or knows who does.
"""

from rollpacker.config.base import Config
from rollpacker.config.data import DataConfig, ModelConfig
from rollpacker.config.reading import ConfigError, load, load_as, parse, parse_as
from rollpacker.config.rewards import (
    CodeTimeoutConfig,
    EnvironmentConfig,
    GradingConfig,
    RewardConfig,
    longest_response,
)
from rollpacker.config.rollout import (
    DynamicSamplingConfig,
    EngineConfig,
    FakeEngineConfig,
    MiniEngineConfig,
    RolloutConfig,
    StreamingConfig,
    TailBatchingConfig,
    VllmEngineConfig,
)
from rollpacker.config.train import (
    AlgorithmConfig,
    DAPOConfig,
    DrGRPOConfig,
    FSDPTrainerConfig,
    GRPOConfig,
    GSPOConfig,
    LocalTrainerConfig,
    ReinforcePPConfig,
    RLOOConfig,
    SamplerCorrectionConfig,
    TrainConfig,
    TrainerConfig,
)
from rollpacker.config.tree import (
    CheckpointConfig,
    ClusterConfig,
    DevicesConfig,
    EvalConfig,
    MuxConfig,
    RunConfig,
    SamplesConfig,
)

__all__ = [
    "AlgorithmConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "CodeTimeoutConfig",
    "Config",
    "ConfigError",
    "DAPOConfig",
    "DataConfig",
    "DevicesConfig",
    "DrGRPOConfig",
    "DynamicSamplingConfig",
    "EngineConfig",
    "EnvironmentConfig",
    "EvalConfig",
    "FSDPTrainerConfig",
    "FakeEngineConfig",
    "GRPOConfig",
    "GSPOConfig",
    "GradingConfig",
    "LocalTrainerConfig",
    "MiniEngineConfig",
    "ModelConfig",
    "MuxConfig",
    "RLOOConfig",
    "ReinforcePPConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "SamplerCorrectionConfig",
    "SamplesConfig",
    "StreamingConfig",
    "TailBatchingConfig",
    "TrainConfig",
    "TrainerConfig",
    "VllmEngineConfig",
    "load",
    "load_as",
    "longest_response",
    "parse",
    "parse_as",
]
