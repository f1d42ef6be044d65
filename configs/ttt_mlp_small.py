"""A small language model with the ttt_mlp memory on two CPU cores.

    titans train ttt_mlp_small

2,044,176 parameters, on the source of the running Python's own standard library, read as bytes.
"""

from titans_jax.config.papers import small

config = small("ttt_mlp")
