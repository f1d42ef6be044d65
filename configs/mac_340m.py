"""Titans MAC (memory as context), 340M: 24 blocks of width 1024, 16 heads of 64.

    titans train mac_340m --data.path fineweb-edu/ --data.tokenizer tokenizer.model

538,651,904 parameters, trained on 15B tokens: 28,610 steps of half a million.
Sized by arithmetic for 8 chips of 16 GB (TPU v5e-8): 8.0 GiB of parameters, gradients and optimizer state
sharded over them, and 2 rows of 4,096 tokens at a time on each.
"""

from titans_jax.config.papers import paper

config = paper("mac", "340m")
