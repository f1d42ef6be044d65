"""Choosing the next token from logits."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from titans_jax.config import ConfigError


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn.

    Raises:
      ConfigError: a value outside its range.
    """

    temperature: float = 0.8
    """Divides the logits; 0, as any number below 1.2e-38, always takes the most likely token."""
    top_k: int | None = None
    """Draw from the k most likely tokens only."""
    top_p: float | None = None
    """Draw from the fewest most likely tokens whose probabilities reach p (nucleus sampling)."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature is {self.temperature}; use 0 for the most likely token, or more")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k is {self.top_k}; use at least 1, or None for all tokens")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}; use a number in (0, 1], or None for all tokens")


def sample(logits: jax.Array, key: jax.Array, sampling: Sampling, vocab_size: int | None = None) -> jax.Array:
    """Draw one token id, int32 [batch], from logits [batch, vocab]; ids from `vocab_size` on are never drawn.

    Tokens as likely as the last one that top_k or top_p keeps are all kept.
    """
    if vocab_size is not None:
        logits = jnp.where(jnp.arange(logits.shape[-1]) < vocab_size, logits, -jnp.inf)
    if sampling.temperature < jnp.finfo(jnp.float32).tiny:  # devices take smaller numbers for 0
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    # Less the largest, which changes no probability: the quotient by a low temperature must not overflow.
    logits = (logits - jnp.max(logits, axis=-1, keepdims=True)) / sampling.temperature
    if sampling.top_k is not None:
        least = jax.lax.top_k(logits, min(sampling.top_k, logits.shape[-1]))[0][:, -1:]
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    if sampling.top_p is not None:
        probabilities = jnp.sort(jax.nn.softmax(logits, axis=-1), axis=-1, descending=True)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities  # of the tokens that are more likely
        least = jnp.min(probabilities, axis=-1, keepdims=True, where=before < sampling.top_p, initial=1.0)
        logits = jnp.where(jax.nn.softmax(logits, axis=-1) >= least, logits, -jnp.inf)
    return jax.random.categorical(key, logits, axis=-1).astype(jnp.int32)
