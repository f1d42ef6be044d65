"""A unit for step sizes: the share of its error that a memory loses by one write."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from titans_jax.memory.forms.inner_gradient import read
from titans_jax.memory.interface import init_params
from titans_jax.memory.rule import algorithms, biases
from titans_jax.memory.rule.rule import MemoryRule

SAMPLES = 256


def error_removed(rule: MemoryRule, head_dim: int) -> float:
    """The share of a token's error that one write of step size 1 removes from a fresh memory.

    A step theta against the gradient of 1/2 ||M(k) - v||^2 by the weights moves what is carried, and with it the read,
    by -theta B (M(k) - v): B = J D J^T, J the derivative of the read by the weights, D that of the weights by what is
    carried. It removes theta trace(B) / head_dim of an error in a random direction (derived). The mean of that over
    random starts, unit keys and directions, the same ones every time, and rounded to three digits, so that all machines
    have the same number.
    """
    plain = algorithms.gradient_descent()  # neither the bias nor the algorithm plays a part
    if rule.algorithm.descends:
        rule = dataclasses.replace(rule, algorithm=plain)
    return _error_removed(dataclasses.replace(rule, bias=biases.l2(), chunk_size=1, forget_to_start=False), head_dim)


@functools.cache
def _error_removed(rule: MemoryRule, head_dim: int) -> float:
    def one(key: jax.Array) -> jax.Array:
        start, key, direction = jax.random.split(key, 3)
        params = init_params(rule, start, head_dim)
        key, direction = (unit(jax.random.normal(one, (head_dim,), jnp.float32)) for one in (key, direction))

        def answer(weights):
            return jnp.vdot(direction, read(rule, params, weights, key[None])[0])

        def moved(carried):
            closed = rule.retention.close(carried, params["weights"], params)
            return answer(rule.retention.weights(closed, params))

        surprise = jax.grad(answer)(rule.retention.weights(params["weights"], params))
        _, removed = jax.jvp(moved, (params["weights"],), (surprise,))
        return removed

    with jax.ensure_compile_time_eval():
        removed = jnp.mean(jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(0), SAMPLES)))
    return float(f"{float(removed):.3g}")


def unit(vector: jax.Array) -> jax.Array:
    """The vector of length 1 in its direction."""
    return vector / jnp.linalg.norm(vector)
