"""A small language model with the rwkv7 memory on two CPU cores.

    titans train rwkv7_small

1,959,680 parameters, on the source of the running Python's own standard library, read as bytes.
"""

from titans_jax.config.papers import small

config = small("rwkv7")
