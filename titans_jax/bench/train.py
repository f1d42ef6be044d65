"""`titans bench train`: speed of a training step and of decoding, for one model on this machine.

Medians of single calls, one process, after compilation. Tokens are random: no time goes into data.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console
from rich.table import Table

from titans_jax import sharding
from titans_jax.bench.timing import check_rows, matmul_peak, median_seconds
from titans_jax.config import Config, ConfigError, MemoryConfig, ModelConfig, OptimizerConfig
from titans_jax.config.validate import validate
from titans_jax.inference import decode_step, prefill
from titans_jax.inference.decoding import decoding_parts, decoding_state
from titans_jax.models import check_model, empty_state, training_flops_per_token
from titans_jax.training.optimizer import make_optimizer
from titans_jax.training.run import init_model
from titans_jax.training.step import make_train_step

PIECE = 256
"""Tokens of a context that are read at once."""


@dataclass(frozen=True)
class Options:
    """Time a training step and decoding. The default model is a MAC of 5M parameters over bytes."""

    model: ModelConfig = field(
        default_factory=lambda: ModelConfig(
            segment=128, dtype="float32", memory=MemoryConfig(depth=2, expansion=2, chunk_size=16)
        )
    )
    batch_size: int = 2
    """Rows of a training step."""
    sequence_length: int = 1024
    """Tokens of a row."""
    repeats: int = 10
    """Training steps timed."""
    contexts: tuple[int, ...] = (256, 1024, 4096)
    """Tokens read before decoding is timed, multiples of 256."""
    decode_tokens: int = 100
    """Tokens decoded one by one at each context."""


def main(options: Options) -> None:
    """Measure and print one table."""
    model = options.model
    validate(Config(model=model))
    check_model(model)
    sharding.use_cores(options.batch_size)
    check_rows("batch_size", options.batch_size)
    for context in options.contexts:
        if context < PIECE or context % PIECE:
            raise ConfigError(f"contexts has {context}; use multiples of {PIECE}, the tokens that are read at once")
    graphdef, params = init_model(model, seed=0)
    count = sum(x.size for x in jax.tree.leaves(params))
    kinds = " ".join(model.pattern)
    console = Console()
    console.print(f"{kinds}, {count:,} parameters, {model.dtype}, on {sharding.machine()}")
    peak = matmul_peak(model.dtype)
    step, temporaries = training_step(graphdef, params, options.batch_size, options.sequence_length, model.vocab_size)
    seconds = median_seconds(step, options.repeats)
    tokens = options.batch_size * options.sequence_length
    achieved = training_flops_per_token(model, options.sequence_length) * tokens / seconds
    table = Table("measured", "value", "unit")
    shape = f"{options.batch_size} x {options.sequence_length}"
    table.add_row(f"training step, {shape}", f"{tokens / seconds:,.0f}", "tokens/s")
    table.add_row("", f"{temporaries / 2**20:,.0f}", "MiB of temporaries")
    table.add_row("", f"{achieved / 1e9:,.1f}", "GFLOP/s, counted analytically")
    table.add_row("", f"{achieved / peak:.1%}", f"of this machine's matmul, {peak / 1e9:,.0f} GFLOP/s")
    longest = max(options.contexts) + 2 * options.decode_tokens
    for context in options.contexts:
        seconds = median_seconds(decoding(graphdef, params, context, longest), options.decode_tokens)
        table.add_row(f"decoding after {context:,} tokens", f"{1 / seconds:,.0f}", "tokens/s")
    console.print(table)


def training_step(
    graphdef: nnx.GraphDef, params: Any, batch_size: int, sequence_length: int, vocab_size: int
) -> tuple[Callable[[], jax.Array], int]:
    """A compiled training step of AdamW on random tokens, to be called repeatedly, and bytes of its temporaries."""
    optimizer = make_optimizer(OptimizerConfig(), steps=1000)
    state = {"params": jax.tree.map(jnp.copy, params), "optimizer": optimizer.init(params)}
    shape = (batch_size, sequence_length)
    tokens = np.random.default_rng(0).integers(0, vocab_size, shape).astype(np.int32)
    batch = {"tokens": tokens, "targets": tokens, "segment_ids": np.ones(shape, np.int32)}
    batch, state = sharding.spread(batch, state)
    step = make_train_step(graphdef, optimizer, accumulation=1).lower(state, batch).compile()

    def run() -> jax.Array:
        nonlocal state
        state, metrics = step(state, batch)
        return metrics["loss"]

    return run, step.memory_analysis().temp_size_in_bytes * jax.device_count()


def decoding(graphdef: nnx.GraphDef, params: Any, context: int, longest: int) -> Callable[[], jax.Array]:
    """A compiled call that decodes one more token of one row, of which `context` tokens are read; at most `longest`."""
    read = jax.jit(lambda params, tokens, state: prefill(nnx.merge(graphdef, params), tokens, state)[1])
    structure, leaves = decoding_parts(graphdef, params)
    step = jax.jit(
        lambda leaves, token, state: decode_step(jax.tree.unflatten(structure, leaves), token, state), donate_argnums=2
    )
    state = jax.jit(lambda params: empty_state(graphdef, params, 1, longest))(params)
    for _ in range(context // PIECE):
        state = read(params, np.zeros((1, PIECE), np.int32), state)
    state, token = jax.jit(decoding_state)(state), jnp.zeros((1,), jnp.int32)

    def run() -> jax.Array:
        nonlocal state
        logits, state = step(leaves, token, state)
        return logits

    return run
