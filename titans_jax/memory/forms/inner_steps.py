"""Tokens of several inner steps (DeltaProduct, RWKV-7) as a longer sequence of single steps."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from titans_jax.memory.forms.chunk_algorithm import MemoryInputs
from titans_jax.memory.gates import Gates


def unroll_inner_steps(steps: int, inputs: MemoryInputs) -> MemoryInputs:
    """Leaves [time, steps, ...] as [time * steps, ...]; queries [time, head_dim] are read after every step of their
    token; the token's retention and reset belong to its first step."""

    def flat(x):
        return None if x is None else x.reshape(-1, *x.shape[2:])

    def every(x):
        return None if x is None else jnp.repeat(x, steps, axis=0)

    def first(x):
        if x is None:
            return None
        rest = jnp.zeros((x.shape[0], steps - 1, *x.shape[1:]), x.dtype)
        return flat(jnp.concatenate([x[:, None], rest], axis=1))

    gates = inputs.gates
    return MemoryInputs(
        every(inputs.queries) if inputs.queries.ndim == 2 else flat(inputs.queries),
        flat(inputs.keys),
        flat(inputs.values),
        Gates(
            log_retention=first(gates.log_retention),
            log_momentum=None,
            step_size=flat(gates.step_size),
            mask=every(gates.mask),
            bias_gate=flat(gates.bias_gate),
            log_key_retention=first(gates.log_key_retention),
            log_value_retention=first(gates.log_value_retention),
            key_step_size=flat(gates.key_step_size),
            value_step_size=flat(gates.value_step_size),
            erase=flat(gates.erase),
        ),
        first(inputs.resets),
    )


def join_inner_steps(steps: int, every_read: bool, reads: jax.Array, per_step):
    """(each token's last read of reads [time * steps, head_dim], or every read as [time, steps, head_dim]; the leaves
    of per_step, [time * steps], summed over each token's steps)."""
    reads = reads.reshape(-1, steps, reads.shape[-1]) if every_read else reads[steps - 1 :: steps]
    return reads, jax.tree.map(lambda x: jnp.sum(x.reshape(-1, steps), axis=1), per_step)
