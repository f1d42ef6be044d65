"""Gated DeltaNet-H2's pattern, small: a Gated DeltaNet layer, then a sliding-window attention (papers.md 3.8).

    titans train gated_deltanet_h2_small

1,841,680 parameters, on the source of the running Python's own standard library, read as bytes.
"""

from titans_jax.config.papers import small

config = small("gated_deltanet", pattern=("lmm", "window"))
