"""What layers that hold memories have in common: a switch for writing, and the way from their reads to the model."""

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from titans_jax.config import ModelConfig
from titans_jax.layers.norms import RMSNorm, side_by_side
from titans_jax.layers.projections import projection

READS = "memory_reads"
"""Name, for policies of rematerialisation, of a memory's reads: nothing of their size costs as much to repeat."""


class MemoryLayer(nnx.Module):
    """A layer with fast weights.

    writes: False leaves them at their start, exactly: they are read, in training as in streaming, and never written,
    not even with persistent tokens. What the memory is worth is measured by it (`models.without_writes`).
    """

    writes = True


class HeadReads(MemoryLayer):
    """One whose reads [b, t, ..., h, d] of its heads go out as Gated DeltaNet's: norm, gate, projection."""

    def make_output(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        """The parameters of `output`."""
        width = config.num_heads * config.head_dim
        self.norm = RMSNorm(config, config.num_heads, config.head_dim, axes=("heads", None), rngs=rngs)
        self.output_gate = projection(config, config.dim, width, ("embed", "heads"), rngs=rngs)
        self.output_projection = projection(
            config, width, config.dim, ("heads", "embed"), writes_residual=True, rngs=rngs
        )

    def output(self, x: jax.Array, reads: jax.Array) -> jax.Array:
        """Reads [b, t, ..., h, d] to model width: RMSNorm per head, gate silu(x W_g) (Gated DeltaNet), output
        projection."""
        # Held flat, or a TPU would take squares as the kernel has them, whose narrow heads fill no register.
        flat = jax.lax.optimization_barrier(side_by_side(reads.astype(self.dtype)))
        reads = checkpoint_name(flat, READS).reshape(reads.shape)
        return self.output_projection(self.gated(self.norm(reads), self.output_gate(x)))

    def gated(self, normed: jax.Array, gate: jax.Array) -> jax.Array:
        """Normed reads [b, t, h, d] and logits of their gate [b, t, h d]: [b, t, h d]."""
        return normed.reshape(gate.shape) * jax.nn.silu(gate)
