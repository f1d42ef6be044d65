"""`titans bench gradients`: what it measures, saves and refuses."""

import csv
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.training.tiny import MODEL
from titans_jax import cli
from titans_jax.bench.gradients import gradient_norm, made_texts
from titans_jax.config import MemoryConfig, ModelConfig
from titans_jax.training.run import init_model

SMALL = "--blocks lmm --presets retnet --seeds 2 --lengths 8 16 --model.dim 8 --model.num_heads 1 --model.head_dim 8"


@pytest.mark.slow
def test_every_seed_length_and_text_is_measured_and_saved(tmp_path, capsys):
    assert cli.main(["bench", "gradients", *SMALL.split(), "--output", str(tmp_path)]) == 0
    with open(tmp_path / "gradients.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3 * 2 * 2 and {row["text"] for row in rows} == {"text", "random", "constant"}
    for first, last in zip(rows[::2], rows[1::2], strict=True):
        assert (first["length"], last["length"], first["growth"]) == ("8", "16", "1.0")
        assert float(last["growth"]) == pytest.approx(float(last["norm"]) / float(first["norm"]))
    assert (tmp_path / "gradients.png").stat().st_size > 1000
    assert "16 over 8" in capsys.readouterr().out


@pytest.mark.slow
def test_norm_is_that_of_the_loss_that_training_takes():
    graphdef, params = init_model(MODEL, seed=1)
    tokens = jnp.asarray(made_texts(17)["text"])[None]
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "segment_ids": jnp.ones((1, 16), jnp.int32)}

    def loss(params):
        total, count = nnx.merge(graphdef, params).loss_sum(batch)
        return total / count

    leaves = jax.tree.leaves(jax.grad(loss)(params))
    wanted = np.sqrt(sum(np.sum(np.square(np.asarray(leaf, np.float64))) for leaf in leaves))
    assert gradient_norm(graphdef)(params, tokens) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.exhaustive  # what_was_tried.md has the record; one byte again and again is seen below
@pytest.mark.slow
def test_writes_of_signs_do_not_magnify_each_other():
    """Behind a sign that is steep at 0 every write is larger than the error that the one before left."""
    norms = {}
    for bias in ("value_less", "value_less(sharpness=50.0)"):
        memory = MemoryConfig(preset="yaad", bias=bias, chunk_size=16, expansion=2)
        graphdef, params = init_model(dataclasses.replace(MODEL, pattern=("lmm",), memory=memory), seed=0)
        text = jnp.asarray(made_texts(513)["text"])[None]
        norms[bias] = [gradient_norm(graphdef)(params, text[:, : length + 1]) for length in (128, 512)]
    short, long = norms.pop("value_less")
    assert long < 2 * short
    (steep,) = norms.values()
    assert steep[1] > 100 * long


@pytest.mark.slow
@pytest.mark.parametrize("block, preset", [("lmm", "titans"), ("mac", "titans"), ("mac", "memora")])
def test_one_byte_again_and_again_does_not_throw_a_fresh_memory_farther(block, preset):
    """As it would Titans with first steps of half the bound, and Memora with values of the size of reads
    (memory/what_was_tried.md)."""
    memory = MemoryConfig(preset=preset, chunk_size=16)
    config = ModelConfig(pattern=(block,), dim=32, depth=1, num_heads=2, head_dim=16, segment=64, memory=memory)
    graphdef, params = init_model(config, seed=1)
    text = jnp.asarray(made_texts(1025)["constant"])[None]
    short, long = (gradient_norm(graphdef)(params, text[:, : length + 1]) for length in (256, 1024))
    assert long < 2 * short


@pytest.mark.exhaustive  # minutes; tests/memory/rule/test_orthogonal_start.py has what it follows from
@pytest.mark.slow
def test_an_orthogonal_start_is_stable_on_one_byte_where_independent_entries_are_not():
    """One of 24 starts of small heads in MAG that one byte throws ever farther (memory/what_was_tried.md)."""
    growth = []
    for orthogonal in (True, False):
        memory = MemoryConfig(chunk_size=16, expansion=2, orthogonal_start=orthogonal)
        shape = {"dim": 32, "depth": 1, "num_heads": 2, "head_dim": 16, "segment": 64, "window": 64, "remat": "none"}
        graphdef, params = init_model(ModelConfig(pattern=("mag",), memory=memory, dtype="float32", **shape), seed=12)
        text = jnp.asarray(made_texts(4097)["constant"])[None]
        short, long = (gradient_norm(graphdef)(params, text[:, : length + 1]) for length in (512, 4096))
        growth.append(float(long / short))
    assert growth[0] < 1.1 and growth[1] > 100


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ("--lengths 1 8", "lengths has 1; use 2 tokens or more"),
        ("--seeds 0", "seeds is 0; use 1 to 4294967295"),
        ("--presets titan", "did you mean titans?"),
        ("--blocks lmn", "did you mean lmm?"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_a_sentence(arguments, sentence, capsys):
    assert cli.main(["bench", "gradients", *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1
