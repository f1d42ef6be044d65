"""The gates of every token: how much the memory keeps, how far it steps."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from numpy.typing import ArrayLike

from titans_jax.memory.rule.rule import MemoryRule
from titans_jax.ops.matmul import to_state_dtype

# Gates are clamped here before the logarithm, so that 1 - alpha = 0 and eta = 0 have a finite value and gradient. It is
# far below what a cumulative product resolves, and far above float32's subnormals, which are flushed to 0.
SMALLEST_RETENTION = 1e-30

CHANNEL_GATES = ("log_key_retention", "log_value_retention", "key_step_size", "value_step_size", "erase")
"""The fields of `Gates` that hold one number per channel."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Gates:
    """The gates of every token: how much the memory keeps, how much past surprise it keeps, how far it steps.

    log_retention = log(1 - alpha) <= 0 (-inf allowed), log_momentum = log(eta) <= 0, step_size = theta >= 0, each
    [time] or [time, matrices] (one set per fast matrix, later text of Titans; memory/README.md, Gates). log_momentum is
    None for gradient descent. mask: [time] bool, False marks padding, which changes nothing; padding may only follow a
    document's last token. bias_gate: [time] or [time, head_dim], a parameter of the attentional bias (the delta of
    Huber).

    Channel-wise factors, each [time, head_dim] or None: log_key_retention acts on the inputs of the first fast matrix,
    log_value_retention on the outputs of the last one (for a linear memory, rows and columns of the same matrix), and
    key_step_size, value_step_size multiply the step there. erase, for linear memories only, multiplies the key with
    which a token's error is computed, but not the key that is written, so that the part of the memory that is erased
    can differ from the part that is written (Gated DeltaNet-2, arXiv 2605.22791).

    window_weight: gamma in [0, 1], [time, window - 1], for an algorithm with a window: entry j - 1 of token t weighs
    theta u of token t - j in the step of token t, whose own weight is 1 (ATLAS, arXiv 2505.23735); else None.

    With n inner steps per token, step_size is [time, n] or [time, n, matrices], the channel-wise step sizes and erase
    [time, n, head_dim], bias_gate [time, n] or [time, n, head_dim]; retention acts once, with the first step.
    """

    log_retention: jax.Array
    log_momentum: jax.Array | None
    step_size: jax.Array
    mask: jax.Array | None = None
    bias_gate: jax.Array | None = None
    log_key_retention: jax.Array | None = None
    log_value_retention: jax.Array | None = None
    key_step_size: jax.Array | None = None
    value_step_size: jax.Array | None = None
    erase: jax.Array | None = None
    window_weight: jax.Array | None = None

    @classmethod
    def from_values(
        cls,
        forget: ArrayLike,
        momentum: ArrayLike | None,
        step_size: ArrayLike,
        mask: jax.Array | None = None,
        window_weight: ArrayLike | None = None,
    ) -> Gates:
        """Gates from the papers' alpha, eta, theta (Titans eq 8-14) and gamma (ATLAS), each in [0, 1] but theta, which
        is >= 0; lists of numbers will do.

        Raises ValueError for values outside these ranges, where they are known (not under `jax.jit`).
        """
        forget, momentum, step_size, window_weight = (
            None if x is None else jnp.asarray(x) for x in (forget, momentum, step_size, window_weight)
        )
        ranges = {"forget": (forget, 1), "momentum": (momentum, 1), "window_weight": (window_weight, 1)}
        for name, (x, most) in (ranges | {"step_size": (step_size, jnp.inf)}).items():
            check_range(name, x, most)

        def log(x):
            return jnp.log(jnp.maximum(x, SMALLEST_RETENTION))

        log_momentum = None if momentum is None else log(momentum)
        return cls(log(1 - forget), log_momentum, step_size, mask, window_weight=window_weight)

    def scalars(self) -> tuple[jax.Array, jax.Array | None, jax.Array]:
        """(log_retention, log_momentum, step_size), the gates of a whole token."""
        return self.log_retention, self.log_momentum, self.step_size

    @property
    def channel_wise(self) -> bool:
        """Whether any gate differs between channels."""
        return any(getattr(self, name) is not None for name in CHANNEL_GATES)


def check_range(name: str, x: jax.Array | None, most: float) -> None:
    """Refuse a gate with values below 0, above `most` or NaN, if they are known: raises ValueError with the first."""
    if x is None or isinstance(x, jax.core.Tracer):
        return
    wrong = jnp.logical_not((x >= 0) & (x <= most))
    if jnp.any(wrong):
        value = float(jnp.ravel(x)[jnp.argmax(jnp.ravel(wrong))])
        raise ValueError(f"{name} has the value {value:g}: it must be " + ("0 or more." if most > 1 else "in [0, 1]."))


def complete_gates(rule: MemoryRule, gates: Gates, keys: jax.Array, matrices: int, dtype) -> Gates:
    """Gates in the state's dtype: scalars [time, matrices], momentum only where the algorithm has it, bias_gate [time,
    1 or head_dim], and the step sizes that the algorithm makes of the given ones."""

    def full(x, width):
        if x is None:
            return None
        x = x.astype(dtype)[:, None] if x.ndim == 1 else x.astype(dtype)
        return jnp.broadcast_to(x, (x.shape[0], max(width, x.shape[1])))

    cast = {name: full(getattr(gates, name), 1) for name in ("bias_gate", *CHANNEL_GATES, "window_weight")}
    step_size, cast["value_step_size"] = rule.algorithm.step_sizes(
        full(gates.step_size, matrices), cast["key_step_size"], cast["value_step_size"], to_state_dtype(keys)
    )
    momentum = full(gates.log_momentum, matrices) if rule.algorithm.has_momentum else None
    return Gates(full(gates.log_retention, matrices), momentum, step_size, gates.mask, **cast)
