"""A first training on real text: a small LMM learns to write Python, in a few minutes on two CPU cores.

    titans train quickstart
    titans generate runs/quickstart --prompt "class "
    titans evaluate runs/quickstart positions

616,604 parameters. Sized for a laptop: the text is the source of the running Python's own standard library (31 MB, no
download), read as bytes. The model has no attention, so all that it knows of a row is in its memories; rows are long
enough for that to matter. Every evaluation prints the "memory gain": how much worse the text is predicted when the
memories are read but never written.
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
        pattern=("lmm",),
        dim=128,
        depth=2,
        num_heads=2,
        head_dim=64,
        num_persistent=8,
        dtype="float32",  # bfloat16 is slower than float32 on a CPU
        memory=MemoryConfig(depth=2, expansion=2, chunk_size=64),
    ),
    data=DataConfig(source="python", packing="stream", sequence_length=512, batch_size=4),
    optimizer=OptimizerConfig(learning_rate=4e-3, warmup_steps=40),
    training=TrainingConfig(
        steps=520,
        log_every=10,
        evaluate_every=130,
        evaluation_batches=16,
        diagnostics_every=130,
        checkpoint_every=130,
        sample_prompt="class ",
        sample_tokens=400,
    ),
)
