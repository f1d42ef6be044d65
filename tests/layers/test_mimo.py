"""Mamba-3 MIMO as a layer against a loop in numpy: values, forms, pieces, documents, causality, gradients, SISO."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from model_oracle import rms_norm, sigmoid, silu

from tests.slopes import assert_slope_is_the_difference
from titans_jax.config import Config, ConfigError, MemoryConfig, ModelConfig, memory_rule
from titans_jax.config.validate import validate
from titans_jax.layers import NeuralMemory, memory_layer
from titans_jax.layers.document_layout import find_documents
from titans_jax.models import BLOCKS
from titans_jax.models.flops import caching_flops, memory_layer_flops

RANK, HEADS, WIDTH, TIME, BATCH = 3, 2, 6, 9, 2
DIM = HEADS * WIDTH
MEMORY = MemoryConfig(preset="mamba3_mimo", mimo_rank=RANK)
CONFIG = ModelConfig(dim=DIM, num_heads=HEADS, head_dim=WIDTH, depth=1, conv_size=3, dtype="float64", memory=MEMORY)
MAMBA3 = ModelConfig(**{**vars(CONFIG), "memory": MemoryConfig(preset="mamba3")})


def with_memory(**fields):
    return ModelConfig(**{**vars(CONFIG), "memory": MemoryConfig(**{**vars(MEMORY), **fields})})


CACHED = with_memory(caching="residual", cache_segment=2)


@functools.cache
def drawn(config=CONFIG):
    """(parameters by path, x [b, t, dim]), all of them far from their starts."""
    generator = np.random.default_rng(0)
    with jax.enable_x64(True):
        shapes = jax.eval_shape(lambda: nnx.to_pure_dict(nnx.state(memory_layer(config, rngs=nnx.Rngs(0)))))
    parameters = jax.tree.map(lambda leaf: generator.normal(size=leaf.shape), shapes)
    return parameters, generator.normal(size=(BATCH, TIME, DIM))


@functools.cache
def graphdef(config):
    return nnx.split(jax.eval_shape(lambda: memory_layer(config, rngs=nnx.Rngs(0))))


def layer(config, parameters):
    definition, state = graphdef(config)
    state = jax.tree.map(lambda x: x, state)
    nnx.replace_by_pure_dict(state, parameters)
    return nnx.merge(definition, state)


def answer(parameters, x, config=CONFIG, segment_ids=None, persistent=None):
    documents = None if segment_ids is None else find_documents(segment_ids)
    return layer(config, parameters)(x, None, documents, persistent)[0]


def run(*inputs, config=CONFIG, parameters=None):
    with jax.enable_x64(True):
        program = jax.jit(lambda parameters, *inputs: answer(parameters, inputs[0], config, *inputs[1:]))
        return np.asarray(program(drawn(config)[0] if parameters is None else parameters, *inputs))


def features(p, x, sides):
    """[t, sides, d] of x [t, dim]: projection, convolution with the newest tap first, SiLU."""
    rows, taps = x @ p["projection"]["kernel"], p["convolution"]["kernel"]
    rows = np.concatenate([np.zeros((len(taps) - 1, rows.shape[1])), rows])
    y = sum(tap * rows[len(taps) - 1 - lag :][: len(x)] for lag, tap in enumerate(taps))
    return silu(y).reshape(len(x), *sides, WIDTH)


def unit(x):
    return x / np.sqrt(np.sum(x**2, axis=-1, keepdims=True) + 1e-6)


def expected(x, tied_to=None, segment=None):
    """y [t, dim] of one row x [t, dim] from an empty memory, every head with its own state, as published; with keys
    that are `tied_to` the queries; with what the states at the ends of earlier segments answer added to the read
    (Memory Caching, residual)."""
    p, out, kept = drawn()[0], [], []
    r = p["rotation"]
    queries, keys = (unit(features(p[name], x, (HEADS, RANK))) for name in ("query", "key"))
    keys = keys if tied_to is None else tied_to(queries)
    values = features(p["value"], x, (HEADS,))
    phases, last, state = np.zeros(HEADS), [], np.zeros((HEADS, WIDTH, WIDTH))

    def turned(x, head):  # the first pair of channels of six
        cos, sin = np.cos(phases[head]), np.sin(phases[head])
        return np.concatenate([[x[0] * cos - x[1] * sin, x[0] * sin + x[1] * cos], x[2:]])

    for t, row in enumerate(x):
        if segment and t and t % segment == 0:
            kept.append(state.copy())
        logits = np.einsum("d,dhk->hk", row / np.sqrt(DIM), r["kernel"]) + r["bias"]
        step = np.log1p(np.exp(logits[:, 0] + r["step_bias"]))
        a = np.exp(-step * np.maximum(np.log1p(np.exp(logits[:, 1])), 1e-4))
        share, gate = sigmoid(logits[:, 2]), (row @ p["output_gate"]["kernel"]).reshape(HEADS, WIDTH)
        phases = phases + step * np.pi * np.tanh(row / np.sqrt(DIM) @ r["turn"])[0]
        now, mixed = [], np.zeros((HEADS, WIDTH))
        for h in range(HEADS):
            state[h] *= a[h]
            for j in range(RANK):
                k = turned(rms_norm(keys[t, h, j], r["key_norm"]["scale"][h, j]) + r["key_bias"][h, j], h)
                v = r["value_mix"][h, j] * values[t, h]
                if last:
                    state[h] += (1 - share[h]) * step[h] * a[h] * np.outer(*last[h * RANK + j])
                state[h] += share[h] * step[h] * np.outer(k, v)
                now.append((k, v))
            for j in range(RANK):
                q = turned(rms_norm(queries[t, h, j], r["query_norm"]["scale"][h, j]) + r["query_bias"][h, j], h)
                read = q @ (state[h] + sum(earlier[h] for earlier in kept))
                y = rms_norm(read + r["skip"][h] * now[h * RANK + j][1], p["norm"]["scale"][h])
                mixed[h] += r["read_mix"][h, j] * y * silu(r["gate_mix"][h, j] * gate[h])
        last = now
        out.append(mixed.reshape(-1) @ p["output_projection"]["kernel"])
    return np.array(out)


def assert_same(reads, wanted):
    np.testing.assert_allclose(reads, wanted, rtol=1e-10, atol=1e-10 * np.abs(wanted).max())


@pytest.mark.parametrize("form", ["recurrent", "associative", "chunked", "fused"])
def test_a_row_is_that_of_the_published_recurrence(form):
    x = drawn()[1]
    reads = run(x, config=with_memory(form=form), parameters=drawn()[0])
    for row in range(BATCH):
        assert_same(reads[row], expected(x[row]))


def test_keys_may_be_the_queries_of_the_token_before():
    config, (parameters, x) = with_memory(tie_keys=True), drawn()
    tied = {name: value for name, value in parameters.items() if name != "key"}
    assert jax.tree.structure(tied) == jax.tree.structure(drawn(config)[0])
    before = lambda x: np.concatenate([np.zeros_like(x[:1]), x[:-1]])  # noqa: E731
    reads = run(x, config=config, parameters=tied)
    for row in range(BATCH):
        assert_same(reads[row], expected(x[row], tied_to=before))


def test_documents_and_persistent_tokens_are_read_as_if_alone():
    """Wherever they start, with padding behind; each after what the persistent tokens left."""
    x, persistent = drawn()[1], np.random.default_rng(2).normal(size=(4, DIM))
    ids = np.array([[1] * 4 + [2] * 5, [1] * 2 + [2] * 5 + [0] * 2], np.int32)
    for prefix in (np.zeros((0, DIM)), persistent):
        reads = run(x, ids, *[prefix] * (len(prefix) > 0))
        for row, borders in enumerate(([0, 4, 9], [0, 2, 7])):
            for begin, end in zip(borders[:-1], borders[1:], strict=True):
                wanted = expected(np.concatenate([prefix, x[row, begin:end]]))[len(prefix) :]
                assert_same(reads[row, begin:end], wanted)


def test_every_rank_reads_kept_memories_too():
    x = drawn()[1]
    reads = run(x, config=CACHED, parameters=drawn()[0])
    for row in range(BATCH):
        assert_same(reads[row], expected(x[row], segment=CACHED.memory.cache_segment))


@pytest.mark.parametrize("config", [CONFIG, CACHED], ids=["alone", "cached"])
@pytest.mark.parametrize("pieces", [(4, 5), (1, 6, 1, 1)])
def test_a_sequence_may_be_cut_anywhere(pieces, config):
    x = drawn()[1]

    def read(parameters, x):
        module = layer(config, parameters)
        state, reads, begin = module.init_state(BATCH, None, TIME), [], 0
        for piece in pieces:
            y, state, _ = module(x[:, begin : begin + piece], state)
            reads.append(y)
            begin += piece
        return jnp.concatenate(reads, axis=1)

    with jax.enable_x64(True):
        reads = np.asarray(jax.jit(read)(drawn()[0], x))
    segment = config.memory.cache_segment if config.memory.caching else None
    assert_same(reads, np.array([expected(row, segment=segment) for row in x]))


def test_a_later_token_changes_no_earlier_output():
    x = drawn()[1]
    changed = x.copy()
    changed[:, 6] *= -2.0
    before, after = run(x), run(changed)
    np.testing.assert_array_equal(before[:, :6], after[:, :6])
    assert (before[:, 6:] != after[:, 6:]).all()


def test_the_gradient_is_the_finite_difference():
    """Of everything: parameters and input."""
    generator = np.random.default_rng(3)
    weigh = generator.normal(size=(BATCH, TIME, DIM))
    with jax.enable_x64(True):
        program = jax.jit(jax.value_and_grad(lambda point: jnp.sum(answer(*point) * weigh)))
        point = jax.tree.map(jnp.asarray, drawn())
        assert_slope_is_the_difference(program, point, generator)
        gradients = jax.tree.map(np.asarray, program(point)[1][0])
    assert all(np.any(leaf != 0) for leaf in jax.tree.leaves(gradients))


def test_equal_ranks_are_siso():
    """With mixes at their start: r keys that are one write what it does, of values of a share 1 / r each, and r reads
    that are one are it; D alone is multiplied by the share."""
    siso, x = drawn(MAMBA3)
    with jax.enable_x64(True):
        start = nnx.to_pure_dict(nnx.state(jax.jit(lambda: NeuralMemory(CONFIG, rngs=nnx.Rngs(0)))()))
    mimo = jax.tree.map(np.asarray, siso)
    for name in ("query", "key"):
        kernels = {part: siso[name][part]["kernel"] for part in ("projection", "convolution")}
        repeated = {part: ranks(kernel.reshape(-1, HEADS, WIDTH), 2) for part, kernel in kernels.items()}
        mimo[name] = {part: {"kernel": kernel.reshape(len(kernel), -1)} for part, kernel in repeated.items()}
        mimo["rotation"][f"{name}_norm"] = {"scale": ranks(siso["rotation"][f"{name}_norm"]["scale"], 1)}
        mimo["rotation"][f"{name}_bias"] = ranks(siso["rotation"][f"{name}_bias"], 1)
    mimo["rotation"]["skip"] = RANK * siso["rotation"]["skip"]
    mimo["rotation"] |= {name: np.asarray(start["rotation"][name]) for name in ("value_mix", "gate_mix", "read_mix")}
    assert_same(run(x, parameters=mimo), run(x, config=MAMBA3))


def ranks(x, axis):
    return np.repeat(np.expand_dims(x, axis), RANK, axis=axis)


def test_a_rank_of_one_is_siso():
    assert memory_rule(MemoryConfig(preset="mamba3_mimo", mimo_rank=1)) == memory_rule(MAMBA3.memory)
    parameters, x = drawn(MAMBA3)
    np.testing.assert_array_equal(run(x, config=with_memory(mimo_rank=1), parameters=parameters), run(x, config=MAMBA3))


def test_a_memory_that_is_not_written_leaves_the_skip():
    def read(parameters, x):
        module = layer(CONFIG, parameters)
        module.writes = False
        state = module.init_state(BATCH)
        return module.memorize(x, state)[0].reads, module.value(x, state.tails["value"])[0]

    parameters, x = drawn()
    with jax.enable_x64(True):
        reads, values = jax.tree.map(np.asarray, jax.jit(read)(parameters, x))
    rotation = parameters["rotation"]
    wanted = np.einsum("h,hrd,bthd->btrhd", rotation["skip"], rotation["value_mix"], values)
    assert_same(reads, wanted)


def test_half_precision_is_near():
    """Operands in bfloat16, the ranks mixed in float32."""
    half = ModelConfig(**{**vars(CONFIG), "dtype": "bfloat16"})
    parameters, x = drawn()
    start = jax.jit(lambda: NeuralMemory(half, rngs=nnx.Rngs(0)))()
    y = jax.jit(lambda module, x: module(x)[0])(start, jnp.asarray(x, jnp.bfloat16))
    parameters = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(start)))
    wanted = run(x, parameters=jax.tree.map(np.float64, parameters))
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(y, np.float64), wanted, atol=0.03 * np.abs(wanted).max())


@pytest.mark.parametrize(
    "pattern, fields, sentence",
    [
        ("lmm", {"mimo_rank": 0}, "model.memory.mimo_rank is 0; use at least 1"),
        (
            "mac",
            {},
            "model.memory.mimo_rank is 3, and mac's attention takes one read of the memory for every token; use 1, or "
            "a pattern of lmm, mag, mal or retrofit",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(pattern, fields, sentence):
    model = ModelConfig(**{**vars(with_memory(**fields)), "pattern": (pattern,), "dtype": "float32"})
    with pytest.raises(ConfigError) as refused:
        validate(Config(model=model))
        BLOCKS[pattern].check(model)
    assert str(refused.value) == sentence


def test_a_rank_is_no_concern_of_others():
    validate(Config(model=ModelConfig(**{**vars(with_memory(preset="titans")), "dtype": "float32"})))


def test_operations():
    """By hand beside SISO's: two more projections and convolutions of queries and of keys; and of either head four more
    inner steps, whose keys, writes and reads are products with W, and which 64 tokens weigh for each other; three
    queries read three values by three keys."""
    more = 2 * 2 * (2 * DIM**2 + 2 * CONFIG.conv_size * DIM) + HEADS * 4 * 2 * (3 * WIDTH**2 + 64 * 2 * WIDTH)
    more += HEADS * 2 * 2 * 3 * 3 * WIDTH
    assert memory_layer_flops(CONFIG) - memory_layer_flops(MAMBA3) == more


def test_operations_of_kept_memories():
    """In 9 tokens, in segments of 2, the tokens of each segment read one kept memory more than those before: 16 reads
    of 6 x 6 numbers by three queries in either head."""
    assert caching_flops(CACHED, TIME) * TIME == (2 * (1 + 2 + 3) + 4) * HEADS * 3 * 2 * WIDTH**2
