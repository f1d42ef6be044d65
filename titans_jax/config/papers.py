"""The settings of the experiments of the Titans and Miras papers, which configs/titans.py and configs/miras.py name."""

from dataclasses import dataclass, replace

from titans_jax.config import (
    Config,
    DataConfig,
    MemoryConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    TrainingConfig,
)


@dataclass(frozen=True)
class Size:
    """A row of Titans' Table 5 (NeurIPS text), the tokens it was trained on, and the machine the batch is cut for."""

    depth: int
    dim: int
    num_heads: int
    learning_rate: float
    tokens: float
    microbatches: int
    """Parts of the 128 rows of a step: 1 or 2 rows at a time on each chip of the topology."""
    topology: str
    """The TPU slice that the batch is cut for."""


SIZES = {
    "170m": Size(12, 768, 16, 3e-3, 15e9, 8, "v5e:2x4"),
    "340m": Size(24, 1024, 16, 1.5e-3, 15e9, 8, "v5e:2x4"),
    # The paper has results for 400M but no row: depth, head width and learning rate of its neighbour, one step wider.
    "400m": Size(24, 1152, 18, 1.5e-3, 15e9, 8, "v5e:2x4"),
    "760m": Size(24, 1536, 16, 1.25e-3, 30e9, 8, "v5e:4x4"),
    "1b": Size(18, 2048, 8, 7e-4, 100e9, 4, "v5e:4x8"),
}
"""The last is the paper's 1.3B. Miras has the rows 170m, 340m and 760m (there 780M) and names 1.3B without a row."""

ROWS, LENGTH = 128, 4096  # half a million tokens a step
WARMUP_TOKENS = 1e9


def titans(block: str, size: str) -> Config:
    """An experiment of the Titans paper: one kind of block, 128 persistent tokens; "attention" is Transformer++."""
    return experiment(size, (block,), MemoryConfig(), num_persistent=128)


def miras(preset: str, size: str, pattern: tuple[str, ...] = ("lmm",)) -> Config:
    """An experiment of the Miras paper: its memories have no persistent tokens."""
    return experiment(size, pattern, MemoryConfig(preset=preset), num_persistent=0)


def experiment(size: str, pattern: tuple[str, ...], memory: MemoryConfig, num_persistent: int) -> Config:
    """A model with the papers' settings, on a folder of JSONL text given by --data.path.

    Memories of two matrices, expansion 4, chunk 16; segment 512, window 2048; AdamW with weight decay 0.1, clipped at
    1.0, cosine after a warm-up of a billion tokens; a SentencePiece vocabulary of 32,000 (the paper: Llama 2's), given
    by --data.tokenizer. Not in the papers: the width of SwiGLU (8/3 of the model's), the final learning rate (a tenth
    of the peak), how often to evaluate and save. Parameters are sharded over all devices.
    """
    row = SIZES[size]
    return Config(
        model=ModelConfig(
            pattern=pattern,
            dim=row.dim,
            depth=row.depth,
            num_heads=row.num_heads,
            head_dim=row.dim // row.num_heads,
            vocab_size=32000,
            segment=512,
            window=2048,
            num_persistent=num_persistent,
            memory=replace(memory, depth=2, expansion=4, chunk_size=16),
        ),
        data=DataConfig(source="jsonl", tokenizer="tokenizer.model", sequence_length=LENGTH, batch_size=ROWS),
        optimizer=OptimizerConfig(
            learning_rate=row.learning_rate,
            warmup_steps=round(WARMUP_TOKENS / (ROWS * LENGTH)),
            weight_decay=0.1,
            clip_norm=1.0,
        ),
        training=TrainingConfig(
            steps=round(row.tokens / (ROWS * LENGTH)),
            gradient_accumulation=row.microbatches,
            evaluate_every=1000,
            checkpoint_every=500,
            diagnostics_every=500,
            sample_prompt="The",
        ),
        mesh=MeshConfig(data=1, fsdp=-1, topology=row.topology),
    )
