"""`titans bench gradients`: how the norm of a fresh model's gradient grows with the length of the text it reads.

A stable memory forgets its earlier weights, so that the gradient of the mean loss has about the same size for any
length of text. Where each write magnifies the one before, the norm grows exponentially, and clipping leaves a random
direction. Measured is one block of a small model in float32, with the whole gradient through all writes.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from titans_jax import plots
from titans_jax.config import Config, ConfigError, DataConfig, MemoryConfig, ModelConfig
from titans_jax.config.validate import validate
from titans_jax.data.sources import open_documents
from titans_jax.data.tokenizers import ByteTokenizer
from titans_jax.models import check_model
from titans_jax.training.run import abstract_model, make_init

STYLES = ("-", "--", ":", "-.")
"""Line styles of the blocks, in their order; colours stand for presets."""


@dataclass(frozen=True)
class Options:
    """Measure the norm of fresh models' gradients, for every block and preset, on text, random and constant bytes."""

    blocks: tuple[str, ...] = ("lmm", "mac", "mag", "mal")
    """Blocks that hold the memories."""
    presets: tuple[str, ...] = ("titans", "yaad", "moneta", "memora", "ttt_mlp")
    """Memories, each in every block."""
    lengths: tuple[int, ...] = (512, 8192)
    """Tokens that are read; the last is compared with the first."""
    seeds: int = 3
    """Fresh models of each kind."""
    model: ModelConfig = field(
        default_factory=lambda: ModelConfig(
            dim=32,
            depth=1,
            num_heads=2,
            head_dim=16,
            segment=64,
            window=64,
            dtype="float32",
            remat="none",
            memory=MemoryConfig(expansion=2),
        )
    )
    """The other fields of the models."""
    output: str = "runs/bench_gradients"
    """Folder for gradients.csv and gradients.png."""


@dataclass(frozen=True)
class Row:
    """The norm of one fresh model's gradient; growth: this norm over the norm at the first of the lengths."""

    block: str
    preset: str
    text: str
    seed: int
    length: int
    norm: float
    growth: float


def main(options: Options) -> None:
    """Measure all, print the growth of every block and preset, and save each norm."""
    from rich.console import Console
    from rich.table import Table

    check(options)
    fresh = {}
    for block, preset in itertools.product(options.blocks, options.presets):
        memory = dataclasses.replace(options.model.memory, preset=preset)
        fresh[block, preset] = dataclasses.replace(options.model, pattern=(block,), memory=memory)
        validate(Config(model=fresh[block, preset]))
        check_model(fresh[block, preset])
    texts, console, rows = made_texts(max(options.lengths)), Console(), []
    first, last = options.lengths[0], options.lengths[-1]
    table = Table("block", "preset", *(f"{text}:\n{last:,} over {first:,}" for text in texts))
    for (block, preset), model in fresh.items():
        with console.status(f"{block}, {preset}"):
            measured = [Row(block, preset, *each) for each in measure(model, texts, options)]
        rows += measured
        save(rows, Path(options.output))
        growths = ([row.growth for row in measured if (row.text, row.length) == (text, last)] for text in texts)
        table.add_row(block, preset, *(f"{min(each):.2f} to {max(each):.2f}" for each in growths))
    console.print(table)
    console.print(f"{options.seeds} fresh models each; saved {options.output}")


def check(options: Options) -> None:
    """Refuse empty lists and lengths below 2.

    Raises:
      ConfigError: names the field.
    """
    for name in ("blocks", "presets", "lengths"):
        if not getattr(options, name):
            raise ConfigError(f"{name} is empty; name at least one")
    if min(options.lengths) < 2:
        raise ConfigError(f"lengths has {min(options.lengths)}; use 2 tokens or more")


def made_texts(length: int) -> dict[str, np.ndarray]:
    """Bytes, int32 [length], by kind: text of Python's library, uniformly random, and constant."""
    written = ""
    for document in itertools.cycle(open_documents(DataConfig(), "validation")):
        written += document
        if len(written) >= length:
            break
    drawn = np.random.default_rng(0).integers(0, 256, length)
    texts = {"text": ByteTokenizer().encode(written)[:length], "random": drawn, "constant": np.full(length, ord("a"))}
    return {name: tokens.astype(np.int32) for name, tokens in texts.items()}


def measure(
    model: ModelConfig, texts: dict[str, np.ndarray], options: Options
) -> Iterator[tuple[str, int, int, float, float]]:
    """(text, seed, length, norm, growth) for every text, seed and length."""
    graphdef, _ = abstract_model(model)
    norm, init = gradient_norm(graphdef), make_init(model)
    starts = {seed: init(jax.random.key(seed)) for seed in range(1, options.seeds + 1)}
    for (text, tokens), (seed, params) in itertools.product(texts.items(), starts.items()):
        sizes = [float(norm(params, jnp.asarray(tokens[:length])[None])) for length in options.lengths]
        for length, size in zip(options.lengths, sizes, strict=True):
            yield text, seed, length, size, size / sizes[0]


def gradient_norm(graphdef: nnx.GraphDef) -> Callable[[Any, jax.Array], jax.Array]:
    """The compiled function from parameters and a row [1, time] to the norm of the gradient of its mean loss."""

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        logits = nnx.merge(graphdef, params)(tokens[:, :-1])
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))

    return jax.jit(lambda params, tokens: optax.tree.norm(jax.grad(loss)(params, tokens)))


def save(rows: list[Row], folder: Path) -> None:
    """gradients.csv with every norm, and gradients.png: norm against length, a panel for each kind of text."""
    plots.save_csv(rows, folder / "gradients.csv")
    texts, blocks, presets = (
        list(dict.fromkeys(getattr(row, name) for row in rows)) for name in ("text", "block", "preset")
    )
    with plots.panels(folder / "gradients.png", len(texts), 4 * len(texts) + 2, 4) as panels:
        for axes, text in zip(panels, texts, strict=True):
            for block, preset in itertools.product(blocks, presets):
                line = [row for row in rows if (row.text, row.block, row.preset) == (text, block, preset)]
                lengths = sorted({row.length for row in line})
                means = [float(np.mean([row.norm for row in line if row.length == length])) for length in lengths]
                style = {"color": f"C{presets.index(preset) % 10}", "linestyle": STYLES[blocks.index(block) % 4]}
                axes.plot(lengths, means, marker="o", markersize=4, label=f"{block}, {preset}", **style)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set(title=text, xlabel="tokens read", ylabel="norm of the gradient, mean of the seeds")
        panels[-1].legend(fontsize=6, loc="center left", bbox_to_anchor=(1, 0.5))
