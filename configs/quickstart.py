"""A first training on real text: a small MAC learns to write Python, in a few minutes on two CPU cores.

    titans train quickstart
    titans generate runs/quickstart --prompt "def "

1,438,744 parameters. Sized for a laptop: the text is the source of the running Python's own standard library (31 MB, no
download), read as bytes.
"""

from titans_jax.config import (
    Config,
    DataConfig,
    MemoryConfig,
    ModelConfig,
    OptimizerConfig,
    TrainingConfig,
)

config = Config(
    model=ModelConfig(
        pattern=("mac",),
        dim=256,
        depth=1,
        num_heads=4,
        head_dim=64,
        segment=64,
        num_persistent=8,
        dtype="float32",  # bfloat16 is slower than float32 on a CPU
        remat="none",
        memory=MemoryConfig(depth=2, expansion=2, chunk_size=64),
    ),
    data=DataConfig(source="python", packing="stream", sequence_length=128, batch_size=4),
    optimizer=OptimizerConfig(learning_rate=4e-3, warmup_steps=40),
    training=TrainingConfig(
        steps=2800,
        log_every=10,
        evaluate_every=700,
        evaluation_batches=16,
        diagnostics_every=700,
        checkpoint_every=700,
        sample_prompt="def ",
        sample_tokens=400,
    ),
)
