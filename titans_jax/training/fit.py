"""A small model trained from beginning to end in memory, for studies: no run folder, no checkpoints.

    graphdef, params, history = fit(model, optimizer, batches, steps=800, seed=1)

The step, the optimizer and the initial parameters are those of `titans train`.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from titans_jax import sharding
from titans_jax.config import ModelConfig, OptimizerConfig
from titans_jax.models.loss import Batch
from titans_jax.registry import registrations
from titans_jax.training.optimizer import make_optimizer
from titans_jax.training.run import abstract_model, make_init
from titans_jax.training.step import make_train_step

STEPS_AHEAD = 10
"""Steps that may wait on the devices before the metrics of the oldest are read."""


class History(NamedTuple):
    """Measurements of a training.

    loss: mean cross entropy of every step's batch, nats, float32 [steps]. grad_norm: before clipping, float32 [steps].
    tokens: tokens read in all, padding included. seconds: time without compilation and the scores of a selection.
    """

    loss: np.ndarray
    grad_norm: np.ndarray
    tokens: int
    seconds: float

    @property
    def finite(self) -> bool:
        """Whether loss and gradient were finite at every step; a step at which they are not is skipped."""
        return bool(np.all(np.isfinite(self.loss)) and np.all(np.isfinite(self.grad_norm)))


class Selection(NamedTuple):
    """How the parameters of a training are chosen: the ones that score best on validation data (early stopping).

    score: (graphdef, params) -> a number, the larger the better; one that is not finite is the worst. every: steps
    between two scores; the last step is scored too. patience: training ends after this many scores in a row that are
    no better than the best, None: never. enough: a score that ends training at once.
    """

    score: Callable[[nnx.GraphDef, Any], float]
    every: int
    patience: int | None = None
    enough: float = math.inf


class Fit(NamedTuple):
    """A trained model: its structure, its parameters on every device, and the history of its training."""

    graphdef: nnx.GraphDef
    params: Any
    history: History


def fit(
    model: ModelConfig,
    optimizer: OptimizerConfig,
    batches: Iterable[Batch],
    steps: int,
    seed: int,
    after_step: Callable[[], None] = lambda: None,
    selection: Selection | None = None,
    start: Any = None,
) -> Fit:
    """Train a model on the first `steps` batches, their rows shared out over all devices.

    Args:
      batches: as the model's head takes them (`titans_jax.models.loss`), all of one shape; segment_ids may be None.
        The number of rows must be a multiple of the number of devices.
      seed: of the initial parameters.
      after_step: called after every step.
      selection: returns the best parameters instead of the last, and may end the training early.
      start: parameters of a model trained before; those whose path and shape occur in this model replace its initial
        ones.

    Models that differ in their seed only are compiled once, one after another.

    Raises:
      ValueError: there are fewer batches than steps.
    """
    program = _program(model, optimizer, steps, registrations())
    params = begun_with(program.init(jax.random.key(seed)), start)
    _, state = sharding.spread(None, {"params": params, "optimizer": program.optimizer.init(params)})
    batches, metrics, tokens, seconds, best, waited = iter(batches), [], 0, 0.0, None, 0
    for step in range(steps):
        batch = next(batches, None)
        if batch is None:
            raise ValueError(f"there are {step} batches: {steps} steps need as many.")
        batch, _ = sharding.spread(batch, None)
        if step == 0:
            train_step = program.compiled(state, batch)
            begun = time.perf_counter()
        state, measured = train_step(state, batch)
        metrics.append(measured)
        tokens += batch["tokens"].size
        if step >= STEPS_AHEAD:
            metrics[step - STEPS_AHEAD] = jax.device_get(metrics[step - STEPS_AHEAD])
        after_step()
        if selection and ((step + 1) % selection.every == 0 or step + 1 == steps):
            paused = time.perf_counter()
            score = selection.score(program.graphdef, state["params"])
            begun += time.perf_counter() - paused
            score = score if math.isfinite(score) else -math.inf
            if best is None or score > best[0]:
                # The next step donates the arrays of the state, so that a copy is kept.
                best, waited = (score, jax.tree.map(jnp.copy, state["params"])), 0
            else:
                waited += 1
            if score >= selection.enough or waited == selection.patience:
                break
    metrics = jax.device_get(metrics)
    if steps:
        seconds = time.perf_counter() - begun
    loss, grad_norm = (np.array([step[name] for step in metrics], np.float32) for name in ("loss", "grad_norm"))
    params = best[1] if best else state["params"]
    return Fit(program.graphdef, params, History(loss, grad_norm, tokens, seconds))


def begun_with(params: Any, start: Any) -> Any:
    """`params`, each replaced by the parameter of `start` that has the same path and shape, if there is one."""
    known = dict(jax.tree_util.tree_leaves_with_path(start))

    def one(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        found = known.get(path)
        return leaf if found is None or found.shape != leaf.shape else jnp.asarray(found, leaf.dtype)

    return jax.tree_util.tree_map_with_path(one, params)


class Program:
    """The compiled initialization of a model, and its training step compiled for each shape of batches."""

    def __init__(self, model: ModelConfig, optimizer: OptimizerConfig, steps: int):
        self.graphdef, _ = abstract_model(model)
        self.init = make_init(model)
        self.optimizer = make_optimizer(optimizer, steps)
        self._step = make_train_step(self.graphdef, self.optimizer, accumulation=1, train_only=optimizer.train_only)
        self._compiled: dict[Any, Callable] = {}

    def compiled(self, state: Any, batch: Batch) -> Callable:
        """The step for a state and a batch of these shapes."""
        shapes = str(jax.tree.map(jax.typeof, batch))
        if shapes not in self._compiled:
            self._compiled[shapes] = self._step.lower(state, batch).compile()
        return self._compiled[shapes]


@functools.lru_cache(maxsize=2)
def _program(model: ModelConfig, optimizer: OptimizerConfig, steps: int, registrations: int) -> Program:
    """The program, of which the last two are kept. A registration may change what a name in the model means, so
    `registrations` is part of the key."""
    return Program(model, optimizer, steps)
