"""A memory beside the attention of a finished model: what it begins with, and that only what shall be is trained."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small_models as small
from flax import nnx

from titans_jax.config import Config, ConfigError, DataConfig, OptimizerConfig, TrainingConfig
from titans_jax.inference.reading import named_leaves
from titans_jax.models.retrofit import FIRST_SHARE, Retrofit
from titans_jax.training import run as runs
from titans_jax.training.optimizer import groups, make_optimizer
from titans_jax.training.step import make_train_step

RETROFIT = small.config("retrofit", dtype="float32", vocab_size=320)


def begun_with(monkeypatch, before, model=RETROFIT, **fields):
    """What a run of `model` begins with, given one of the model `before`; and that one's parameters."""
    params = nnx.to_pure_dict(nnx.state(small.build(before)))
    run = SimpleNamespace(params=params, tokenizer_name="byte", step=7, config=Config(model=before))
    monkeypatch.setattr(runs, "load_run", lambda source: run)
    training = TrainingConfig(init_from="runs/before", **fields)
    return runs.initial_weights(Config(model=model, data=DataConfig(), training=training)), named_leaves(params)


@pytest.mark.parametrize("kind", ["attention", "window"])
def test_it_begins_with_the_weights_of_a_model_without_memory(kind, monkeypatch):
    (found, said), before = begun_with(monkeypatch, dataclasses.replace(RETROFIT, pattern=(kind,)), seed=3)
    found = named_leaves(found)
    for name, value in before.items():
        np.testing.assert_array_equal(found[name], value)
    drawn = named_leaves(runs.init_model(RETROFIT, 3)[1])
    added = set(found) - set(before)
    assert added == {name for name in drawn if ".memory." in name or name.endswith(".share")}
    for name in added:
        np.testing.assert_array_equal(found[name], drawn[name])
    assert (drawn["cycles.blocks.0.share"] == np.float32(FIRST_SHARE)).all()
    count = sum(drawn[name].size for name in added)
    assert said[1] == f"not there, and drawn: {count:,} parameters of cycles.blocks.0.memory, cycles.blocks.0.share"
    assert said[2:] == [f"not as there: model.pattern is ('retrofit',), was ('{kind}',)"]


def test_what_it_does_not_add_must_be_there(monkeypatch):
    with pytest.raises(ConfigError, match="whose cycles.blocks.0.attention.* is absent, and this model's is .*; use"):
        begun_with(monkeypatch, dataclasses.replace(RETROFIT, pattern=("lmm",)))
    with pytest.raises(ConfigError, match="whose cycles.blocks.0.memory.* is absent"):
        begun_with(
            monkeypatch,
            dataclasses.replace(RETROFIT, pattern=("window",)),
            dataclasses.replace(RETROFIT, pattern=("mal",)),
        )


def test_without_a_share_it_is_the_window():
    """To rounding: nothing else of the Transformer is touched."""
    with jax.enable_x64(True):
        graphdef, every = nnx.split(small.build(small.config("retrofit")))
        every, tokens = nnx.to_pure_dict(every), small.tokens()
        own, plain = nnx.split(small.build(small.config("window")))
        shared = [named_leaves(every)[name] for name in named_leaves(nnx.to_pure_dict(plain))]
        window = nnx.merge(own, jax.tree.unflatten(jax.tree.structure(nnx.to_pure_dict(plain)), shared))
        expected = small.forward(window, tokens)
        assert np.abs(small.forward(nnx.merge(graphdef, every), tokens) - expected).max() > 1e-3
        every["cycles"]["blocks"][0]["share"] = jnp.zeros_like(every["cycles"]["blocks"][0]["share"])
        np.testing.assert_allclose(small.forward(nnx.merge(graphdef, every), tokens), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_only_what_is_named_is_trained(name):
    """The rest stays bit for bit, decay included, has no moments, and does not count in the gradients' norm."""
    how = OptimizerConfig(name=name, train_only=Retrofit.added, weight_decay=0.5, warmup_steps=0)
    graphdef, params = runs.init_model(RETROFIT, 0)
    optimizer = make_optimizer(how, 10)
    state = {"params": params, "optimizer": optimizer.init(params)}
    before = jax.tree.map(np.asarray, params)
    added = [leaf for path, leaf in named_leaves(before).items() if ".memory." in path or path.endswith(".share")]
    moments = sum(leaf.size for leaf in jax.tree.leaves(state["optimizer"]) if leaf.ndim)
    assert sum(leaf.size for leaf in added) <= moments <= 2 * sum(leaf.size for leaf in added)
    every = sum(leaf.size for leaf in jax.tree.leaves(before))
    assert groups(how, params)["not trained"] == every - sum(leaf.size for leaf in added)

    tokens = np.asarray(small.tokens(time=16))
    batch = {"tokens": tokens, "targets": tokens, "segment_ids": np.ones_like(tokens)}
    loss = lambda params: nnx.merge(graphdef, params).loss_sum(batch)[0] / tokens.size  # noqa: E731
    gradients = named_leaves(jax.tree.map(np.asarray, jax.jit(jax.grad(loss))(params)))
    state, metrics = make_train_step(graphdef, optimizer, 1, train_only=how.train_only)(state, batch)
    after, norm = named_leaves(jax.tree.map(np.asarray, state["params"])), 0.0
    for path, value in named_leaves(before).items():
        trained = ".memory." in path or path.endswith(".share")
        assert np.array_equal(after[path], value) != trained, path
        norm += float(np.sum(gradients[path] ** 2)) if trained else 0.0
    assert float(metrics["grad_norm"]) == pytest.approx(norm**0.5, rel=1e-4)


def test_updates_of_what_is_trained_are_those_of_it_alone():
    how = OptimizerConfig(train_only=("share",), warmup_steps=0, learning_rate=0.1)
    params = {"share": jnp.asarray([1.0, -2.0]), "kernel": jnp.asarray([[3.0]])}
    gradients = {"share": jnp.asarray([0.3, 0.4]), "kernel": jnp.asarray([[50.0]])}
    alone = make_optimizer(dataclasses.replace(how, train_only=()), 5)
    part = {"share": params["share"]}
    with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer counts
        expected, _ = alone.update({"share": gradients["share"]}, alone.init(part), part)
        optimizer = make_optimizer(how, 5)
        updates, _ = optimizer.update(gradients, optimizer.init(params), params)
    np.testing.assert_array_equal(updates["share"], expected["share"])
    np.testing.assert_array_equal(optax.apply_updates(params, updates)["kernel"], params["kernel"])


def test_a_name_that_nothing_has_is_refused():
    config = Config(model=RETROFIT, optimizer=OptimizerConfig(train_only=("memory", "shares")))
    sentence = "optimizer.train_only has 'shares', which is in no parameter's path; use some of .*; did you mean share?"
    with pytest.raises(ConfigError, match=sentence):
        runs.check_train_only(config)
    runs.check_train_only(dataclasses.replace(config, optimizer=OptimizerConfig(train_only=("memory", "share"))))
