"""Memora (Kullback-Leibler retention), then sliding-window attention, 340M: 24 blocks of width 1024, 16 heads of 64.

    titans train memora_h_340m --data.path fineweb-edu/ --data.tokenizer tokenizer.model

390,187,136 parameters, trained on 15B tokens: 28,610 steps of half a million.
Sized by arithmetic for 8 chips of 16 GB (TPU v5e-8): 5.8 GiB of parameters, gradients and optimizer state
sharded over them, and 2 rows of 4,096 tokens at a time on each.
"""

from titans_jax.config.papers import paper

config = paper("memora_h", "340m")
