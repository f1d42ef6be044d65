"""What a memory that was kept is for: a text that was read once is read better the second time."""

import dataclasses
import io
import json
import random
import string

import numpy as np
import pytest
from rich.console import Console

from tests.training.tiny import tiny_config
from titans_jax.config import DataConfig, MemoryConfig, ModelConfig, OptimizerConfig
from titans_jax.inference import Memory, Reader
from titans_jax.training import load_run, train

LETTERS = 16
"""Of a text: different ones, in any order, so that only who has read it knows which one comes next."""

MODEL = ModelConfig(
    pattern=("lmm",),
    dim=64,
    depth=1,
    num_heads=2,
    head_dim=32,
    num_persistent=0,
    dtype="float32",
    remat="none",
    memory=MemoryConfig(expansion=2, chunk_size=8),
)


def texts(count: int, seed: int) -> list[str]:
    generator = random.Random(seed)
    return ["".join(generator.sample(string.ascii_lowercase, LETTERS)) for _ in range(count)]


@pytest.mark.slow
def test_a_second_copy_is_read_better_with_the_memory_of_the_first(tmp_path):
    """A model trained on texts that are said four times, asked of texts it has not seen: read, kept in a file, loaded,
    read once more. A fresh memory and that of another text know nothing of them: one of 26 letters is 3.26 nats."""
    for name, count, seed in (("train", 10_000, 0), ("valid", 100, 1)):
        lines = (json.dumps({"text": 4 * text}) + "\n" for text in texts(count, seed))
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    data = DataConfig(
        source="jsonl", path=str(tmp_path / "train.jsonl"), validation_path=str(tmp_path / "valid.jsonl"),
        sequence_length=72, batch_size=16,
    )  # fmt: skip
    config = tiny_config(MODEL, steps=800, log_every=100, evaluate_every=800, diagnostics_every=800, sample_tokens=0)
    config = dataclasses.replace(
        config, data=data, optimizer=OptimizerConfig(learning_rate=4e-3, warmup_steps=10),
        training=dataclasses.replace(config.training, checkpoint_every=800),
    )  # fmt: skip
    train(config, tmp_path / "run", Console(file=io.StringIO()))

    run = load_run(tmp_path / "run")
    reader = Reader(run.graphdef, run.params, run.tokenizer)
    nats = {"fresh": [], "same": [], "other": []}
    unseen = texts(8, seed=2)
    for text, other in zip(unseen, unseen[1:] + unseen[:1], strict=True):
        first, loss = reader.read(reader.start(), reader.encode(text))
        nats["fresh"].append(loss.nats / LETTERS)
        first.save(tmp_path / "first.memory")
        kept = Memory.load(tmp_path / "first.memory", reader)
        nats["same"].append(reader.read(kept, reader.encode(text, kept))[1].nats / LETTERS)
        others, _ = reader.read(reader.start(), reader.encode(other))
        nats["other"].append(reader.read(others, reader.encode(text, others))[1].nats / LETTERS)
    fresh, same, other = (np.mean(nats[name]) for name in ("fresh", "same", "other"))
    assert fresh == pytest.approx(np.log(26), abs=0.3) and other > fresh - 0.1
    assert same < fresh - 0.5, (fresh, same, other)
