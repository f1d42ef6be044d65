"""A small language model with the delta_product memory on two CPU cores.

    titans train delta_product_small

2,180,904 parameters, on the source of the running Python's own standard library, read as bytes.
"""

from titans_jax.config.papers import small

config = small("delta_product")
