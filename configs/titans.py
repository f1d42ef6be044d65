"""The models of the Titans paper (arXiv 2501.00663) and Transformer++, their baseline, in the sizes of its Table 5.

    titans train mac_340m --data.path fineweb-edu/ --data.tokenizer tokenizer.model

    size  blocks  width  heads      tokens    steps  TPU slice  rows at a time on a chip
    170m      12    768  16 of 48      15B   28,610  v5e-8      2
    340m      24   1024  16 of 64      15B   28,610  v5e-8      2
    400m      24   1152  18 of 64      15B   28,610  v5e-8      2
    760m      24   1536  16 of 96      30B   57,220  v5e-16     1
    1b        18   2048  8 of 256     100B  190,735  v5e-32     1

Sized by arithmetic for chips of 16 GB: the GiB behind each are its parameters, gradients and optimizer state, 16 bytes
a parameter, sharded over the chips of the slice, each of which takes so many rows of 4,096 tokens at a time. A step is
half a million tokens.
The paper's 1.3B is called 1b. It gives no shape for 400M: that is one step wider than 340M.
"""

from titans_jax.config.papers import titans

configs = {
    # LMM, the memory alone
    "lmm_170m": titans("lmm", "170m"),  # 146,917,248 parameters, 2.2 GiB
    "lmm_340m": titans("lmm", "340m"),  # 412,749,056 parameters, 6.2 GiB
    "lmm_400m": titans("lmm", "400m"),  # 508,911,264 parameters, 7.6 GiB
    "lmm_760m": titans("lmm", "760m"),  # 871,567,104 parameters, 13.0 GiB
    "lmm_1b": titans("lmm", "1b"),  # 1,199,836,000 parameters, 17.9 GiB
    # MAC, memory as context
    "mac_170m": titans("mac", "170m"),  # 182,334,336 parameters, 2.7 GiB
    "mac_340m": titans("mac", "340m"),  # 538,651,904 parameters, 8.0 GiB
    "mac_400m": titans("mac", "400m"),  # 668,246,688 parameters, 10.0 GiB
    "mac_760m": titans("mac", "760m"),  # 1,154,793,216 parameters, 17.2 GiB
    "mac_1b": titans("mac", "1b"),  # 1,577,433,952 parameters, 23.5 GiB
    # MAG, memory as gate
    "mag_170m": titans("mag", "170m"),  # 182,325,120 parameters, 2.7 GiB
    "mag_340m": titans("mag", "340m"),  # 538,627,328 parameters, 8.0 GiB
    "mag_400m": titans("mag", "400m"),  # 668,219,040 parameters, 10.0 GiB
    "mag_760m": titans("mag", "760m"),  # 1,154,756,352 parameters, 17.2 GiB
    "mag_1b": titans("mag", "1b"),  # 1,577,397,088 parameters, 23.5 GiB
    # MAL, memory as layer
    "mal_170m": titans("mal", "170m"),  # 175,238,016 parameters, 2.6 GiB
    "mal_340m": titans("mal", "340m"),  # 513,436,928 parameters, 7.7 GiB
    "mal_400m": titans("mal", "400m"),  # 636,340,896 parameters, 9.5 GiB
    "mal_760m": titans("mal", "760m"),  # 1,098,096,384 parameters, 16.4 GiB
    "mal_1b": titans("mal", "1b"),  # 1,501,862,752 parameters, 22.4 GiB
    # Transformer++, the baseline
    "transformer_170m": titans("attention", "170m"),  # 134,105,856 parameters, 2.0 GiB
    "transformer_340m": titans("attention", "340m"),  # 369,148,928 parameters, 5.5 GiB
    "transformer_400m": titans("attention", "400m"),  # 455,990,400 parameters, 6.8 GiB
    "transformer_760m": titans("attention", "760m"),  # 777,856,512 parameters, 11.6 GiB
    "transformer_1b": titans("attention", "1b"),  # 1,041,836,032 parameters, 15.5 GiB
}
