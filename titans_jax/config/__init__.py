"""The configuration of one experiment: its fields, what is refused, the command line, and the papers' settings."""

from titans_jax.config.extensions import import_extensions, import_file
from titans_jax.config.rules import (
    cache_aggregation,
    gate_choices,
    local_memories,
    memory_rule,
    read_call,
    registered,
    step_size_bound,
)
from titans_jax.config.schema import (
    Config,
    ConfigError,
    DataConfig,
    MemoryConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    ProcessesConfig,
    ProfileConfig,
    TrainingConfig,
    from_dict,
    from_saved,
    leaves,
    to_dict,
    unknown_field,
)
from titans_jax.registry import did_you_mean

__all__ = [
    "Config",
    "ConfigError",
    "DataConfig",
    "MemoryConfig",
    "MeshConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ProcessesConfig",
    "ProfileConfig",
    "TrainingConfig",
    "cache_aggregation",
    "local_memories",
    "did_you_mean",
    "from_dict",
    "from_saved",
    "gate_choices",
    "import_extensions",
    "import_file",
    "leaves",
    "memory_rule",
    "read_call",
    "registered",
    "step_size_bound",
    "to_dict",
    "unknown_field",
]
