"""AdamW as in the papers: warm-up and cosine, gradients clipped by global norm, decay on matrices only; or Muon."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from titans_jax.config import OptimizerConfig

DECAYING = 0.2
"""Share of the steps after the warm-up in which the "trapezoid" schedule decays (arXiv 2405.18392)."""


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """The optimizer of a run of `steps` steps: the recipe of Gated DeltaNet (arXiv 2412.06464), as in Titans 5.1.

    Muon (Jordan et al. 2024) takes the matrices that have weight decay, except the head, and gives their updates the
    size of AdamW's (arXiv 2502.16982), so that learning rates mean the same; with Muon, both parts use Nesterov
    momentum. With `train_only` only the parameters that it names are clipped, decayed and updated.
    """
    schedule = learning_rate_schedule(config, steps)
    if config.name == "muon":
        rule = optax.contrib.muon(
            schedule,
            weight_decay=config.weight_decay,
            weight_decay_mask=decay_mask,
            adam_b1=config.beta1,
            adam_b2=config.beta2,
            eps=config.epsilon,
            adam_weight_decay=config.weight_decay,
            muon_weight_dimension_numbers=muon_dimensions,
            consistent_rms=0.2,
        )
        rule = _decaying_matrices_only(rule)
    else:
        rule = optax.adamw(
            schedule,
            b1=config.beta1,
            b2=config.beta2,
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            mask=decay_mask,
        )
    whole = optax.chain(optax.clip_by_global_norm(config.clip_norm), rule)
    if not config.train_only:
        return whole
    kinds = {True: whole, False: optax.set_to_zero()}
    return optax.multi_transform(
        kinds, lambda params: jax.tree_util.tree_map_with_path(lambda path, _: trains(config.train_only, path), params)
    )


def _decaying_matrices_only(rule: optax.GradientTransformation) -> optax.GradientTransformation:
    """The rule, which looks at parameters only to decay them, with zeros in place of those that have no weight decay:
    `optax.contrib.muon` takes no mask for the parameters that AdamW updates, and would decay all of them."""

    def update(updates: Any, state: Any, params: Any) -> tuple[Any, Any]:
        decayed = jax.tree_util.tree_map_with_path(lambda path, x: x if decays(path) else jnp.zeros_like(x), params)
        return rule.update(updates, state, decayed)

    return optax.GradientTransformation(rule.init, update)


def trains(train_only: tuple[str, ...], path: tuple[Any, ...]) -> bool:
    """Whether the parameter at this tree path is trained: its path has one of these names, or there are no names."""
    return not train_only or any(str(entry.key) in train_only for entry in path)


def groups(config: OptimizerConfig, params: Any) -> dict[str, int]:
    """How many parameters each rule of the optimizer updates, with and without weight decay, and how many none does."""
    counts: dict[str, int] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not trains(config.train_only, path):
            counts["not trained"] = counts.get("not trained", 0) + leaf.size
            continue
        muon = config.name == "muon" and takes_muon(path, leaf)
        label = f"{'muon' if muon else 'adamw'}, {'decayed' if decays(path) else 'not decayed'}"
        counts[label] = counts.get(label, 0) + leaf.size
    return counts


def takes_muon(path: tuple[Any, ...], leaf: jax.Array) -> bool:
    """Whether Muon, where it is chosen, updates the parameter at this tree path: a matrix, or a stack of matrices."""
    return decays(path) and path[0].key != "head" and leaf.ndim in (2, 3)


def muon_dimensions(params: Any) -> Any:
    """For every parameter, which of its axes Muon takes as those of a matrix, or None where AdamW updates it; with a
    leading axis of layers, a parameter is a stack of matrices."""

    def of(path: tuple[Any, ...], leaf: jax.Array) -> Any:
        if not takes_muon(path, leaf):
            return None
        return optax.contrib.MuonDimensionNumbers(reduction_axis=leaf.ndim - 2, output_axis=leaf.ndim - 1)

    return jax.tree_util.tree_map_with_path(of, params)


def learning_rate_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Learning rate by the number of updates already made: linear to the peak, then `config.schedule`, which ends at
    `steps` with `final_learning_rate_ratio` of the peak (but for "constant").

    The first update already moves: it uses 1 / warmup_steps of the peak, not 0.
    """
    decay_steps = max(steps - config.warmup_steps, 1)  # a run may end in its warm-up
    peak, last = config.learning_rate, config.learning_rate * config.final_learning_rate_ratio
    tail = max(round(DECAYING * decay_steps), 1)
    after = {
        "cosine": lambda: optax.cosine_decay_schedule(peak, decay_steps, alpha=config.final_learning_rate_ratio),
        "linear": lambda: optax.linear_schedule(peak, last, decay_steps),
        "constant": lambda: optax.constant_schedule(peak),
        "trapezoid": lambda: optax.linear_schedule(peak, last, tail, transition_begin=decay_steps - tail),
    }[config.schedule]()
    if config.warmup_steps == 0:
        return after
    first = config.learning_rate / config.warmup_steps
    warmup = optax.linear_schedule(first, config.learning_rate, config.warmup_steps - 1)
    return optax.join_schedules([warmup, after], [config.warmup_steps])


def decay_mask(params: Any) -> Any:
    """True at the parameters that weight decay pulls to zero."""
    return jax.tree_util.tree_map_with_path(lambda path, _: decays(path), params)


def decays(path: tuple[Any, ...]) -> bool:
    """Whether the parameter at this tree path is a matrix that multiplies activations.

    Goes by name, "kernel", not by rank, because stacked layers give every parameter a leading axis. Not decayed: norm
    scales, biases, convolution kernels, persistent tokens, the maps of channel-wise gates, the embedding (a look-up:
    decay would only shrink rare tokens), and the memory's start (its fast weights before the first token): its
    forgetting is what the retention gate learns.
    """
    names = [entry.key for entry in path]
    return names[-1] == "kernel" and "convolution" not in names
