"""Memora (Kullback-Leibler retention), 340M: 24 blocks of width 1024, 16 heads of 64.

    titans train memora_340m --data.path fineweb-edu/ --data.tokenizer tokenizer.model

411,225,344 parameters, trained on 15B tokens: 28,610 steps of half a million.
Sized by arithmetic for 8 chips of 16 GB (TPU v5e-8): 6.1 GiB of parameters, gradients and optimizer state
sharded over them, and 2 rows of 4,096 tokens at a time on each.
"""

from titans_jax.config.papers import paper

config = paper("memora", "340m")
