"""The models of the ATLAS paper (arXiv 2505.23735): OmegaNet and Atlas, with attention behind them too, and its DLA.

    titans train omeganet_340m --data.path fineweb-edu/ --data.tokenizer tokenizer.model

    size  blocks  width  heads      tokens    steps  TPU slice  rows at a time on a chip
    170m      12    768  16 of 48      15B   28,610  v5e-8      2
    340m      24   1024  16 of 64      15B   28,610  v5e-8      2
    760m      24   1536  16 of 96      30B   57,220  v5e-16     1
    1b        18   2048  8 of 256     100B  190,735  v5e-32     1

Sizes are those of Titans (configs/titans.py), the learning rate is the paper's 4e-4 for all, the window 16 tokens. The
paper's polynomial features are left out: it states no degree, and with that of 2 (`polynomial_mlp(degree=2)`) the
learned starts of the memories alone would have 217 million parameters at 340m and 715 million at 760m. Atlas takes one
orthogonal step every 16 tokens, and the paper one at every token (memory/later_models.md, Steps of whole chunks).
Atlas++ is `--model.memory.architecture residual_gated_mlp`.
"""

from titans_jax.config.papers import atlas

HYBRID = ("lmm", "window")

configs = {
    # OmegaNet: a window of 16 tokens
    "omeganet_170m": atlas("omeganet", "170m"),  # 170,697,216 parameters, 2.5 GiB
    "omeganet_340m": atlas("omeganet", "340m"),  # 339,583,488 parameters, 5.1 GiB
    "omeganet_760m": atlas("omeganet", "760m"),  # 761,816,064 parameters, 11.4 GiB
    "omeganet_1b": atlas("omeganet", "1b"),  # 1,303,434,048 parameters, 19.4 GiB
    # OmegaNet, then sliding-window attention
    "omeganet_h_170m": atlas("omeganet", "170m", HYBRID),  # 169,211,520 parameters, 2.5 GiB
    "omeganet_h_340m": atlas("omeganet", "340m", HYBRID),  # 340,341,504 parameters, 5.1 GiB
    "omeganet_h_760m": atlas("omeganet", "760m", HYBRID),  # 762,955,008 parameters, 11.4 GiB
    "omeganet_h_1b": atlas("omeganet", "1b", HYBRID),  # 1,302,658,464 parameters, 19.4 GiB
    # Atlas: the same window, momentum, and steps made orthogonal
    "atlas_170m": atlas("atlas", "170m"),  # 170,992,512 parameters, 2.5 GiB
    "atlas_340m": atlas("atlas", "340m"),  # 340,370,688 parameters, 5.1 GiB
    "atlas_760m": atlas("atlas", "760m"),  # 762,996,480 parameters, 11.4 GiB
    "atlas_1b": atlas("atlas", "1b"),  # 1,304,024,160 parameters, 19.4 GiB
    # Atlas, then sliding-window attention
    "atlas_h_170m": atlas("atlas", "170m", HYBRID),  # 169,359,168 parameters, 2.5 GiB
    "atlas_h_340m": atlas("atlas", "340m", HYBRID),  # 340,735,104 parameters, 5.1 GiB
    "atlas_h_760m": atlas("atlas", "760m", HYBRID),  # 763,545,216 parameters, 11.4 GiB
    "atlas_h_1b": atlas("atlas", "1b", HYBRID),  # 1,302,953,520 parameters, 19.4 GiB
    # Deep linear attention, with which the paper compares its models
    "dla_170m": atlas("dla", "170m"),  # 170,251,968 parameters, 2.5 GiB
    "dla_340m": atlas("dla", "340m"),  # 338,398,080 parameters, 5.0 GiB
    "dla_760m": atlas("dla", "760m"),  # 760,040,832 parameters, 11.3 GiB
    "dla_1b": atlas("dla", "1b"),  # 1,299,008,208 parameters, 19.4 GiB
}
