"""The models of the Miras paper (arXiv 2504.13173): Moneta, Yaad, Memora, and each with attention behind it.

    titans train yaad_340m --data.path fineweb-edu/ --data.tokenizer tokenizer.model

    size  blocks  width  heads      tokens    steps  TPU slice  rows at a time on a chip
    120m      12    768  16 of 48      15B   28,610  v5e-8      2
    170m      12    768  16 of 48      15B   28,610  v5e-8      2
    340m      24   1024  16 of 64      15B   28,610  v5e-8      2
    760m      24   1536  16 of 96      30B   57,220  v5e-16     1
    1b        18   2048  8 of 256     100B  190,735  v5e-32     1

Sized by arithmetic for chips of 16 GB. The GiB after each model are its parameters, gradients and optimizer state, 16
bytes per parameter, sharded over the chips of the slice; the last column is how many rows of 4,096 tokens a chip takes
at a time. A step is half a million tokens. Miras names 1.3B, here 1b, without its shape, and calls 760m 780M: the
shapes here are those of Titans, with the same number of parameters. Miras' text also names 120M, where its table of
shapes has 170M, and says nothing else of that size. So 120m has the shape, tokens and learning rate of 170m, but
embedding and head are one matrix, and the feed-forward, 1,984 wide inside SwiGLU where there is no attention, is near
8/3 of the width.
"""

from titans_jax.config.papers import miras

HYBRID = ("lmm", "window")
"""Samba's pattern: a memory, then a sliding-window attention."""

configs = {
    # Moneta: L_p bias, L_q retention
    "moneta_120m": miras("moneta", "120m"),  # 120,645,312 parameters, 1.8 GiB
    "moneta_170m": miras("moneta", "170m"),  # 169,993,920 parameters, 2.5 GiB
    "moneta_340m": miras("moneta", "340m"),  # 342,428,544 parameters, 5.1 GiB
    "moneta_760m": miras("moneta", "760m"),  # 759,008,640 parameters, 11.3 GiB
    "moneta_1b": miras("moneta", "1b"),  # 1,305,053,904 parameters, 19.4 GiB
    # Moneta: L_p bias, L_q retention; then sliding-window attention
    "moneta_h_120m": miras("moneta", "120m", HYBRID),  # 119,511,264 parameters, 1.8 GiB
    "moneta_h_170m": miras("moneta", "170m", HYBRID),  # 170,629,344 parameters, 2.5 GiB
    "moneta_h_340m": miras("moneta", "340m", HYBRID),  # 339,404,736 parameters, 5.1 GiB
    "moneta_h_760m": miras("moneta", "760m", HYBRID),  # 761,551,296 parameters, 11.3 GiB
    "moneta_h_1b": miras("moneta", "1b", HYBRID),  # 1,303,468,392 parameters, 19.4 GiB
    # Yaad: Huber bias
    "yaad_120m": miras("yaad", "120m"),  # 120,949,440 parameters, 1.8 GiB
    "yaad_170m": miras("yaad", "170m"),  # 170,298,048 parameters, 2.5 GiB
    "yaad_340m": miras("yaad", "340m"),  # 343,239,552 parameters, 5.1 GiB
    "yaad_760m": miras("yaad", "760m"),  # 760,225,152 parameters, 11.3 GiB
    "yaad_1b": miras("yaad", "1b"),  # 1,306,270,416 parameters, 19.5 GiB
    # Yaad: Huber bias; then sliding-window attention
    "yaad_h_120m": miras("yaad", "120m", HYBRID),  # 119,663,328 parameters, 1.8 GiB
    "yaad_h_170m": miras("yaad", "170m", HYBRID),  # 170,781,408 parameters, 2.5 GiB
    "yaad_h_340m": miras("yaad", "340m", HYBRID),  # 339,810,240 parameters, 5.1 GiB
    "yaad_h_760m": miras("yaad", "760m", HYBRID),  # 762,159,552 parameters, 11.4 GiB
    "yaad_h_1b": miras("yaad", "1b", HYBRID),  # 1,304,076,648 parameters, 19.4 GiB
    # Memora: Kullback-Leibler retention
    "memora_120m": miras("memora", "120m"),  # 120,037,440 parameters, 1.8 GiB
    "memora_170m": miras("memora", "170m"),  # 169,386,048 parameters, 2.5 GiB
    "memora_340m": miras("memora", "340m"),  # 340,807,296 parameters, 5.1 GiB
    "memora_760m": miras("memora", "760m"),  # 756,576,384 parameters, 11.3 GiB
    "memora_1b": miras("memora", "1b"),  # 1,302,621,168 parameters, 19.4 GiB
    # Memora: Kullback-Leibler retention; then sliding-window attention
    "memora_h_120m": miras("memora", "120m", HYBRID),  # 119,207,328 parameters, 1.8 GiB
    "memora_h_170m": miras("memora", "170m", HYBRID),  # 170,325,408 parameters, 2.5 GiB
    "memora_h_340m": miras("memora", "340m", HYBRID),  # 338,594,112 parameters, 5.0 GiB
    "memora_h_760m": miras("memora", "760m", HYBRID),  # 760,335,168 parameters, 11.3 GiB
    "memora_h_1b": miras("memora", "1b", HYBRID),  # 1,302,252,024 parameters, 19.4 GiB
}
