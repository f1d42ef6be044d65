"""A small language model with the hgrn2 memory on two CPU cores.

    titans train hgrn2_small

1,909,504 parameters, on the source of the running Python's own standard library, read as bytes.
"""

from titans_jax.config.papers import small

config = small("hgrn2")
