"""An experiment small enough to run many times in tests."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from titans_jax.config import (
    Config,
    DataConfig,
    MemoryConfig,
    ModelConfig,
    OptimizerConfig,
    TrainingConfig,
)

JSON_SOURCES = Path(json.__file__).parent
"""Four files of the standard library: real text, 32 KB."""

MODEL = ModelConfig(
    pattern=("attention",),
    dim=32,
    depth=2,
    num_heads=2,
    head_dim=16,
    segment=16,
    window=16,
    num_persistent=2,
    dtype="float32",
    remat="none",
    memory=MemoryConfig(depth=2, expansion=2, chunk_size=8),
)


def tiny_config(model: ModelConfig = MODEL, **training: Any) -> Config:
    """A Transformer++ of 45,000 parameters for 12 steps, with the given fields of TrainingConfig."""
    defaults = TrainingConfig(
        steps=12,
        log_every=1,
        evaluate_every=6,
        evaluation_batches=2,
        diagnostics_every=6,
        checkpoint_every=4,
        checkpoints_kept=3,
        sample_tokens=8,
    )
    return Config(
        model=model,
        data=DataConfig(source="text", path=str(JSON_SOURCES), sequence_length=64, batch_size=4, validation_every=3),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=3),
        training=dataclasses.replace(defaults, **training),
    )


def assert_every_file_has_a_checksum(step: Path) -> None:
    """Every file of an item of a checkpoint, and it is right."""
    from titans_jax.training.checksums import NAME, damage

    items = ["params", "optimizer", "run"]
    files = {each.relative_to(step).as_posix() for item in items for each in (step / item).rglob("*") if each.is_file()}
    assert set(json.loads((step / NAME).read_text())) == files
    assert damage(step, items) is None
