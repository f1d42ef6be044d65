"""The gates that a memory layer makes for every token: how much to keep, how far to step, and on which channels.

A preset's `GateChoices` say which gates its memory has, and which function of a logit each gate is. The logits are made
here, each from a bias and a learned function of the block's input x. Scalars are per head (and fast matrix).
Channel-wise gates have low-rank maps, dim -> gate_rank -> heads * head_dim, whose first map they share or have one
each, or a full map each.

Logits are float32, of x / sqrt(dim): Adam moves all entries of a kernel alike, and would change a plain product with x
so fast that gates saturate before the model has learned.

Shapes: b batch, t time, h heads, d head_dim, m fast matrices of one memory, n inner steps per token.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.nn import initializers

from titans_jax import memory
from titans_jax.config import ModelConfig, gate_choices, limits_steps, step_size_bound
from titans_jax.layers.norms import l2_normalize
from titans_jax.layers.projections import param_dtype
from titans_jax.memory.rule.gate_choices import ConstantGate, LearnedGate, Rate, starts_of_heads
from titans_jax.sharding import logical

# Small: at first every token has nearly the same gates.
HEAD_KERNEL = logical(initializers.truncated_normal(0.1), None, "heads", None)
"""The start of a kernel [dim, heads, n] of scalar logits."""
FIRST_CORRECTION = 0.02
"""What Comba's d starts at: its public code has 1, and says that 0.02 is sometimes better for small models."""


class MemoryGates(nnx.Module):
    """The gates of every token and head from the block's input, and the keys and values that depend on gates."""

    def __init__(self, config: ModelConfig, rule: memory.MemoryRule, *, rngs: nnx.Rngs):
        choices = gate_choices(config.memory)
        self.choices, self.steps, self.dtype = choices, rule.algorithm.steps, param_dtype(config)
        self.by_chunk = rule.algorithm.steps_by_chunk
        self.config = config
        self.limits_steps, self.one_by_one = limits_steps(config.memory), rule.chunk_size == 1
        heads, dtype = config.num_heads, self.dtype

        scalars = choices.scalar_logits(rule, config.head_dim)
        self.scalars = {name: width for name, (width, _) in scalars.items()}
        if self.scalars:
            width = sum(self.scalars.values())
            self.kernel = nnx.Param(HEAD_KERNEL(rngs.params(), (config.dim, heads, width), dtype))
            starts = [np.repeat(starts_of_heads(bias, heads)[:, None], width, 1) for width, bias in scalars.values()]
            start = jnp.asarray(np.concatenate(starts, axis=1), dtype)
            self.bias = nnx.Param(logical(lambda: start, "heads", None)())
        if "rate" in self.scalars:
            self.log_rate, self.step_bias = rate_parameters(heads, dtype)
        if choices.key_gate == Rate():
            self.key_log_rate, self.key_step_bias = rate_parameters(heads, dtype, config.head_dim)

        channels = choices.channel_logits(rule)
        self.channels = tuple(channels)
        if self.channels:
            shape = (len(self.channels), heads, config.head_dim)
            self._make_channel_maps(config, shape, rngs=rngs)
            start = jnp.asarray([starts_of_heads(bias, heads) for bias in channels.values()], dtype)
            start = jnp.broadcast_to(start[..., None], shape)
            self.channel_bias = nnx.Param(logical(lambda: start, None, "heads", None)())
        if choices.complement_keys:
            start = jnp.asarray(starts_of_heads(choices.key_gate.start, heads), dtype)[:, None]
            bias = logical(lambda: jnp.broadcast_to(start, (heads, config.head_dim)), "heads", None)
            self.forget_bias = nnx.Param(bias())
        if choices.lower_bound:
            bound = logical(initializers.zeros, "heads", None)
            self.lower_bound = nnx.Param(bound(rngs.params(), (heads, config.head_dim), dtype))
        if choices.removal_keys:  # which channels of a key are removed, and how much of them is replaced
            ones = logical(initializers.ones, "heads", None)
            self.removal = nnx.Param(ones(rngs.params(), (heads, config.head_dim), dtype))
            self.replacement = nnx.Param(ones(rngs.params(), (heads, config.head_dim), dtype))

        if choices.erase == "head":
            ones = logical(initializers.ones, "heads")
            self.erase = nnx.Param(ones(rngs.params(), (heads,), dtype))
        if choices.corrected_queries:
            first = logical(initializers.constant(FIRST_CORRECTION), "heads")
            self.correction = nnx.Param(first(rngs.params(), (heads,), dtype))

    def _make_channel_maps(self, config: ModelConfig, shape: tuple[int, int, int], *, rngs: nnx.Rngs) -> None:
        """The maps to channel-wise logits, `shape` gates, heads and head_dim: full [dim, *shape], or down and up."""
        rank, own = config.memory.gate_rank, config.memory.gate_maps == "own"
        full = logical(initializers.truncated_normal(0.1), None, None, "heads", None)
        self.full = nnx.Param(full(rngs.params(), (config.dim, *shape), self.dtype)) if rank is None else None
        if rank is None:
            return
        wide = (config.dim, shape[0], rank) if own else (config.dim, rank)
        down = logical(initializers.truncated_normal(1.0), *(None,) * len(wide))
        up = logical(initializers.truncated_normal(0.1 * rank**-0.5), None, None, "heads", None)
        self.down = nnx.Param(down(rngs.params(), wide, self.dtype))
        self.up = nnx.Param(up(rngs.params(), (rank, *shape), self.dtype))

    def __call__(
        self, x: jax.Array, keys: jax.Array, values: jax.Array, mask: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array, memory.Gates]:
        """x [b, t, dim], keys, values [b, t, h, (n,) d], mask bool [b, t] -> (keys, values, gates [b, t, h, ...])."""
        choices, logits, shape = self.choices, self.logits(x), values.shape[:3]
        if choices.complement_keys:
            logits["key"] = keys.astype(self.dtype) + self.forget_bias[...][None, None]
        channel = {}
        if choices.key_gate:
            channel["log_key_retention"] = self.log_key_retention(logits["key"])
        if choices.lower_bound:
            bound = self.lower_bound[...][None, None]
            channel["log_key_retention"] = at_least(bound, channel["log_key_retention"])
        if choices.value_gate:
            channel["log_value_retention"] = choices.value_gate.function(logits["value"])
        if choices.channel_steps:  # 1 at first
            channel |= {f"{s}_size": 2 * jax.nn.sigmoid(logits[s]) for s in ("key_step", "value_step") if s in logits}
        if "bias_gate" in logits:
            channel["bias_gate"] = jax.nn.softplus(logits["bias_gate"])

        if choices.complement_keys:
            keys = -jnp.expm1(channel["log_key_retention"]).astype(values.dtype)
        if choices.removal_keys:
            keys, values, steps = self.remove_and_write(keys, values, logits["removal_step"])
            channel |= steps
        if choices.erase == "channels":
            channel["erase"], write = jax.nn.sigmoid(logits["erase"]), jax.nn.sigmoid(logits["write"])
            values = (values.astype(write.dtype) * write).astype(values.dtype)
        if choices.erase == "head":
            part = jax.nn.sigmoid(self.erase[...])[None, None, :, None]
            channel["erase"] = jnp.broadcast_to(part, values.shape)
        step_size, retention = self.step_size(logits, shape), self.log_retention(logits, shape)
        momentum = jax.nn.log_sigmoid(logits["momentum"]) if "momentum" in logits else None
        if "window_weight" in logits:
            channel["window_weight"] = jax.nn.sigmoid(logits["window_weight"])
            if not self.by_chunk:  # the one step of a chunk does not grow with what is summed
                step_size /= window_total(channel["window_weight"])
        return keys, values, self.limited(memory.Gates(retention, momentum, step_size, mask, **channel))

    def queries(self, queries: jax.Array, keys: jax.Array) -> jax.Array:
        """The queries to read with, made of a token's query and key, [b, t, h, d] each.

        A read without a key, such as MAC's first, uses the query as it is.
        """
        if not self.choices.corrected_queries:
            return queries
        correction = self.correction[...][None, None, :, None]
        return (queries.astype(self.dtype) - correction * keys.astype(self.dtype)).astype(queries.dtype)

    def logits(self, x: jax.Array) -> dict[str, jax.Array]:
        """Scalars [b, t, h, m] and channels [b, t, h, d], by name."""
        found = {}
        if self.scalars:
            logits = head_logits(self.kernel[...], self.bias[...], x)
            splits, total = [], 0
            for width in self.scalars.values():
                splits.append(total := total + width)
            found |= dict(zip(self.scalars, jnp.split(logits, splits[:-1], axis=-1), strict=True))
        if self.channels:
            logits = self.mapped(x.astype(self.dtype) * x.shape[-1] ** -0.5) + self.channel_bias[...][:, None, None]
            found |= dict(zip(self.channels, logits, strict=True))
        return found

    def mapped(self, x: jax.Array) -> jax.Array:
        """The linear part of the channel-wise logits, [b, t, dim] -> [c, b, t, h, d]."""
        if self.full is not None:
            return jnp.einsum("bti,ichd->cbthd", x, self.full[...])
        down, up = self.down[...], self.up[...]
        if down.ndim == 2:
            return jnp.einsum("btr,rchd->cbthd", jnp.einsum("bti,ir->btr", x, down), up)
        return jnp.einsum("btcr,rchd->cbthd", jnp.einsum("bti,icr->btcr", x, down), up)

    def rate_step(self, logits: dict[str, jax.Array]) -> jax.Array:
        """The step of Mamba2, [b, t, h, 1]."""
        return jax.nn.softplus(logits["rate"] + self.step_bias[...][None, None, :, None])

    def log_retention(self, logits: dict[str, jax.Array], shape: tuple[int, ...]) -> jax.Array:
        """[b, t, h, m or 1]."""
        match self.choices.retention_gate:
            case LearnedGate() as gate:
                return gate.function(logits["retention"])
            case Rate():
                return -jnp.exp(self.log_rate[...])[None, None, :, None] * self.rate_step(logits)
            case ConstantGate() as gate:
                return self.constant(gate, (*shape, 1))

    def log_key_retention(self, logits: jax.Array) -> jax.Array:
        """[b, t, h, d], of logits of that shape."""
        match self.choices.key_gate:
            case LearnedGate() as gate:
                return gate.function(logits)
            case Rate():
                steps = jax.nn.softplus(logits + self.key_step_bias[...][None, None])
                return -jnp.exp(self.key_log_rate[...])[None, None, :, None] * steps

    def step_size(self, logits: dict[str, jax.Array], shape: tuple[int, ...]) -> jax.Array:
        """[b, t, h, m or 1], or with n inner steps [b, t, h, n]."""
        match self.choices.step_size_gate:
            case LearnedGate() as gate:
                size = gate.function(logits["step_size"])
                return step_size_bound(self.config) * size if gate.bounded else size
            case Rate():
                return self.rate_step(logits)
            case ConstantGate() as gate:
                return self.constant(gate, (*shape, self.steps))

    def error_shares(self, gates: memory.Gates) -> jax.Array:
        """[b, t, h], the share of its error that each token's step removes from a fresh memory, with momentum and
        window; 0 at padding."""
        shares = error_share(self.config, jnp.mean(gates.step_size, axis=-1))
        if gates.window_weight is not None:
            shares *= window_total(gates.window_weight)[..., 0]
        if gates.log_momentum is not None:  # the sum of a step and of what momentum makes of it
            shares /= jnp.maximum(-jnp.expm1(jnp.mean(gates.log_momentum, axis=-1)), 1e-3)
        return shares if gates.mask is None else jnp.where(gates.mask[..., None], shares, 0)

    def limited(self, gates: memory.Gates) -> memory.Gates:
        """Gates with steps that a linear memory can take again and again for one key without growing (memory/README.md,
        Gates, Steps of a linear memory). Steps from a chunk's start remove at most all of the error, momentum included;
        steps token by token less than twice the error, which reverses its sign."""
        if not self.limits_steps:
            return gates
        if self.one_by_one:
            share, most = error_share(self.config, gates.step_size), 1 + least_kept(gates)
        else:
            share, most = self.error_shares(gates)[..., None], 1
        for factors in (gates.key_step_size, gates.value_step_size):  # of channels: the largest counts
            share = share if factors is None else share * jnp.max(factors, axis=-1, keepdims=True)
        return dataclasses.replace(gates, step_size=gates.step_size * most / jnp.maximum(share, most))

    def constant(self, gate: ConstantGate, shape: tuple[int, ...]) -> jax.Array:
        """A gate of every head for all tokens, [b, t, h, n]."""
        values = gate.function(jnp.arange(shape[2], dtype=self.dtype), shape[2])
        return jnp.broadcast_to(values[None, None, :, None], shape)

    def remove_and_write(
        self, keys: jax.Array, values: jax.Array, logit: jax.Array
    ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """RWKV-7's two inner steps, what is removed, then what is written: keys and values [b, t, h, 2, d], and the
        gates that tell the steps apart (arXiv 2503.14456)."""
        amount = jax.nn.sigmoid(logit)
        wide = keys.astype(amount.dtype)
        removal = l2_normalize(wide * self.removal[...][None, None])
        written = wide * (1 + (amount - 1) * self.replacement[...][None, None])
        keys = jnp.stack([removal, written], axis=3).astype(keys.dtype)
        values = jnp.stack([jnp.zeros_like(values), values], axis=3)
        slope = jnp.broadcast_to(jnp.array([1.0, 0.0], amount.dtype), (*amount.shape[:3], 2))
        return keys, values, {
            "key_step_size": jnp.stack([amount, jnp.ones_like(amount)], axis=3),
            "bias_gate": slope,
        }  # fmt: skip


def head_logits(kernel: jax.Array, bias: jax.Array, x: jax.Array) -> jax.Array:
    """x [b, t, dim] -> [b, t, h, n] by a kernel [dim, h, n] and a bias [h, n], in their dtype."""
    scaled = x.astype(kernel.dtype) * x.shape[-1] ** -0.5
    return jnp.einsum("btd,dhk->bthk", scaled, kernel) + bias[None, None]


def error_share(config: ModelConfig, step_size: jax.Array) -> jax.Array:
    """The share of its error that a step of this size removes alone, from a fresh memory."""
    return step_size / (step_size_bound(config) / config.memory.max_step_size)  # over that which removes all


def least_kept(gates: memory.Gates) -> jax.Array:
    """The least that a token keeps of any channel, [b, t, h, m or 1]."""
    sides = (gates.log_key_retention, gates.log_value_retention)
    channels = (jnp.min(side, axis=-1, keepdims=True) for side in sides if side is not None)
    return jnp.exp(gates.log_retention + sum(channels))


def rate_parameters(heads: int, dtype: jnp.dtype, channels: int | None = None) -> tuple[nnx.Param, nnx.Param]:
    """log A [heads] and the biases of steps, [heads] or [heads, channels], with Mamba2's starts: A between 1 and 16,
    steps between 0.001 and 0.1."""
    rate = jnp.log(jnp.linspace(1, 16, heads, dtype=dtype))
    step = jnp.exp(jnp.linspace(math.log(0.001), math.log(0.1), channels or heads, dtype=dtype))
    bias, axes = jnp.log(jnp.expm1(step)), ("heads",)
    if channels is not None:
        bias, axes = jnp.broadcast_to(bias[None], (heads, channels)), ("heads", None)
    return nnx.Param(logical(lambda: rate, "heads")()), nnx.Param(logical(lambda: bias, *axes)())


def window_total(window_weight: jax.Array) -> jax.Array:
    """The sum of the weights that a token gives its window, its own 1 among them, [..., w - 1] -> [..., 1].

    A token's step is taken in every window that the token is in, with weights that later tokens choose. It is divided
    by the sum of the token's own weights, so that all of these together are about one step (memory/later_models.md, The
    Omega rule).
    """
    return 1 + jnp.sum(window_weight, axis=-1, keepdims=True)


def at_least(logit: jax.Array, log_gate: jax.Array) -> jax.Array:
    """Log of bound + (1 - bound) gate, the bound being a logit's sigmoid (arXiv 2404.07904)."""
    return jnp.logaddexp(jax.nn.log_sigmoid(logit), jax.nn.log_sigmoid(-logit) + log_gate)
