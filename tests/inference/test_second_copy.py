"""What a memory that was kept is for: a text that was read once is read better the second time."""

import dataclasses
import io
import json
import random
import string
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from tests.training.tiny import tiny_config
from titans_jax.config import DataConfig, MemoryConfig, OptimizerConfig
from titans_jax.inference import Memory, Reader
from titans_jax.studies.models import small_model
from titans_jax.training import load_run, train

LETTERS = 8
"""Of a text: different ones of 16, in any order, so that only who has read it knows which one comes next."""

MODEL = small_model("titans", "lmm", dim=64, depth=1, head_dim=32, memory=MemoryConfig(expansion=2, chunk_size=8))


def texts(count: int, seed: int) -> list[str]:
    generator = random.Random(seed)
    return ["".join(generator.sample(string.ascii_lowercase[:16], LETTERS)) for _ in range(count)]


def measure(folder: Path) -> dict[str, float]:
    """Nats a letter of texts that a model trained in `folder` has not seen, with a fresh memory, with that of the same
    text, kept in a file, and with that of another one."""
    for name, count, seed in (("train", 10_000, 0), ("valid", 100, 1)):
        lines = (json.dumps({"text": 4 * text}) + "\n" for text in texts(count, seed))
        (folder / f"{name}.jsonl").write_text("".join(lines))
    data = DataConfig(
        source="jsonl", path=str(folder / "train.jsonl"), validation_path=str(folder / "valid.jsonl"),
        sequence_length=72, batch_size=4,
    )  # fmt: skip
    once = dict.fromkeys(("steps", "evaluate_every", "diagnostics_every", "checkpoint_every"), 240)
    config = tiny_config(MODEL, log_every=100, sample_tokens=0, **once)
    config = dataclasses.replace(config, data=data, optimizer=OptimizerConfig(learning_rate=8e-3, warmup_steps=10))
    train(config, folder / "run", Console(file=io.StringIO()))

    run = load_run(folder / "run")
    reader = Reader(run.graphdef, run.params, run.tokenizer)

    def cost(memory: Memory, text: str) -> tuple[Memory, float]:
        memory, loss = reader.read(memory, reader.encode(text, memory))
        return memory, loss.nats / LETTERS

    nats = {"fresh": [], "same": [], "other": []}
    unseen = texts(8, seed=2)
    for text, other in zip(unseen, unseen[1:] + unseen[:1], strict=True):
        first, fresh = cost(reader.start(), text)
        first.save(folder / "first.memory")
        nats["fresh"].append(fresh)
        nats["same"].append(cost(Memory.load(folder / "first.memory", reader), text)[1])
        nats["other"].append(cost(cost(reader.start(), other)[0], text)[1])
    return {name: float(np.mean(values)) for name, values in nats.items()}


@pytest.mark.slow
def test_a_second_copy_is_read_better_with_the_memory_of_the_first(tmp_path):
    """By a model trained on texts that are said four times. A fresh memory and that of another text know nothing of
    them: one of 16 letters is 2.77 nats."""
    found = measure(tmp_path)
    assert found["fresh"] == pytest.approx(np.log(16), abs=0.3) and found["other"] > found["fresh"] - 0.1
    assert found["same"] < 1, found
