"""The recurrent models that Titans (arXiv 2501.00663) and Miras (arXiv 2504.13173) compare theirs with, in their sizes.

    titans train gated_deltanet_340m --data.path fineweb-edu/ --data.tokenizer tokenizer.model

    size  blocks  width  heads      tokens    steps  TPU slice  rows at a time on a chip
    120m      12    768  16 of 48      15B   28,610  v5e-8      2
    170m      12    768  16 of 48      15B   28,610  v5e-8      2
    340m      24   1024  16 of 64      15B   28,610  v5e-8      2
    400m      24   1024  16 of 64      15B   28,610  v5e-8      2
    760m      24   1536  16 of 96      30B   57,220  v5e-16     1
    1b        18   2048  8 of 256     100B  190,735  v5e-32     1

Backbone, data and training are those of the papers' own models (configs/titans.py, configs/miras.py), so that only the
memory differs; every model of a size has as many parameters. TTT forgets towards its learned start, as all memories
with one do here by default: `--model.memory.forget preset` is the published rule, which keeps everything. Samba is
built from Mamba, which is in configs/mamba.py, as it has more blocks. Every model is here in every size, also where the
papers have no result for it: they have HGRN2 at 400M only, and Samba at 400M and above.
"""

from titans_jax.config.papers import baseline, samba

HYBRID = ("lmm", "window")

configs = {
    # RetNet
    "retnet_120m": baseline("retnet", "120m"),  # 120,266,496 parameters, 1.8 GiB
    "retnet_170m": baseline("retnet", "170m"),  # 169,615,104 parameters, 2.5 GiB
    "retnet_340m": baseline("retnet", "340m"),  # 338,273,280 parameters, 5.0 GiB
    "retnet_400m": baseline("retnet", "400m"),  # 399,614,976 parameters, 6.0 GiB
    "retnet_760m": baseline("retnet", "760m"),  # 757,495,296 parameters, 11.3 GiB
    "retnet_1b": baseline("retnet", "1b"),  # 1,300,002,816 parameters, 19.4 GiB
    # HGRN2
    "hgrn2_120m": baseline("hgrn2", "120m"),  # 120,284,928 parameters, 1.8 GiB
    "hgrn2_170m": baseline("hgrn2", "170m"),  # 169,633,536 parameters, 2.5 GiB
    "hgrn2_340m": baseline("hgrn2", "340m"),  # 338,322,432 parameters, 5.0 GiB
    "hgrn2_400m": baseline("hgrn2", "400m"),  # 399,664,128 parameters, 6.0 GiB
    "hgrn2_760m": baseline("hgrn2", "760m"),  # 757,569,024 parameters, 11.3 GiB
    "hgrn2_1b": baseline("hgrn2", "1b"),  # 1,300,076,544 parameters, 19.4 GiB
    # Gated linear attention
    "gla_120m": baseline("gla", "120m"),  # 120,865,536 parameters, 1.8 GiB
    "gla_170m": baseline("gla", "170m"),  # 170,214,144 parameters, 2.5 GiB
    "gla_340m": baseline("gla", "340m"),  # 339,870,720 parameters, 5.1 GiB
    "gla_400m": baseline("gla", "400m"),  # 401,212,416 parameters, 6.0 GiB
    "gla_760m": baseline("gla", "760m"),  # 759,891,456 parameters, 11.3 GiB
    "gla_1b": baseline("gla", "1b"),  # 1,302,398,976 parameters, 19.4 GiB
    # Mamba2
    "mamba2_120m": baseline("mamba2", "120m"),  # 120,414,528 parameters, 1.8 GiB
    "mamba2_170m": baseline("mamba2", "170m"),  # 169,763,136 parameters, 2.5 GiB
    "mamba2_340m": baseline("mamba2", "340m"),  # 338,667,648 parameters, 5.0 GiB
    "mamba2_400m": baseline("mamba2", "400m"),  # 400,009,344 parameters, 6.0 GiB
    "mamba2_760m": baseline("mamba2", "760m"),  # 758,086,272 parameters, 11.3 GiB
    "mamba2_1b": baseline("mamba2", "1b"),  # 1,300,298,160 parameters, 19.4 GiB
    # DeltaNet
    "deltanet_120m": baseline("deltanet", "120m"),  # 120,414,144 parameters, 1.8 GiB
    "deltanet_170m": baseline("deltanet", "170m"),  # 169,762,752 parameters, 2.5 GiB
    "deltanet_340m": baseline("deltanet", "340m"),  # 338,666,880 parameters, 5.0 GiB
    "deltanet_400m": baseline("deltanet", "400m"),  # 400,008,576 parameters, 6.0 GiB
    "deltanet_760m": baseline("deltanet", "760m"),  # 758,085,504 parameters, 11.3 GiB
    "deltanet_1b": baseline("deltanet", "1b"),  # 1,300,297,872 parameters, 19.4 GiB
    # TTT-Linear
    "ttt_linear_120m": baseline("ttt_linear", "120m"),  # 119,280,960 parameters, 1.8 GiB
    "ttt_linear_170m": baseline("ttt_linear", "170m"),  # 170,399,040 parameters, 2.5 GiB
    "ttt_linear_340m": baseline("ttt_linear", "340m"),  # 340,756,608 parameters, 5.1 GiB
    "ttt_linear_400m": baseline("ttt_linear", "400m"),  # 397,379,712 parameters, 5.9 GiB
    "ttt_linear_760m": baseline("ttt_linear", "760m"),  # 762,399,360 parameters, 11.4 GiB
    "ttt_linear_1b": baseline("ttt_linear", "1b"),  # 1,303,136,688 parameters, 19.4 GiB
    # TTT-MLP
    "ttt_mlp_120m": baseline("ttt_mlp", "120m"),  # 120,903,360 parameters, 1.8 GiB
    "ttt_mlp_170m": baseline("ttt_mlp", "170m"),  # 170,251,968 parameters, 2.5 GiB
    "ttt_mlp_340m": baseline("ttt_mlp", "340m"),  # 338,398,080 parameters, 5.0 GiB
    "ttt_mlp_400m": baseline("ttt_mlp", "400m"),  # 399,739,776 parameters, 6.0 GiB
    "ttt_mlp_760m": baseline("ttt_mlp", "760m"),  # 760,040,832 parameters, 11.3 GiB
    "ttt_mlp_1b": baseline("ttt_mlp", "1b"),  # 1,299,008,208 parameters, 19.4 GiB
    # Gated DeltaNet
    "gated_deltanet_120m": baseline("gated_deltanet", "120m"),  # 120,562,176 parameters, 1.8 GiB
    "gated_deltanet_170m": baseline("gated_deltanet", "170m"),  # 169,910,784 parameters, 2.5 GiB
    "gated_deltanet_340m": baseline("gated_deltanet", "340m"),  # 339,061,248 parameters, 5.1 GiB
    "gated_deltanet_400m": baseline("gated_deltanet", "400m"),  # 400,402,944 parameters, 6.0 GiB
    "gated_deltanet_760m": baseline("gated_deltanet", "760m"),  # 758,676,480 parameters, 11.3 GiB
    "gated_deltanet_1b": baseline("gated_deltanet", "1b"),  # 1,300,593,216 parameters, 19.4 GiB
    # Samba (arXiv 2406.07522): a Mamba layer, then a sliding-window attention
    "samba_120m": samba("120m"),  # 119,768,832 parameters, 1.8 GiB
    "samba_170m": samba("170m"),  # 170,886,912 parameters, 2.5 GiB
    "samba_340m": samba("340m"),  # 342,451,200 parameters, 5.1 GiB
    "samba_400m": samba("400m"),  # 399,074,304 parameters, 5.9 GiB
    "samba_760m": samba("760m"),  # 759,043,584 parameters, 11.3 GiB
    "samba_1b": samba("1b"),  # 1,303,910,400 parameters, 19.4 GiB
    # Gated DeltaNet-H2 (arXiv 2412.06464): a Gated DeltaNet layer, then a sliding-window attention
    "gated_deltanet_h2_120m": baseline("gated_deltanet", "120m", HYBRID),  # 120,354,432 parameters, 1.8 GiB
    "gated_deltanet_h2_170m": baseline("gated_deltanet", "170m", HYBRID),  # 169,703,040 parameters, 2.5 GiB
    "gated_deltanet_h2_340m": baseline("gated_deltanet", "340m", HYBRID),  # 340,080,384 parameters, 5.1 GiB
    "gated_deltanet_h2_400m": baseline("gated_deltanet", "400m", HYBRID),  # 401,422,080 parameters, 6.0 GiB
    "gated_deltanet_h2_760m": baseline("gated_deltanet", "760m", HYBRID),  # 757,846,272 parameters, 11.3 GiB
    "gated_deltanet_h2_1b": baseline("gated_deltanet", "1b", HYBRID),  # 1,297,699,104 parameters, 19.3 GiB
}
