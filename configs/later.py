"""Linear recurrent models that came after the Titans and Miras papers, in sizes of their baselines.

    titans train kimi_delta_attention_340m --data.path fineweb-edu/ --data.tokenizer tokenizer.model

    size  blocks  width  heads      tokens    steps  TPU slice  rows at a time on a chip
    170m      12    768  16 of 48      15B   28,610  v5e-8      2
    340m      24   1024  16 of 64      15B   28,610  v5e-8      2
    760m      24   1536  16 of 96      30B   57,220  v5e-16     1
    1b        18   2048  8 of 256     100B  190,735  v5e-32     1

Backbone, data and training are those of configs/baselines.py, so that only the memory differs; the models' own papers
have other sizes and settings.
"""

from titans_jax.config.papers import baseline, log_linear, mamba3_mimo

configs = {
    # Kimi Delta Attention
    "kimi_delta_attention_170m": baseline("kimi_delta_attention", "170m"),  # 170,371,200 parameters, 2.5 GiB
    "kimi_delta_attention_340m": baseline("kimi_delta_attention", "340m"),  # 340,289,280 parameters, 5.1 GiB
    "kimi_delta_attention_760m": baseline("kimi_delta_attention", "760m"),  # 760,518,912 parameters, 11.3 GiB
    "kimi_delta_attention_1b": baseline("kimi_delta_attention", "1b"),  # 1,302,731,040 parameters, 19.4 GiB
    # Gated DeltaNet-2
    "gated_deltanet_2_170m": baseline("gated_deltanet_2", "170m"),  # 170,831,808 parameters, 2.5 GiB
    "gated_deltanet_2_340m": baseline("gated_deltanet_2", "340m"),  # 341,517,696 parameters, 5.1 GiB
    "gated_deltanet_2_760m": baseline("gated_deltanet_2", "760m"),  # 762,361,728 parameters, 11.4 GiB
    "gated_deltanet_2_1b": baseline("gated_deltanet_2", "1b"),  # 1,304,869,008 parameters, 19.4 GiB
    # Comba
    "comba_170m": baseline("comba", "170m"),  # 169,911,168 parameters, 2.5 GiB
    "comba_340m": baseline("comba", "340m"),  # 339,062,016 parameters, 5.1 GiB
    "comba_760m": baseline("comba", "760m"),  # 758,677,248 parameters, 11.3 GiB
    "comba_1b": baseline("comba", "1b"),  # 1,300,593,504 parameters, 19.4 GiB
    # Preconditioned Gated DeltaNet
    "preconditioned_delta_170m": baseline("preconditioned_delta", "170m"),  # 170,206,656 parameters, 2.5 GiB
    "preconditioned_delta_340m": baseline("preconditioned_delta", "340m"),  # 339,849,600 parameters, 5.1 GiB
    "preconditioned_delta_760m": baseline("preconditioned_delta", "760m"),  # 759,858,048 parameters, 11.3 GiB
    "preconditioned_delta_1b": baseline("preconditioned_delta", "1b"),  # 1,301,183,760 parameters, 19.4 GiB
    # Preconditioned Kimi Delta Attention
    "preconditioned_kimi_170m": baseline("preconditioned_kimi", "170m"),  # 170,667,072 parameters, 2.5 GiB
    "preconditioned_kimi_340m": baseline("preconditioned_kimi", "340m"),  # 341,077,632 parameters, 5.1 GiB
    "preconditioned_kimi_760m": baseline("preconditioned_kimi", "760m"),  # 761,700,480 parameters, 11.4 GiB
    "preconditioned_kimi_1b": baseline("preconditioned_kimi", "1b"),  # 1,303,321,584 parameters, 19.4 GiB
    # Mamba-3 (SISO)
    "mamba3_170m": baseline("mamba3", "170m"),  # 170,205,888 parameters, 2.5 GiB
    "mamba3_340m": baseline("mamba3", "340m"),  # 339,946,368 parameters, 5.1 GiB
    "mamba3_760m": baseline("mamba3", "760m"),  # 760,298,880 parameters, 11.3 GiB
    "mamba3_1b": baseline("mamba3", "1b"),  # 1,303,395,024 parameters, 19.4 GiB
    # Mamba-3 with four keys a token (MIMO)
    "mamba3_mimo_1b": mamba3_mimo("1b"),  # 1,305,164,496 parameters, 19.4 GiB
    # Log-linear attention: parts of 1, 2, 4, .. 2,048 tokens, and one of all older
    "log_linear_mamba2_760m": log_linear("mamba2", "760m", 12),  # 758,681,088 parameters, 11.3 GiB
    "log_linear_gated_deltanet_760m": log_linear("gated_deltanet", "760m", 12),  # 759,271,296 parameters, 11.3 GiB
}
