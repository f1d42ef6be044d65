"""Titans LMM (the memory alone), 760M: 24 blocks of width 1536, 16 heads of 96.

    titans train lmm_760m --data.path fineweb-edu/ --data.tokenizer tokenizer.model

871,567,104 parameters, trained on 30B tokens: 57,220 steps of half a million.
Sized by arithmetic for 16 chips of 16 GB (TPU v5e-16): 13.0 GiB of parameters, gradients and optimizer state
sharded over them, and 1 row of 4,096 tokens at a time on each.
"""

from titans_jax.config.papers import paper

config = paper("lmm", "760m")
