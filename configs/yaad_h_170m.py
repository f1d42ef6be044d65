"""Yaad (Huber bias), then sliding-window attention, 170M: 12 blocks of width 768, 16 heads of 48.

    titans train yaad_h_170m --data.path fineweb-edu/ --data.tokenizer tokenizer.model

140,681,856 parameters, trained on 15B tokens: 28,610 steps of half a million.
Sized by arithmetic for 8 chips of 16 GB (TPU v5e-8): 2.1 GiB of parameters, gradients and optimizer state
sharded over them, and 2 rows of 4,096 tokens at a time on each.
"""

from titans_jax.config.papers import paper

config = paper("yaad_h", "170m")
