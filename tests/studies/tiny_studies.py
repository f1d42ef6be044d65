"""Options of studies so small that they finish in a moment."""

import json
from pathlib import Path

from titans_jax.config import DataConfig
from titans_jax.studies import Language, Recall

TEXT = DataConfig(
    source="text", path=str(Path(json.__file__).parent), packing="stream", sequence_length=16, validation_every=3
)
LANGUAGE = Language(
    steps=2, batch_size=2, data=TEXT, evaluation_batches=1, positions=64, positions_rows=2, learning_rate=1e-3
)
RECALL = Recall(steps=2, batch_size=4, num_pairs=2, length=8, vocab_size=10, test_sequences=8)
RECALL_OPTIONS = """
    --presets attention --head_dims 4 --num_pairs 2 --sequence_lengths 8 --vocab_size 10 --dims 8 --depth 1 --steps 2
    --attention_steps 2 --batch_size 4 --test_sequences 8 --learning_rates 0.003 --validation_sequences 0
""".split()
