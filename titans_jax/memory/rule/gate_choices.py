"""Gate choices: how a model makes the gates of a preset's memory from a token, as the preset's paper has them.

    GateChoices(retention="forget", step_size="bounded")              names from the tables below
    GateChoices(key=LearnedGate(lambda x: jax.nn.log_sigmoid(x) / 8, start=2.0))          a gate of your own

A learned gate is a function of a logit, which is linear in the token; the layer that makes the logits is
`titans_jax.layers.memory_gates`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from titans_jax.memory.gates import Gates
from titans_jax.memory.rule.rule import MemoryRule

# alpha = sigmoid(. - 8): a memory that forgets towards zero starts by keeping all but 3e-4 per token. Behind a norm,
# forgetting only shrinks the weights, and every gradient grows with it, until training explodes (-4 would be a factor
# of 50 in 220 tokens). The gates learn to forget.
FORGET_BIAS = -8.0
# Memories without a norm of their own begin by forgetting within some hundred tokens.
OPEN_BIAS = -5.0
# For memories that forget towards their start: 1/e is left after 1,100 tokens in the first head, after 8 in the last
# (memory/what_was_tried.md).
SPREAD_BIAS = (-7.0, -2.0)
# sigmoid of it is 1/3. With the default max_step_size of 3 a first write removes just its token's error, and from the
# direction where it removes most 1.4 times as much. With a half that would be more than twice the error, and one key
# again and again not stable (memory/what_was_tried.md).
THIRD_BIAS = -math.log(2.0)
# sigmoid of it is 1/6. Momentum of a half makes twice as much of a step, so a first write again removes the error once.
SIXTH_BIAS = -math.log(5.0)
# sigmoid(-2) = 0.12. Moneta's writes grow with the square of the error: with larger steps the writes of a chunk enlarge
# one another, and its gradients explode (memory/what_was_tried.md).
LOW_BIAS = -2.0
# sigmoid(-3.2) = 0.04. Hope's memories make one another's keys and targets: a write changes where later ones go.
LOWEST_BIAS = -3.2
SOFTPLUS_ONE = math.log(math.expm1(1.0))
"""softplus of it is 1."""
FIRST_THRESHOLD = math.log(math.expm1(5.0))
"""softplus of it is 5. Where values are as large as reads, errors deviate by 1.4 at first, by 2 where writes overshoot.
A Huber loss that clips many of them learns to recall late, and one that clips some magnifies gradients
(memory/what_was_tried.md)."""


Start = float | tuple[float, float]
"""The initial bias of a logit: one number for all heads, or one for the first head and one for the last."""


def starts_of_heads(start: Start, heads: int) -> np.ndarray:
    """The initial bias of every head, float64 [heads]; a single head gets the mean of two numbers."""
    first, last = start if isinstance(start, tuple) else (start, start)
    return np.linspace(first, last, heads) if heads > 1 else np.array([(first + last) / 2])


@dataclasses.dataclass(frozen=True)
class LearnedGate:
    """A gate that is a function of a logit, elementwise: the step size, or the logarithm of the retention (<= 0).

    start: the logit's initial bias; two numbers are those of the first and the last head, with even steps between them
    (`starts_of_heads`). bounded: the function is in [0, 1], and its product with `MemoryConfig.max_step_size`, in its
    unit, is the step size.
    """

    function: Callable[[jax.Array], jax.Array]
    start: Start = 0.0
    bounded: bool = False

    def logits(self, name: str, count: int) -> dict[str, tuple[int, Start]]:
        """The logits that the gate needs for every token, {name: (how many, their initial bias)}."""
        return {name: (count, self.start)}


@dataclasses.dataclass(frozen=True)
class ConstantGate:
    """A gate that does not depend on the token: a function that takes the heads' numbers [heads], 0 to heads - 1, and
    how many heads there are, and returns the logarithm of the retention, or the step size, of every head [heads]."""

    function: Callable[[jax.Array, int], jax.Array]

    def logits(self, name: str, count: int) -> dict[str, tuple[int, float]]:
        """No logits."""
        return {}


@dataclasses.dataclass(frozen=True)
class Rate:
    """Mamba2: a step for every token, softplus of a logit, and retention exp(-A step) with a learned A for every head.

    As a gate of key channels, it has a step for every channel (Kimi Delta Attention, arXiv 2510.26692).
    """

    start: ClassVar[float] = 0.0

    def logits(self, name: str, count: int) -> dict[str, tuple[int, float]]:
        """One logit, of the step that retention and step size share."""
        return {"rate": (1, self.start)}


def forget(logit: jax.Array) -> jax.Array:
    """log(1 - sigmoid(logit)): alpha = sigmoid(logit) is what is forgotten (Titans eq 13)."""
    return jax.nn.log_sigmoid(-logit)


def gla(logit: jax.Array) -> jax.Array:
    """log of sigmoid(logit)^(1/16) (arXiv 2312.06635)."""
    return jax.nn.log_sigmoid(logit) / 16


def rwkv(logit: jax.Array) -> jax.Array:
    """-e^(-1/2) sigmoid(logit) (arXiv 2503.14456)."""
    return -(math.e**-0.5) * jax.nn.sigmoid(logit)


def twice_sigmoid(logit: jax.Array) -> jax.Array:
    """In (0, 2), so that a DeltaNet step can reverse the sign of what a key holds (arXiv 2502.10297)."""
    return 2 * jax.nn.sigmoid(logit)


def retnet(head: jax.Array, heads: int) -> jax.Array:
    """log(1 - 2^(-5 - head)) (arXiv 2307.08621)."""
    return jnp.log1p(-(2.0 ** (-5 - head)))


def lightning(head: jax.Array, heads: int) -> jax.Array:
    """-2^(-8 (head + 1) / heads) (arXiv 2405.17381)."""
    return -(2.0 ** (-8 * (head + 1) / heads))


def zeros(head: jax.Array, heads: int) -> jax.Array:
    """Everything is kept."""
    return jnp.zeros_like(head)


def ones(head: jax.Array, heads: int) -> jax.Array:
    """A step of 1."""
    return jnp.ones_like(head)


Gate = LearnedGate | ConstantGate | Rate

RETENTION_GATES: Mapping[str, Gate] = {
    "forget": LearnedGate(forget, OPEN_BIAS),
    "rate": Rate(),
    "retnet": ConstantGate(retnet),
    "lightning": ConstantGate(lightning),
    "keep": ConstantGate(zeros),
}
"""Gates by the names that `GateChoices.retention` takes."""

STEP_SIZE_GATES: Mapping[str, Gate] = {
    "bounded": LearnedGate(jax.nn.sigmoid, bounded=True),
    "bounded_third": LearnedGate(jax.nn.sigmoid, THIRD_BIAS, bounded=True),
    "bounded_sixth": LearnedGate(jax.nn.sigmoid, SIXTH_BIAS, bounded=True),
    "bounded_low": LearnedGate(jax.nn.sigmoid, LOW_BIAS, bounded=True),
    "bounded_lowest": LearnedGate(jax.nn.sigmoid, LOWEST_BIAS, bounded=True),
    "sigmoid": LearnedGate(jax.nn.sigmoid),
    "softplus": LearnedGate(jax.nn.softplus),
    "double": LearnedGate(twice_sigmoid),
    "rate": Rate(),
    "one": ConstantGate(ones),
}
"""Gates by the names that `GateChoices.step_size` takes."""

CHANNEL_GATES: Mapping[str, LearnedGate] = {
    "forget": LearnedGate(forget, OPEN_BIAS),
    "gla": LearnedGate(gla),
    "rwkv": LearnedGate(rwkv, -3.0),
}
"""Gates by the names that `GateChoices.value` takes."""

KEY_GATES: Mapping[str, LearnedGate | Rate] = {**CHANNEL_GATES, "rate": Rate()}
"""Gates by the names that `GateChoices.key` takes."""


STEP_SIDES: Mapping[str, tuple[str, ...]] = {"key": ("key",), "value": ("value",), "both": ("key", "value")}
"""Sides by the names that `GateChoices.channel_steps` takes."""


@dataclasses.dataclass(frozen=True)
class GateChoices:
    """How one preset fills `memory.Gates`. Each of the first four is a name from the tables above, or a gate itself.

    retention: "forget", 1 - sigmoid of a logit per matrix (Titans); "rate", exp(-A step) with a step softplus of a
    logit (Mamba2); "retnet" and "lightning", constants per head; "keep", 1.
    step_size: "bounded", max_step_size * sigmoid per matrix (Titans), at first half of it; "bounded_third",
    "bounded_sixth", "bounded_low" and "bounded_lowest", at first a third, a sixth, an eighth and a twenty-fifth;
    "sigmoid", "softplus", "double" (2 sigmoid, so that a DeltaNet step can reverse a sign); "rate", the step of the
    retention; "one".
    key, value: channel-wise retention of the memory's inputs and outputs: "forget", "gla" (sigmoid^(1/16)), "rwkv"
    (exp(-e^(-1/2) sigmoid)), or None; for inputs also "rate", as for retention, with a step for every channel (Kimi).
    lower_bound: key retention is at least a learned number of every channel (HGRN2). The paper's bounds are sums of one
    softmax over the layers, from 0 in the first; as layers share no parameters, each learns its own here, from 1/2.
    channel_steps: step sizes vary by channel too: True, on the sides with channel-wise retention; "key", "value" or
    "both", on these sides.
    bias_gate: a bias whose gate can differ by channel (Huber's threshold) gets one per channel, softplus of a logit,
    which starts at 5. Any other bias that takes a gate, and any where this is False, gets one per head in the same way,
    which starts at 1.
    keys: "projected"; "complement", 1 - key retention, whose logits are the projection (HGRN2, whose gates are of full
    rank); "removal", a removal and a replacement key (RWKV-7); "rotated", a token's key and that of the token before,
    turned by phases (Mamba-3, `layers.rotation`), or several of each, with gates of their own that the gates here
    multiply.
    erase: the part of its key with which a token's error is computed (`Gates.erase`): "all"; "channels", a sigmoid for
    every channel, with another one that multiplies the written values (Gated DeltaNet-2); "head", the sigmoid of a
    learned number for every head, at first 0.73 (Comba).
    corrected_queries: q - d k takes the place of the query q, d a learned number for every head (Comba).
    preconditioned: channels of the written key that earlier keys have used more are made smaller
    (`layers.preconditioner`).
    forget_bias: the initial bias of the logits of gates called "forget", as `LearnedGate.start`.
    shared: retention, momentum and step size are one number for all fast matrices (Titans v1), not one for each.

    Raises ValueError for unknown choices, and for choices that exclude each other.
    """

    retention: str | Gate = "keep"
    step_size: str | Gate = "one"
    key: str | LearnedGate | Rate | None = None
    value: str | LearnedGate | None = None
    lower_bound: bool = False
    channel_steps: bool | Literal["key", "value", "both"] = False
    bias_gate: bool = False
    keys: Literal["projected", "complement", "removal", "rotated"] = "projected"
    erase: Literal["all", "channels", "head"] = "all"
    corrected_queries: bool = False
    preconditioned: bool = False
    forget_bias: Start = OPEN_BIAS
    shared: bool = False

    def __post_init__(self) -> None:
        tables = {
            "retention": RETENTION_GATES,
            "step_size": STEP_SIZE_GATES,
            "key": KEY_GATES | {None: None},
            "value": CHANNEL_GATES | {None: None},
            "channel_steps": dict.fromkeys((True, False, *STEP_SIDES)),
            "keys": dict.fromkeys(("projected", "complement", "removal", "rotated")),
            "erase": dict.fromkeys(("all", "channels", "head")),
        }
        for field, table in tables.items():
            choice = getattr(self, field)
            if isinstance(choice, str | None) and choice not in table:
                words = ", ".join(map(repr, table))
                own = "" if field in ("channel_steps", "keys", "erase") else ", or a LearnedGate"
                raise ValueError(f"{field} is {choice!r}: it must be one of {words}{own}.")
        if self.complement_keys and self.key is None:
            raise ValueError('key is None: keys "complement" are 1 - key retention, which needs a gate, "forget".')
        if self.lower_bound and self.key is None:
            raise ValueError('key is None: lower_bound bounds key retention, which needs a gate, "forget".')
        if self.preconditioned and (self.channel_steps or self.keys != "projected"):
            raise ValueError(
                "preconditioned is True: the steps of its channels are those of one projected key; use channel_steps "
                'False and keys "projected".'
            )
        if self.step_size_gate == Rate() and self.retention_gate != Rate():
            raise ValueError('step_size is "rate": it is the step of a retention "rate", which this is not.')

    @property
    def retention_gate(self) -> Gate:
        """The gate that `retention` names or is."""
        return self._gate(self.retention, RETENTION_GATES)

    @property
    def step_size_gate(self) -> Gate:
        """The gate that `step_size` names or is."""
        return self._gate(self.step_size, STEP_SIZE_GATES)

    @property
    def key_gate(self) -> LearnedGate | Rate | None:
        """The gate that `key` names or is."""
        return self._gate(self.key, KEY_GATES)

    @property
    def value_gate(self) -> LearnedGate | None:
        """The gate that `value` names or is."""
        return self._gate(self.value, CHANNEL_GATES)

    @property
    def step_sides(self) -> tuple[str, ...]:
        """The sides, of "key" and "value", whose channels have step sizes of their own."""
        if isinstance(self.channel_steps, str):
            return STEP_SIDES[self.channel_steps]
        gates = {"key": None if self.complement_keys else self.key_gate, "value": self.value_gate}
        return tuple(side for side, gate in gates.items() if gate and self.channel_steps)

    @property
    def bounded(self) -> bool:
        """Whether the step size has a bound, max_step_size in its unit."""
        return getattr(self.step_size_gate, "bounded", False)

    @property
    def complement_keys(self) -> bool:
        """Whether a key is 1 - key retention."""
        return self.keys == "complement"

    @property
    def removal_keys(self) -> bool:
        """Whether a token has two keys, one to remove with and one to write with."""
        return self.keys == "removal"

    @property
    def rotated_keys(self) -> bool:
        """Whether a token has the key of the token before and its own, turned by phases."""
        return self.keys == "rotated"

    def projected_steps(self, rule: MemoryRule) -> int:
        """How many projected keys and values a token has: one for each inner step, unless all are made from one."""
        return rule.algorithm.steps if self.keys == "projected" else 1

    def key_rank(self, rule: MemoryRule) -> int:
        """Keys and queries of a token per projected value: more than one only for rotated keys, each of which takes
        two inner steps (Mamba-3's MIMO)."""
        return rule.algorithm.steps // 2 if self.rotated_keys else 1

    def by_channel(self, rule: MemoryRule) -> bool:
        """Whether the bias has a gate per channel; a configuration may have put in a bias that takes none."""
        return self.bias_gate and rule.bias.takes_gate and rule.bias.gate_by_channel

    def scalar_logits(self, rule: MemoryRule, head_dim: int) -> dict[str, tuple[int, Start]]:
        """The scalar logits of one head, {name: (how many, their initial bias)}."""
        matrices, steps = 1 if self.shared else len(rule.shapes(head_dim)), rule.algorithm.steps
        found = self.retention_gate.logits("retention", matrices)
        found |= self.step_size_gate.logits("step_size", matrices * steps)
        if rule.algorithm.has_momentum:
            found["momentum"] = (matrices, 0.0)
        reach = rule.algorithm.window - 1
        if reach:  # at first the tokens of the window together weigh nearly as much as the token itself
            found["window_weight"] = (reach, -math.log(reach))
        if rule.bias.takes_gate and not rule.bias.affine and not self.by_channel(rule):
            found["bias_gate"] = (steps, SOFTPLUS_ONE)
        return found

    def channel_logits(self, rule: MemoryRule) -> dict[str, Start]:
        """The logits of every channel, {name: their initial bias}; those of complement keys are the key projection."""
        found = {}
        for side, gate in (("key", self.key_gate), ("value", self.value_gate)):
            if gate and not (side == "key" and self.complement_keys):
                found[side] = gate.start
        found |= {f"{side}_step": 0.0 for side in self.step_sides}
        if self.by_channel(rule):
            found["bias_gate"] = FIRST_THRESHOLD
        if self.removal_keys:
            found["removal_step"] = 0.0
        return found | (dict.fromkeys(("erase", "write"), 0.0) if self.erase == "channels" else {})

    def example(self, rule: MemoryRule) -> Gates:
        """Example gates of one token, 1 for each gate that a memory with these choices has, to choose a form by."""
        one = jnp.ones((1, 1))
        steps = {f"{side}_step_size": one for side in self.step_sides}
        steps |= {"key_step_size": one} if self.preconditioned else {}
        erase = None if self.erase == "all" else one
        retention = {f"log_{side}_retention": one for side in ("key", "value") if getattr(self, side)}
        reach = rule.algorithm.window - 1
        window = jnp.ones((1, reach)) if reach else None
        momentum = one if rule.algorithm.has_momentum else None
        return Gates(one, momentum, one, **retention, **steps, erase=erase, window_weight=window)

    def _gate(self, choice: str | Gate | None, table: Mapping[str, Gate]) -> Gate | None:
        if not isinstance(choice, str):
            return choice
        gate = table[choice]
        return dataclasses.replace(gate, start=self.forget_bias) if choice == "forget" else gate
