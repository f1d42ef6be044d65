"""A small language model of the width of quickstart with each of the other memories and blocks, for two CPU cores.

    titans train gla_small

Each is trained as quickstart is, an LMM with the memory of Titans: on the source of the running Python's own standard
library, read as bytes, in rows of 512, long enough for a memory to matter. So their figures stand beside one
another's, with unequal numbers of parameters; the tables of `titans study` make them equal.
"""

from typing import Any

from titans_jax.config import Config, DataConfig, MemoryConfig, ModelConfig, OptimizerConfig, TrainingConfig


def small(preset: str, pattern: tuple[str, ...] = ("lmm",), depth: int = 2, **memory: Any) -> Config:
    """Blocks of width 128 with this memory rule; `memory` sets other fields of `MemoryConfig`."""
    return Config(
        model=ModelConfig(
            pattern=pattern,
            dim=128,
            depth=depth,
            num_heads=2,
            head_dim=64,
            segment=64,
            window=64,
            num_persistent=0,
            dtype="float32",  # bfloat16 is slower than float32 on a CPU
            memory=MemoryConfig(preset=preset, expansion=2, chunk_size=64, **memory),
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


configs = {
    # Titans (arXiv 2501.00663) beside attention; alone it is quickstart
    "mac_small": small("titans", ("mac",)),  # 746,652 parameters
    "mag_small": small("titans", ("mag",)),  # 746,140 parameters
    "mal_small": small("titans", ("mal",)),  # 745,884 parameters
    # Miras (arXiv 2504.13173)
    "moneta_small": small("moneta"),  # 655,508 parameters
    "yaad_small": small("yaad"),  # 663,956 parameters
    "memora_small": small("memora"),  # 638,620 parameters
    "retnet_small": small("retnet"),  # 544,640 parameters
    "linear_attention_small": small("linear_attention"),  # 544,640 parameters
    "dfw_small": small("dfw"),  # 569,728 parameters
    "lightning_attention_small": small("lightning_attention"),  # 544,640 parameters
    "gla_small": small("gla"),  # 561,280 parameters
    "mamba2_small": small("mamba2"),  # 545,164 parameters
    "hgrn2_small": small("hgrn2"),  # 545,152 parameters
    "deltanet_small": small("deltanet"),  # 545,156 parameters
    "longhorn_small": small("longhorn"),  # 545,156 parameters
    "ttt_linear_small": small("ttt_linear"),  # 563,340 parameters
    "gated_deltanet_small": small("gated_deltanet"),  # 545,680 parameters
    "rwkv7_small": small("rwkv7"),  # 570,240 parameters
    "delta_product_small": small("delta_product"),  # 613,780 parameters
    "mesa_small": small("mesa"),  # 545,928 parameters
    "ttt_mlp_small": small("ttt_mlp"),  # 613,524 parameters
    "kimi_delta_attention_small": small("kimi_delta_attention"),  # 562,056 parameters
    "gated_deltanet_2_small": small("gated_deltanet_2"),  # 578,436 parameters
    "comba_small": small("comba"),  # 545,688 parameters
    "preconditioned_delta_small": small("preconditioned_delta"),  # 546,724 parameters
    "preconditioned_kimi_small": small("preconditioned_kimi"),  # 563,100 parameters
    "omeganet_small": small("omeganet"),  # 621,264 parameters
    "atlas_small": small("atlas"),  # 622,296 parameters
    "dla_small": small("dla"),  # 613,524 parameters
    # LaCT (arXiv 2505.23884): chunks as long as the window of the attention beside them
    "lact_small": small("lact", ("mag",)),  # 779,172 parameters
    "mamba3_small": small("mamba3"),  # 551,316 parameters
    "mamba3_mimo_small": small("mamba3_mimo"),  # 760,212 parameters
    # Gated DeltaNet-H2 (arXiv 2412.06464): a Gated DeltaNet layer, then a sliding-window attention
    "gated_deltanet_h2_small": small("gated_deltanet", pattern=("lmm", "window")),  # 527,112 parameters
    # Mamba (arXiv 2312.00752), twice as many blocks without a feed-forward layer, and Samba (arXiv 2406.07522)
    "mamba_small": small("titans", ("mamba",), depth=4),  # 548,480 parameters
    "samba_small": small("titans", ("samba", "window")),  # 559,488 parameters
    # Nested Learning (arXiv 2512.24695): Hope, and attention with a continuum memory
    "hope_small": small("hope", ("hope",)),  # 842,900 parameters
    "hope_attention_small": small("hope", ("hope_attention",)),  # 543,884 parameters
    # Memory Caching (arXiv 2602.24281): Titans, read together with copies of it from the ends of earlier segments
    "memory_caching_small": small("titans", caching="gated", cache_segment=64),  # 647,324 parameters
    # Log-linear attention (arXiv 2506.04761): the two memories of its paper, in parts by how long ago they were written
    "log_linear_mamba2_small": small("mamba2", log_linear_levels=10),  # 550,840 parameters
    "log_linear_gated_deltanet_small": small("gated_deltanet", log_linear_levels=10),  # 551,356 parameters
    # TPTT (arXiv 2506.17671): a Transformer++, and a memory beside a window of its attention (`training.init_from`)
    "transformer_small": small("titans", ("attention",)),  # 508,544 parameters
    "retrofit_small": small("titans", ("retrofit",)),  # 745,884 parameters
    # TNT (arXiv 2511.07343): a global memory of long chunks, and a local one that restarts with every shard
    "tnt_small": small("titans", local_chunks=(16,), shard=128),  # 683,444 parameters
}
