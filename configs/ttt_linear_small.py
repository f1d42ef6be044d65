"""A small language model with the ttt_linear memory on two CPU cores.

    titans train ttt_linear_small

1,943,816 parameters, on the source of the running Python's own standard library, read as bytes.
"""

from titans_jax.config.papers import small

config = small("ttt_linear")
