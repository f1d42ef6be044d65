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
from jax.sharding import NamedSharding, PartitionSpec

from titans_jax import sharding
from titans_jax.config import Config
from titans_jax.models.loss import Batch, loss_sum
from titans_jax.training.optimizer import trains

State = dict[str, Any]


def first_state(
    config: Config, optimizer: optax.GradientTransformation, params: Any, mesh: jax.sharding.Mesh | None
) -> State:
    """The state before the first step. On a mesh (None: a single device), arrays that are not yet spread over it, such
    as a counter, are copied to every device."""

    def on_mesh(array: jax.Array) -> jax.Array:
        if mesh is None or len(array.sharding.device_set) == mesh.size:
            return array
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec()))

    state = jax.tree.map(on_mesh, {"params": params, "optimizer": optimizer.init(params)})
    if config.optimizer.ema is not None:
        state["ema"] = jax.tree.map(jnp.copy, state["params"])
    return state


def step_of(
    config: Config, graphdef: nnx.GraphDef, optimizer: optax.GradientTransformation, state: State | None = None
) -> Callable[[State, Batch], tuple[State, dict[str, jax.Array]]]:
    """`make_train_step` with the arguments of a configuration."""
    training, how = config.training, config.optimizer
    return make_train_step(
        graphdef, optimizer, training.gradient_accumulation, how.ema, training.z_loss, state, how.train_only
    )


def make_train_step(
    graphdef: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    accumulation: int,
    ema: float | None = None,
    z_loss: float = 0.0,
    state: State | None = None,
    train_only: tuple[str, ...] = (),
) -> Callable[[State, Batch], tuple[State, dict[str, jax.Array]]]:
    """The compiled step: (state, batch) -> (state, {"loss", "grad_norm", "tokens"}), the metrics float32 scalars.

    The loss is the mean cross entropy in nats over predicted targets. The batch is cut into `accumulation`
    microbatches whose losses are summed and divided once, so padding weighs the same however the batch is cut. A
    step whose loss or gradient norm is not finite changes nothing. The state given to the step is donated.

    `ema`: the decay of the average, where the state has one. `z_loss`: weight of the mean squared log partition
    function over predicted targets, for heads that have `losses`; where it is not 0, this is added to the training loss
    and reported, weight included, as the metric "z_loss". `state`: the first state, or its shapes, needed where a mesh
    is set: later states are sharded like it. `train_only`: as in `make_optimizer`; no gradients of other parameters are
    computed, nor counted in "grad_norm".
    """
    fixed = {
        "graphdef": graphdef, "optimizer": optimizer, "accumulation": accumulation, "ema": ema, "z_loss": z_loss,
        "train_only": train_only,
    }  # fmt: skip
    # Without this, the compiler shards some leaves differently, and the second step would be compiled again for them.
    places = None if jax.sharding.get_abstract_mesh().empty else (jax.tree.map(lambda x: x.sharding, state), None)
    return jax.jit(functools.partial(_train_step, **fixed), donate_argnums=0, out_shardings=places)


def _losses(
    params: Any, batch: Batch, *, graphdef: nnx.GraphDef, z_loss: float, train_only: tuple[str, ...]
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The training loss, summed over targets, and as metrics the sums of its parts and the number of targets."""
    if train_only:
        kept = lambda path, x: x if trains(train_only, path) else jax.lax.stop_gradient(x)  # noqa: E731
        params = jax.tree_util.tree_map_with_path(kept, params)
    if not z_loss:
        loss, tokens = loss_sum(graphdef, params, batch)
        return loss, {"loss": loss, "tokens": tokens}
    total, parts = nnx.merge(graphdef, params).losses(batch, z_loss)
    return total, {"loss": parts.nats, "tokens": parts.count, "z_loss": parts.z_loss}


def _train_step(
    state: State,
    batch: Batch,
    *,
    graphdef: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    accumulation: int,
    ema: float | None,
    z_loss: float,
    train_only: tuple[str, ...],
) -> tuple[State, dict[str, jax.Array]]:
    params = state["params"]
    losses = functools.partial(_losses, graphdef=graphdef, z_loss=z_loss, train_only=train_only)
    grad_fn = jax.grad(losses, has_aux=True)

    def sums_of_rows(params: Any, batch: Batch) -> tuple[dict[str, jax.Array], Any]:
        def microbatch(carry: tuple[dict[str, jax.Array], Any], batch: Batch) -> tuple[Any, None]:
            grads, sums = grad_fn(params, batch)
            return jax.tree.map(jnp.add, carry, (sums, grads)), None

        # Interleaved rows (row i goes to microbatch i mod n): each device keeps its own rows of a sharded batch.
        batch = jax.tree.map(lambda x: x.reshape(-1, accumulation, *x.shape[1:]).swapaxes(0, 1), batch)
        # The losses and their count are of the parameters' dtype; to ask for it would trace the model once more.
        zero = jnp.zeros((), jnp.result_type(*jax.tree.leaves(params)))
        sums = dict.fromkeys(("loss", "tokens", "z_loss") if z_loss else ("loss", "tokens"), zero)
        return jax.lax.scan(microbatch, (sums, jax.tree.map(jnp.zeros_like, params)), batch)[0]

    sums, grads = sharding.add_over_copies(sums_of_rows, params, batch)
    tokens = sums.pop("tokens")
    predicted = jnp.maximum(tokens, 1.0)  # a batch of padding only has loss 0 and gradient 0
    means, grads = jax.tree.map(lambda x: x / predicted, (sums, grads))

    grad_norm = optax.tree.norm(grads)
    with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer counts
        updates, optimizer_state = optimizer.update(grads, state["optimizer"], params)
    finite = jnp.isfinite(means["loss"]) & jnp.isfinite(grad_norm)
    new = {"params": optax.apply_updates(params, updates), "optimizer": optimizer_state}
    if ema is not None:
        new["ema"] = optax.incremental_update(new["params"], state["ema"], 1 - ema)
    state = jax.tree.map(lambda new, old: jnp.where(finite, new, old), new, state)
    return state, means | {"grad_norm": grad_norm, "tokens": tokens}
