"""How keys start: as the queries of one token before, so that a fresh memory says of a token what followed its like."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from titans_jax.config import MemoryConfig, ModelConfig
from titans_jax.layers import NeuralMemory

CONFIG = ModelConfig(
    dim=64, num_heads=2, head_dim=32, depth=1, dtype="float32", memory=MemoryConfig(preset="linear_attention")
)


def layer(config: ModelConfig) -> NeuralMemory:
    return jax.jit(lambda: NeuralMemory(config, rngs=nnx.Rngs(0)))()


def with_memory(**fields: object) -> ModelConfig:
    return dataclasses.replace(CONFIG, memory=dataclasses.replace(CONFIG.memory, **fields))


def features(of: NeuralMemory, x: np.ndarray) -> dict[str, jax.Array]:
    return of.features(jnp.asarray(x), of.init_state(len(x)))[0]


def starts_as_induction(config: ModelConfig) -> bool:
    ours = layer(config)
    one, other = ours.query.projection.kernel[...], ours.key.projection.kernel[...]
    return one.shape == other.shape and bool(jnp.all(one == other))


def test_a_fresh_key_is_the_query_of_the_token_before():
    """Of a single token between zeros: all taps but the query's last one meet it in both, one token apart."""
    x = np.zeros((1, 8, 64), np.float32)
    x[0, 2] = np.random.default_rng(0).normal(size=64)
    found = features(layer(CONFIG), x)
    np.testing.assert_allclose(found["key"][0, 3:6], found["query"][0, 2:5], rtol=1e-5, atol=1e-6)
    assert np.all(np.asarray(found["key"][0, :3]) == 0)  # a token's own key does not know it


@pytest.mark.parametrize("key_start", ["induction", "random"])
def test_a_fresh_memory_says_what_followed_a_token(key_start):
    """Random tokens, one of them once more at the end: which key is nearest to its query, whose value a linear memory
    thus says loudest? That of the token which followed; with keys of their own start any of the 23."""
    right, ours = 0, layer(with_memory(key_start=key_start))
    for seed in range(40):
        x = np.random.default_rng(seed).normal(size=(1, 24, 64)).astype(np.float32)
        asked = seed % 20  # whose like comes again as the last token
        x[0, -1] = x[0, asked]
        found = {name: np.asarray(value, np.float64) for name, value in features(ours, x).items()}
        scores = np.einsum("thd,hd->t", found["key"][0], found["query"][0, -1])
        right += int(np.argmax(scores[:-1])) == asked + 1
    assert right >= 36 if key_start == "induction" else right <= 8


def test_tied_keys_start_from_a_token_alone_in_the_first_head_and_from_all_taps_in_the_last():
    """A head's features of a token change with the token before it by its share of the taps: 0, 1/3, 2/3, 1."""
    titans = dataclasses.replace(CONFIG, num_heads=4, head_dim=16, memory=MemoryConfig())
    near, drawn = layer(titans), layer(dataclasses.replace(titans, memory=MemoryConfig(key_start="random")))
    for part in ("query", "value"):
        ours, plain = (getattr(each, part).convolution.kernel[...] for each in (near, drawn))
        np.testing.assert_array_equal(ours[0], plain[0])
        shares = np.asarray(ours[1:] / plain[1:]).reshape(3, 4, 16)
        np.testing.assert_allclose(shares, np.broadcast_to(np.arange(4)[:, None] / 3, shares.shape), rtol=1e-6)
    x = np.random.default_rng(0).normal(size=(2, 8, 64)).astype(np.float32)
    x[1, 5] = x[0, 5]  # the same token behind others
    found = features(near, x)
    for part in ("query", "value"):
        there = np.asarray(found[part])
        np.testing.assert_allclose(there[0, 5, 0], there[1, 5, 0], rtol=1e-5, atol=1e-6)
        assert np.abs(there[0, 5, 3] - there[1, 5, 3]).max() > 0.01


def test_no_two_parameters_share_a_buffer():
    """As a training step gives all of them away (donation)."""
    for make in (lambda: layer(CONFIG), lambda: NeuralMemory(CONFIG, rngs=nnx.Rngs(0))):
        leaves = jax.tree.leaves(nnx.state(make(), nnx.Param))
        assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)


@pytest.mark.parametrize(
    "config",
    [
        with_memory(key_start="random"),
        with_memory(preset="hgrn2"),  # keys are gates
        with_memory(preset="delta_product"),  # several keys a token
        dataclasses.replace(CONFIG, conv_size=1),  # no token before is seen
    ],
    ids=["random", "hgrn2", "delta_product", "conv_size=1"],
)
def test_other_keys_start_on_their_own(config):
    assert starts_as_induction(CONFIG) and not starts_as_induction(config)
    found = features(layer(config), np.random.default_rng(0).normal(size=(1, 8, 64)).astype(np.float32))
    assert np.any(np.asarray(found["key"][0, 0]) != 0)
