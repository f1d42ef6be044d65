"""The model of the Memory Caching paper (arXiv 2602.24281): Titans' LMM, also read as it was every 256 tokens.

    titans train memory_caching_1b --data.path fineweb-edu/ --data.tokenizer tokenizer.model

    size  blocks  width  heads      tokens    steps  TPU slice  rows at a time on a chip
    760m      24   1536  16 of 96      30B   57,220  v5e-16     1
    1b        18   2048  8 of 256     100B  190,735  v5e-32     1

Sizes, data and training are those of Titans (configs/titans.py). The paper's results are those of 1b; secondary notes
name no other size. Its other ways to read are `--model.memory.caching residual`, `soup` and `"sparse(k=4)"`.
"""

from titans_jax.config.papers import memory_caching

configs = {
    "memory_caching_760m": memory_caching("760m"),  # 758,861,952 parameters, 11.3 GiB
    "memory_caching_1b": memory_caching("1b"),  # 1,301,957,616 parameters, 19.4 GiB
}
