"""Choosing the next token from logits."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from titans_jax.config import ConfigError

SMALLEST = float(jnp.finfo(jnp.float32).tiny)
"""Devices take smaller numbers for 0."""
HOTTEST = 1e30
"""A temperature at which all tokens are equally likely; devices divide by much larger ones as by infinity, and then
excluded tokens, whose logits are minus infinity, become NaN."""


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
    min_p: float | None = None
    """Draw from the tokens at least this many times as likely as the likeliest (arXiv 2407.01082)."""
    repetition_penalty: float = 1.0
    """For tokens of the prompt and continuation, divides logits above 0 and multiplies those below (arXiv 1909.05858);
    1 is no penalty."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature is {self.temperature}; use 0 for the most likely token, or more")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k is {self.top_k}; use at least 1, or None for all tokens")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}; use a number in (0, 1], or None for all tokens")
        if self.min_p is not None and not 0 < self.min_p <= 1:
            raise ConfigError(f"min_p is {self.min_p}; use a number in (0, 1], or None for all tokens")
        if not 0 < self.repetition_penalty < float("inf"):
            raise ConfigError(f"repetition_penalty is {self.repetition_penalty}; use 1 for none, or more")


def sample(
    logits: jax.Array,
    key: jax.Array,
    sampling: Sampling,
    vocab_size: int | None = None,
    seen: jax.Array | None = None,
) -> jax.Array:
    """Draw one token id, int32 [batch], from logits [batch, vocab]; ids from `vocab_size` on are never drawn.

    seen: bool [batch, vocab], the tokens to which `repetition_penalty` applies. All tokens as likely as the least
    likely one that top_k or top_p keeps are kept too.
    """
    if seen is not None and sampling.repetition_penalty != 1:
        penalty = sampling.repetition_penalty
        logits = jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
    if vocab_size is not None:
        logits = jnp.where(jnp.arange(logits.shape[-1]) < vocab_size, logits, -jnp.inf)
    if sampling.temperature < SMALLEST:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    # Subtracting the largest changes no probability, and keeps the quotient by a low temperature from overflowing.
    logits = (logits - jnp.max(logits, axis=-1, keepdims=True)) / min(sampling.temperature, HOTTEST)
    if sampling.top_k is not None:
        least = jax.lax.top_k(logits, min(sampling.top_k, logits.shape[-1]))[0][:, -1:]
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    if sampling.top_p is not None:
        probabilities = jnp.sort(jax.nn.softmax(logits, axis=-1), axis=-1, descending=True)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities  # of the tokens that are more likely
        kept = before < max(sampling.top_p, SMALLEST)
        least = jnp.min(probabilities, axis=-1, keepdims=True, where=kept, initial=1.0)
        logits = jnp.where(jax.nn.softmax(logits, axis=-1) >= least, logits, -jnp.inf)
    if sampling.min_p is not None:
        probabilities = jax.nn.softmax(logits, axis=-1)
        least = sampling.min_p * jnp.max(probabilities, axis=-1, keepdims=True)
        logits = jnp.where(probabilities >= least, logits, -jnp.inf)
    return jax.random.categorical(key, logits, axis=-1).astype(jnp.int32)
