"""A small language model with the mesa memory on two CPU cores.

    titans train mesa_small

1,913,104 parameters, on the source of the running Python's own standard library, read as bytes.
"""

from titans_jax.config.papers import small

config = small("mesa")
