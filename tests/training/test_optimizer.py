"""AdamW against its formulas, the schedule against its corners, and what is decayed."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.training.tiny import MODEL
from titans_jax.config import OptimizerConfig
from titans_jax.training.optimizer import decays, learning_rate_schedule, make_optimizer
from titans_jax.training.run import abstract_model

CONFIG = OptimizerConfig(learning_rate=0.1, warmup_steps=4, final_learning_rate_ratio=0.2, weight_decay=0.3)


def test_schedule():
    schedule = learning_rate_schedule(CONFIG, steps=14)
    rates = [float(schedule(updates)) for updates in range(16)]
    np.testing.assert_allclose(rates[:5], [0.025, 0.05, 0.075, 0.1, 0.1], rtol=1e-6)
    halfway = 0.02 + (0.1 - 0.02) * (1 + math.cos(math.pi / 2)) / 2
    np.testing.assert_allclose(rates[9], halfway, rtol=1e-6)
    np.testing.assert_allclose(rates[14:], 0.02, rtol=1e-6)
    assert rates[4:15] == sorted(rates[4:15], reverse=True)


@pytest.mark.parametrize("warmup", [0, 1])
def test_schedule_without_warmup_begins_at_the_peak(warmup):
    schedule = learning_rate_schedule(dataclasses.replace(CONFIG, warmup_steps=warmup), steps=10)
    np.testing.assert_allclose(float(schedule(0)), 0.1, rtol=1e-6)


def test_a_run_may_end_in_its_warmup():
    schedule = learning_rate_schedule(CONFIG, steps=2)
    np.testing.assert_allclose([float(schedule(updates)) for updates in range(2)], [0.025, 0.05], rtol=1e-6)


@pytest.mark.parametrize("norm", [0.5, 40.0])
def test_update_is_clipped_adamw(norm):
    rng = np.random.default_rng(0)
    params = {"kernel": rng.normal(size=(3, 4)), "scale": rng.normal(size=(3, 4))}
    gradients = [jax.tree.map(lambda x: rng.normal(size=x.shape), params) for _ in range(3)]
    for gradient in gradients:
        size = math.sqrt(sum((x**2).sum() for x in gradient.values()))
        gradient.update({name: x * norm / size for name, x in gradient.items()})
    expected, first, second = dict(params), dict.fromkeys(params, 0.0), dict.fromkeys(params, 0.0)
    for t, gradient in enumerate(gradients, 1):
        for name, g in gradient.items():
            g = g * min(1.0, CONFIG.clip_norm / norm)
            first[name] = CONFIG.beta1 * first[name] + (1 - CONFIG.beta1) * g
            second[name] = CONFIG.beta2 * second[name] + (1 - CONFIG.beta2) * g**2
            step = first[name] / (1 - CONFIG.beta1**t)
            step = step / (np.sqrt(second[name] / (1 - CONFIG.beta2**t)) + CONFIG.epsilon)
            decay = CONFIG.weight_decay * expected[name] if name == "kernel" else 0.0
            expected[name] = expected[name] - 0.025 * t * (step + decay)

    optimizer = make_optimizer(CONFIG, steps=14)
    with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer counts
        ours = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
        state = optimizer.init(ours)
        for gradient in gradients:
            gradient = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), gradient)
            updates, state = optimizer.update(gradient, state, ours)
            ours = optax.apply_updates(ours, updates)
    for name, value in expected.items():
        np.testing.assert_allclose(ours[name], value, rtol=1e-5, atol=1e-6)


def test_what_is_decayed():
    """Exactly the matrices that multiply activations, whatever axes stacking adds."""
    pattern = ("lmm", "mac", "mag", "mal", "attention")
    _, params = abstract_model(dataclasses.replace(MODEL, pattern=pattern, depth=5))
    names = {True: set(), False: set()}
    for path, _ in jax.tree_util.tree_leaves_with_path(params):
        names[decays(path)].add("/".join(str(entry.key) for entry in path))
    projections = [f"memory/{name}/projection/kernel" for name in ("query", "value", "skip_value")]
    for word in ("attention/query/kernel", "feed_forward/down/kernel", "head/kernel", *projections):
        assert any(name.endswith(word) for name in names[True])
        assert not any(name.endswith(word) for name in names[False])
    for word in ("embedding", "scale", "bias", "convolution/kernel", "tokens", "norm_scale", "start_weights/0"):
        assert any(name.endswith(word) for name in names[False])
        assert not any(name.endswith(word) for name in names[True])
