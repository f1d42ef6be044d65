"""Mamba (arXiv 2312.00752), which Titans and Miras compare theirs with, in their sizes.

    titans train mamba_340m --data.path fineweb-edu/ --data.tokenizer tokenizer.model

    size  blocks  width  heads      tokens    steps  TPU slice  rows at a time on a chip
    120m      25    768  16 of 48      15B   28,610  v5e-8      2
    170m      32    768  16 of 48      15B   28,610  v5e-8      2
    340m      46   1024  16 of 64      15B   28,610  v5e-8      2
    400m      55   1024  16 of 64      15B   28,610  v5e-8      2
    760m      48   1536  16 of 96      30B   57,220  v5e-16     1
    1b        47   2048  8 of 256     100B  190,735  v5e-32     1

A block is a Mamba layer alone: the paper puts two of them where a Transformer has an attention and a feed-forward
layer. There is thus no feed-forward width that could bring a model to its size, as in the other families. The width is
that of the other models of the size (Titans, Table 5), and so are data and training; the number of blocks is the one
with which it has as many parameters. Heads are the fields' that other blocks use: Mamba has none.
"""

from titans_jax.config.papers import mamba

configs = {
    "mamba_120m": mamba("120m"),  # 118,867,968 parameters, 1.8 GiB
    "mamba_170m": mamba("170m"),  # 169,845,504 parameters, 2.5 GiB
    "mamba_340m": mamba("340m"),  # 339,463,168 parameters, 5.1 GiB
    "mamba_400m": mamba("400m"),  # 399,468,544 parameters, 6.0 GiB
    "mamba_760m": mamba("760m"),  # 765,126,144 parameters, 11.4 GiB
    "mamba_1b": mamba("1b"),  # 1,308,299,264 parameters, 19.5 GiB
}
