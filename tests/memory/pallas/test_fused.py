"""The fused form against the chunked form, in value and in every gradient; interpreted, as there is no TPU here."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from titans_jax import memory
from titans_jax.memory import algorithms, architectures, biases, presets, retentions
from titans_jax.memory.forms.delta_rule import DeltaRule
from titans_jax.memory.gates import CHANNEL_GATES
from titans_jax.memory.pallas import entry, kernels
from titans_jax.memory.pallas.kernel_algorithm import Chunks, HeadState
from titans_jax.memory.state import WindowTokens
from titans_jax.ops import backend, matmul

CHUNK, BLOCK = 8, 16
FLOAT64, FLOAT32, BFLOAT16, BFLOAT16_GATES = 1e-10, 1e-5, 5e-3, 2e-2
GATES = ("log_retention", "log_momentum", "step_size", "bias_gate", "window_weight", *CHANNEL_GATES)
HEADS, ROWS_AND_HEADS = (2,), (2, 2)


def draw(rule, lead=(), time=3 * CHUNK, head_dim=48, dtype=np.float32, bias_gate=None, by_channel=()):
    """(params, inputs): leaves [..., head_dim or hidden] of as many heads and rows as `lead` has. by_channel: gates."""
    generator = np.random.default_rng(0)
    normal = lambda *shape: generator.normal(size=shape).astype(np.float32)  # noqa: E731
    uniform = lambda low, high, *shape: generator.uniform(low, high, shape).astype(np.float32)  # noqa: E731
    shapes, tokens, steps = rule.shapes(head_dim), (*lead, time), rule.algorithm.steps
    written = tokens if steps == 1 else (*tokens, steps)
    slow = rule.algorithm.slow(rule.architecture, head_dim) | rule.retention.slow(shapes)
    params = {name: np.asarray(x) * uniform(0.7, 1.3, *lead[-1:], *x.shape) for name, x in slow.items()}
    fan_in = (normal(*lead[-1:], *shape) / np.float32(shape[0] ** 0.5) for shape in shapes)
    start = jax.vmap(rule.retention.start) if lead else rule.retention.start
    params["weights"] = tuple(np.asarray(start(w)) for w in fan_in)
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)  # noqa: E731
    inputs = {
        "queries": unit(normal(*tokens, head_dim)),
        "keys": unit(normal(*written, head_dim)),
        "values": normal(*written, head_dim),
        "log_retention": np.log(uniform(0.6, 1, *tokens, len(shapes))),
        "step_size": uniform(0.005, 0.02, *written, len(shapes)),
    }
    if rule.algorithm.has_momentum:
        inputs["log_momentum"] = np.log(uniform(0.1, 0.9, *tokens, len(shapes)))
    if rule.algorithm.window > 1:
        inputs["window_weight"] = uniform(0, 1, *tokens, rule.algorithm.window - 1)
    for name in by_channel:
        retention = name.startswith("log")
        gate = uniform(0.3, 1, *(tokens if retention else written), head_dim)
        inputs[name] = np.log(gate) if retention else gate
    if rule.bias.takes_gate:
        inputs["bias_gate"] = uniform(0.3, 1.5, *written, *(() if bias_gate is None else (bias_gate,)))
    for name in ("queries", "keys", "values"):
        inputs[name] = jnp.asarray(inputs[name], dtype)
    return params, inputs


def gates_of(inputs):
    """The gates among what `draw` made, and padding."""
    names = "log_retention", "log_momentum", "step_size", "mask", "bias_gate", *CHANNEL_GATES, "window_weight"
    return memory.Gates(*(inputs.get(name) for name in names))


def stream(rule, params):
    """Matrices of a state that arrives inside a chunk."""
    like = lambda scale: tuple(w * scale for w in params["weights"])  # noqa: E731
    momentum = like(np.float32(0.03)) if rule.algorithm.has_momentum else ()
    state = {"weights": like(np.float32(0.9)), "momentum": momentum, "anchor": like(np.float32(1.1))}
    if (reach := rule.algorithm.window - 1) > 0:
        generator, width = np.random.default_rng(1), params["weights"][-1].shape[-1]
        keys, values = generator.normal(size=(2, *params["weights"][-1].shape[:-2], reach, width)).astype(np.float32)
        step_size = np.full((*keys.shape[:-1], len(params["weights"])), 0.01, np.float32)
        state["window"] = WindowTokens(keys, values, step_size)
    if rule.algorithm.steps_by_chunk:
        state["step_total"] = np.full((*momentum[0].shape[:-2], len(momentum)), 0.03, np.float32)
    return state


def probed(tree):
    """A scalar that weighs every number of a tree differently."""

    def one(x):
        return jnp.sum(x * jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape))

    return sum(one(x) for x in map(jnp.asarray, jax.tree.leaves(tree)) if jnp.issubdtype(x.dtype, jnp.floating))


def answers(rule, form, params, inputs, lead=(), flags=None, position=0, gradients=True):
    """{reads, state, surprise, gradients by params and by inputs}; `flags` has what is no number: mask, resets, and
    a traced position. Without gradients, the kernel that keeps nothing for them runs."""

    def head(params, x):
        state = memory.init_state(rule, params)
        if "state" in x:
            state = memory.MemoryState(**x["state"], position=x.get("position", position))
        tokens = (x[name] for name in ("queries", "keys", "values"))
        options = {"resets": x.get("resets"), "return_surprise": True}
        return memory.memorize(rule, params, state, *tokens, gates_of(x), form, **options)

    rows = head
    for i in range(len(lead)):
        rows = jax.vmap(rows, (0 if i == 0 else None, 0))

    def loss(params, inputs, flags):
        reads, state, surprise = rows(params, inputs | flags)
        return probed((reads, state)), {"reads": reads, "state": state, "surprise": surprise}

    program = jax.grad(loss, (0, 1), has_aux=True) if gradients else loss
    program = jax.jit(program)
    found, answer = program(params, inputs, flags or {})
    return answer | {"params": found[0], "inputs": found[1]} if gradients else answer


def assert_equal(got, wanted, tolerance=FLOAT32, of_gates=None):
    """Relative RMS of every leaf, nothing left out."""
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    pairs = zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(wanted), strict=True)
    for (path, a), b in pairs:
        name = jax.tree_util.keystr(path)
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.all(np.isfinite(b)), name
        allowed = of_gates if of_gates and any(gate in name for gate in GATES) else tolerance
        assert np.sqrt(np.mean((a - b) ** 2)) <= allowed * max(np.sqrt(np.mean(b**2)), 1e-6), name


def as_float32(tree):
    return jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, tree)


def check(rule, lead=(), tolerance=FLOAT32, of_gates=None, flags=None, position=0, gradients=True, **options):
    params, inputs = draw(rule, lead, **options)
    for name in ("log_key_retention", "log_value_retention"):
        if name in inputs and tolerance == FLOAT64:  # gates that cut
            inputs[name][..., 5, ::2] = -np.inf
    if position or "position" in (flags or {}):
        inputs["state"] = stream(rule, params)
    if tolerance == FLOAT64:
        params, inputs = jax.tree.map(lambda x: np.asarray(x, np.float64), (params, inputs))
    with jax.enable_x64(tolerance == FLOAT64):
        fused_and_chunked = [
            answers(rule, form, params, inputs, lead, flags, position, gradients) for form in ("fused", "chunked")
        ]
    assert_equal(*fused_and_chunked, tolerance, of_gates)


def titans(depth=2, **options):
    return presets.titans(depth, 2, CHUNK, **options)


@pytest.mark.slow
def test_rows_and_heads():
    """By two vmaps, three matrices, and a last chunk that stays open; other tests have two matrices, and one."""
    check(titans(3), ROWS_AND_HEADS, time=2 * CHUNK + 3)


@pytest.mark.slow
@pytest.mark.parametrize("state_tokens", [CHUNK, 64], ids=["a state a chunk", "one for all chunks"])
def test_bfloat16_operands(state_tokens, monkeypatch):
    """A state for one chunk only is stored in bfloat16, which its products read it in."""
    monkeypatch.setattr(kernels, "STATE_TOKENS", state_tokens)
    check(titans(), HEADS, BFLOAT16, BFLOAT16_GATES, head_dim=64, dtype=jnp.bfloat16)


@pytest.mark.slow
def test_states_made_again_for_the_gradient():
    """Of a row with documents and padding, whose last chunk stays open: gradients are those of stored states."""
    rule, time = titans(), 3 * CHUNK
    params, inputs = draw(rule, time=time)
    resets, mask = (np.arange(time) == CHUNK), np.arange(time) < time - 3

    def loss(params, inputs, again):
        gates = memory.Gates(inputs["log_retention"], inputs["log_momentum"], inputs["step_size"], mask)
        tokens = [inputs[name] for name in ("queries", "keys", "values")]
        state = memory.init_state(rule, params)
        return probed(
            memory.memorize(rule, params, state, *tokens, gates, "fused", resets=resets, rematerialised=again)
        )

    programs = [jax.jit(jax.grad(functools.partial(loss, again=again), (0, 1))) for again in (True, False)]
    text = str(programs[0].trace(params, inputs).jaxpr)
    assert "memorize_states" in text and "memorize_states" not in str(programs[1].trace(params, inputs).jaxpr)
    assert_equal(*(program(params, inputs) for program in programs), 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["fused", "chunked"])
def test_a_state_without_its_anchor(form):
    """All else is as with it, the kernel's shorter way of a chunk that stays open included."""
    rule = titans()
    params, inputs = draw(rule, time=CHUNK + 3)
    gates = memory.Gates(inputs["log_retention"], inputs["log_momentum"], inputs["step_size"])
    tokens = [inputs[name] for name in ("queries", "keys", "values")]
    run = functools.partial(memory.memorize, rule, params, memory.init_state(rule, params), *tokens, gates, form)
    (reads, state), (same, closed) = run(), run(return_anchor=False)
    assert closed.anchor is None
    np.testing.assert_array_equal(reads, same)
    assert_equal(closed, dataclasses.replace(state, anchor=None))


def plain(rule, tokens=1):
    """Scalar gates, as the kernel takes them."""
    gate = np.zeros((tokens, len(rule.shapes(4))), np.float32)
    return memory.Gates(gate, gate if rule.algorithm.has_momentum else None, gate)


RULES = {name: preset.make() for name, preset in presets.PRESETS.items()}
RUNNING = {name: rule for name, rule in RULES.items() if entry.supports(rule, plain(rule))}
# What linear attentions write is one rule, and only gates make them differ.
DISTINCT = {rule: name for name, rule in RUNNING.items()}


def test_which_presets_run():
    by_chunk = {"titans", "ttt_linear", "ttt_mlp", "moneta", "yaad", "omeganet", "atlas"}
    by_block = {"deltanet", "longhorn", "mamba2", "retnet", "gated_deltanet", "delta_product"}
    assert by_chunk | by_block <= set(RUNNING) and not {"mesa", "memora", "lact"} & set(RUNNING)
    linear = {name for name in RUNNING if DeltaRule.supports(RUNNING[name], plain(RUNNING[name]))}
    assert by_block <= linear and not by_chunk & linear


@pytest.mark.slow_but_for("ttt_linear", "deltanet")
@pytest.mark.parametrize("rule", [rule for rule in DISTINCT if DISTINCT[rule] != "titans"], ids=DISTINCT.get)
def test_every_other_preset_that_runs(rule, small_blocks):
    check(rule, time=rule.chunk_size + BLOCK + 3, head_dim=8)


@pytest.fixture
def small_blocks(monkeypatch):
    """A kernel's block of a linear memory has so many tokens, the chunked form's a half or a quarter of them."""
    for name, linear, gated in (("PALLAS", BLOCK, BLOCK), ("CPU", BLOCK // 2, BLOCK // 4)):
        sizes = {"delta_rule": backend.BlockSize(linear, 4), "gated_delta_rule": backend.BlockSize(gated, 8)}
        monkeypatch.setattr(backend, name, dataclasses.replace(getattr(backend, name), **sizes))


def linear(chunk_size):
    """A linear memory with momentum."""
    return presets.titans(1, chunk_size=chunk_size, residual=False)


@pytest.mark.slow
@pytest.mark.parametrize("rule, starts", [(linear(1), [3, 24]), (linear(8), [8, 32])], ids=["token", "chunk"])
def test_documents_and_padding_of_linear_memories(rule, starts, small_blocks):
    """Documents that start inside a block; a row that ends with padding, for chunks from inside one."""
    time = 2 * BLOCK + 8
    flags = {"resets": np.zeros((2, time), bool), "mask": np.ones((2, time), bool)}
    flags["resets"][0, starts] = True
    flags["mask"][1, BLOCK + 5 :] = False
    if rule.chunk_size > 1:
        flags["position"] = np.array([0, 5], np.int32)
    check(rule, HEADS, flags=flags, time=time, head_dim=8)


@pytest.fixture
def outer_products_of_columns(monkeypatch):
    """XLA on CPUs has no product of bfloat16 operands for a sum of outer products as the kernel transposes it."""
    apart = dataclasses.replace(backend.PALLAS, weighted_outer_products=matmul.weighted_outer_products_of_columns)
    monkeypatch.setattr(backend, "PALLAS", apart)


@pytest.mark.slow
def test_bfloat16_operands_of_a_linear_memory(outer_products_of_columns):
    check(presets.gated_deltanet(), HEADS, BFLOAT16, BFLOAT16_GATES, time=100, head_dim=64, dtype=jnp.bfloat16)


KEY, VALUE, KEY_STEP, VALUE_STEP, ERASE = CHANNEL_GATES
SIDES = (KEY, VALUE, KEY_STEP, VALUE_STEP)
BY_CHANNEL = {
    "dfw": (presets.dfw(), SIDES),  # and both step sizes, with nothing to solve
    "kimi": (presets.gated_deltanet(), (KEY,)),
    "rwkv7": (presets.rwkv7(), (KEY, KEY_STEP)),
    "gated_deltanet_2": (presets.gated_deltanet(), (KEY, ERASE)),
    "scalar": (presets.rwkv7(), ()),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_CHANNEL)
def test_documents_and_padding_where_channels_forget_apart(name, small_blocks):
    """Documents that start inside a block, one of them at its first token; a row that ends with padding; the state
    before the first token is no document's."""
    rule, gates = BY_CHANNEL[name]
    time = 2 * BLOCK + 8
    flags = {"resets": np.zeros((2, time), bool), "mask": np.ones((2, time), bool)}
    flags |= {"position": np.zeros(2, np.int32)}
    flags["resets"][0, [3, BLOCK, 24]] = True
    flags["mask"][1, BLOCK + 5 :] = False
    check(rule, HEADS, FLOAT64, flags=flags, time=time, head_dim=8, by_channel=gates)


@pytest.mark.slow
def test_bfloat16_operands_where_channels_forget_apart():
    rule, gates = BY_CHANNEL["rwkv7"]
    check(rule, HEADS, BFLOAT16, BFLOAT16_GATES, time=40, head_dim=64, dtype=jnp.bfloat16, by_channel=gates)


@pytest.mark.slow
def test_padding_between_tokens_is_never_silently_wrong():
    """Where documents begin inside blocks, too."""
    rule, gates = BY_CHANNEL["kimi"]
    params, inputs = draw(rule, HEADS, head_dim=8, by_channel=gates)
    flags = {"resets": np.zeros((2, 3 * CHUNK), bool), "mask": np.ones((2, 3 * CHUNK), bool)}
    flags["resets"][:, 9] = True
    flags["mask"][0, 5] = False
    reads = answers(rule, "fused", params, inputs, HEADS, flags, gradients=False)["reads"]
    assert np.isnan(reads[0]).all() and np.isfinite(reads[1]).all()


def test_what_auto_stands_for_on_a_tpu():
    """A linear rule takes the kernel, whatever its gates, and so does a deep one with chunks of a register."""

    def choose(rule, **gates):
        return memory.choose_form("auto", rule, dataclasses.replace(plain(rule), **gates), backend.TPU)

    assert {choose(rule) for rule in (presets.gated_deltanet(), linear(1), linear(16), titans())} == {"fused"}
    assert choose(linear(3)) == choose(presets.ttt_mlp(chunk_size=4)) == choose(presets.memora()) == "chunked"
    channels = np.zeros((1, 4), np.float32)
    gated = (presets.gla(), presets.rwkv7(), presets.gated_deltanet())
    assert {choose(rule, log_key_retention=channels) for rule in gated} == {"fused"}
    assert choose(presets.gated_deltanet(), log_value_retention=channels) == "chunked"


MOMENTUM, DESCENT = algorithms.momentum(), algorithms.gradient_descent()


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture, bias, retention, algorithm, bias_gate",
    [
        (architectures.residual_mlp(2, 2), biases.huber(), retentions.decay(), MOMENTUM, 16),
        (architectures.residual_mlp(2, 2, learned_scale=False), biases.l2(), retentions.decay(), MOMENTUM, None),
        (architectures.gated_mlp(2), biases.lp(3), retentions.decay(), DESCENT, None),
        (architectures.residual_mlp(1), biases.l2(), retentions.norm_power(1.5), MOMENTUM, None),
        (architectures.residual_mlp(1), biases.l2(), retentions.ftrl_elastic_net(0.02), DESCENT, None),
        (architectures.linear(), biases.l2(), retentions.elastic_net(0.02), DESCENT, None),
    ],
    ids=["huber", "norm-without-scale", "gated-lp", "norm-power", "ftrl-elastic-net", "elastic-net"],
)
def test_other_choices(architecture, bias, retention, algorithm, bias_gate):
    rule = memory.MemoryRule(architecture, bias, retention, algorithm, CHUNK)
    check(rule, HEADS, head_dim=16, bias_gate=bias_gate)


@pytest.mark.slow
def test_gates_of_every_channel():
    """A chunk that is no power of two, gates that cut, and padding behind the last token."""
    rule = presets.yaad(expansion=2, chunk_size=12)
    check(rule, HEADS, FLOAT64, time=2 * rule.chunk_size + 3, head_dim=16, by_channel=SIDES)


@pytest.mark.slow
def test_chunks_that_share_a_stored_state(monkeypatch):
    """One head without a vmap; the backward kernel comes to every chunk's start once more."""

    def shared(chunks, width=16):
        start = HeadState((np.zeros((1, width, width), np.float32),), None)
        queries = np.zeros((1, chunks, CHUNK, width), np.float32)
        found = kernels.grid_steps(titans(1), Chunks(queries, queries, *[None] * 8), start, 1, kernels.BACKWARD)
        return found.chunks, found.groups

    monkeypatch.setattr(kernels, "STATE_TOKENS", 4 * CHUNK)
    assert [shared(chunks) for chunks in (4, 5, 6)] == [(4, 1), (1, 5), (3, 2)]
    # States of 1.56 MiB, but not of 1.89, are within 1 / 64 of 0.8 of 128 MiB.
    assert [shared(6, width) for width in (640, 704)] == [(3, 2), (1, 6)]
    check(titans(1), time=6 * CHUNK, head_dim=48)


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule", [titans(), presets.moneta(expansion=2, chunk_size=CHUNK), linear(8)], ids=["titans", "moneta", "linear"]
)
def test_forgetting_to_the_start(rule):
    """The learned start is read beside what has changed since, from another start inside a chunk too; as in models,
    steps are smaller where a norm is steep."""
    rule = dataclasses.replace(rule, forget_to_start=True, bound_slope=rule.architecture.normalized)
    check(rule, HEADS, time=3 * CHUNK, head_dim=16, position=3)


def two_rows():
    """Flags of a row of documents, and of a row whose state arrives inside a chunk, which one is known only when it
    runs, and whose end is padding, which spans a whole chunk and some."""
    time = 3 * CHUNK
    flags = {"position": np.array([0, 5], np.int32), "resets": np.zeros((2, time), bool)}
    flags["resets"][0, CHUNK] = True
    flags["mask"] = np.ones((2, time), bool)
    flags["mask"][1, CHUNK + 5 :] = False
    return flags


def omega(window, **options):
    """A memory whose steps sum a window of tokens."""
    rule = presets.omeganet(window, expansion=2, chunk_size=CHUNK)
    return dataclasses.replace(rule, **options)


@pytest.mark.slow_but_for("whole chunk")
@pytest.mark.parametrize(
    "rule",
    [omega(CHUNK), omega(3, algorithm=algorithms.omega(3, has_momentum=True)), omega(2, forget_to_start=True)],
    ids=["whole chunk", "momentum", "two tokens"],
)
def test_windows_of_tokens(rule):
    """A document's window starts with no token; the other row's arrives with its state."""
    check(rule, HEADS, FLOAT64, flags=two_rows(), head_dim=16)


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm",
    [algorithms.muon(CHUNK), algorithms.muon(coefficients="lact", momentum_by_chunk=True)],
    ids=["windows", "momentum of whole chunks"],
)
def test_steps_of_whole_chunks(algorithm):
    """The state that arrives inside a chunk brings the steps that it has gathered."""
    check(omega(1, algorithm=algorithm, forget_to_start=True), HEADS, FLOAT64, flags=two_rows(), head_dim=16)


@pytest.mark.slow
def test_bfloat16_operands_of_windows(outer_products_of_columns):
    """As near to float32 as the chunked form: a token is written in two chunks, and the two forms round other sums."""
    rule = omega(5)
    params, inputs = draw(rule, HEADS, head_dim=64, dtype=jnp.bfloat16)
    wide = inputs | {name: inputs[name].astype(jnp.float32) for name in ("queries", "keys", "values")}
    exact = answers(rule, "chunked", params, wide, HEADS)
    for form in ("chunked", "fused"):  # what products of 8 bits, of which several follow each other, leave
        assert_equal(as_float32(answers(rule, form, params, inputs, HEADS)), exact, 0.04)


@pytest.mark.slow
def test_documents():
    """A row of two documents beside a row of one."""
    resets = np.zeros((2, 3 * CHUNK), bool)
    resets[0, [0, 2 * CHUNK]] = True
    check(titans(), HEADS, flags={"resets": resets}, head_dim=16)


@pytest.mark.slow
@pytest.mark.parametrize("rule", [titans(), presets.moneta(expansion=2, chunk_size=CHUNK)], ids=["titans", "moneta"])
def test_documents_and_padding_from_inside_a_chunk(rule):
    check(rule, HEADS, flags=two_rows(), head_dim=16)


@pytest.mark.slow
def test_a_state_that_arrives_at_a_static_position():
    check(titans(), HEADS, position=3, gradients=False, time=2 * CHUNK, head_dim=16)


@pytest.mark.slow
def test_a_reset_inside_a_chunk_is_never_silently_wrong():
    params, inputs = draw(titans(), HEADS, head_dim=16)
    resets = np.zeros((2, 3 * CHUNK), bool)
    resets[0, 3] = True
    reads = answers(titans(), "fused", params, inputs, HEADS, {"resets": resets}, gradients=False)["reads"]
    assert np.isnan(reads[0]).all() and np.isfinite(reads[1]).all()


@pytest.mark.slow
def test_a_sequence_in_two_calls():
    rule, split = titans(), CHUNK + 5
    params, inputs = draw(rule, head_dim=16, time=3 * CHUNK)

    def call(state, begin, end):
        x = {name: leaf[begin:end] for name, leaf in inputs.items()}
        tokens = (x[name] for name in ("queries", "keys", "values"))
        gates = memory.Gates(x["log_retention"], x["log_momentum"], x["step_size"])
        return jax.jit(functools.partial(memory.memorize, rule, form="fused"))(params, state, *tokens, gates)

    start = memory.init_state(rule, jax.tree.map(jnp.asarray, params))
    whole, end = call(start, 0, 3 * CHUNK)
    first, state = call(start, 0, split)
    second, last = call(state, split, 3 * CHUNK)
    assert_equal({"reads": np.concatenate([first, second]), "end": last.weights}, {"reads": whole, "end": end.weights})


@pytest.mark.parametrize(
    "rule, changed",
    [
        (titans(), {"log_key_retention": np.zeros((CHUNK, 16), np.float32)}),
        (presets.memora(expansion=2, chunk_size=CHUNK), {}),
        (presets.memora(expansion=2, chunk_size=CHUNK, lag_token=True), {}),
        (presets.gated_deltanet(), {"log_value_retention": np.zeros((CHUNK, 16), np.float32)}),
        (presets.mesa(), {}),
        (RULES["lact"], {}),
        (presets.titans(expansion=2, chunk_size=2), {}),
        (presets.titans(expansion=2, chunk_size=7), {}),
    ],
    ids=[
        "channel-wise retention with momentum",
        "weights of every token",
        "lag token",
        "value channels, decay first",
        "least squares",
        "norms of the start",
        "a chunk of 2",
        "a chunk of 7",
    ],
)
def test_rules_that_it_cannot_run_are_refused(rule, changed):
    params = memory.init_params(rule, jax.random.key(0), 16)
    x = np.zeros((CHUNK, 16), np.float32)
    gate = np.zeros((CHUNK,), np.float32)
    gates = memory.Gates(gate, gate if rule.algorithm.has_momentum else None, gate, **changed)
    with pytest.raises(ValueError, match="form is 'fused': .*use form='chunked'"):
        memory.memorize(rule, params, memory.init_state(rule, params), x, x, x, gates, "fused")
