"""Queries, keys and values of a memory: projection, causal convolution, SiLU, unit norm; and how they start."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from titans_jax.config import ModelConfig
from titans_jax.layers.convolution import CausalConvolution
from titans_jax.layers.document_layout import Documents
from titans_jax.layers.projections import projection
from titans_jax.sharding import BATCH, constrain

NEWEST_TAP = 1.6
"""Factor on the initial taps of a query's own token in `start_as_induction` and `start_halves_as_induction`."""
OLDER_TAPS = 0.5
"""Factor on the initial taps of earlier tokens in `start_halves_as_induction`: with 1, recall comes later; with 0 text
is read 0.07 bits worse."""


class MemoryInput(nnx.Module):
    """x [b, t, dim] -> queries, keys or values [b, t, h, d]: projection, causal convolution, SiLU, unit norm.

    With several copies, one for each inner step of a token, they are [b, t, h, copies, d]; with `logits`, without SiLU;
    with another `length` they have that norm.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        unit_norm: bool,
        length: float = 1.0,
        logits: bool = False,
        copies: int = 1,
        rngs: nnx.Rngs,
    ):
        width = config.num_heads * copies * config.head_dim
        self.heads = (config.num_heads, *[copies] * (copies > 1), config.head_dim)
        self.activation = config.memory.activation and not logits
        self.unit_norm, self.length = unit_norm, length
        self.projection = projection(config, config.dim, width, ("embed", "heads"), rngs=rngs)
        self.convolution = CausalConvolution(config, width, rngs=rngs)

    def __call__(
        self,
        x: jax.Array,
        tail: jax.Array,
        documents: Documents | None = None,
        initial_tail: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Also returns the convolution's next tail; see `CausalConvolution`."""
        x = constrain(self.projection(x), BATCH, None, "tensor")
        unit_norm = self.heads[-1] if self.unit_norm else None
        x, tail = self.convolution.features(
            x, tail, documents, initial_tail, activation=self.activation, unit_norm=unit_norm, length=self.length
        )
        return checkpoint_name(x.reshape(*x.shape[:-1], *self.heads), "features"), tail


def start_as_induction(query: MemoryInput, key: MemoryInput) -> None:
    """Let keys start as the queries of one token before: same projection, taps delayed by one.

    A memory then stores each token under the tokens before it, and a read returns what followed tokens like the
    query's: an induction head (Olsson et al., arXiv 2209.11895), which training has to find first if keys start at
    random. The papers say nothing of starts; memory/what_was_tried.md has what this one is worth. The queries keep
    their oldest taps, which have no counterpart in the keys.
    """
    taps = query.convolution.kernel[...]
    taps = jnp.concatenate([NEWEST_TAP * taps[:1], taps[1:]])
    query.convolution.kernel[...] = taps
    key.convolution.kernel[...] = delayed(taps)
    # A copy: parameters that share a buffer could not both be donated.
    key.projection.kernel[...] = jnp.copy(query.projection.kernel[...])


def start_halves_as_induction(query: MemoryInput, convolution: CausalConvolution) -> int:
    """Let half of the heads start with queries that find what followed a token, where key and value have one input;
    returns how many heads, the first ones.

    Hope's memories make a token's key and its value of the same x', `convolution` of x. So in these heads the first
    half of the channels of x' starts as the token before, with the queries' taps delayed by one, and the other half as
    the token itself; queries start as the first half of the channels of x. The other heads start at random, which reads
    text better (memory/what_was_tried.md, Hope's start).
    """
    heads, width = query.heads[0], query.heads[-1]
    first = max(1, heads // 2)
    channel = jnp.arange(heads * width)[None]
    chosen = channel < first * width
    before = chosen & (channel % width < width // 2)
    taps = query.convolution.kernel[...]
    own = jnp.concatenate([NEWEST_TAP * taps[:1], OLDER_TAPS * taps[1:]])
    convolution.kernel[...] = jnp.where(before, delayed(own), jnp.where(chosen, own, convolution.kernel[...]))
    query.convolution.kernel[...] = jnp.where(chosen, own, taps)
    matrix = query.projection.kernel[...]
    query.projection.kernel[...] = jnp.where(chosen, jnp.diag(before[0].astype(matrix.dtype)), matrix)
    return first


def delayed(taps: jax.Array) -> jax.Array:
    """Taps [conv_size, channels] of the token before, without the oldest."""
    return jnp.concatenate([jnp.zeros_like(taps[:1]), taps[:-1]])


def start_near_to_far(*parts: MemoryInput) -> None:
    """Let the first head start from a token alone and the last from all taps of its convolution: the taps of earlier
    tokens are scaled by 0 in the first head, by 1 in the last, and evenly in between.

    For memories whose keys are the queries of the token before. A head whose keys are made of four tokens finds what
    followed four tokens like these, which predicting text needs; one whose keys are made of one token finds what
    followed that token, which recalling pairs needs, and for which a head with all taps has to unlearn the others
    first. The first heads also forget slowest at the start. The papers say nothing of starts; memory/what_was_tried.md
    has what this one is worth.
    """
    for part in parts:
        taps = part.convolution.kernel[...]
        heads = part.heads[0]
        share = jnp.repeat(jnp.linspace(0, 1, heads) if heads > 1 else jnp.ones(1), taps.shape[1] // heads)
        part.convolution.kernel[...] = jnp.concatenate([taps[:1], share.astype(taps.dtype)[None] * taps[1:]])


def of_token_before(
    x: jax.Array, before: jax.Array, documents: Documents | None = None, first: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """For every token x [b, t, ...] of the token before it; and x of the last token, [b, ...].

    Args:
      before: x of the token before the first one, [b, ...].
      first: what stands for x before a document's first token, [...]; with documents.
    """
    # Padded and chosen, where a concatenation's gradient would be two more copies of x.
    shifted = jnp.pad(x[:, :-1], ((0, 0), (1, 0), *[(0, 0)] * (x.ndim - 2)))
    is_first = jnp.expand_dims(jnp.arange(x.shape[1], dtype=jnp.int32) == 0, (0, *range(2, x.ndim)))
    earlier = jnp.where(is_first, before[:, None], shifted)
    if documents is not None:
        starts = jnp.expand_dims(documents.starts, range(2, x.ndim))
        earlier = jnp.where(starts, first[None, None], earlier)
    return earlier, x[:, -1]
