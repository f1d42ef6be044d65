"""Rules whose tokens read their chunk's start (TNT): against numpy token by token, in every form, in pieces."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from titans_jax import memory
from titans_jax.memory.rule.presets import PRESETS

HEAD_DIM, CHUNK, TIME = 4, 6, 20
FORMS = ("recurrent", "associative", "chunked")
DEEP = ("titans", "ttt_mlp", "moneta", "yaad", "memora")


@pytest.fixture(autouse=True)
def doubles():
    with jax.enable_x64(True):
        yield


@functools.cache
def rule_of(preset, **fields):
    rule = PRESETS[preset].make(expansion=2, chunk_size=CHUNK)
    return dataclasses.replace(rule, stale=True, **fields)


def drawn(rule, time=TIME, seed=0, **channels):
    """Slow parameters, and queries, keys, values, gates."""
    rng = np.random.default_rng(seed)
    params = memory.init_params(rule, jax.random.key(3), HEAD_DIM)
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64) + 0.1 * rng.normal(size=x.shape), params)
    q, k, v = rng.normal(size=(3, time, HEAD_DIM))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    shape = (time, len(params["weights"]))
    gates = memory.Gates.from_values(
        rng.uniform(0.02, 0.3, shape), rng.uniform(0.1, 0.9, shape), rng.uniform(0.01, 0.05, shape)
    )
    channels = {name: jnp.asarray(np.log(rng.uniform(0.6, 1, (time, HEAD_DIM)))) for name in channels}
    if rule.bias.takes_gate:
        channels["bias_gate"] = jnp.asarray(rng.uniform(0.2, 1, (time, HEAD_DIM)))
    gates = jax.tree.map(jnp.asarray, dataclasses.replace(gates, **channels))
    return params, tuple(map(jnp.asarray, (q, k, v))), gates


@functools.partial(jax.jit, static_argnums=(0, 5))
def memorize(rule, params, state, tokens, gates, form, resets=None):
    return memory.memorize(rule, params, state, *tokens, gates, form, resets=resets)


def numpy_reads(rule, params, tokens, gates):
    """The oracle's weights at the start of every chunk, read by all of its tokens."""
    numpy_rule = oracle.Rule("residual_mlp", "l2", rule.algorithm.has_momentum, CHUNK, rule.forget_to_start)
    params = jax.tree.map(np.asarray, params)
    q, k, v = map(np.asarray, tokens)
    forget, momentum = 1 - np.exp(gates.log_retention), np.exp(gates.log_momentum)
    state, reads = oracle.start(params), []
    for begin in range(0, len(k), CHUNK):
        part = slice(begin, begin + CHUNK)
        reads += [oracle.read(numpy_rule, state.weights, params["norm_scale"], one) for one in q[part]]
        rest = k[part], v[part], forget[part], momentum[part], np.asarray(gates.step_size)[part]
        _, state, _, _ = oracle.memorize(numpy_rule, params, state, q[part], *rest)
    return np.array(reads)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("preset, to_start", [("titans", False), ("titans", True), ("ttt_mlp", False)])
def test_reads_equal_the_numpy_recurrence(preset, to_start, form):
    rule = rule_of(preset, forget_to_start=to_start)
    params, tokens, gates = drawn(rule)
    reads, _ = memorize(rule, params, memory.init_state(rule, params), tokens, gates, form)
    expected = numpy_reads(rule, params, tokens, gates)
    np.testing.assert_allclose(reads, expected, rtol=0, atol=1e-10 * abs(expected).max())


SIDES = ((), ("log_key_retention",), ("log_value_retention",), ("log_key_retention", "log_value_retention"))


@pytest.mark.slow_but_for("titans-sides1", "ttt_mlp-sides3")
@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("preset", DEEP)
def test_forms_agree_in_value_and_gradient_whatever_is_forgotten(preset, sides):
    """Also in what is carried, with padding behind the tokens."""
    rule = rule_of(preset)
    params, tokens, gates = drawn(rule, **dict.fromkeys(sides))
    if preset == "memora" and "log_key_retention" in sides:
        pytest.skip("a softmax over inputs forgets all of them alike")
    gates = dataclasses.replace(gates, mask=jnp.arange(TIME) < TIME - 3)
    if not rule.algorithm.has_momentum:
        gates = dataclasses.replace(gates, log_momentum=None)
    probe = jnp.asarray(np.random.default_rng(7).normal(size=(TIME, HEAD_DIM)))

    def loss(point, form):
        params, tokens, gates = point
        reads, state = memory.memorize(rule, params, memory.init_state(rule, params), *tokens, gates, form)
        carried = sum(jnp.sum(jnp.sin(leaf)) for leaf in (*state.weights, *state.momentum))
        return jnp.sum(reads[: TIME - 3] * probe[: TIME - 3]) + carried

    grad = jax.jit(jax.value_and_grad(loss, allow_int=True), static_argnums=1)
    expected, found = (grad((params, tokens, gates), form) for form in ("recurrent", "chunked"))
    for one, other in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        if one.dtype == jnp.float64:
            np.testing.assert_allclose(other, one, rtol=1e-9, atol=1e-9 * max(1, abs(one).max()))


def test_no_token_changes_its_own_chunk():
    rule = rule_of("titans")
    params, (q, k, v), gates = drawn(rule)
    state = memory.init_state(rule, params)
    before, _ = memorize(rule, params, state, (q, k, v), gates, "chunked")
    for t in (0, 5, 7):
        after, _ = memorize(rule, params, state, (q, k.at[t].add(1.0), v.at[t].add(1.0)), gates, "chunked")
        until = (t // CHUNK + 1) * CHUNK
        np.testing.assert_array_equal(after[:until], before[:until])
        assert (after[until:] != before[until:]).any(axis=1).all()


def test_pieces_equal_the_whole_and_documents_begin_anew():
    rule = rule_of("titans", forget_to_start=True)
    params, tokens, gates = drawn(rule)
    start = memory.init_state(rule, params)
    whole, _ = memorize(rule, params, start, tokens, gates, "chunked")
    state, reads, begin = dataclasses.replace(start, position=jnp.zeros((), jnp.int32)), [], 0
    for size, form in ((7, "chunked"), (1, "recurrent"), (1, "recurrent"), (7, "chunked"), (4, "associative")):
        part = jax.tree.map(lambda leaf: leaf[begin : begin + size], (tokens, gates))  # noqa: B023
        read, state = memorize(rule, params, state, *part, form)
        reads.append(read)
        begin += size
    np.testing.assert_allclose(jnp.concatenate(reads), whole, rtol=0, atol=1e-10 * abs(whole).max())

    resets = jnp.zeros((TIME,), bool).at[12].set(True)
    found, _ = memorize(rule, params, start, tokens, gates, "chunked", resets)
    np.testing.assert_allclose(found[:12], whole[:12], rtol=1e-12)
    alone, _ = memorize(rule, params, start, *jax.tree.map(lambda leaf: leaf[12:], (tokens, gates)), "chunked")
    np.testing.assert_allclose(found[12:], alone, rtol=0, atol=1e-10 * abs(alone).max())


def test_gates_at_their_ends_are_finite_in_value_and_gradient():
    rule = rule_of("titans")
    params, tokens, gates = drawn(rule)
    shut = jnp.full_like(gates.log_retention, -jnp.inf)
    gates = dataclasses.replace(gates, log_retention=shut, log_momentum=shut)

    def loss(gates):
        reads, state = memory.memorize(rule, params, memory.init_state(rule, params), *tokens, gates, "chunked")
        return jnp.sum(reads) + sum(map(jnp.sum, state.weights))

    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(jax.jit(jax.value_and_grad(loss))(gates)))


def test_what_cannot_be_stale_is_refused():
    with pytest.raises(ValueError, match="^stale is True: it needs gradients at the chunk's start"):
        dataclasses.replace(PRESETS["gated_deltanet"].make(), stale=True)
    with pytest.raises(ValueError, match="no lag token"):
        dataclasses.replace(PRESETS["memora"].make(lag_token=True), stale=True)
    rule = rule_of("titans")
    params, tokens, gates = drawn(rule)
    with pytest.raises(ValueError, match="no stale reads"):
        memory.memorize(rule, params, memory.init_state(rule, params), *tokens, gates, "fused")
