"""Transformer++ (the baseline), 1B: 18 blocks of width 2048, 8 heads of 256.

    titans train transformer_1b --data.path fineweb-edu/ --data.tokenizer tokenizer.model

1,041,836,032 parameters, trained on 100B tokens: 190,735 steps of half a million. The paper's 1.3B.
Sized by arithmetic for 32 chips of 16 GB (TPU v5e-32): 15.5 GiB of parameters, gradients and optimizer state
sharded over them, and 1 row of 4,096 tokens at a time on each.
"""

from titans_jax.config.papers import paper

config = paper("transformer", "1b")
