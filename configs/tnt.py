"""The model of the TNT paper (arXiv 2511.07343): a stale global memory, and local memories that restart every shard.

    titans train tnt_150m --data.path fineweb-edu/ --data.tokenizer tokenizer.model
    titans train tnt_150m --training.init_from runs/tnt_150m --training.run_dir runs/tnt_150m_2 \\
        --model.memory.local_chunks 2 --training.steps 950

    size  blocks  width  heads      tokens    steps  TPU slice  rows at a time on a chip
    150m      12    768  16 of 48      10B   19,073  v5e-8      1

The second command is the paper's second stage: a twentieth more of training, with the smaller local chunks that the
finished model uses, as a model must be read with the chunks it was trained with. Rows have 8,192 tokens. Four local
memories were its best model: `--model.memory.local_chunks 4 8 16 32`.
"""

from titans_jax.config.papers import tnt

configs = {
    # One local memory, with chunks of 8 tokens
    "tnt_150m": tnt(8),  # 150,208,704 parameters, 2.2 GiB
}
