"""Heads: what each makes of the outputs of the blocks, in numbers worked out beside it; names and refusals."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from titans_jax import models
from titans_jax.config import ConfigError, MemoryConfig, ModelConfig
from titans_jax.models.heads import num_patches, sinusoids
from titans_jax.models.loss import loss_sum
from titans_jax.sharding import make_mesh, use_mesh
from titans_jax.training.run import count_params, init_model

MODEL = ModelConfig(
    pattern=("lmm",), dim=8, depth=1, num_heads=2, head_dim=4, vocab_size=12, num_persistent=0, dtype="float32",
    remat="none", memory=MemoryConfig(preset="gated_deltanet"),
)  # fmt: skip


def made(head, **fields):
    return models.make_model(dataclasses.replace(MODEL, head=head, **fields), rngs=nnx.Rngs(0))


def tokens(shape, seed=0, size=12):
    return jnp.asarray(np.random.default_rng(seed).integers(size, size=shape), jnp.int32)


def test_the_classifier_is_a_projection_of_the_mean_over_what_is_no_padding():
    model, rows = made("classifier(classes=3)"), tokens((2, 6))
    kept = jnp.array([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    hidden = np.asarray(model._read(model.embedding(rows)), np.float64)
    means = np.stack([hidden[0, 2:].mean(0), hidden[1].mean(0)])
    np.testing.assert_allclose(model(rows, kept), means @ np.asarray(model.head.kernel[...]), atol=1e-6)
    batch = {"tokens": rows, "segment_ids": kept, "targets": jnp.array([2, -1])}
    nats, count = model.loss_sum(batch)
    logits = np.asarray(model(rows, kept), np.float64)[0]
    assert count == 1 and float(nats) == pytest.approx(np.log(np.exp(logits).sum()) - logits[2], rel=1e-5)


def test_the_autoencoder_says_all_from_the_last_position():
    model, rows = made("autoencoder"), tokens((1, 5))
    gains = [np.random.default_rng(number).uniform(0.5, 2, 8) for number in range(3)]
    for norm, gain in zip(model.norms, gains, strict=True):
        norm.scale[...] = jnp.asarray(gain, jnp.float32)
    matrices = [np.asarray(layer.kernel[...], np.float64) for layer in (*model.hidden, model.head)]
    code = np.asarray(model._read(model.embedding(rows)), np.float64)[0, -1]
    for place, logits in enumerate(model(rows)[0]):
        x = code + sinusoids(5, 8)[place]
        for number, (gain, matrix) in enumerate(zip(gains, matrices, strict=True)):
            x = (x / np.sqrt(np.mean(x**2) + MODEL.norm_eps) * gain) @ matrix
            x = x if number == 2 else x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
        np.testing.assert_allclose(logits, x, atol=1e-5)
    assert sinusoids(5, 7).shape == (5, 7) and np.allclose(
        sinusoids(3, 4)[2], [np.sin(2), np.sin(0.02), np.cos(2), np.cos(0.02)]
    )


def test_a_forecast_follows_level_and_scale_of_its_window():
    """Instance norm: values a x + b of a channel are continued by a y + b."""
    model = made("forecaster(look_back=12, horizon=5, patch=4, stride=2)")
    values = jnp.asarray(np.random.default_rng(0).normal(size=(3, 12, 2)), jnp.float32)
    scale, shift = jnp.array([[[3.0, 0.5]]]), jnp.array([[[100.0, -7.0]]])
    ahead = model(values)
    assert ahead.shape == (3, 5, 2)
    np.testing.assert_allclose(model(values * scale + shift), ahead * scale + shift, rtol=1e-3, atol=1e-3)
    plain = made("forecaster(look_back=12, horizon=5, patch=4, stride=2, normalize=False)")
    assert not np.allclose(plain(values * scale + shift), plain(values) * scale + shift, atol=1e-2)


def test_channels_are_forecast_alone_and_alike():
    model = made("forecaster(look_back=12, horizon=5, patch=4, stride=2)")
    values = jnp.asarray(np.random.default_rng(1).normal(size=(1, 12, 3)), jnp.float32)
    np.testing.assert_allclose(model(values[..., ::-1]), model(values)[..., ::-1], atol=1e-6)
    batch = {"tokens": values, "targets": model(values) + 2, "segment_ids": None}
    squares, count = model.loss_sum(batch)
    assert count == 15 and float(squares) == pytest.approx(60, rel=1e-5)


@pytest.mark.parametrize("look_back, patches", [(96, 12), (336, 42), (512, 64)])
def test_patches_are_those_of_patch_tst(look_back, patches):
    assert num_patches(look_back, 16, 8) == patches


@pytest.mark.parametrize(
    "head, message",
    [
        ("classifer", "model.head is 'classifer'; use .*did you mean classifier"),
        ("classifier(class=3)", "use a name, or classifier"),
        ("classifier(size=3)", "which takes classes, not size"),
        ("classifier(classes='a')", "and classes is 'a'; use a whole number"),
        ("classifier(classes=0)", "has classes 0; use a whole number of at least 1"),
        ("forecaster(patch=200)", "has patch 200; use at most 104"),
        ("autoencoder(x=1)", "which takes nothing, not x"),
    ],
)
def test_a_head_that_cannot_be_is_refused(head, message):
    with pytest.raises(ConfigError, match=message):
        count_params(dataclasses.replace(MODEL, head=head))


def test_a_head_is_sharded_like_any_layer():
    """Two devices or not, the loss is the same, and the rows' features are spread."""
    config = dataclasses.replace(MODEL, head="classifier(classes=3)")
    graphdef, params = init_model(config, 0)
    batch = {"tokens": tokens((4, 6)), "segment_ids": None, "targets": jnp.array([0, 1, 2, 0])}
    expected = loss_sum(graphdef, params, batch)
    with use_mesh(make_mesh(devices=jax.devices()[:1])):
        graphdef, params = init_model(config, 0)
        np.testing.assert_allclose(loss_sum(graphdef, params, batch), expected, rtol=1e-6)


def test_a_head_of_one_s_own():
    @models.register_head("last_token_sum")
    class Own(models.TokenStack):
        def __call__(self, tokens, segment_ids=None):
            return self._read(self._embed(tokens))[:, -1].sum(-1)

        def loss_sum(self, batch):
            return self(batch["tokens"]).sum(), jnp.float32(len(batch["tokens"]))

    try:
        assert made("last_token_sum")(tokens((2, 3))).shape == (2,)
    finally:
        del models.HEADS._parts["last_token_sum"]
