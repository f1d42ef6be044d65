"""A small language model with the dfw memory on two CPU cores.

    titans train dfw_small

1,958,656 parameters, on the source of the running Python's own standard library, read as bytes.
"""

from titans_jax.config.papers import small

config = small("dfw")
