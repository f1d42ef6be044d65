"""LaCT (arXiv 2505.23884): large chunks, orthogonal steps and a window attention as long as a chunk.

    titans train lact_340m --data.path fineweb-edu/ --data.tokenizer tokenizer.model

    size  blocks  width  heads      tokens    steps  TPU slice  rows at a time on a chip
    170m      12    768  16 of 48      15B   28,610  v5e-8      1
    340m      24   1024  16 of 64      15B   28,610  v5e-8      1
    760m      24   1536  16 of 96      30B   57,220  v5e-16     1

Sizes and training are those of Titans (configs/titans.py), for comparison; chunk and window are the paper's 2,048, the
base of the rotary embedding its 1,000,000. Rows are of 8,192 tokens, four chunks; the paper's are of 32,768.
Its 760M has 4 memories a layer of width 384 without expansion, beside 24 heads of attention; here the two have the same
heads, and expansion 4 gives as many fast weights, 0.75 dim^2 a layer. Memories forget towards their start, a deviation
without which they harm beyond a row; `--model.memory.forget preset` is the paper's rule. The rest is in
memory/later_models.md, Steps of whole chunks.
"""

from titans_jax.config.papers import lact

configs = {
    "lact_170m": lact("170m"),  # 170,962,368 parameters, 2.5 GiB
    "lact_340m": lact("340m"),  # 343,437,696 parameters, 5.1 GiB
    "lact_760m": lact("760m"),  # 762,880,896 parameters, 11.4 GiB
}
