"""A small language model with the mamba2 memory on two CPU cores.

    titans train mamba2_small

1,910,552 parameters, on the source of the running Python's own standard library, read as bytes.
"""

from titans_jax.config.papers import small

config = small("mamba2")
