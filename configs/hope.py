"""The models of Nested Learning (arXiv 2512.24695): Hope, and softmax attention with Hope's continuum memory.

    titans train hope_760m --data.path fineweb-edu/ --data.tokenizer tokenizer.model

    size  blocks  width  heads      tokens    steps  TPU slice  rows at a time on a chip
    760m      24   1536  16 of 96      30B   57,220  v5e-16     1
    1b        18   2048  8 of 256     100B  190,735  v5e-32     1

Sizes, learning rates and data are those of Titans (configs/titans.py), as the paper's own are not known to us. In place
of a feed-forward layer there is a continuum memory of three levels, whose weights change after 16, 64 and 256 tokens.
"""

from titans_jax.config.papers import hope

configs = {
    # Hope: self-referential Titans, then the continuum memory
    "hope_760m": hope("hope", "760m"),  # 757,975,440 parameters, 11.3 GiB
    "hope_1b": hope("hope", "1b"),  # 1,298,123,148 parameters, 19.3 GiB
    # Hope-Attention: softmax attention, then the continuum memory
    "hope_attention_760m": hope("hope_attention", "760m"),  # 757,384,848 parameters, 11.3 GiB
    "hope_attention_1b": hope("hope_attention", "1b"),  # 1,299,892,332 parameters, 19.4 GiB
}
