"""Known members of the family, presets, starts, retrieval, and bad input refused in one sentence."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import rules
from rules import EVERY_CASE, FORMS, HEAD_DIM, LINEAR, ONLINE, TIME, TITANS, Case

from titans_jax import memory


def linear_reads(case, form, forget, momentum, step_size, seed=3):
    """Package reads of one linear row under the given gates [time], with the row and its start weight."""
    params, rows = rules.random_params(case), rules.random_rows(case, 1, TIME, seed)
    for name, gate in (("forget", forget), ("momentum", momentum), ("step_size", step_size)):
        rows[name] = np.broadcast_to(np.asarray(gate, np.float64), (TIME,))[None, :, None].copy()
    return rules.run(case, form, params, rows)["reads"][0], rules.row(rows, 0), params["weights"][0]


def delta_reads(row, weight, decay, beta, decay_first):
    """(Gated) DeltaNet: W' = a W + beta k^T (v - k W), the error taken at a W if the decay comes first, else at W."""
    reads = []
    for query, key, value, a, b in zip(row["queries"], row["keys"], row["values"], decay, beta, strict=True):
        decayed = a * weight
        weight = decayed + b * np.outer(key, value - key @ (decayed if decay_first else weight))
        reads.append(query @ weight)
    return np.array(reads)


@pytest.mark.parametrize("form", FORMS)
def test_titans_without_momentum_or_forgetting_is_delta_net(form):
    beta = np.random.default_rng(4).uniform(0.1, 0.9, TIME)
    reads, row, weight = linear_reads(ONLINE, form, 0.0, 0.0, beta)
    np.testing.assert_allclose(reads, delta_reads(row, weight, np.ones(TIME), beta, True), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_titans_without_momentum_is_not_gated_delta_net(form):
    """They differ by (1 - a) beta k^T k W: equal only where nothing is forgotten (memory/README.md, The rule)."""
    decay, beta = np.random.default_rng(4).uniform(0.3, 0.9, (2, TIME))
    reads, row, weight = linear_reads(ONLINE, form, 1 - decay, 0.0, beta)
    np.testing.assert_allclose(reads, delta_reads(row, weight, decay, beta, False), rtol=1e-10, atol=1e-12)
    key, query = row["keys"][0], row["queries"][0]
    gap = delta_reads(row, weight, decay, beta, True)[0] - reads[0]
    np.testing.assert_allclose(gap, (1 - decay[0]) * beta[0] * (query @ key) * (key @ weight), rtol=1e-9, atol=1e-12)
    assert np.abs(gap).max() > 1e-3


@pytest.mark.parametrize("form", FORMS)
def test_dot_product_bias_is_linear_attention(form):
    case = Case("linear", bias="dot_product", chunk_size=4)
    reads, row, weight = linear_reads(case, form, 0.0, 0.0, 1.0)
    scores = np.tril(row["queries"] @ row["keys"].T)
    np.testing.assert_allclose(reads, row["queries"] @ weight + scores @ row["values"], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_chunk_constant_gates_are_a_convolution(form):
    """Constant gates: S_t = -theta sum_j eta^(t-j) u_j, M_t = a^t M_0 + sum_i a^(t-i) S_i (Titans 3.2;
    memory/README.md, Gates)."""
    a, eta, theta = 0.8, 0.6, 0.1
    reads, row, weight = linear_reads(Case("linear", bias="dot_product"), form, 1 - a, eta, theta)
    expected = []
    for t in range(TIME):
        score = a ** (t + 1) * row["queries"][t] @ weight
        for j in range(t + 1):
            kernel = sum(a ** (t - i) * eta ** (i - j) for i in range(j, t + 1))
            score = score + theta * kernel * (row["queries"][t] @ row["keys"][j]) * row["values"][j]
        expected.append(score)
    np.testing.assert_allclose(reads, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.slow_but_for("*-chunked")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", [LINEAR, TITANS], ids=str)
def test_gates_constant_in_each_chunk(case, form):
    """Gates that change only from chunk to chunk."""
    params, rows = rules.random_params(case), rules.random_rows(case, 2, 12)
    for name in ("forget", "momentum", "step_size"):
        rows[name] = np.repeat(rows[name][:, ::4], 4, axis=1)
    answer = rules.run(case, form, params, rows)
    for index in range(2):
        rules.assert_answers(case, rules.row(answer, index), rules.expect(case, params, rules.row(rows, index)))


def test_presets_are_their_rules():
    """titans(depth=1, residual=False) is x @ W; the default is the residual memory of depth 2; rules are hashable."""
    assert memory.presets.titans(depth=2, expansion=2, chunk_size=4, residual=True) == TITANS.rule
    assert memory.presets.titans(depth=3, expansion=2, chunk_size=4, residual=False) == Case("mlp", 3).rule
    assert len({case.rule for case in EVERY_CASE}) == len(EVERY_CASE)
    plain = memory.presets.titans(depth=1, residual=False, chunk_size=4)
    params = {"weights": (jnp.asarray(np.random.default_rng(0).normal(size=(HEAD_DIM, HEAD_DIM)), jnp.float32),)}
    queries = jnp.asarray(np.random.default_rng(1).normal(size=(3, HEAD_DIM)), jnp.float32)
    reads = memory.retrieve(plain, params, memory.init_state(plain, params), queries)
    np.testing.assert_allclose(reads, np.asarray(queries) @ np.asarray(params["weights"][0]), rtol=1e-5, atol=1e-6)


@pytest.mark.slow_but_for("linear1-l2-momentum-4", "residual_mlp2-*")
@pytest.mark.parametrize("case", EVERY_CASE, ids=str)
def test_start(case):
    """Shapes [in, out] in the order of application, a norm scale of ones where there is a norm, zero momentum."""
    params = memory.init_params(case.rule, jax.random.key(0), HEAD_DIM)
    assert tuple(matrix.shape for matrix in params["weights"]) == case.shapes
    assert all(matrix.dtype == jnp.float32 and np.abs(matrix).min() > 0 for matrix in params["weights"])
    if case.architecture == "residual_mlp":
        np.testing.assert_array_equal(params["norm_scale"], np.ones(HEAD_DIM, np.float32))
    else:
        assert set(params) == {"weights"}
    state = memory.init_state(case.rule, params)
    jax.tree.map(np.testing.assert_array_equal, tuple(state.weights), tuple(params["weights"]))
    jax.tree.map(np.testing.assert_array_equal, tuple(state.anchor), tuple(params["weights"]))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(state.momentum)) and int(state.position) == 0


@pytest.mark.slow_but_for("linear1-l2-momentum-4-0", "residual_mlp2-*-7", "gated_mlp3-*-7")
@pytest.mark.parametrize("count", [0, 1, 7])
@pytest.mark.parametrize("case", EVERY_CASE, ids=str)
def test_retrieve_is_the_architecture_at_the_states_weights(case, count):
    params, weights = rules.random_params(case), rules.random_params(case, seed=8)["weights"]
    queries = np.random.default_rng(5).normal(size=(count, HEAD_DIM))
    with jax.enable_x64(True):
        arrays = jax.tree.map(jnp.asarray, weights)
        state = memory.MemoryState(weights=arrays, momentum=arrays, anchor=arrays, position=0)
        reads = memory.retrieve(case.rule, jax.tree.map(jnp.asarray, params), state, jnp.asarray(queries))
        assert reads.shape == (count, HEAD_DIM)
        reads = np.asarray(reads)
    for query, got in zip(queries, reads, strict=True):
        expected = oracle.read(case.oracle_rule, weights, params.get("norm_scale"), query)
        np.testing.assert_allclose(got, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.slow_but_for("chunked")
@pytest.mark.parametrize("form", FORMS)
def test_gradient_descent_ignores_the_momentum_gate(form):
    """log_momentum may be anything or None."""
    rule = Case("linear", algorithm="gradient_descent").rule
    params = memory.init_params(rule, jax.random.key(0), HEAD_DIM)
    tokens = jax.random.normal(jax.random.key(1), (3, TIME, HEAD_DIM))

    @functools.partial(jax.jit, static_argnums=0)
    def reads(form, log_momentum):
        gates = memory.Gates(jnp.full(TIME, -0.1), log_momentum, jnp.full(TIME, 0.1))
        return memory.memorize(rule, params, memory.init_state(rule, params), *tokens, gates, form)[0]

    np.testing.assert_allclose(reads(form, None), reads(form, jnp.full(TIME, -0.5)), rtol=1e-6)


def call(case=TITANS, form="chunked", time=TIME, **changes):
    """A good float32 call of zeros with some of its arrays replaced."""
    arrays = {name: jnp.zeros((time, HEAD_DIM)) for name in ("queries", "keys", "values")}
    arrays |= {name: jnp.zeros(time) for name in ("log_retention", "log_momentum", "step_size")}
    arrays |= {"mask": None, "resets": None} | changes
    params = memory.init_params(case.rule, jax.random.key(0), HEAD_DIM)
    gates = memory.Gates(*(arrays[name] for name in ("log_retention", "log_momentum", "step_size", "mask")))
    tokens = (arrays[name] for name in ("queries", "keys", "values"))
    state = memory.init_state(case.rule, params)
    return memory.memorize(case.rule, params, state, *tokens, gates, form, resets=arrays["resets"])


def retrieve(queries=None, swapped=False):
    """A good read of zeros, with other queries, or with the parameters and the state in each other's place."""
    params = memory.init_params(TITANS.rule, jax.random.key(0), HEAD_DIM)
    given = params, memory.init_state(TITANS.rule, params)
    queries = jnp.zeros((3, HEAD_DIM)) if queries is None else queries
    return memory.retrieve(TITANS.rule, *(reversed(given) if swapped else given), queries)


def started_by(preset=memory.presets.titans, position=0, **fields):
    """A good read of zeros by Titans, but for a state that another preset or place in a chunk has."""
    rule = memory.presets.titans(expansion=2)
    other = preset(**fields)
    params = memory.init_params(rule, jax.random.key(0), HEAD_DIM)
    state = memory.init_state(other, memory.init_params(other, jax.random.key(0), HEAD_DIM))
    return memory.retrieve(rule, params, dataclasses.replace(state, position=position), jnp.zeros((3, HEAD_DIM)))


def by_channel(name):
    """A call with a gate for each of head_dim channels of a memory that has more of them."""
    rule = dataclasses.replace(memory.presets.titans(), architecture=memory.architectures.polynomial_mlp())
    params = memory.init_params(rule, jax.random.key(0), HEAD_DIM)
    tokens = jnp.zeros((3, TIME, HEAD_DIM))
    gates = dataclasses.replace(memory.Gates(*jnp.zeros((3, TIME))), **{name: jnp.zeros((TIME, HEAD_DIM))})
    return memory.memorize(rule, params, memory.init_state(rule, params), *tokens, gates)


def unanchored(preset, tokens):
    """A state left without an anchor by some of 12 tokens; functions of a state that write the others and that read
    all; and the reads that are expected of the others."""
    rule = preset(chunk_size=4, expansion=2)
    params = memory.init_params(rule, jax.random.key(0), HEAD_DIM)
    rows = jax.random.normal(jax.random.key(1), (3, 12, HEAD_DIM)) / HEAD_DIM**0.5
    gates = memory.Gates.from_values(*jnp.full((3, 12), 0.01))
    first, others = (jax.tree.map(lambda x: x[part], (*rows, gates)) for part in (slice(tokens), slice(tokens, None)))  # noqa: B023
    start = memory.init_state(rule, params)
    _, state = memory.memorize(rule, params, start, *first, return_anchor=False)
    expected, _ = jax.jit(lambda start: memory.memorize(rule, params, start, *rows, gates, "recurrent"))(start)

    def write(state, form="chunked"):
        return memory.memorize(rule, params, state, *others, form)[0]

    return state, write, lambda state: memory.retrieve(rule, params, state, rows[0]), expected[tokens:]


@pytest.mark.parametrize("preset", [memory.presets.titans, memory.presets.moneta])
def test_a_state_without_an_anchor_starts_a_chunk(preset):
    state, write, read, expected = unanchored(preset, 8)
    closed = memory.start_chunk(state)
    np.testing.assert_array_equal(read(state), read(closed))
    for form in ("recurrent", "associative", "chunked"):
        np.testing.assert_array_equal(write(state, form), write(closed, form))
        np.testing.assert_allclose(write(state, form), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("use, preset", [("write", memory.presets.titans), ("read", memory.presets.moneta)])
def test_an_open_chunk_without_an_anchor_is_refused(use, preset):
    state, write, read, _ = unanchored(preset, 6)
    with pytest.raises(ValueError, match="state.anchor is None: .* use start_chunk"):
        write(state) if use == "write" else read(state)


TWO_STEPS = SimpleNamespace(rule=memory.presets.delta_product())
BAD_INPUT = {
    "form": lambda: call(form="parallel"),
    "architecture": lambda: memory.MemoryRule(
        "transformer", memory.biases.l2(), memory.retentions.decay(), memory.algorithms.momentum(), 4
    ),
    "depth": lambda: memory.presets.titans(depth=0),
    "chunk_size": lambda: memory.presets.titans(chunk_size=0),
    "expansion": lambda: memory.architectures.mlp(depth=2, expansion=0),
    "log_retention": lambda: call(log_retention=jnp.zeros(TIME + 1)),
    "log_momentum": lambda: call(log_momentum=jnp.zeros((TIME, 3))),
    "step_size": lambda: call(step_size=jnp.zeros((TIME, 2, 1))),
    "mask": lambda: call(mask=jnp.ones(TIME + 1, bool)),
    "resets": lambda: call(resets=jnp.zeros(TIME - 1, bool)),
    "queries": lambda: call(queries=jnp.zeros((TIME, HEAD_DIM + 1))),
    "queries is int32": lambda: call(queries=jnp.zeros((TIME, HEAD_DIM), int)),
    "queries is float16: it must be float32, bf": lambda: call(queries=jnp.zeros((TIME, HEAD_DIM), jnp.float16)),
    "key is 0: it must be a random key of JAX": lambda: memory.init_params(TITANS.rule, 0, HEAD_DIM),
    "head_dim is True: it must be an integer": lambda: memory.init_params(TITANS.rule, jax.random.key(0), True),
    "queries has head_dim 1 ": lambda: retrieve(queries=jnp.zeros((3, 1))),
    "queries is int8": lambda: retrieve(queries=jnp.zeros((3, HEAD_DIM), jnp.int8)),
    "params is a MemoryState and state a dict": lambda: retrieve(swapped=True),
    "queries has shape": lambda: call(queries=jnp.zeros((TIME, 1, HEAD_DIM))),
    r"\[time, 2, head_dim\]; vmap": lambda: call(TWO_STEPS, queries=jnp.zeros((TIME, 3, HEAD_DIM))),
    "mimo_rank is 0": lambda: memory.presets.PRESETS["mamba3_mimo"].make(0),
    "rule is a function: .* presets.titans": lambda: memory.retrieve(memory.presets.titans, {}, None, jnp.zeros(4)),
    "queries is a list": lambda: retrieve(queries=[[0.0] * HEAD_DIM]),
    "queries is a number": lambda: retrieve(queries=jnp.float32(1)),
    "resets is a list": lambda: call(resets=[True] * TIME),
    "gates is a dict": lambda: memory.memorize(TITANS.rule, {}, None, *jnp.zeros((3, TIME, HEAD_DIM)), {}),
    "state.weights has shapes": lambda: started_by(expansion=4),
    "state.position is -1: it must be 0 to 15": lambda: started_by(expansion=2, position=-1),
    "gates.log_key_retention is given: .* key channels": lambda: by_channel("log_key_retention"),
    "gates.key_step_size is given: .* key channels": lambda: by_channel("key_step_size"),
    "keys": lambda: call(keys=jnp.zeros((TIME, HEAD_DIM + 1))),
    "values": lambda: call(values=jnp.zeros((TIME - 1, HEAD_DIM))),
}


@pytest.mark.parametrize("field", BAD_INPUT)
def test_bad_input_is_refused_by_name(field):
    with pytest.raises(ValueError, match=field) as refusal:
        BAD_INPUT[field]()
    assert len(str(refusal.value).splitlines()) == 1


@pytest.mark.parametrize("architecture", ["mlp", "residual_mlp"])
def test_depth_below_one_is_refused(architecture):
    with pytest.raises(ValueError, match="depth"):
        getattr(memory.architectures, architecture)(depth=0, expansion=2)
