"""A small language model with the lightning_attention memory on two CPU cores.

    titans train lightning_attention_small

1,908,480 parameters, on the source of the running Python's own standard library, read as bytes.
"""

from titans_jax.config.papers import small

config = small("lightning_attention")
