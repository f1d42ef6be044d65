"""AdamW as the papers train: warm-up and cosine, gradients clipped by global norm, decay on matrices only."""

from typing import Any

import jax
import optax

from titans_jax.config import OptimizerConfig


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """The optimizer of a run of `steps` steps: the recipe of Gated DeltaNet (arXiv 2412.06464), as in Titans 5.1."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            learning_rate_schedule(config, steps),
            b1=config.beta1,
            b2=config.beta2,
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            mask=decay_mask,
        ),
    )


def learning_rate_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Learning rate by the number of updates already made: linear to the peak, then a cosine that ends at
    `steps` with `final_learning_rate_ratio` of the peak.

    The first update already moves: it uses 1 / warmup_steps of the peak, not 0.
    """
    decay_steps = max(steps - config.warmup_steps, 1)  # a run may end in its warm-up
    cosine = optax.cosine_decay_schedule(config.learning_rate, decay_steps, alpha=config.final_learning_rate_ratio)
    if config.warmup_steps == 0:
        return cosine
    first = config.learning_rate / config.warmup_steps
    warmup = optax.linear_schedule(first, config.learning_rate, config.warmup_steps - 1)
    return optax.join_schedules([warmup, cosine], [config.warmup_steps])


def decay_mask(params: Any) -> Any:
    """True at the parameters that weight decay pulls to zero."""
    return jax.tree_util.tree_map_with_path(lambda path, _: decays(path), params)


def decays(path: tuple[Any, ...]) -> bool:
    """Whether the parameter at this tree path is a matrix that multiplies activations.

    Goes by name, not by rank, because stacked layers give every parameter a leading axis. Not decayed: norm scales,
    biases, convolution kernels, persistent tokens, the embedding (a look-up: decay would only shrink rare tokens), and
    the memory's start (its fast weights before the first token): its forgetting is what the retention gate learns.
    """
    names = [entry.key for entry in path]
    return names[-1] == "kernel" and "convolution" not in names
