"""The models of the Miras paper (arXiv 2504.13173): Moneta, Yaad, Memora, and each with attention behind it.

    titans train yaad_340m --data.path fineweb-edu/ --data.tokenizer tokenizer.model

    size  blocks  width  heads      tokens    steps  TPU slice  rows at a time on a chip
    170m      12    768  16 of 48      15B   28,610  v5e-8      2
    340m      24   1024  16 of 64      15B   28,610  v5e-8      2
    760m      24   1536  16 of 96      30B   57,220  v5e-16     1
    1b        18   2048  8 of 256     100B  190,735  v5e-32     1

Sized by arithmetic for chips of 16 GB: the GiB behind each are its parameters, gradients and optimizer state, 16 bytes
a parameter, sharded over the chips of the slice, each of which takes so many rows of 4,096 tokens at a time. A step is
half a million tokens.
Miras names 1.3B, here 1b, without giving its shape, and calls 760m 780M: the shapes are those of Titans.
"""

from titans_jax.config.papers import miras

HYBRID = ("lmm", "window")
"""Samba's pattern: a memory, then a sliding-window attention."""

configs = {
    # Moneta: L_p bias, L_q retention
    "moneta_170m": miras("moneta", "170m"),  # 146,953,728 parameters, 2.2 GiB
    "moneta_340m": miras("moneta", "340m"),  # 412,846,592 parameters, 6.2 GiB
    "moneta_760m": miras("moneta", "760m"),  # 871,713,792 parameters, 13.0 GiB
    "moneta_1b": miras("moneta", "1b"),  # 1,200,572,992 parameters, 17.9 GiB
    # Moneta: L_p bias, L_q retention; then sliding-window attention
    "moneta_h_170m": miras("moneta", "170m", HYBRID),  # 140,529,792 parameters, 2.1 GiB
    "moneta_h_340m": miras("moneta", "340m", HYBRID),  # 390,997,760 parameters, 5.8 GiB
    "moneta_h_760m": miras("moneta", "760m", HYBRID),  # 824,785,152 parameters, 12.3 GiB
    "moneta_h_1b": miras("moneta", "1b", HYBRID),  # 1,121,204,512 parameters, 16.7 GiB
    # Yaad: Huber bias
    "yaad_170m": miras("yaad", "170m"),  # 147,257,856 parameters, 2.2 GiB
    "yaad_340m": miras("yaad", "340m"),  # 413,657,600 parameters, 6.2 GiB
    "yaad_760m": miras("yaad", "760m"),  # 872,930,304 parameters, 13.0 GiB
    "yaad_1b": miras("yaad", "1b"),  # 1,201,789,504 parameters, 17.9 GiB
    # Yaad: Huber bias; then sliding-window attention
    "yaad_h_170m": miras("yaad", "170m", HYBRID),  # 140,681,856 parameters, 2.1 GiB
    "yaad_h_340m": miras("yaad", "340m", HYBRID),  # 391,403,264 parameters, 5.8 GiB
    "yaad_h_760m": miras("yaad", "760m", HYBRID),  # 825,393,408 parameters, 12.3 GiB
    "yaad_h_1b": miras("yaad", "1b", HYBRID),  # 1,121,812,768 parameters, 16.7 GiB
    # Memora: Kullback-Leibler retention
    "memora_170m": miras("memora", "170m"),  # 146,345,856 parameters, 2.2 GiB
    "memora_340m": miras("memora", "340m"),  # 411,225,344 parameters, 6.1 GiB
    "memora_760m": miras("memora", "760m"),  # 869,281,536 parameters, 13.0 GiB
    "memora_1b": miras("memora", "1b"),  # 1,198,140,256 parameters, 17.9 GiB
    # Memora: Kullback-Leibler retention; then sliding-window attention
    "memora_h_170m": miras("memora", "170m", HYBRID),  # 140,225,856 parameters, 2.1 GiB
    "memora_h_340m": miras("memora", "340m", HYBRID),  # 390,187,136 parameters, 5.8 GiB
    "memora_h_760m": miras("memora", "760m", HYBRID),  # 823,569,024 parameters, 12.3 GiB
    "memora_h_1b": miras("memora", "1b", HYBRID),  # 1,119,988,144 parameters, 16.7 GiB
}
