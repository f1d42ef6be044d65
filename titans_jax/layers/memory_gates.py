"""What a memory layer tells its memory about every token: how much to keep, how far to step, and on which channels.

Every preset of `titans_jax.memory.presets` has a row in `GATES`; its gates are made from the block's input x as in its
paper, each from a bias and a learned function of x. Scalars are per head (and fast matrix); channel-wise gates go
through a low rank, dim -> gate_rank -> heads * head_dim (papers.md 3.5).

Logits are float32, of x / sqrt(dim): Adam moves all entries of a kernel alike, and would turn a plain product with x so
fast that gates saturate before the model has learned.

Shapes: b batch, t time, h heads, d head_dim, m fast matrices of one memory, n inner steps per token.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn import initializers

from titans_jax import memory
from titans_jax.config import ModelConfig
from titans_jax.layers.norms import l2_normalize
from titans_jax.layers.projections import param_dtype
from titans_jax.sharding import logical

# alpha = sigmoid(. - 8): a memory starts by keeping all but 3e-4 per token. Behind a norm, forgetting only shrinks the
# weights, and every gradient grows with it, until training explodes (papers.md 1.3 suggests -4, which is a factor of 50
# in 220 tokens). The gates learn to forget.
FORGET_BIAS = -8.0
# Memories without a norm of their own start to forget within some hundred tokens.
OPEN_BIAS = -5.0
SOFTPLUS_ONE = math.log(math.expm1(1.0))  # softplus of it is 1


@dataclasses.dataclass(frozen=True)
class GateChoices:
    """How one preset fills `memory.Gates`.

    retention: "forget", 1 - sigmoid of a logit per matrix; "rate", exp(-A step) with a step softplus of a logit
    (Mamba2); "retnet" and "lightning", constants per head; "keep", 1.
    step_size: "bounded", max_step_size / head_dim * sigmoid per matrix (Titans); "sigmoid", "softplus", "double" (2
    sigmoid, so that a DeltaNet step can turn over); "rate", the step of the retention; "one".
    key, value: channel-wise retention of the memory's inputs and outputs: "forget", "gla" (sigmoid^(1/16)), "rwkv"
    (exp(-e^(-1/2) sigmoid)), or None. channel_steps: step sizes vary by channel too, on the same sides.
    lower_bound: key retention is at least a learned number of every channel (HGRN2). The paper's bounds are sums of one
    softmax over the layers, from 0 in the first; as layers share no parameters, each learns its own here, from 1/2.
    bias_gate: the threshold of a Huber bias is per channel, softplus of a logit. Any other bias with a number of its
    own (and Huber's where this is False) gets one per head in the same way; both start at 1.
    keys: "projected"; "complement", 1 - key retention, whose logits are the projection (HGRN2, whose gates are of full
    rank); "removal", a removal and a replacement key (RWKV-7).
    """

    retention: Literal["forget", "rate", "retnet", "lightning", "keep"] = "keep"
    step_size: Literal["bounded", "sigmoid", "softplus", "double", "rate", "one"] = "one"
    key: Literal["forget", "gla", "rwkv"] | None = None
    value: Literal["forget"] | None = None
    lower_bound: bool = False
    channel_steps: bool = False
    bias_gate: bool = False
    keys: Literal["projected", "complement", "removal"] = "projected"
    forget_bias: float = OPEN_BIAS


MIRAS = GateChoices("forget", "bounded", "forget", "forget", channel_steps=True, forget_bias=FORGET_BIAS)

GATES = {
    "retnet": GateChoices("retnet"),
    "linear_attention": GateChoices(),
    "dfw": GateChoices(key="forget", value="forget"),
    "lightning_attention": GateChoices("lightning"),
    "gla": GateChoices(key="gla"),
    "mamba2": GateChoices("rate", "rate"),
    "hgrn2": GateChoices(key="forget", lower_bound=True, keys="complement"),
    "deltanet": GateChoices(step_size="sigmoid"),
    "longhorn": GateChoices(step_size="softplus"),
    "ttt_linear": GateChoices(step_size="bounded"),
    "gated_deltanet": GateChoices("rate", "sigmoid"),
    "rwkv7": GateChoices(key="rwkv", keys="removal"),
    "delta_product": GateChoices("rate", "double"),
    "mesa": GateChoices("forget", "sigmoid"),
    "ttt_mlp": GateChoices(step_size="bounded"),
    "titans": GateChoices("forget", "bounded", forget_bias=FORGET_BIAS),
    "moneta": MIRAS,
    "yaad": dataclasses.replace(MIRAS, bias_gate=True),
    # A softmax over inputs is the paper's rule only while retention is the same for all inputs (papers.md 3.5).
    "memora": dataclasses.replace(MIRAS, key=None),
}
"""The gates of every preset."""


class MemoryGates(nnx.Module):
    """The gates of every token and head from the block's input, and the keys and values that depend on gates."""

    def __init__(self, config: ModelConfig, rule: memory.MemoryRule, *, rngs: nnx.Rngs):
        choices = GATES[config.memory.preset]
        self.choices, self.steps, self.dtype = choices, rule.algorithm.steps, param_dtype(config)
        self.max_step_size = config.memory.max_step_size / config.head_dim
        heads, dtype = config.num_heads, self.dtype

        scalars = scalar_gates(choices, rule, config.head_dim)
        self.scalars = {name: width for name, (width, _) in scalars.items()}
        if self.scalars:
            width = sum(self.scalars.values())
            # Small: at first every token has nearly the same gates.
            kernel = logical(initializers.truncated_normal(0.1), None, "heads", None)
            self.kernel = nnx.Param(kernel(rngs.params(), (config.dim, heads, width), dtype))
            starts = [jnp.full((heads, width), bias, dtype) for width, bias in scalars.values()]
            start = jnp.concatenate(starts, axis=1)
            self.bias = nnx.Param(logical(lambda: start, "heads", None)())
        if choices.retention == "rate":
            # As in Mamba2: rates between 1 and 16, steps between 0.001 and 0.1.
            rate = jnp.log(jnp.linspace(1, 16, heads, dtype=dtype))
            step = jnp.exp(jnp.linspace(math.log(0.001), math.log(0.1), heads, dtype=dtype))
            self.log_rate = nnx.Param(logical(lambda: rate, "heads")())
            self.step_bias = nnx.Param(logical(lambda: jnp.log(jnp.expm1(step)), "heads")())

        channels = channel_gates(choices, rule)
        self.channels = tuple(channels)
        if self.channels:
            shape = (len(self.channels), heads, config.head_dim)
            down = logical(initializers.truncated_normal(1.0), None, None)
            up = logical(initializers.truncated_normal(0.1 * config.memory.gate_rank**-0.5), None, None, "heads", None)
            start = jnp.array(list(channels.values()), dtype)
            start = jnp.broadcast_to(start[:, None, None], shape)
            self.down = nnx.Param(down(rngs.params(), (config.dim, config.memory.gate_rank), dtype))
            self.up = nnx.Param(up(rngs.params(), (config.memory.gate_rank, *shape), dtype))
            self.channel_bias = nnx.Param(logical(lambda: start, None, "heads", None)())
        if choices.keys == "complement":
            bias = logical(initializers.constant(choices.forget_bias), "heads", None)
            self.forget_bias = nnx.Param(bias(rngs.params(), (heads, config.head_dim), dtype))
        if choices.lower_bound:
            bound = logical(initializers.zeros, "heads", None)
            self.lower_bound = nnx.Param(bound(rngs.params(), (heads, config.head_dim), dtype))
        if choices.keys == "removal":  # which channels of a key are removed, and how much of them is replaced
            ones = logical(initializers.ones, "heads", None)
            self.removal = nnx.Param(ones(rngs.params(), (heads, config.head_dim), dtype))
            self.replacement = nnx.Param(ones(rngs.params(), (heads, config.head_dim), dtype))

    def __call__(self, x: jax.Array, keys: jax.Array, values: jax.Array, mask: jax.Array | None = None):
        """x [b, t, dim], keys, values [b, t, h, (n,) d], mask bool [b, t] -> (keys, values, gates [b, t, h, ...])."""
        logits, shape = self.logits(x), values.shape[:3]
        if self.choices.keys == "complement":
            logits["key"] = keys.astype(self.dtype) + self.forget_bias[...][None, None]
        channel = {}
        if self.choices.key:
            channel["log_key_retention"] = log_retention(self.choices.key, logits["key"])
        if self.choices.lower_bound:
            bound = self.lower_bound[...][None, None]
            channel["log_key_retention"] = at_least(bound, channel["log_key_retention"])
        if self.choices.value:
            channel["log_value_retention"] = log_retention(self.choices.value, logits["value"])
        if self.choices.channel_steps:  # 1 at first
            channel |= {f"{s}_size": 2 * jax.nn.sigmoid(logits[s]) for s in ("key_step", "value_step") if s in logits}
        if "bias_gate" in logits:
            channel["bias_gate"] = jax.nn.softplus(logits["bias_gate"])

        if self.choices.keys == "complement":
            keys = -jnp.expm1(channel["log_key_retention"]).astype(values.dtype)
        if self.choices.keys == "removal":
            keys, values, steps = self.remove_and_write(keys, values, logits["removal_step"])
            channel |= steps
        step_size, retention = self.step_size(logits, shape), self.log_retention(logits, shape)
        momentum = jax.nn.log_sigmoid(logits["momentum"]) if "momentum" in logits else None
        return keys, values, memory.Gates(retention, momentum, step_size, mask, **channel)

    def logits(self, x: jax.Array) -> dict[str, jax.Array]:
        """Scalars [b, t, h, m] and channels [b, t, h, d], by name."""
        found = {}
        if self.scalars:
            kernel = self.kernel[...]
            scaled = x.astype(kernel.dtype) * x.shape[-1] ** -0.5
            logits = jnp.einsum("btd,dhk->bthk", scaled, kernel) + self.bias[...][None, None]
            splits, total = [], 0
            for width in self.scalars.values():
                splits.append(total := total + width)
            found |= dict(zip(self.scalars, jnp.split(logits, splits[:-1], axis=-1), strict=True))
        if self.channels:
            down = self.down[...]
            low = jnp.einsum("btd,dr->btr", x.astype(down.dtype) * x.shape[-1] ** -0.5, down)
            logits = jnp.einsum("btr,rchd->cbthd", low, self.up[...]) + self.channel_bias[...][:, None, None]
            found |= dict(zip(self.channels, logits, strict=True))
        return found

    def rate_step(self, logits) -> jax.Array:
        """The step of Mamba2, [b, t, h, 1]."""
        return jax.nn.softplus(logits["rate"] + self.step_bias[...][None, None, :, None])

    def log_retention(self, logits, shape) -> jax.Array:
        """[b, t, h, m or 1]."""
        heads = shape[2]
        if self.choices.retention == "forget":
            return jax.nn.log_sigmoid(-logits["retention"])
        if self.choices.retention == "rate":
            return -jnp.exp(self.log_rate[...])[None, None, :, None] * self.rate_step(logits)
        head = jnp.arange(heads, dtype=self.dtype)
        constants = {
            "retnet": jnp.log1p(-(2.0 ** (-5 - head))),
            "lightning": -(2.0 ** (-8 * (head + 1) / heads)),
            "keep": jnp.zeros((heads,), self.dtype),
        }
        return jnp.broadcast_to(constants[self.choices.retention][None, None, :, None], (*shape, 1))

    def step_size(self, logits, shape) -> jax.Array:
        """[b, t, h, m or 1], or with n inner steps [b, t, h, n]."""
        if self.choices.step_size == "one":
            return jnp.ones((*shape, self.steps), self.dtype)
        if self.choices.step_size == "rate":
            return self.rate_step(logits)
        function = {
            "bounded": lambda x: self.max_step_size * jax.nn.sigmoid(x),
            "sigmoid": jax.nn.sigmoid,
            "softplus": jax.nn.softplus,
            "double": lambda x: 2 * jax.nn.sigmoid(x),
        }[self.choices.step_size]
        return function(logits["step_size"])

    def remove_and_write(self, keys, values, logit):
        """RWKV-7's two inner steps: what is removed, then what is written; keys and values [b, t, h, 2, d]."""
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


def gates_given(rule: memory.MemoryRule, choices: GateChoices) -> memory.Gates:
    """Which gates a preset's memory gets, each a 1 for one token: what a form is chosen by."""
    one = jnp.ones((1, 1))
    steps = dict.fromkeys(("key_step_size", "value_step_size"), one) if choices.channel_steps else {}
    retention = {f"log_{side}_retention": one for side in ("key", "value") if getattr(choices, side)}
    return memory.Gates(one, one if rule.algorithm.has_momentum else None, one, **retention, **steps)


def scalar_gates(choices: GateChoices, rule: memory.MemoryRule, head_dim: int) -> dict[str, tuple[int, float]]:
    """The scalar logits of one head, {name: (how many, their bias at first)}."""
    matrices, steps = len(rule.shapes(head_dim)), rule.algorithm.steps
    found = {}
    if choices.retention == "forget":
        found["retention"] = (matrices, choices.forget_bias)
    if choices.retention == "rate":
        found["rate"] = (1, 0.0)
    if choices.step_size not in ("one", "rate"):
        found["step_size"] = (matrices * steps, 0.0)
    if rule.algorithm.has_momentum:
        found["momentum"] = (matrices, 0.0)
    if rule.bias.takes_gate and not rule.bias.affine and not by_channel(choices, rule):
        found["bias_gate"] = (steps, SOFTPLUS_ONE)
    return found


def channel_gates(choices: GateChoices, rule: memory.MemoryRule) -> dict[str, float]:
    """The logits of every channel, {name: their bias at first}."""
    forget = {"forget": choices.forget_bias, "gla": 0.0, "rwkv": -3.0}
    found = {}
    for side, kind in (("key", choices.key), ("value", choices.value)):
        if kind and not (side == "key" and choices.keys == "complement"):
            found[side] = forget[kind]
    for side in tuple(found) if choices.channel_steps else ():
        found[f"{side}_step"] = 0.0
    if by_channel(choices, rule):
        found["bias_gate"] = SOFTPLUS_ONE
    if choices.keys == "removal":
        found["removal_step"] = 0.0
    return found


def by_channel(choices: GateChoices, rule: memory.MemoryRule) -> bool:
    """Whether the bias has a threshold per channel: Huber's may; a configuration may put another bias in its place."""
    return choices.bias_gate and isinstance(rule.bias, memory.biases.Huber)


def log_retention(kind: str, logit: jax.Array) -> jax.Array:
    """Channel-wise log retention of a logit; see `GateChoices`."""
    return {
        "forget": lambda x: jax.nn.log_sigmoid(-x),
        "gla": lambda x: jax.nn.log_sigmoid(x) / 16,
        "rwkv": lambda x: -(math.e**-0.5) * jax.nn.sigmoid(x),
    }[kind](logit)


def at_least(logit: jax.Array, log_gate: jax.Array) -> jax.Array:
    """Log of bound + (1 - bound) gate, the bound being a logit's sigmoid (arXiv 2404.07904)."""
    return jnp.logaddexp(jax.nn.log_sigmoid(logit), jax.nn.log_sigmoid(-logit) + log_gate)
