"""The models of the Titans paper (arXiv 2501.00663) and Transformer++, their baseline, in the sizes of its Table 5.

    titans train mac_340m --data.path fineweb-edu/ --data.tokenizer tokenizer.model

    size  blocks  width  heads      tokens    steps  TPU slice  rows at a time on a chip
    120m      12    768  16 of 48      15B   28,610  v5e-8      2
    170m      12    768  16 of 48      15B   28,610  v5e-8      2
    340m      24   1024  16 of 64      15B   28,610  v5e-8      2
    400m      24   1024  16 of 64      15B   28,610  v5e-8      2
    760m      24   1536  16 of 96      30B   57,220  v5e-16     1
    1b        18   2048  8 of 256     100B  190,735  v5e-32     1

Sized by arithmetic for chips of 16 GB. The GiB after each model are its parameters, gradients and optimizer state, 16
bytes per parameter, sharded over the chips of the slice; the last column is how many rows of 4,096 tokens a chip takes
at a time. A step is half a million tokens. The paper's 1.3B is called 1b. The paper gives no shape for 400M; here it is
340M's with a wider feed-forward. Nor does it give the feed-forward's width; here the width brings every model of a size
to the same number of parameters, within a percent of its name. The paper's own models have no 120M, which is a size of
Miras (configs/miras.py): Transformer++ is a baseline there too.
"""

from titans_jax.config.papers import titans

configs = {
    # LMM, the memory alone
    "lmm_170m": titans("lmm", "170m"),  # 169,957,440 parameters, 2.5 GiB
    "lmm_340m": titans("lmm", "340m"),  # 342,331,008 parameters, 5.1 GiB
    "lmm_400m": titans("lmm", "400m"),  # 398,954,112 parameters, 5.9 GiB
    "lmm_760m": titans("lmm", "760m"),  # 758,861,952 parameters, 11.3 GiB
    "lmm_1b": titans("lmm", "1b"),  # 1,304,316,912 parameters, 19.4 GiB
    # MAC, memory as context
    "mac_170m": titans("mac", "170m"),  # 169,994,304 parameters, 2.5 GiB
    "mac_340m": titans("mac", "340m"),  # 339,283,584 parameters, 5.1 GiB
    "mac_400m": titans("mac", "400m"),  # 400,625,280 parameters, 6.0 GiB
    "mac_760m": titans("mac", "760m"),  # 759,009,408 parameters, 11.3 GiB
    "mac_1b": titans("mac", "1b"),  # 1,302,105,072 parameters, 19.4 GiB
    # MAG, memory as gate
    "mag_170m": titans("mag", "170m"),  # 169,975,872 parameters, 2.5 GiB
    "mag_340m": titans("mag", "340m"),  # 339,234,432 parameters, 5.1 GiB
    "mag_400m": titans("mag", "400m"),  # 400,576,128 parameters, 6.0 GiB
    "mag_760m": titans("mag", "760m"),  # 758,935,680 parameters, 11.3 GiB
    "mag_1b": titans("mag", "1b"),  # 1,302,031,344 parameters, 19.4 GiB
    # MAL, memory as layer
    "mal_170m": titans("mal", "170m"),  # 169,966,656 parameters, 2.5 GiB
    "mal_340m": titans("mal", "340m"),  # 339,209,856 parameters, 5.1 GiB
    "mal_400m": titans("mal", "400m"),  # 400,551,552 parameters, 6.0 GiB
    "mal_760m": titans("mal", "760m"),  # 758,898,816 parameters, 11.3 GiB
    "mal_1b": titans("mal", "1b"),  # 1,301,994,480 parameters, 19.4 GiB
    # Transformer++, the baseline
    "transformer_120m": titans("attention", "120m"),  # 120,146,688 parameters, 1.8 GiB
    "transformer_170m": titans("attention", "170m"),  # 169,495,296 parameters, 2.5 GiB
    "transformer_340m": titans("attention", "340m"),  # 341,099,520 parameters, 5.1 GiB
    "transformer_400m": titans("attention", "400m"),  # 397,722,624 parameters, 5.9 GiB
    "transformer_760m": titans("attention", "760m"),  # 757,016,064 parameters, 11.3 GiB
    "transformer_1b": titans("attention", "1b"),  # 1,301,882,880 parameters, 19.4 GiB
}
