"""One training step, as a pure function of arrays.

state is {"params", "optimizer"}: nested dictionaries of the model's parameters, and the optax state; and "ema", the
moving average of the parameters, where one is kept.
batch is {"tokens", "targets", "segment_ids"}, int32 [rows, time]: target -1 is not predicted, segment 0 is padding.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from titans_jax.models.loss import Batch, loss_sum

State = dict[str, Any]


def make_train_step(
    graphdef: nnx.GraphDef, optimizer: optax.GradientTransformation, accumulation: int, ema: float | None = None
) -> Callable[[State, Batch], tuple[State, dict[str, jax.Array]]]:
    """The compiled step: (state, batch) -> (state, {"loss", "grad_norm", "tokens"}), the metrics float32 scalars.

    The loss is the mean cross entropy in nats over predicted targets. The batch is cut into `accumulation`
    microbatches whose losses are summed and divided once, so padding weighs the same however the batch is cut. A
    step whose loss or gradient norm is not finite changes nothing. `ema`: the decay of the average, where the state has
    one. `state` is donated.
    """
    return jax.jit(
        functools.partial(_train_step, graphdef=graphdef, optimizer=optimizer, accumulation=accumulation, ema=ema),
        donate_argnums=0,
    )


def _train_step(
    state: State,
    batch: Batch,
    *,
    graphdef: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    accumulation: int,
    ema: float | None,
) -> tuple[State, dict[str, jax.Array]]:
    params = state["params"]
    grad_fn = jax.value_and_grad(functools.partial(loss_sum, graphdef), has_aux=True)

    def microbatch(carry: tuple[jax.Array, jax.Array, Any], batch: Batch) -> tuple[Any, None]:
        (loss, tokens), grads = grad_fn(params, batch)
        return jax.tree.map(jnp.add, carry, (loss, tokens, grads)), None

    # Interleaved rows (row i goes to microbatch i mod n): each device keeps its own rows when the batch is sharded.
    batch = jax.tree.map(lambda x: x.reshape(-1, accumulation, *x.shape[1:]).swapaxes(0, 1), batch)
    # The loss and its count are of the parameters' dtype; to ask for it would trace the model once more.
    zero = jnp.zeros((), jnp.result_type(*jax.tree.leaves(params)))
    (loss, tokens, grads), _ = jax.lax.scan(microbatch, (zero, zero, jax.tree.map(jnp.zeros_like, params)), batch)
    predicted = jnp.maximum(tokens, 1.0)  # a batch of padding only has loss 0 and gradient 0
    loss, grads = loss / predicted, jax.tree.map(lambda g: g / predicted, grads)

    grad_norm = optax.tree.norm(grads)
    with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer counts
        updates, optimizer_state = optimizer.update(grads, state["optimizer"], params)
    finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    new = {"params": optax.apply_updates(params, updates), "optimizer": optimizer_state}
    if ema is not None:
        new["ema"] = optax.incremental_update(new["params"], state["ema"], 1 - ema)
    state = jax.tree.map(lambda new, old: jnp.where(finite, new, old), new, state)
    return state, {"loss": loss, "grad_norm": grad_norm, "tokens": tokens}
