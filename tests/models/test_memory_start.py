"""Where memories start: learned, drawn and never trained, or zero, and which memories cannot be zero."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_models as small
from flax import nnx

from titans_jax.config import ConfigError, MemoryConfig, memory_rule


def gradients_of(config):
    """Logits, and the gradient of every parameter by path."""
    graphdef, params = nnx.split(small.build(config))
    tokens = small.tokens(batch=1, time=9)

    def loss(params):
        logits = nnx.merge(graphdef, params)(tokens)
        return jnp.sum(jnp.sin(logits)), logits

    gradient, logits = jax.jit(jax.grad(loss, has_aux=True))(params)
    return np.asarray(logits), {path: np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(gradient)}


@pytest.mark.slow
@pytest.mark.parametrize("block", ["lmm", "mac", "hope"])
def test_a_fixed_start_is_the_learned_one_without_a_gradient(block):
    """The same parameters and logits; no gradient of the start, those of all others as they were."""
    memory = {"preset": "hope", "continuum_chunks": (4, 8)} if block == "hope" else {}
    with jax.enable_x64(True):
        learned, fixed = (
            gradients_of(small.config(block, depth=1, memory=memory | {"start": start})) for start in (None, "fixed")
        )
    np.testing.assert_array_equal(learned[0], fixed[0])
    assert list(learned[1]) == list(fixed[1])
    starts = [path for path in fixed[1] if path[-3:-1] == ("memory", "start_weights")]
    assert len(starts) == 2
    for path, gradient in fixed[1].items():
        if path in starts:
            assert np.all(gradient == 0) and np.any(learned[1][path] != 0)
        else:
            np.testing.assert_allclose(gradient, learned[1][path], rtol=1e-10, atol=1e-12)
            assert np.any(gradient != 0), path


def test_a_zero_start_is_no_parameter_and_forgets_to_itself():
    """Every parameter there is has a gradient from the first step on."""
    with jax.enable_x64(True):
        _, gradients = gradients_of(small.config("lmm", depth=1, memory={"architecture": "linear", "start": "zero"}))
    assert not any("start_weights" in path for path in gradients)
    assert all(np.isfinite(leaf).all() and np.any(leaf != 0) for leaf in gradients.values())
    rule = memory_rule(MemoryConfig(architecture="linear", start="zero"))
    assert not rule.learned_start and not rule.forget_to_start
    assert memory_rule(MemoryConfig(architecture="linear")).learned_start


@pytest.mark.parametrize(
    "fields, sentence",
    [
        (
            {},
            "the norm of ResidualMlp(depth=2, expansion=4, learned_scale=True, scale_keys=False) multiplies the "
            "gradients of a zero matrix by 1 / sqrt(1e-6)",
        ),
        (
            {"preset": "ttt_linear"},
            "as the norm of ResidualMlp(depth=1, expansion=4, learned_scale=True, scale_keys=False) multiplies",
        ),
        ({"architecture": "mlp"}, "as no matrix of Mlp(depth=2, expansion=4) has a gradient where the others are zero"),
        ({"architecture": "linear", "retention": "elastic_net"}, "maps what is carried to weights, and has no slope"),
    ],
)
def test_memories_that_cannot_start_at_zero_are_refused(fields, sentence):
    with pytest.raises(ConfigError) as refused:
        memory_rule(MemoryConfig(**fields, start="zero"))
    message = str(refused.value)
    assert message.startswith("model.memory.start is zero; use learned or fixed, as ") and sentence in message


def test_what_is_defined_from_zero_learns_no_start():
    assert memory_rule(MemoryConfig(preset="gla", start="zero")) == memory_rule(MemoryConfig(preset="gla"))
    for start in ("learned", "fixed"):
        with pytest.raises(ConfigError) as refused:
            memory_rule(MemoryConfig(preset="gla", start=start))
        assert str(refused.value) == f"model.memory.start is {start}; use zero, as gla starts from there"
