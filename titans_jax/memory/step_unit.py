"""A unit for step sizes: the share of its error that a memory loses by one write."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp

from titans_jax.memory.forms.inner_gradient import read
from titans_jax.memory.interface import init_params
from titans_jax.memory.rule import algorithms, biases
from titans_jax.memory.rule.rule import MemoryRule

SAMPLES = 256
ROUNDING = 1e-4
"""A gradient with a norm below this, for an error of 1 in every channel, is only rounding error."""
MOST_FLOATS = 1 << 20
"""The most weights, over all samples, that are measured together: more would not stay in a CPU's cache, where drawing
orthogonal starts goes over them again and again."""


def error_removed(rule: MemoryRule, head_dim: int) -> float:
    """The share of a token's error that one write of step size 1 removes from a fresh memory.

    A step theta against the gradient of the bias by the weights moves the carried matrices, and through them the read
    by -theta B c: B = J D J^T, J the derivative of the read by the weights, D that of the weights by the carried
    matrices, and c the cotangent of the read for an error of 1 or -1 in every channel (derived; for l2, c is the
    error). The result is the mean over random starts, unit keys and signs, the same ones every time, rounded to three
    digits, so that all machines have the same number. A bias whose cotangent does not depend on the error counts as l2.

    A rule that steps by chunks takes a step of theta times a direction, whatever the size of the error: its share is
    that of an error of 1 or -1, for the direction of one token's gradient. Where the gradients of a chunk's tokens are
    orthogonal, every token loses that share.
    """
    direction = rule.algorithm.direction if rule.algorithm.steps_by_chunk else None
    if rule.algorithm.descends:
        rule = dataclasses.replace(rule, algorithm=algorithms.gradient_descent())
    if rule.bias.constant_slope == 0:
        rule = dataclasses.replace(rule, bias=biases.l2())
    rule = dataclasses.replace(rule, chunk_size=1, forget_to_start=False, bound_slope=False, stale=False)
    return _error_removed(rule, direction, head_dim)


@functools.cache
def _error_removed(rule: MemoryRule, direction: Callable | None, head_dim: int) -> float:
    def one(key: jax.Array) -> jax.Array:
        start, key, sign = jax.random.split(key, 3)
        params = init_params(rule, start, head_dim)
        key = jax.random.normal(key, (head_dim,), jnp.float32)
        key, error = key / jnp.linalg.norm(key), jax.random.rademacher(sign, (head_dim,), jnp.float32)

        def answer(weights):
            return read(rule, params, weights, key[None])[0]

        def moved(carried):
            return answer(rule.retention.weights(rule.retention.close(carried, params["weights"], params), params))

        weights = rule.retention.weights(params["weights"], params)
        value, gate = answer(weights) - error, jnp.ones((1,), jnp.float32) if rule.bias.takes_gate else None
        surprise = jax.grad(lambda weights: rule.bias(answer(weights), value, gate))(weights)
        step = surprise if direction is None else tuple(direction(u, u.dtype) for u in surprise)
        _, removed = jax.jvp(moved, (params["weights"],), (step,))
        share = jnp.vdot(error, removed) / head_dim
        # A norm takes out an error that is the same in all channels. Its gradient is then only rounding error, and may
        # differ where unoptimised code computes it twice: it has no direction, nor a norm to divide it by.
        size = sum(jnp.sum(jnp.square(u)) for u in surprise)
        return jnp.where(size > ROUNDING**2, share, 0)

    floats = sum(rows * columns for rows, columns in rule.shapes(head_dim))
    together = max(1, min(SAMPLES, MOST_FLOATS // floats))

    def mean() -> float:
        samples = jax.random.split(jax.random.key(0), SAMPLES)
        return float(jnp.mean(jax.jit(lambda samples: jax.lax.map(one, samples, batch_size=together))(samples)))

    # In a thread of its own, which the caller's trace and mesh do not reach: the mesh's devices may be elsewhere.
    with ThreadPoolExecutor(1) as thread:
        return float(f"{thread.submit(mean).result():.3g}")
