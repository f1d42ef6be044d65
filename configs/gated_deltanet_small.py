"""A small language model with the gated_deltanet memory on two CPU cores.

    titans train gated_deltanet_small

1,912,608 parameters, on the source of the running Python's own standard library, read as bytes.
"""

from titans_jax.config.papers import small

config = small("gated_deltanet")
