"""A small language model with each of the other memories, for two CPU cores.

    titans train gla_small

The text is the source of the running Python's own standard library, read as bytes. For Titans, see quickstart.
"""

from typing import Any

from titans_jax.config import Config, DataConfig, MemoryConfig, ModelConfig, OptimizerConfig, TrainingConfig

LEVELS = 16, 32, 64
"""Tokens after which the levels of a continuum memory change, all fewer than in a row."""


def small(preset: str, pattern: tuple[str, ...] = ("lmm",), depth: int = 2, **memory: Any) -> Config:
    """Blocks of width 256 with this memory rule; `memory` sets other fields of `MemoryConfig`."""
    return Config(
        model=ModelConfig(
            pattern=pattern,
            dim=256,
            depth=depth,
            num_heads=4,
            head_dim=64,
            window=64,
            num_persistent=0,
            dtype="float32",  # bfloat16 is slower than float32 on a CPU
            remat="none",
            memory=MemoryConfig(preset=preset, expansion=2, **memory),
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


configs = {
    "retnet_small": small("retnet"),  # 1,908,480 parameters
    "linear_attention_small": small("linear_attention"),  # 1,908,480 parameters
    "dfw_small": small("dfw"),  # 1,958,656 parameters
    "lightning_attention_small": small("lightning_attention"),  # 1,908,480 parameters
    "gla_small": small("gla"),  # 1,941,760 parameters
    "mamba2_small": small("mamba2"),  # 1,910,552 parameters
    "hgrn2_small": small("hgrn2"),  # 1,909,504 parameters
    "deltanet_small": small("deltanet"),  # 1,910,536 parameters
    "longhorn_small": small("longhorn"),  # 1,910,536 parameters
    "ttt_linear_small": small("ttt_linear"),  # 1,947,928 parameters
    "gated_deltanet_small": small("gated_deltanet"),  # 1,912,608 parameters
    "rwkv7_small": small("rwkv7"),  # 1,959,680 parameters
    "delta_product_small": small("delta_product"),  # 2,180,904 parameters
    "mesa_small": small("mesa"),  # 1,913,104 parameters
    "ttt_mlp_small": small("ttt_mlp"),  # 2,050,344 parameters
    "kimi_delta_attention_small": small("kimi_delta_attention"),  # 1,944,336 parameters
    "gated_deltanet_2_small": small("gated_deltanet_2"),  # 1,976,072 parameters
    "comba_small": small("comba"),  # 1,912,624 parameters
    "preconditioned_delta_small": small("preconditioned_delta"),  # 1,916,744 parameters
    "preconditioned_kimi_small": small("preconditioned_kimi"),  # 1,948,472 parameters
    "omeganet_small": small("omeganet"),  # 2,081,184 parameters
    "atlas_small": small("atlas"),  # 2,085,296 parameters
    "dla_small": small("dla"),  # 2,050,344 parameters
    # LaCT (arXiv 2505.23884): chunks as long as the window of the attention beside them
    "lact_small": small("lact", pattern=("mag",), chunk_size=64, forget="preset"),  # 2,642,736 parameters
    "mamba3_small": small("mamba3"),  # 1,924,904 parameters
    "mamba3_mimo_small": small("mamba3_mimo"),  # 2,735,912 parameters
    # Gated DeltaNet-H2 (arXiv 2412.06464): a Gated DeltaNet layer, then a sliding-window attention
    "gated_deltanet_h2_small": small("gated_deltanet", pattern=("lmm", "window")),  # 1,841,680 parameters
    # Mamba (arXiv 2312.00752), twice as many blocks without a feed-forward layer, and Samba (arXiv 2406.07522)
    "mamba_small": small("titans", ("mamba",), depth=4),  # 1,916,160 parameters
    "samba_small": small("titans", ("samba", "window")),  # 1,946,368 parameters
    # Nested Learning (arXiv 2512.24695): Hope, and attention with a continuum memory
    "hope_small": small("hope", ("hope",), continuum_chunks=LEVELS),  # 2,439,452 parameters
    "hope_attention_small": small("hope", ("hope_attention",), continuum_chunks=LEVELS),  # 1,906,956 parameters
    # Memory Caching (arXiv 2602.24281): Titans, read together with copies of it from the ends of earlier segments
    "memory_caching_small": small("titans", caching="gated", cache_segment=32),  # 2,185,528 parameters
    # Log-linear attention (arXiv 2506.04761): the two memories of its paper, in parts by how long ago they were written
    "log_linear_mamba2_small": small("mamba2", log_linear_levels=8),  # 1,929,056 parameters
    "log_linear_gated_deltanet_small": small("gated_deltanet", log_linear_levels=8),  # 1,931,112 parameters
    # TPTT (arXiv 2506.17671): a Transformer++, and a memory beside a window of its attention (`training.init_from`)
    "transformer_small": small("titans", ("attention",)),  # 1,770,752 parameters
    "retrofit_small": small("titans", ("retrofit",)),  # 2,579,256 parameters
    # TNT (arXiv 2511.07343): a global memory of long chunks, and a local one that restarts with every shard
    "tnt_small": small("titans", chunk_size=64, local_chunks=(8,), shard=64),  # 2,198,376 parameters
}
