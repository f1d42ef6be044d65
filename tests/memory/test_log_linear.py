"""Log-linear attention against the paper's recurrence (arXiv 2506.04761) in numpy float64; kernels are interpreted."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from titans_jax import memory
from titans_jax.memory.log_linear import Levels, first_difference, memorize_levels, splits_into_levels
from titans_jax.memory.rule.presets import PRESETS

D, TIME, LEVELS = 4, 23, 3  # five blocks and a remainder; eight tokens and more behind one are the last level
NAMES, FORMS = ("gated_deltanet", "mamba2", "gla"), ("recurrent", "chunked", "associative", "fused")


@pytest.fixture(autouse=True)
def doubles():
    with jax.enable_x64(True):
        yield


def tokens(name, time=TIME, levels=LEVELS, seed=0):
    """What `time` tokens bring, in numpy."""
    rng = np.random.default_rng(seed)
    keys = rng.normal(size=(time, D))
    return {
        "queries": rng.normal(size=(time, D)),
        "keys": keys / np.linalg.norm(keys, axis=1, keepdims=True),
        "values": rng.normal(size=(time, D)),
        "retention": rng.uniform(0.6, 1, (time, D) if name == "gla" else time),
        "step": np.ones(time) if name == "gla" else rng.uniform(0.2, 1.5, time),
        "scales": rng.normal(size=(time, levels + 1)),
    }


def joined(*parts):
    return {field: np.concatenate([x[field] for x in parts]) for field in parts[0]}


def part(x, begin, end):
    return {field: value[begin:end] for field, value in x.items()}


def as_seen_by(token, states):
    """Of every level for `token`, what the levels of the token before it are, without what `token` itself does."""
    if token == 0:
        return np.zeros_like(states)
    level = (token & -token).bit_length()  # lssb(t) + 1
    return np.concatenate([np.zeros_like(states[:level]), states[:level].sum(0)[None], states[level + 1 :]])


def merged(states, levels):
    return np.concatenate([states[:levels], states[levels:].sum(0)[None]])


def recurrence(name, x):
    """Reads [time, d] of one document, and the parts of levels 1 .. K that the next token finds."""
    time, levels = len(x["keys"]), x["scales"].shape[1] - 1
    states, reads = np.zeros((max(levels, time.bit_length()) + 1, D, D)), []
    for t in range(time):
        a, b, k, v = (x[field][t] for field in ("retention", "step", "keys", "values"))
        transition = np.diag(np.broadcast_to(a, D))
        if name == "gated_deltanet":
            transition = a * (np.eye(D) - b * np.outer(k, k))
        states = transition @ as_seen_by(t, states)
        states[0] = b * np.outer(k, v)
        reads.append(sum(s * x["queries"][t] @ W for s, W in zip(x["scales"][t], merged(states, levels), strict=True)))
    return np.array(reads).reshape(time, D), merged(as_seen_by(time, states), levels)[1:]


def rule_and_params(name):
    rule = PRESETS[name].make()
    params = memory.init_params(rule, jax.random.key(0), D)
    return rule, jax.tree.map(lambda leaf: leaf.astype(jnp.float64), params)


def gates_of(name, x, mask=None):
    log = jnp.log(x["retention"])
    if name == "gla":
        return memory.Gates(jnp.zeros_like(x["step"]), None, x["step"], mask, log_key_retention=log)
    return memory.Gates(log, None, x["step"], mask)


def memorize(name, form, x, state=None, mask=None, **options):
    """`memorize_levels` of the tokens x; without a state, from an empty one at a position known to be 0."""
    state = state or Levels(jnp.zeros((x["scales"].shape[1] - 1, D, D)), 0)
    arrays = (x[field] for field in ("queries", "keys", "values"))
    rule, params = rule_and_params(name)
    return memorize_levels(rule, params, state, *arrays, gates_of(name, x, mask), x["scales"], form, **options)


run = jax.jit(memorize, static_argnums=(0, 1), static_argnames="rematerialised")


def arrays(tree):
    return jax.tree.map(jnp.asarray, tree)


def state_after(name, x):
    """The oracle's, as a state to go on from."""
    return Levels(jnp.asarray(recurrence(name, x)[1]), jnp.asarray(len(x["keys"]), jnp.int32))


def close_to(found, expected, tolerance=1e-10):
    assert np.shape(found) == np.shape(expected)
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * max(1, abs(expected).max()))


def is_state(found, parts, position, tolerance=1e-10):
    close_to(found.parts, parts, tolerance)
    assert int(found.position) == position


exhaustive = functools.partial(pytest.param, marks=pytest.mark.exhaustive)


@pytest.mark.parametrize(
    "time, levels",
    [(TIME, LEVELS), exhaustive(13, 1), exhaustive(13, 4), exhaustive(TIME, 6), exhaustive(37, 4), exhaustive(3, 2)],
)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", NAMES)
def test_reads_and_parts_are_the_recurrence_s(name, form, time, levels):
    x = tokens(name, time, levels)
    reads, state = run(name, form, arrays(x))
    expected, parts = recurrence(name, x)
    close_to(reads, expected)
    is_state(state, parts, time)


@pytest.mark.parametrize("levels", [1, 7])  # all that is older together; more levels than tokens fill
def test_few_and_many_levels(levels):
    x = tokens("gated_deltanet", 13, levels)
    reads, state = run("gated_deltanet", "chunked", arrays(x))
    expected, parts = recurrence("gated_deltanet", x)
    close_to(reads, expected)
    is_state(state, parts, 13)


def test_the_state_is_empty_where_no_bit_of_the_position_is():
    """After 16 tokens all are of level 5; at position 23 = 10111 in binary all levels but 4 hold something."""
    for time, filled in ((16, [False] * 4 + [True, False]), (TIME, [True] * 3 + [False, True, False])):
        state = run("mamba2", "chunked", arrays(tokens("mamba2", time, 6)))[1]
        assert [bool(one.any()) for one in np.array(state.parts)] == filled


@pytest.mark.parametrize("name, form", [("gated_deltanet", "chunked"), ("gla", "recurrent"), ("mamba2", "associative")])
@pytest.mark.parametrize("pieces", [[1, 5, 1, 1, 9, 5, 1], exhaustive([1] * TIME), exhaustive([4, 8, 4, 7])])
def test_pieces_equal_the_whole(name, form, pieces):
    x = tokens(name)
    state, reads = Levels(jnp.zeros((LEVELS, D, D)), jnp.zeros((), jnp.int32)), []
    for end in np.cumsum(pieces):
        begin = int(state.position)
        read, state = run(name, form, arrays(part(x, begin, end)), state)
        reads.append(read)
        is_state(state, recurrence(name, part(x, 0, end))[1], end)
    whole, after = run(name, form, arrays(x))
    close_to(np.concatenate(reads), np.array(whole))
    close_to(state.parts, np.array(after.parts))
    assert (state.position.shape, state.position.dtype, state.parts.dtype) == ((), jnp.int32, jnp.float64)


@pytest.mark.parametrize("prefix", [3, 0])
@pytest.mark.parametrize(
    "name, form",
    [
        ("gated_deltanet", "chunked"),
        ("mamba2", "recurrent"),
        ("gla", "associative"),
        *(exhaustive(name, form) for name, form in [("gla", "chunked"), ("gated_deltanet", "recurrent")]),
    ],
)
def test_packed_documents_equal_documents_alone(name, form, prefix):
    """The first goes on from a state; some begin and end inside a block; padding is between two. With a prefix, that is
    what each new one starts with."""
    before, first = tokens(name, 5, seed=1), tokens(name, prefix, seed=2)
    lengths, x = [4, 1, 2, 7, 9], tokens(name)
    resets, positions, documents, begin = np.zeros(TIME, bool), np.zeros(TIME, np.int32), [], 0
    for number, length in enumerate(lengths):
        place = slice(begin, begin + length)
        resets[begin] = number > 0
        read = (first if number else before)["step"].size
        positions[place] = read + np.arange(length)
        documents.append((place, joined(first if number else before, part(x, place.start, place.stop)), read))
        begin += length
    mask = np.ones(TIME, bool)
    mask[11:14] = False  # the end of the fourth
    start = state_after(name, first) if prefix else None
    options = arrays({"resets": resets, "positions": positions, "mask": mask})
    reads, state = run(name, form, arrays(x), state_after(name, before), start=start, **options)
    for place, document, read in documents:
        expected, parts = recurrence(name, document)
        said = mask[place]
        close_to(np.array(reads)[place][said], expected[read:][said])
    is_state(state, parts, prefix + lengths[-1])


@pytest.mark.parametrize("form", FORMS)
def test_a_later_token_changes_no_earlier_read(form):
    x = tokens("gated_deltanet")
    before = np.array(run("gated_deltanet", form, arrays(x))[0])
    for t in (1, 5, 8, 22):
        other = joined(part(x, 0, t), tokens("gated_deltanet", TIME - t, seed=1))
        after = np.array(run("gated_deltanet", form, arrays(other))[0])
        np.testing.assert_array_equal(after[:t], before[:t])
        assert (after[t:] != before[t:]).any(axis=1).all()


@pytest.mark.parametrize(
    "name, form, rematerialised",
    [
        ("gated_deltanet", "chunked", False),
        exhaustive("gated_deltanet", "fused", False),
        exhaustive("gated_deltanet", "recurrent", True),
        exhaustive("mamba2", "associative", True),
        exhaustive("gla", "chunked", True),
    ],
)
def test_gradients_are_differences(name, form, rematerialised):
    """By all that tokens bring, by the state before them, and by that with which the second document starts."""
    time, border, rng = 13, 6, np.random.default_rng(3)
    before, first = (state_after(name, tokens(name, count, seed=count)) for count in (5, 3))
    read = np.arange(time) + np.where(np.arange(time) < border, 5, 3 - border)
    weights = arrays((rng.normal(size=(time, D)), rng.normal(size=(LEVELS, D, D))))
    layout = {"resets": jnp.arange(time) == border, "positions": jnp.asarray(read, jnp.int32)}
    point, whole = ravel_pytree((arrays(tokens(name, time)), before.parts, first.parts))

    def loss(point):
        x, *parts = whole(point)
        state, start = (known._replace(parts=each) for known, each in zip((before, first), parts, strict=True))
        reads, after = memorize(name, form, x, state, start=start, rematerialised=rematerialised, **layout)
        return jnp.vdot(weights[0], jnp.sin(reads)) + jnp.vdot(weights[1], jnp.sin(after.parts))

    step, found = 1e-5, np.array(jax.jit(jax.grad(loss))(point))
    aside, values = step * np.eye(point.size), jax.jit(lambda points: jax.lax.map(loss, points))
    ahead, behind = (np.array(values(np.array(point) + sign * aside)) for sign in (1, -1))
    close_to(found, (ahead - behind) / (2 * step), 1e-6)
    assert all(np.any(leaf != 0) for leaf in jax.tree.leaves(whole(jnp.asarray(found))))


@pytest.mark.parametrize("name", NAMES)
def test_with_scales_of_one_it_is_the_memory_without_levels(name):
    x = tokens(name)
    x["scales"] = np.ones_like(x["scales"])

    @jax.jit
    def plain(x):
        rule, params = rule_and_params(name)
        state, inputs = memory.init_state(rule, params), (x["queries"], x["keys"], x["values"], gates_of(name, x))
        reads, state = memory.memorize(rule, params, state, *inputs, "chunked")
        return reads, state.weights[0]

    reads, state = run(name, "chunked", arrays(x))
    expected, weights = plain(arrays(x))
    close_to(reads, np.array(expected), 1e-12)
    close_to(state.parts.sum(0), np.array(weights), 1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_padding_counts_and_changes_nothing(form):
    """As tokens that keep all and write nothing; what the parts sum to is as before them."""
    name, count = "gated_deltanet", 15
    x, mask = tokens(name), np.arange(TIME) < count
    nothing = x | {"retention": np.where(mask, x["retention"], 1), "step": np.where(mask, x["step"], 0)}
    reads, state = run(name, form, arrays(x), mask=jnp.asarray(mask))
    expected, parts = recurrence(name, nothing)
    close_to(np.array(reads)[mask], expected[mask])
    is_state(state, parts, TIME)
    close_to(state.parts.sum(0), recurrence(name, part(x, 0, count))[1].sum(0))


def test_the_first_difference_of_numbers():
    rng, most = np.random.default_rng(0), 2**31 - 1
    one = np.concatenate([rng.integers(0, most, 100), rng.integers(0, 64, 100), [0, 0, most, most, 2**30]])
    other = np.concatenate([rng.integers(0, most, 100), rng.integers(0, 64, 100), [0, most, most, 0, 2**30 - 1]])
    expected = [int(a ^ b).bit_length() for a, b in zip(one, other, strict=True)]
    one, other = (jnp.asarray(each, jnp.int32) for each in (one, other))
    np.testing.assert_array_equal(first_difference(one, other), expected)
    np.testing.assert_array_equal(first_difference(one, 21), [int(a ^ 21).bit_length() for a in one.tolist()])


SPLIT = (
    "linear_attention", "retnet", "lightning_attention", "gla", "mamba2", "hgrn2", "deltanet", "longhorn",
    "gated_deltanet", "kimi_delta_attention", "comba", "gated_deltanet_2", "preconditioned_delta",
)  # fmt: skip
WHOLE = (
    "titans", "mesa", "rwkv7", "delta_product", "mamba3", "mamba3_mimo", "ttt_linear", "ttt_mlp", "omeganet", "atlas",
    "moneta", "yaad", "memora", "hope",
)  # fmt: skip


def test_which_rules_split_into_levels():
    assert [name for name in SPLIT + WHOLE if splits_into_levels(PRESETS[name].make())] == list(SPLIT)


def test_momentum_is_a_state_of_its_own():
    rule = memory.presets.matrix(memory.biases.dot_product(), memory.algorithms.momentum())
    assert not splits_into_levels(rule)
