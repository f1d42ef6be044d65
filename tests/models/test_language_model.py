"""What must hold for every block kind: causality, gradients, independent rows, and the options of a model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_models as small
from flax import nnx

from titans_jax.models import LanguageModel, granularity


@pytest.mark.slow_but_for("mac", "mal", "retrofit")
@pytest.mark.parametrize("kind", small.KINDS)
def test_logits_do_not_depend_on_later_tokens(kind):
    """Bit for bit: token t is changed for many t, and logits before t stay as they were."""
    model = small.build(small.config(kind, dtype="float32"))
    tokens = np.array(small.tokens(batch=1))
    changed = np.repeat(tokens, small.TIME, axis=0)
    changed[np.diag_indices(small.TIME)] = (changed[np.diag_indices(small.TIME)] + 1) % small.VOCAB
    original = small.forward(model, jnp.asarray(np.repeat(tokens, small.TIME, axis=0)))
    logits = small.forward(model, jnp.asarray(changed))
    for t in range(small.TIME):
        np.testing.assert_array_equal(logits[t, :t], original[t, :t])
        assert (logits[t, t] != original[t, t]).any()


@pytest.mark.slow
@pytest.mark.parametrize("kind", small.KINDS)
def test_gradient(kind):
    """Every parameter of every layer gets a finite, non-zero gradient, and together they are the finite difference."""
    with jax.enable_x64(True):
        model, tokens = small.build(small.config(kind, memory={"max_step_size": 0.1})), small.tokens()
        rng = np.random.default_rng(1)
        weights = jnp.asarray(rng.normal(size=(*tokens.shape, small.VOCAB)))
        value_and_gradient = jax.jit(jax.value_and_grad(lambda model: jnp.sum(model(tokens) * weights)))
        _, gradient = value_and_gradient(model)
        for path, leaf in nnx.to_flat_state(nnx.state(gradient)):
            value = np.array(leaf[...])
            assert np.isfinite(value).all(), path
            axes = tuple(range(1, value.ndim)) if path[0] == "cycles" else None
            assert (np.abs(value).sum(axis=axes) > 0).all(), path
        assert np.count_nonzero(gradient.embedding.embedding[...].any(axis=1)) == len(np.unique(tokens))

        direction = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), model)
        slope = sum(jnp.vdot(d, g) for d, g in zip(jax.tree.leaves(direction), jax.tree.leaves(gradient), strict=True))
        step = 1e-8  # these random models bend: the slope changes by 1e-3 over 1e-7
        above, below = (
            value_and_gradient(jax.tree.map(lambda x, d, s=s: x + s * d, model, direction))[0] for s in (step, -step)
        )
        np.testing.assert_allclose((above - below) / (2 * step), slope, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", small.KINDS)
def test_rows_are_independent(kind):
    model, tokens = small.build(small.config(kind, dtype="float32")), small.tokens(batch=4)
    logits = small.forward(model, tokens)
    other = tokens.at[2].set((tokens[2] + 1) % small.VOCAB)
    changed = small.forward(model, other)
    np.testing.assert_array_equal(np.delete(logits, 2, axis=0), np.delete(changed, 2, axis=0))


@pytest.mark.slow_but_for("mag")
@pytest.mark.parametrize("kind", small.KINDS)
def test_one_token_and_none(kind):
    model = small.build(small.config(kind, dtype="float32"))
    assert jnp.isfinite(small.forward(model, small.tokens(time=1))).all()
    with pytest.raises(ValueError, match=r"tokens has shape \[2, 0\]; use \[batch, time\] with at least one token"):
        model(small.tokens(time=0))


@pytest.mark.slow
def test_diagnostics_are_means_over_what_is_not_padding():
    with jax.enable_x64(True):
        config = small.config("mac", "window", "lmm", depth=6)
        model, tokens = small.build(config), small.tokens(time=16)
        report = jax.jit(lambda t, s: model(t, s, return_diagnostics=True)[1])
        full = report(tokens, jnp.ones((2, 16), jnp.int32))
        assert set(full) == {
            "retention", "momentum", "step_size", "inner_loss", "explained_share", "update_norm", "weight_norm"
        }  # fmt: skip
        assert all(value.shape == (4,) for value in full.values())
        assert ((full["retention"] > 0) & (full["retention"] < 1)).all()
        assert ((full["step_size"] > 0) & (full["step_size"] < config.memory.max_step_size / config.head_dim)).all()
        assert (full["inner_loss"] > 0).all() and (full["explained_share"] < 1).all()
        assert (full["update_norm"] > 0).all()
        ids = jnp.where(jnp.arange(16, dtype=jnp.int32) < 11, 1, 0)[None] * jnp.ones((2, 1), jnp.int32)
        padded = report(tokens, ids)
        other = report(jnp.where(ids > 0, tokens, 0), ids)
        jax.tree.map(np.testing.assert_array_equal, padded, other)
    model = small.build(small.config("window", dtype="float32"))
    assert model(tokens, return_diagnostics=True)[1] == {}


@pytest.mark.slow
def test_remat_changes_memory_not_numbers():
    with jax.enable_x64(True):
        tokens, gradients = small.tokens(time=8), []
        for remat in ("none", "full", "dots"):
            model = small.build(small.config("window", remat=remat))
            gradient = jax.jit(jax.grad(lambda model: jnp.sum(jnp.sin(model(tokens)))))(model)
            gradients.append(jax.tree.leaves(gradient))
        for other in gradients[1:]:
            for a, b in zip(gradients[0], other, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-10)


def test_bfloat16_computes_and_keeps_parameters_and_state_wide():
    model = small.build(small.config("mac", dtype="bfloat16"))
    logits = small.forward(model, small.tokens())
    assert logits.dtype == jnp.float32 and jnp.isfinite(logits).all()
    assert {leaf.dtype for leaf in jax.tree.leaves(model)} == {jnp.dtype(jnp.float32)}
    state = small.init_state(model, 2)
    assert state[0].memory.memory.weights[0].dtype == jnp.float32
    assert state[0].context[0].keys.dtype == jnp.bfloat16


def test_start_values():
    """A fresh model predicts nearly nothing yet: logits are small, and so is what blocks add to the stream."""
    config = small.config("attention", dtype="float32", dim=64, head_dim=32)
    model = jax.jit(lambda: LanguageModel(config, rngs=nnx.Rngs(0)))()
    paths = dict(nnx.to_flat_state(nnx.state(model)))
    kernel = paths["cycles", "blocks", 0, "feed_forward", "up", "kernel"][...]
    down = paths["cycles", "blocks", 0, "feed_forward", "down", "kernel"][...]
    # Cut at two deviations, a normal keeps 0.88 of its deviation.
    np.testing.assert_allclose(jnp.std(kernel), 0.88 * 0.02, rtol=0.05)
    np.testing.assert_allclose(jnp.std(down), 0.88 * 0.02 / np.sqrt(2 * config.depth), rtol=0.05)
    assert (kernel[0] != kernel[1]).any()  # layers differ
    loss = -jnp.mean(jax.nn.log_softmax(small.forward(model, small.tokens()))[..., 0])
    np.testing.assert_allclose(loss, np.log(small.VOCAB), atol=0.2)


def test_granularity():
    assert granularity(small.config("mac", "window")) == small.SEGMENT
    assert granularity(small.config("lmm", "window")) == small.CHUNK
    assert granularity(small.config("attention")) == 1


def test_tied_embeddings_have_no_head():
    model = small.build(small.config("lmm", tie_embeddings=True, dtype="float32"))
    assert ("head", "kernel") not in dict(nnx.to_flat_state(nnx.state(model)))
