"""The experiments of the Titans paper as configurations (papers.md 2.1)."""

from dataclasses import dataclass

from titans_jax.config import Config, DataConfig, MemoryConfig, MeshConfig, ModelConfig, OptimizerConfig, TrainingConfig

PATTERNS = {"lmm": "lmm", "mac": "mac", "mag": "mag", "mal": "mal", "transformer": "attention"}
"""Block kind of each model; the transformer is Transformer++, the baseline."""


@dataclass(frozen=True)
class Size:
    """A row of Table 5 of the NeurIPS text, the tokens it was trained on, and the machine the batch is cut for."""

    depth: int
    dim: int
    num_heads: int
    learning_rate: float
    tokens: float
    microbatches: int
    """Parts of the 128 rows of a step: 1 or 2 rows at a time on each of the chips that the files in configs/ name."""


SIZES = {
    "170m": Size(12, 768, 16, 3e-3, 15e9, 8),
    "340m": Size(24, 1024, 16, 1.5e-3, 15e9, 8),
    # The paper has results for 400M but no row: depth, head width and learning rate of its neighbour, one step wider.
    "400m": Size(24, 1152, 18, 1.5e-3, 15e9, 8),
    "760m": Size(24, 1536, 16, 1.25e-3, 30e9, 8),
    "1b": Size(18, 2048, 8, 7e-4, 100e9, 4),
}
"""The last is the paper's 1.3B."""

ROWS, LENGTH = 128, 4096  # half a million tokens a step
WARMUP_TOKENS = 1e9


def paper(model: str, size: str) -> Config:
    """The paper's experiment with this model and size, on a folder of JSONL text given by --data.path.

    Chunk 16, segment 512, window 2048, 128 persistent tokens; AdamW with weight decay 0.1, clipped at 1.0, cosine
    after a warm-up of a billion tokens; a SentencePiece vocabulary of 32,000 (the paper: Llama 2's), given by
    --data.tokenizer. Not in the paper: the width of SwiGLU (8/3 of the model's), the final learning rate (a tenth of
    the peak), how often to evaluate and save. Parameters are sharded over all devices.
    """
    row = SIZES[size]
    steps = round(row.tokens / (ROWS * LENGTH))
    return Config(
        model=ModelConfig(
            pattern=(PATTERNS[model],),
            dim=row.dim,
            depth=row.depth,
            num_heads=row.num_heads,
            head_dim=row.dim // row.num_heads,
            vocab_size=32000,
            segment=512,
            window=2048,
            num_persistent=128,
            memory=MemoryConfig(depth=2, expansion=4, chunk_size=16),
        ),
        data=DataConfig(source="jsonl", tokenizer="tokenizer.model", sequence_length=LENGTH, batch_size=ROWS),
        optimizer=OptimizerConfig(
            learning_rate=row.learning_rate,
            warmup_steps=round(WARMUP_TOKENS / (ROWS * LENGTH)),
            weight_decay=0.1,
            clip_norm=1.0,
        ),
        training=TrainingConfig(
            steps=steps,
            gradient_accumulation=row.microbatches,
            evaluate_every=1000,
            checkpoint_every=500,
            diagnostics_every=500,
            sample_prompt="The",
        ),
        mesh=MeshConfig(data=1, fsdp=-1),
    )
