"""Titans LMM (the memory alone), 400M: 24 blocks of width 1152, 18 heads of 64.

    titans train lmm_400m --data.path fineweb-edu/ --data.tokenizer tokenizer.model

508,911,264 parameters, trained on 15B tokens: 28,610 steps of half a million.
The paper gives no shape for 400M: this is one step wider than 340M.
Sized by arithmetic for 8 chips of 16 GB (TPU v5e-8): 7.6 GiB of parameters, gradients and optimizer state
sharded over them, and 2 rows of 4,096 tokens at a time on each.
"""

from titans_jax.config.papers import paper

config = paper("lmm", "400m")
