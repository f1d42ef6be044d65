"""What layers with memories have in common: a switch for writing, and the output projection of their reads."""

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from titans_jax.config import ModelConfig
from titans_jax.layers.head_channels import side_by_side
from titans_jax.layers.norms import RMSNorm
from titans_jax.layers.projections import projection

READS = "memory_reads"
"""Name of a memory's reads for rematerialisation policies: no other array of their size costs as much to recompute."""


class MemoryLayer(nnx.Module):
    """A layer with fast weights.

    writes: False leaves the fast weights exactly at their start: they are read but never written, in training, in
    streaming and by persistent tokens. This measures what writing is worth (`models.without_writes`).
    """

    writes = True


class HeadReads(MemoryLayer):
    """A `MemoryLayer` whose reads [b, t, ..., h, d] leave as in Gated DeltaNet: by a norm, a gate and a projection."""

    def make_output(self, config: ModelConfig, *, rngs: nnx.Rngs) -> None:
        """The parameters of `output`."""
        width = config.num_heads * config.head_dim
        self.norm = RMSNorm(config, config.num_heads, config.head_dim, axes=("heads", None), rngs=rngs)
        self.output_gate = projection(config, config.dim, width, ("embed", "heads"), rngs=rngs)
        self.output_projection = projection(
            config, width, config.dim, ("heads", "embed"), writes_residual=True, rngs=rngs
        )

    def kept(self, reads: jax.Array) -> jax.Array:
        """What a memory read [b, t, ..., h, d], as activations that rematerialisation policies know by name."""
        # Kept flat, or a TPU would square them in the memory kernel's layout, in which narrow heads fill no register.
        flat = jax.lax.optimization_barrier(side_by_side(reads.astype(self.dtype)))
        return checkpoint_name(flat, READS).reshape(reads.shape)

    def output(self, x: jax.Array, reads: jax.Array, gate: jax.Array | None = None) -> jax.Array:
        """Reads [b, t, ..., h, d] to model width: RMSNorm per head, gate silu(x W_g) (Gated DeltaNet), output
        projection. gate: added to the gate's logits, [b, t, h d]."""
        logits = self.output_gate(x)
        return self.output_projection(self.gated(self.norm(reads), logits if gate is None else logits + gate))

    def gated(self, normed: jax.Array, gate: jax.Array) -> jax.Array:
        """Normed reads [b, t, h, d] and logits of their gate [b, t, h d]: [b, t, h d]."""
        return normed.reshape(gate.shape) * jax.nn.silu(gate)
