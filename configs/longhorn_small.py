"""A small language model with the longhorn memory on two CPU cores.

    titans train longhorn_small

1,910,536 parameters, on the source of the running Python's own standard library, read as bytes.
"""

from titans_jax.config.papers import small

config = small("longhorn")
