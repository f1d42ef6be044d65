"""The settings of the experiments of the Titans, Miras and later papers; configs/ has a file for each paper."""

import math
from dataclasses import dataclass, replace

from titans_jax.config import (
    Config,
    DataConfig,
    MemoryConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    TrainingConfig,
    memory_rule,
)


@dataclass(frozen=True)
class Size:
    """A row of Titans' Table 5 (NeurIPS text), the tokens it was trained on, and the machine the batch is cut for."""

    parameters: float
    depth: int
    dim: int
    num_heads: int
    learning_rate: float
    tokens: float
    microbatches: int
    """Parts of the 128 rows of a step: 1 or 2 rows at a time on each chip of the topology."""
    topology: str
    """The TPU slice that the batch is cut for."""
    shares_embeddings: bool = True
    """Whether embedding and head are one matrix: in all sizes but 170m, else MAC's feed-forward would have no width
    left."""


SIZES = {
    # Miras names 120M but has no row for it: this is the row of 170m, whose separate head alone has 25 million
    # parameters.
    "120m": Size(120e6, 12, 768, 16, 3e-3, 15e9, 8, "v5e:2x4"),
    "170m": Size(170e6, 12, 768, 16, 3e-3, 15e9, 8, "v5e:2x4", shares_embeddings=False),
    "340m": Size(340e6, 24, 1024, 16, 1.5e-3, 15e9, 8, "v5e:2x4"),
    # The paper has results for 400M but no row: this is the row of 340m, with a wider feed-forward.
    "400m": Size(400e6, 24, 1024, 16, 1.5e-3, 15e9, 8, "v5e:2x4"),
    "760m": Size(760e6, 24, 1536, 16, 1.25e-3, 30e9, 8, "v5e:4x4"),
    "1b": Size(1.3e9, 18, 2048, 8, 7e-4, 100e9, 4, "v5e:4x8"),
}
"""1b is the paper's 1.3B. Miras has rows for 170m, 340m and 760m (there 780M), and names 120M and 1.3B without rows."""

MATRICES = {
    "attention": 4, "window": 4, "lmm": 5, "mac": 9, "mag": 9, "mal": 9, "hope": 4, "hope_attention": 5,
    "mamba": 6.25, "samba": 6.25,
}  # fmt: skip
"""Matrices of dim x dim in a block, beside those of its feed-forward."""
MAMBA_ROWS = 110
"""Further parameters of a Mamba layer, in rows of width dim."""
START = {"ttt_linear": 1, "ttt_mlp": 8}
"""Parameters of a memory's learned start divided by head_dim^2, for the baselines that have one."""
VOCABULARY = 32000
ROWS, LENGTH = 128, 4096  # half a million tokens a step
WARMUP_TOKENS = 1e9


def titans(block: str, size: str) -> Config:
    """An experiment of the Titans paper: one kind of block, 128 persistent tokens; "attention" is Transformer++."""
    return experiment(size, (block,), MemoryConfig(), num_persistent=128)


def miras(preset: str, size: str, pattern: tuple[str, ...] = ("lmm",)) -> Config:
    """An experiment of the Miras paper: its memories have no persistent tokens."""
    return experiment(size, pattern, MemoryConfig(preset=preset), num_persistent=0)


def atlas(preset: str, size: str, pattern: tuple[str, ...] = ("lmm",)) -> Config:
    """An experiment of the ATLAS paper (arXiv 2505.23735, by secondary notes): Titans' sizes, one learning rate."""
    memory = MemoryConfig(preset=preset)
    rows = 4 + (memory_rule(memory).algorithm.window - 1) * SIZES[size].num_heads  # weights of a window, for every head
    config = experiment(size, pattern, memory, num_persistent=0, rows=rows)
    return replace(config, optimizer=replace(config.optimizer, learning_rate=4e-4))


def hope(block: str, size: str) -> Config:
    """An experiment of the Nested Learning paper (arXiv 2512.24695, by secondary notes) in Titans' sizes: "hope", with
    five memories in every head, or "hope_attention", with none."""
    start = 40 if block == "hope" else 0
    return experiment(size, (block,), MemoryConfig(preset="hope"), num_persistent=0, start=start, rows=0)


def lact(size: str) -> Config:
    """LaCT (arXiv 2505.23884) in the sizes of the others: chunks as long as the window of the attention beside them, in
    rows of four chunks."""
    config = experiment(size, ("mag",), MemoryConfig(preset="lact"), num_persistent=0, start=12, rows=0)
    model = replace(config.model, rope_theta=1e6, memory=replace(config.model.memory, chunk_size=config.model.window))
    rows, chips = ROWS // 2, math.prod(int(side) for side in SIZES[size].topology.removeprefix("v5e:").split("x"))
    data = replace(config.data, sequence_length=2 * LENGTH, batch_size=rows)
    training = replace(config.training, gradient_accumulation=rows // chips)  # one row at a time on a chip
    return replace(config, model=model, data=data, training=training)


def tnt(*local_chunks: int) -> Config:
    """An experiment of the TNT paper (arXiv 2511.07343, by secondary notes): 150M parameters, 10 billion tokens.

    Global chunks and shards of 2,048 tokens, AdamW at 1e-3. Not stated: depth, width and heads, here those of Titans'
    170m with a narrower feed-forward; the rows, here of 8,192 tokens; momentum and forgetting, which its equations
    leave out and its text allows, here as in Titans. Rows are cut from a stream of documents, as packed documents would
    each have to start with a shard.
    """
    memory, length, tokens = MemoryConfig(local_chunks=local_chunks, shard=2048), 2 * LENGTH, ROWS * LENGTH
    config = experiment("170m", ("lmm",), memory, num_persistent=0)
    return replace(
        config,
        model=replace(config.model, hidden_dim=2048, memory=replace(config.model.memory, chunk_size=2048)),
        data=replace(config.data, sequence_length=length, batch_size=tokens // length, packing="stream"),
        optimizer=replace(config.optimizer, learning_rate=1e-3),
        training=replace(config.training, steps=round(10e9 / tokens)),
    )


def baseline(preset: str, size: str, pattern: tuple[str, ...] = ("lmm",)) -> Config:
    """A recurrent model that the papers compare theirs with: the same backbone around its memory, and the same
    training."""
    return experiment(size, pattern, MemoryConfig(preset=preset), num_persistent=0, start=START.get(preset, 0), rows=0)


def log_linear(preset: str, size: str, levels: int) -> Config:
    """A baseline with log-linear attention (arXiv 2506.04761): its memory in `levels` parts for the latest tokens, and
    one for all older."""
    memory = MemoryConfig(preset=preset, log_linear_levels=levels)
    rows = (levels + 1) * SIZES[size].num_heads  # a scale of every part, for every head
    return experiment(size, ("lmm",), memory, num_persistent=0, start=0, rows=rows)


def memory_caching(size: str) -> Config:
    """Titans' LMM with Memory Caching (arXiv 2602.24281, by secondary notes): a memory kept every 256 tokens, all of
    them read by gates."""
    memory = MemoryConfig(caching="gated", cache_segment=256)
    rows = 132 + SIZES[size].dim  # as Titans has, and the matrix of the scores
    return experiment(size, ("lmm",), memory, num_persistent=128, rows=rows)


def mamba3_mimo(size: str) -> Config:
    """Mamba-3 with four keys, queries and values a token (arXiv 2603.15569), with the training of the other
    baselines."""
    rows = 6 * SIZES[size].dim  # three further matrices for queries and three for keys
    return experiment(size, ("lmm",), MemoryConfig(preset="mamba3_mimo"), num_persistent=0, start=0, rows=rows)


def mamba(size: str) -> Config:
    """Mamba (arXiv 2312.00752), with the training of the other baselines: blocks without a feed-forward layer, as many
    as bring it to the parameters of its size at the width of the others."""
    row, config = SIZES[size], experiment(size, ("mamba",), MemoryConfig(), num_persistent=0)
    block = MATRICES["mamba"] * row.dim**2 + MAMBA_ROWS * row.dim
    depth = round((row.parameters - embeddings(row)) / block)
    return replace(config, model=replace(config.model, depth=depth, hidden_dim=None))


def samba(size: str) -> Config:
    """Samba (arXiv 2406.07522): in turn Mamba and sliding-window attention, each with a feed-forward layer.

    What a Mamba layer has beside its matrices is little, and counted as if it were a memory's gates.
    """
    return experiment(size, ("samba", "window"), MemoryConfig(), num_persistent=0, start=0, rows=0)


def experiment(
    size: str, pattern: tuple[str, ...], memory: MemoryConfig, num_persistent: int, start: int = 8, rows: int = 132
) -> Config:
    """A model with the papers' settings, on a folder of JSONL text given by --data.path.

    Memories of two matrices, expansion 4, chunk 16; segment 512, window 2048; AdamW with weight decay 0.1, clipped at
    1.0, cosine after a warm-up of a billion tokens; a SentencePiece vocabulary of 32,000 (the paper: Llama 2's), given
    by --data.tokenizer. Not in the papers: the width of SwiGLU, here chosen so that all models of a size have as many
    parameters (`hidden_dim`); shared embeddings, which all sizes but 170m need; tokens scaled by sqrt(dim), without
    which LMM has bursts of large gradients at these learning rates (memory/what_was_tried.md); the final learning rate
    (a tenth of the peak); how often to evaluate and save. Parameters are sharded over all devices.

    start: parameters of the memory's learned start divided by head_dim^2. rows: further parameters, in rows of width
    dim, for persistent tokens or channel-wise gates, and for what the output's gate sees of predictions.
    """
    row = SIZES[size]
    return Config(
        model=ModelConfig(
            pattern=pattern,
            dim=row.dim,
            depth=row.depth,
            num_heads=row.num_heads,
            head_dim=row.dim // row.num_heads,
            vocab_size=VOCABULARY,
            hidden_dim=hidden_dim(row, pattern, start * row.dim // row.num_heads + rows),
            tie_embeddings=row.shares_embeddings,
            embedding_scale=math.sqrt(row.dim),
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


def hidden_dim(row: Size, pattern: tuple[str, ...], memory: int) -> int:
    """The width inside SwiGLU that brings a model to the parameters of its size, a multiple of 64.

    Models of one size are compared, so they have the same number of parameters (within 2 %) at the depth and width of
    the papers' table: a block with both attention and memory has a narrower feed-forward layer.

    memory: parameters of a memory layer beside its matrices, in rows of width dim.
    """
    matrices = sum(MATRICES[block] for block in pattern) / len(pattern)
    with_memory = sum(block not in ("attention", "window") for block in pattern) / len(pattern)
    small = with_memory * row.dim * (memory + 4 * row.num_heads)  # 4: gates
    block = (row.parameters - embeddings(row)) / row.depth - matrices * row.dim**2 - small
    return round(block / (3 * row.dim) / 64) * 64


def embeddings(row: Size) -> int:
    """Parameters of the embedding, and of the head where it is another matrix."""
    return VOCABULARY * row.dim * (1 if row.shares_embeddings else 2)
