"""The experiments of the Titans and Miras papers as configurations (papers.md 2.1, 3.7), and a small one per model."""

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

TITANS = {"lmm": "lmm", "mac": "mac", "mag": "mag", "mal": "mal", "transformer": "attention"}
"""Block kind of each model of the Titans paper; the transformer is Transformer++, the baseline."""

MIRAS = ("moneta", "yaad", "memora", "moneta_h", "yaad_h", "memora_h")
"""The models of the Miras paper; _h is the Samba pattern, a memory and then a sliding-window attention."""


@dataclass(frozen=True)
class Size:
    """A row of Table 5 of the NeurIPS text, the tokens it was trained on, and the machine the batch is cut for."""

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


def paper(model: str, size: str) -> Config:
    """The paper's experiment with this model and size, on a folder of JSONL text given by --data.path.

    Chunk 16, segment 512, window 2048, 128 persistent tokens (Titans; Miras has none); AdamW with weight decay 0.1,
    clipped at 1.0, cosine after a warm-up of a billion tokens; a SentencePiece vocabulary of 32,000 (the paper: Llama
    2's), given by --data.tokenizer. Not in the paper: the width of SwiGLU (8/3 of the model's), the final learning
    rate (a tenth of the peak), how often to evaluate and save. Parameters are sharded over all devices.
    """
    row = SIZES[size]
    if model in TITANS:
        pattern, num_persistent, memory = (TITANS[model],), 128, MemoryConfig()
    else:
        pattern = ("lmm", "window") if model.endswith("_h") else ("lmm",)
        num_persistent, memory = 0, MemoryConfig(preset=model.removesuffix("_h"))
    steps = round(row.tokens / (ROWS * LENGTH))
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
            steps=steps,
            gradient_accumulation=row.microbatches,
            evaluate_every=1000,
            checkpoint_every=500,
            diagnostics_every=500,
            sample_prompt="The",
        ),
        mesh=MeshConfig(data=1, fsdp=-1, topology=row.topology),
    )


def small(preset: str, pattern: tuple[str, ...] = ("lmm",)) -> Config:
    """A language model of one memory rule for two CPU cores, on the source of Python's own standard library."""
    return Config(
        model=ModelConfig(
            pattern=pattern,
            dim=256,
            depth=2,
            num_heads=4,
            head_dim=64,
            window=64,
            num_persistent=0,
            dtype="float32",  # bfloat16 is slower than float32 on a CPU
            remat="none",
            memory=MemoryConfig(preset=preset, expansion=2),
        ),
        data=DataConfig(source="python", packing="stream", sequence_length=128, batch_size=4),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=40),
        training=TrainingConfig(
            steps=2000,
            log_every=10,
            evaluate_every=500,
            evaluation_batches=16,
            diagnostics_every=500,
            checkpoint_every=500,
            sample_prompt="def ",
            sample_tokens=400,
        ),
    )
