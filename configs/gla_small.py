"""A small language model with the gla memory on two CPU cores.

    titans train gla_small

1,941,760 parameters, on the source of the running Python's own standard library, read as bytes.
"""

from titans_jax.config.papers import small

config = small("gla")
