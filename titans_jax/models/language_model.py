"""The language model: embedding, a pattern of blocks cycled over the depth, norm, head.

    logits = model(tokens, segment_ids)                # training and scoring
    state = model.init_state(batch_size)
    logits, state = model.extend(prompt, state)        # prefill
    logits, state = model.extend(token, state)         # decode

A call and `extend` run the same blocks: a call starts a sequence, `extend` continues from its state.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from titans_jax.config import ModelConfig
from titans_jax.layers import document_layout as layout
from titans_jax.layers.document_layout import Documents
from titans_jax.layers.memory_report import explained_share
from titans_jax.layers.projections import compute_dtype, projection
from titans_jax.models.loss import TokenLosses, next_token_logits, next_token_losses
from titans_jax.models.pattern import granularity
from titans_jax.models.stack import TokenStack, register_head


@register_head()
class LanguageModel(TokenStack):
    """Tokens in, logits of the next token out.

    Args:
      config: the model; see `titans_jax.config.ModelConfig`.
      rngs: the parameters' random numbers, nnx.Rngs(seed).
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        head = None if config.tie_embeddings else ("embed", "vocab")
        self.head = head and projection(config, config.dim, config.vocab_size, head, rngs=rngs)

    def __call__(
        self, tokens: jax.Array, segment_ids: jax.Array | None = None, *, return_diagnostics: bool = False
    ) -> jax.Array | tuple[jax.Array, dict[str, jax.Array]]:
        """Logits of every next token, each from the tokens of its document up to its own.

        Args:
          tokens: int32 [batch, time].
          segment_ids: int32 [batch, time], one id per packed document, 0 at padding; None is one document a row. Each
            document must start at a multiple of `granularity(config)`, or rows need `config.document_slack` further
            slots for moving it there; a row that does not fit has NaN logits.
          return_diagnostics: also return what the memories did, {"retention", "momentum", "step_size", "inner_loss",
            "explained_share", "update_norm", "weight_norm"} (no "momentum" and no "explained_share" where the rule has
            none, see `layers.memory_report`): float32 [memory layers], means over rows, tokens, heads and matrices.
            Empty for a model without memory, and where nothing is written.

        Returns:
          logits float32 [batch, time, vocab_size] (float64 for a float64 model).

        Raises:
          ValueError: tokens hold no time step.
        """
        x, reports, documents = self._hidden(tokens, segment_ids, return_diagnostics)
        logits = next_token_logits(x, self._head())
        if not return_diagnostics:
            return logits
        return logits, _mean_reports(reports, documents)

    def loss_sum(self, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Summed cross entropy in nats of a batch's predicted targets, and how many there are, in the logits' dtype."""
        nats, parts = self.losses(batch)
        return nats, parts.count

    def losses(self, batch: dict[str, jax.Array], z_loss: float = 0.0) -> tuple[jax.Array, TokenLosses]:
        """The training loss, summed, and its parts; see `next_token_losses`."""
        x, _, _ = self._hidden(batch["tokens"], batch["segment_ids"], False)
        return next_token_losses(x, self._head(), batch["targets"], z_loss)

    def _hidden(
        self, tokens: jax.Array, segment_ids: jax.Array | None, return_diagnostics: bool
    ) -> tuple[jax.Array, tuple, Documents | None]:
        """The head's input [batch, time, dim], the blocks' reports, and the documents."""
        _check_time(tokens)
        documents, relay = None, None
        if segment_ids is not None:
            length = tokens.shape[1] + self.config.document_slack
            documents = layout.find_documents(segment_ids)
            if self.config.document_slack:
                relay = layout.relay(documents, granularity(self.config), length)
                tokens = layout.scatter(relay, tokens, length)
                fits = relay.fits
                documents = layout.find_documents(layout.scatter(relay, documents.index + 1, length))
            else:
                fits = layout.aligned(documents, granularity(self.config))
        select = lambda _, reports: reports if return_diagnostics else ()  # noqa: E731
        x, reports = self._blocks(self._embed(tokens), None, documents, select)
        if relay is not None:
            x = layout.gather(relay, x)
        if documents is not None:
            x = jnp.where(fits[:, None, None], x, jnp.nan)
        return self.norm(x), reports, documents

    def extend(self, tokens: jax.Array, state: Any, *, closed: bool = False) -> tuple[jax.Array, Any]:
        """Read further tokens: int32 [batch, time] -> logits [batch, time, vocab_size] and the state after them.

        Any split of a sequence into calls gives the logits of one call on all of it, to rounding.

        Args:
          closed: the state has read a multiple of `granularity(config)` tokens. This saves the work for a chunk that
            might be open, and half of the compilation; if it is not true, the numbers are wrong.

        Raises:
          ValueError: tokens hold no time step.
        """
        _check_time(tokens)
        x, after = self._blocks(self._embed(tokens), state, None, lambda states, _: states, closed)
        after = jax.tree.map(lambda new, old: jnp.asarray(new, old.dtype), after, state)
        return next_token_logits(self.norm(x), self._head()), after

    def _head(self) -> jax.Array:
        """[dim, vocab_size], in the dtype of activations."""
        head = self.embedding.embedding[...].T if self.head is None else self.head.kernel[...]
        return head.astype(compute_dtype(self.config))


def _check_time(tokens: jax.Array) -> None:
    if tokens.ndim != 2 or tokens.shape[1] == 0:
        raise ValueError(f"tokens has shape {list(tokens.shape)}; use [batch, time] with at least one token of time")


def _mean_reports(reports: tuple[dict, ...], documents: Documents | None) -> dict[str, jax.Array]:
    """Reports of a cycle's blocks, leaves [cycles, batch(, time)], to means [memory layers] in order of depth."""

    def mean(leaf: jax.Array) -> jax.Array:
        if leaf.ndim == 2 or documents is None:
            return jnp.mean(leaf, axis=tuple(range(1, leaf.ndim)))
        return jnp.mean(leaf, axis=(1, 2), where=documents.mask[None])

    reports = [jax.tree.map(mean, report) for report in reports if report]
    found = {name: jnp.stack([report[name] for report in reports], axis=1).reshape(-1) for name in (reports or [{}])[0]}
    if "constant_loss" in found:
        found["explained_share"] = explained_share(found["inner_loss"], found.pop("constant_loss"))
    return found
