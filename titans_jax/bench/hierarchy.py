"""`titans bench hierarchy`: time of the gradient of a layer with local memories, and of one memory with their chunk.

Both layers have the same width and the same kind of memory, and both write every `chunk` tokens; with local memories
(TNT, arXiv 2511.07343) all shards of a row are written at the same time, and the long-range memory is read as it was
before. Calls of the two alternate, and the least time counts, so that other work on the machine affects both alike.
Float32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from titans_jax import plots, sharding
from titans_jax.bench.timing import seconds
from titans_jax.config import Config, MemoryConfig, ModelConfig
from titans_jax.layers import memory_layer


@dataclass(frozen=True)
class Options:
    """Time the gradient of a layer with local memories, and that of a layer with one memory of their chunk."""

    chunk: int = 8
    """Tokens of a chunk, of the local memories and of the one memory."""
    shard: int = 2048
    """Tokens of a shard, and of a chunk of the global memory."""
    time: int = 8192
    """Tokens of the row."""
    num_heads: int = 4
    """Heads, each with memories of its own."""
    head_dim: int = 64
    """Width of a head."""
    expansion: int = 4
    """Hidden width of a memory over head_dim."""
    repeats: int = 3
    """Calls of each layer; the least time is printed."""
    output: str = "runs/bench_hierarchy"
    """Folder for hierarchy.csv."""


@dataclass(frozen=True)
class Row:
    """A layer, the least seconds of a gradient, and how many times as fast as one memory it is."""

    layer: str
    chunk: int
    time: int
    seconds: float
    speed: float


def main(options: Options) -> None:
    """Time both layers, print and save the results.

    Raises:
      ConfigError: the shard is not a multiple of the chunk.
    """
    from rich.console import Console

    from titans_jax.config.validate import validate

    one = ModelConfig(
        pattern=("lmm",),
        dim=options.num_heads * options.head_dim,
        depth=1,
        num_heads=options.num_heads,
        head_dim=options.head_dim,
        dtype="float32",
        memory=MemoryConfig(expansion=options.expansion, chunk_size=options.chunk),
    )
    several = dataclasses.replace(
        one.memory, chunk_size=options.shard, shard=options.shard, local_chunks=(options.chunk,)
    )
    models = {"one memory": one, "global and local": dataclasses.replace(one, memory=several)}
    for model in models.values():
        validate(Config(model=model))
    console, runs = Console(), {}
    for name, model in models.items():
        with console.status(f"{name}: compiling"):
            runs[name] = gradient(model, options.time)
    least = dict.fromkeys(runs, float("inf"))
    for _ in range(options.repeats):
        for name, run in runs.items():
            least[name] = min(least[name], seconds(run))
    slow = least["one memory"]
    rows = [Row(name, options.chunk, options.time, each, slow / each) for name, each in least.items()]
    for row in rows:
        console.print(
            f"{row.layer}, chunk {row.chunk}, {row.time:,} tokens: {row.seconds:.3g} s, {row.speed:.2f} times"
        )
    plots.save_csv(rows, Path(options.output) / "hierarchy.csv")


def gradient(model: ModelConfig, length: int, rows: int = 1) -> Callable[[], jax.Array]:
    """The compiled gradient of a layer on rows of tokens, with respect to its parameters and its input."""
    graphdef, params = nnx.split(memory_layer(model, rngs=nnx.Rngs(0)))
    x = jax.random.normal(jax.random.key(1), (rows, length, model.dim))
    if rows % jax.device_count() == 0:
        x, params = sharding.spread(x, params)

    def loss(params: nnx.State, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(nnx.merge(graphdef, params)(x)[0]))

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(params, x).compile()
    return lambda: compiled(params, x)
